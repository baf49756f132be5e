"""Every graph, node and tensor of a model: also those in the bodies of If, Loop and Scan, and in functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto


def bodies(node: NodeProto) -> Iterator[GraphProto]:
    """Graphs among the attributes of `node`."""
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH or attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def graphs(graph: GraphProto) -> Iterator[GraphProto]:
    """`graph`, and all graphs in it."""
    yield graph
    for inner in of_nodes(graph.node):
        yield from graphs(inner)


def of_nodes(nodes: Sequence[NodeProto]) -> Iterator[GraphProto]:
    """Graphs directly among the attributes of `nodes`."""
    for node in nodes:
        if node.attribute:
            yield from bodies(node)


def nodes(model: ModelProto) -> Iterator[NodeProto]:
    """All nodes, functions included."""
    for graph in all_graphs(model):
        yield from graph.node
    for function in model.functions:
        yield from function.node


def all_graphs(model: ModelProto) -> Iterator[GraphProto]:
    """All graphs, those in functions included."""
    yield from graphs(model.graph)
    for function in model.functions:
        for inner in of_nodes(function.node):
            yield from graphs(inner)


def tensors(model: ModelProto) -> Iterator[TensorProto]:
    """All tensors but the initializers of the main graph, which come by number."""
    for graph in all_graphs(model):
        if graph is not model.graph:
            yield from graph.initializer
        for sparse in graph.sparse_initializer:
            yield from (sparse.values, sparse.indices)
    for node in nodes(model):
        for attribute in node.attribute:
            yield from _of_attribute(attribute)


def _of_attribute(attribute: Any) -> Iterator[TensorProto]:
    if attribute.HasField("t"):
        yield attribute.t
    yield from attribute.tensors
    for sparse in (*((attribute.sparse_tensor,) if attribute.HasField("sparse_tensor") else ()),
                   *attribute.sparse_tensors):  # fmt: skip
        yield from (sparse.values, sparse.indices)
