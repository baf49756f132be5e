"""Models that were damaged by chance: cut, flipped, and changed field by field, with fixed seeds."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import onnx
import onnx_models as models
from onnx import ModelProto

CUTS, FLIPS, SHIFTS, CHANGES = 40, 50, 10, 40


def mutations() -> Iterator[tuple[str, bytes, bool]]:
    """(name, bytes, whether no check may accept them)."""
    with tempfile.TemporaryDirectory() as folder:
        whole = models.convolution(Path(folder) / "m").read_bytes()
    for i in range(CUTS):
        # The last bytes hold the opset, without which nothing can be run.
        yield f"cut-{i}", whole[: 1 + (len(whole) - 2) * i // CUTS], True
    for i in range(FLIPS):
        yield f"flipped-{i}", _flipped(whole, random.Random(i)), False
    for i in range(SHIFTS):
        chance = random.Random(1000 + i)
        at, size = chance.randrange(len(whole)), chance.randint(1, 40)
        shifted = whole[:at] + (whole[at + size :] if i % 2 else chance.randbytes(size) + whole[at:])
        yield f"shifted-{i}", shifted, False
    for i in range(CHANGES):
        model = onnx.load_from_string(whole)
        chance = random.Random(2000 + i)
        for _ in range(1 + i % 3):
            chance.choice(_CHANGES)(model, chance)
        yield f"changed-{i}", model.SerializeToString(), False


def _flipped(data: bytes, chance: random.Random) -> bytes:
    """One to eight bits; half of the files in the small part that is no weight."""
    found, graph_only = bytearray(data), chance.random() < 0.5
    for _ in range(chance.randint(1, 8)):
        at = chance.randrange(400) if graph_only else chance.randrange(len(found))
        found[at] ^= 1 << chance.randrange(8)
    return bytes(found)


def _drop_node(model: ModelProto, chance: random.Random) -> None:
    if model.graph.node:
        model.graph.node.pop(chance.randrange(len(model.graph.node)))


def _shuffle_nodes(model: ModelProto, chance: random.Random) -> None:
    nodes = list(model.graph.node)
    chance.shuffle(nodes)
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def _repeat_node(model: ModelProto, chance: random.Random) -> None:
    model.graph.node.append(chance.choice(list(model.graph.node)))


def _rename_input(model: ModelProto, chance: random.Random) -> None:
    node = chance.choice(list(model.graph.node))
    node.input[chance.randrange(len(node.input))] = chance.choice(["", "x", "y", "w", "nothing"])


def _change_operator(model: ModelProto, chance: random.Random) -> None:
    chance.choice(list(model.graph.node)).op_type = chance.choice(["Relu", "MatMul", "LSTM", "Sum", "Nothing", "If"])


def _change_weight_type(model: ModelProto, chance: random.Random) -> None:
    chance.choice(list(model.graph.initializer)).data_type = chance.randrange(25)


def _change_weight_shape(model: ModelProto, chance: random.Random) -> None:
    weight = chance.choice(list(model.graph.initializer))
    weight.dims.append(chance.choice([0, 1, 2, -1, 1 << 33]))


def _drop_weight(model: ModelProto, chance: random.Random) -> None:
    if model.graph.initializer:
        model.graph.initializer.pop(chance.randrange(len(model.graph.initializer)))


def _change_input(model: ModelProto, chance: random.Random) -> None:
    kind = model.graph.input[0].type.tensor_type
    if chance.random() < 0.5:
        kind.elem_type = chance.randrange(20)
    else:
        kind.shape.dim[chance.randrange(len(kind.shape.dim))].dim_value = chance.choice([-1, 0, 1, 3, 7, 1 << 40])


def _change_attribute(model: ModelProto, chance: random.Random) -> None:
    attribute = chance.choice([a for n in model.graph.node for a in n.attribute] or [onnx.AttributeProto()])
    if attribute.ints:
        attribute.ints[chance.randrange(len(attribute.ints))] = chance.choice([-1, 0, 2, 9, 1 << 40])
    else:
        attribute.i = chance.choice([-1, 0, 2, 9, 1 << 40])


_CHANGES: tuple[Callable[[ModelProto, random.Random], None], ...] = (
    _drop_node, _shuffle_nodes, _repeat_node, _rename_input, _change_operator, _change_weight_type,
    _change_weight_shape, _drop_weight, _change_input, _change_attribute,
)  # fmt: skip
