"""What is wrong with a graph, or odd about it, whatever runtime is to run it: names, order, shapes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from onnx import GraphProto, ModelProto, NodeProto, ValueInfoProto
from trtmodel_contract.jobs import Reason

from trtmodel_worker.builder import walk
from trtmodel_worker.builder.findings import error, listed, warning
from trtmodel_worker.engines.building import Finding

MOST_ELEMENTS = 1 << 40  # of one value: beyond the memory of any machine that this is for
LARGE_CONSTANT_BYTES = 16 << 20
RANDOM = {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli"}

Scopes = tuple[Collection[str], ...]


def is_empty(model: ModelProto) -> bool:
    return not model.graph.node and not model.graph.output


def strange_names(model: ModelProto) -> list[Finding]:
    """Names that are no text. Nothing else can be asked about such a model."""
    strange = [text for text in _texts(model) if not isinstance(text, str)]
    if not strange:
        return []
    text = f"{len(strange)} names are no UTF-8 text, such as {strange[0]!r}"
    return [_invalid(text, "the file is damaged, or its exporter is: export it again")]


def check(model: ModelProto) -> list[Finding]:
    """Findings of the file itself."""
    problems = [*_headers(model), *_functions(model), *_names(model.graph, ())]
    for function in model.functions:
        known = {*function.input}
        problems += _order(function.node, known, (), f"function {function.name!r}")
    problems += _inputs(model)
    problems += _outputs(model)
    problems += _domains(model)
    problems += _constants(model)
    problems += _random(model)
    return problems


def sizes(model: ModelProto) -> Iterator[Finding]:
    """Values that no memory holds, in a model whose shapes were inferred."""
    for graph in walk.graphs(model.graph):
        for value in (*graph.input, *graph.value_info, *graph.output):
            known = [d.dim_value for d in _dims(value) if d.WhichOneof("value") == "dim_value"]
            if math.prod(known) > MOST_ELEMENTS:
                text = f"value {value.name!r} is of shape {_shape(value)}: at least {math.prod(known):,} elements"
                yield _invalid(text, "no machine holds that: the shape is wrong")


def label(node: NodeProto) -> str:
    """What a person finds the node by."""
    operator = f"{node.domain}:{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type
    if node.name:
        return f"node {node.name!r} ({operator})"
    return f"the {operator} that makes {node.output[0]!r}" if node.output else f"a {operator} without outputs"


def _texts(model: ModelProto) -> Iterator[object]:
    """Every name that something else refers to. Protobuf gives bytes where a text is none."""
    for opset in model.opset_import:
        yield opset.domain
    for graph in walk.all_graphs(model):
        yield graph.name
        for value in (*graph.input, *graph.output, *graph.value_info):
            yield value.name
            yield from (d.dim_param for d in value.type.tensor_type.shape.dim)
        yield from (weight.name for weight in graph.initializer)
    for function in model.functions:
        yield from (function.domain, function.name, *function.input, *function.output)
    for node in walk.nodes(model):
        yield from (node.name, node.op_type, node.domain, *node.input, *node.output)
        yield from (attribute.name for attribute in node.attribute)


def _headers(model: ModelProto) -> Iterator[Finding]:
    if model.ir_version < 1:
        yield _invalid(f"the file states IR version {model.ir_version}", "export it again, or set ir_version")
    versions: dict[str, set[int]] = {}
    for opset in model.opset_import:
        versions.setdefault("" if opset.domain == "ai.onnx" else opset.domain, set()).add(opset.version)
    for domain, found in versions.items():
        shown = domain or "ai.onnx"
        if len(found) > 1:
            yield _invalid(f"the file states opsets {sorted(found)} of {shown}", "state one: export it again")
        elif min(found) < 1:
            yield _invalid(f"the file states opset {min(found)} of {shown}", "opsets begin with 1: export it again")


def _functions(model: ModelProto) -> Iterator[Finding]:
    """A function that calls itself has no end: runtimes expand functions where they are called."""
    calls = {
        (f.domain, f.name): {(n.domain, n.op_type) for n in f.node} for f in model.functions
    }  # bodies of If in functions are not expanded by themselves
    for function in model.functions:
        for inner in walk.of_nodes(function.node):
            for graph in walk.graphs(inner):
                calls[(function.domain, function.name)] |= {(n.domain, n.op_type) for n in graph.node}
    left = dict(calls)
    while ends := [name for name, called in left.items() if not called & left.keys()]:
        for name in ends:
            del left[name]
    if left:
        names = [name for _, name in left]
        yield _invalid(f"functions {listed(names)} call one another without end", "export the model without them")
    if len(calls) < len(model.functions):
        yield _invalid("two functions of the file have one name", "export the model again")


def _names(graph: GraphProto, outer: Scopes) -> Iterator[Finding]:
    where = f"graph {graph.name!r}" if outer else "the graph"
    weights = [*(w.name for w in graph.initializer), *(s.values.name for s in graph.sparse_initializer)]
    known = {*(value.name for value in graph.input), *weights}
    for what, names in (("inputs", [v.name for v in graph.input]), ("weights", weights)):
        if twice := _repeated(names):
            yield _invalid(f"{where} has {what} of the same name: {listed(twice)}", "export the model again")
    yield from _order(graph.node, known, outer, where)
    made = {name for node in graph.node for name in node.output if name}
    lost = [v.name for v in graph.output if v.name not in made and v.name not in known and not _in(v.name, outer)]
    if lost:
        yield _invalid(f"{where} has outputs that nothing makes: {listed(lost)}", "export the model again")


def _order(nodes: Sequence[NodeProto], known: set[str], outer: Scopes, where: str) -> Iterator[Finding]:
    """Every value is made once, and before it is used."""
    made = [name for node in nodes for name in node.output if name]
    all_made = set(made)
    twice = [*_repeated(made), *sorted(all_made & known)]
    if twice:
        yield _invalid(f"{where} makes values twice: {listed(twice)}", "names of values are unique: export it again")
    undefined, late, before = list[tuple[NodeProto, str]](), list[NodeProto](), set(known)
    for node in nodes:
        for name in node.input:
            if name and name not in before and not _in(name, outer):
                if name not in all_made:
                    undefined.append((node, name))
                elif not late or late[-1] is not node:
                    late.append(node)
        before.update(node.output)
    if undefined:
        node, name = undefined[0]
        names = list(dict.fromkeys(name for _, name in undefined))
        text = f"{label(node)} takes {name!r}, which nothing makes"
        more = f"; nor {listed(names[1:])}" if len(names) > 1 else ""
        yield _invalid(text + more, "the export is incomplete: export it again", node=node.name, operator=node.op_type)
    if late:
        yield _cycle_or_order(nodes, late, where)
    for node in nodes:
        if node.attribute:
            for body in walk.bodies(node):
                yield from _names(body, (*outer, known, all_made))


def _cycle_or_order(nodes: Sequence[NodeProto], late: Sequence[NodeProto], where: str) -> Finding:
    left = _in_a_circle(nodes)
    first = (left or late)[0]
    about = {"node": first.name, "operator": first.op_type, "domain": first.domain}
    if left:
        text = f"{where} runs in a circle: {label(first)} takes what is made of its own output"
        return _invalid(text, "use Loop or Scan for what repeats", **about)
    text = f"{where} is not sorted: {label(first)} stands before what makes its inputs"
    return _invalid(text, "sort it, for instance with onnx-graphsurgeon's toposort()", **about)


def _in_a_circle(nodes: Sequence[NodeProto]) -> list[NodeProto]:
    """Nodes that no order can run."""
    made = {name for node in nodes for name in node.output if name}
    users: dict[str, list[int]] = {}
    open_inputs = []
    for i, node in enumerate(nodes):
        needed = {name for name in node.input if name in made}
        open_inputs.append(len(needed))
        for name in needed:
            users.setdefault(name, []).append(i)
    ready = [i for i, count in enumerate(open_inputs) if not count]
    done = set[int]()
    while ready:
        i = ready.pop()
        done.add(i)
        for name in nodes[i].output:
            for user in users.pop(name, ()):
                open_inputs[user] -= 1
                if not open_inputs[user]:
                    ready.append(user)
    return [node for i, node in enumerate(nodes) if i not in done]


def _in(name: str, scopes: Scopes) -> bool:
    return any(name in scope for scope in scopes)


def _repeated(names: Sequence[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]


def _inputs(model: ModelProto) -> Iterator[Finding]:
    weights = {w.name for w in model.graph.initializer}
    also = [value.name for value in model.graph.input if value.name in weights]
    if also and model.ir_version >= 4:
        text = f"weights {listed(also)} are inputs, too: runtimes cannot fold them"
        yield warning(Reason.MODEL_INVALID, text, "export with keep_initializers_as_inputs=False")
    used = {name for graph in walk.graphs(model.graph) for node in graph.node for name in node.input}
    used |= {value.name for value in model.graph.output}
    for value in model.graph.input:
        if value.name in weights:
            continue
        if value.name not in used:
            text = f"input {value.name!r} is used by no node"
            yield warning(Reason.MODEL_INVALID, text, "clients must send it all the same: export without it")
        if any(d.WhichOneof("value") == "dim_value" and d.dim_value == 0 for d in _dims(value)):
            text = f"input {value.name!r} is of shape {_shape(value)}: it holds no value"
            yield _invalid(text, "export the model with the size that it has, or a free one")
        if value.type.HasField("tensor_type") and not _dims(value):
            shaped = value.type.tensor_type.HasField("shape")
            text = (
                f"input {value.name!r} is {'one number' if shaped else 'of no stated shape'}: it has no batch dimension"
            )
            yield _invalid(
                text, "a data set has samples in its first dimension: export the model with a batch dimension"
            )
        if any(d.dim_value < -1 for d in _dims(value)):  # some exporters write -1 where the size is free
            text = f"input {value.name!r} is of shape {_shape(value)}: no size is negative"
            yield _invalid(text, "export the model with a named dimension where the size is free")
    idle = [w for w in model.graph.initializer if w.name not in used]
    if idle:
        text = f"{len(idle)} weights are used by no node: {listed([w.name for w in idle])}"
        yield warning(Reason.MODEL_INVALID, text, "they only take space: export the model again")


def _outputs(model: ModelProto) -> Iterator[Finding]:
    if not model.graph.output:
        yield _invalid("the model has no output", "name what clients want among the graph's outputs")
    if twice := _repeated([value.name for value in model.graph.output]):
        yield _invalid(f"the graph has outputs of the same name: {listed(twice)}", "export the model again")
    unwritable = [v.name for v in (*model.graph.input, *model.graph.output) if "\0" in v.name]
    if unwritable:
        text = f"inputs or outputs have a NUL in their names: {listed(unwritable)}"
        yield _invalid(text, "no data set can hold such names: export the model with others")
    maps = {name for node in model.graph.node if node.op_type == "ZipMap" for name in node.output}
    for value in model.graph.output:
        if value.name in maps:
            text = f"output {value.name!r} is a sequence of maps, one per sample, which ZipMap makes"
            yield error(
                Reason.OPERATOR_UNSUPPORTED,
                text,
                "export with options={'zipmap': False}, which gives an array of scores",
                operator="ZipMap",
                domain="ai.onnx.ml",
            )
        elif value.type.HasField("tensor_type") and value.type.tensor_type.HasField("shape"):
            if not _dims(value):
                text = f"output {value.name!r} is one number, whatever the batch"
                yield warning(Reason.MODEL_INVALID, text, "requests that share a batch share it, too")
            elif any(d.WhichOneof("value") == "dim_value" and d.dim_value == 0 for d in _dims(value)):
                text = f"output {value.name!r} is of shape {_shape(value)}: it holds no value"
                yield warning(Reason.MODEL_INVALID, text, "nothing can be compared there")


def _domains(model: ModelProto) -> Iterator[Finding]:
    """Those of ONNX Runtime: other runtimes lack them."""
    own = [node for node in walk.nodes(model) if node.domain.startswith("com.microsoft")]
    if own:
        names = sorted({node.op_type for node in own})
        text = f"{len(own)} nodes are of com.microsoft ({', '.join(names[:8])}), such as {label(own[0])}"
        yield warning(
            Reason.OPERATOR_UNSUPPORTED,
            text,
            "only ONNX Runtime has these: for TensorRT give the model before it was optimised",
            node=own[0].name,
            operator=own[0].op_type,
            domain=own[0].domain,
        )


def _constants(model: ModelProto) -> Iterator[Finding]:
    for node in walk.nodes(model):
        if node.op_type == "Constant" and node.ByteSize() > LARGE_CONSTANT_BYTES:
            text = f"{label(node)} is a constant of {node.ByteSize():,} bytes"
            yield warning(
                Reason.MODEL_INVALID, text, "as an initializer it takes less memory to load", node=node.name,
                operator=node.op_type,
            )  # fmt: skip


def _random(model: ModelProto) -> Iterator[Finding]:
    node = next((node for node in walk.nodes(model) if node.op_type in RANDOM and not node.domain), None)
    if node is not None:
        text = f"{label(node)} answers differently each time"
        way_out = "no engine can be compared with that: take the random numbers as an input"
        yield warning(Reason.MODEL_INVALID, text, way_out, node=node.name, operator=node.op_type)


def _dims(value: ValueInfoProto) -> Sequence[Any]:
    return list(value.type.tensor_type.shape.dim)


def _shape(value: ValueInfoProto) -> str:
    return str([d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim])


def _invalid(message: str, way_out: str, **about: str) -> Finding:
    return error(Reason.MODEL_INVALID, message, way_out, **about)
