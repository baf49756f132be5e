"""Bad and odd ONNX files: from the field cases, from what exporters and uploads do, and by mutation with fixed seeds.

Each is written into a directory of its own. `verdict` says what a check must answer: REFUSED, ACCEPTED, or EITHER where
only a crash, a retry or a wrong promise would be a fault. `words` must be in a refusal.
"""

from __future__ import annotations

import enum
import random
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from odd_mutations import mutations
from onnx import AttributeProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
FILE = "model.onnx"


class Verdict(enum.Enum):
    REFUSED = enum.auto()
    ACCEPTED = enum.auto()
    EITHER = enum.auto()


@dataclass(frozen=True)
class Odd:
    name: str
    write: Callable[[Path], object]  # into the file of that path
    verdict: Verdict
    words: str = ""


def all_models() -> list[Odd]:
    """In a fixed order, with unique names."""
    made = [*_files(), *_headers(), *_graphs(), *_values(), *_weights(), *_external(), *_types(), *_bodies()]
    made += [*_functions(), *_nodes(), *_large(), *_mutated()]
    assert len({odd.name for odd in made}) == len(made)
    return made


# How a case is written down: the model that is right, and what is done to it.


def _refused(name: str, model: ModelProto | bytes, words: str = "") -> Odd:
    return Odd(name, _writer(model), Verdict.REFUSED, words)


def _accepted(name: str, model: ModelProto | bytes) -> Odd:
    return Odd(name, _writer(model), Verdict.ACCEPTED)


def _either(name: str, model: ModelProto | bytes) -> Odd:
    return Odd(name, _writer(model), Verdict.EITHER)


def _writer(model: ModelProto | bytes) -> Callable[[Path], object]:
    data = model if isinstance(model, bytes) else model.SerializeToString()
    return lambda path: path.write_bytes(data)


def node(op: str, inputs: Sequence[str], outputs: Sequence[str], name: str = "", **attributes: Any) -> NodeProto:
    return helper.make_node(op, list(inputs), list(outputs), name=name, **attributes)


def value(name: str, kind: int = FLOAT, dims: Sequence[Any] | None = ("n", 4)) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, None if dims is None else list(dims))


def model(
    nodes: Sequence[NodeProto],
    inputs: Sequence[ValueInfoProto] | None = None,
    outputs: Sequence[ValueInfoProto] | None = None,
    weights: Sequence[TensorProto] = (),
    ir: int = 9,
    opsets: Sequence[tuple[str, int]] = (("", 17),),
    **more: Any,
) -> ModelProto:
    """By default from x [n, 4] to y [n, 4]."""
    graph = helper.make_graph(
        list(nodes),
        "odd",
        [value("x")] if inputs is None else list(inputs),
        [value("y")] if outputs is None else list(outputs),
        list(weights),
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid(*o) for o in opsets], ir_version=ir, **more)


def relu() -> ModelProto:
    return model([node("Relu", ["x"], ["y"], "n")])


def changed(change: Callable[[ModelProto], object], start: Callable[[], ModelProto] = relu) -> ModelProto:
    made = start()
    change(made)
    return made


def added(weight: TensorProto, op: str = "Add") -> ModelProto:
    return model([node(op, ["x", "w"], ["y"], "sum")], weights=[weight])


def array(values: Any, kind: Any = np.float32, name: str = "w") -> TensorProto:
    return numpy_helper.from_array(np.asarray(values, kind), name)


def _files() -> Iterator[Odd]:
    good = relu().SerializeToString()
    for name, data, words in (
        ("empty", b"", "0 bytes"),
        ("one-byte", b"\x08", ""),
        ("zeros", bytes(4096), ""),
        ("ones", b"\xff" * 4096, ""),
        ("text", b"hello world, this is no model\n" * 20, ""),
        ("lfs", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs"),
        ("html", b"<!DOCTYPE html><html><body>404</body></html>", "HTML"),
        ("xml", b"<?xml version='1.0'?><Error><Code>NoSuchKey</Code></Error>", "XML"),
        ("json", b'{"error": "not found"}', "JSON"),
        ("gzip", b"\x1f\x8b\x08" + bytes(100), "gzip"),
        ("pickle", b"\x80\x04\x95" + bytes(100), "pickle"),
        ("hdf5", b"\x89HDF\r\n\x1a\n" + bytes(100), "HDF5"),
        ("plan", b"ftrt" + bytes(200), "TensorRT plan"),
        ("numpy", b"\x93NUMPY\x01\x00" + bytes(100), "NumPy"),
        ("tflite", b"\x1c\0\0\0TFL3" + bytes(100), "TensorFlow Lite"),
        ("ort-format", b"\x18\0\0\0ORTM" + bytes(100), "ORT format"),
        ("safetensors", b"\x40\0\0\0\0\0\0\0" + b'{"w":{"dtype":"F32"}}' + bytes(64), "safetensors"),
        ("random", random.Random(0).randbytes(5000), ""),
        ("trailing-zeros", good + bytes(64), ""),
        ("trailing-text", good + b"</html>", ""),
        ("bom", b"\xef\xbb\xbf" + good, ""),
        ("crlf", good.replace(b"\n", b"\r\n"), ""),
    ):
        yield _refused(name, data, words)
    yield _either("twice-in-a-row", good + good)
    yield _either("as-utf8-text", good.decode("latin-1").encode())
    yield Odd("zip", _zip, Verdict.REFUSED, "zip archive")


def _zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"x")


def _headers() -> Iterator[Odd]:
    def with_ir(version: int) -> ModelProto:
        return changed(lambda m: setattr(m, "ir_version", version))

    def with_opset(version: int) -> ModelProto:
        return changed(lambda m: setattr(m.opset_import[0], "version", version))

    for version in (-1, 0, 15, 99, 999, 2**62):
        yield _refused(f"ir-{version}", with_ir(version), "IR version")
    for version in (1, 2, 3, 4, 11, 12):
        yield _either(f"ir-{version}", with_ir(version))
    for version in (-5, 0):
        yield _refused(f"opset-{version}", with_opset(version), "opset")
    for version in (99, 999, 2**62):
        yield _refused(f"opset-{version}", with_opset(version))
    for version in (1, 6, 7, 12, 21):
        yield _either(f"opset-{version}", with_opset(version))
    yield _refused("no-ir", changed(lambda m: m.ClearField("ir_version")), "IR version")
    yield _refused("no-opset", changed(lambda m: m.ClearField("opset_import")))
    yield _refused("two-opsets", changed(lambda m: m.opset_import.add(domain="", version=7)), "opsets [7, 17]")
    yield _accepted("unused-domain", changed(lambda m: m.opset_import.add(domain="com.acme", version=1)))
    yield _refused("nothing-but-a-header", ModelProto(ir_version=9), "no graph")
    yield _refused("training-info-only", changed(lambda m: m.ClearField("graph")), "no graph")
    yield _accepted("producer-of-a-megabyte", changed(lambda m: setattr(m, "doc_string", "x" * 1_000_000)))
    yield _either("metadata-twice", changed(_metadata_twice))


def _metadata_twice(made: ModelProto) -> None:
    for text in ("1", "2"):
        made.metadata_props.add(key="author", value=text)


def _graphs() -> Iterator[Odd]:
    two = [node("Relu", ["x"], ["z"], "a"), node("Abs", ["z"], ["y"], "b")]
    yield _refused("empty-graph", model([], [], []), "no graph")
    yield _refused("no-nodes", model([]), "")
    yield _accepted("straight-through", model([node("Identity", ["x"], ["y"])]))
    yield _refused(
        "no-input", model([node("Identity", ["w"], ["y"])], [], [value("y", dims=[1])], [array([1])]), "no i"
    )
    yield _refused("no-output", model([node("Relu", ["x"], ["y"])], outputs=[]))
    yield _refused("circle", model([node("Add", ["x", "b"], ["a"], "one"), node("Relu", ["a"], ["b"], "two"),
                                    node("Abs", ["b"], ["y"])]), "circle")  # fmt: skip
    yield _refused("node-feeds-itself", model([node("Add", ["x", "y"], ["y"], "loop")]), "circle")
    yield _refused("not-sorted", model(two[::-1]), "not sorted")
    yield _refused("input-of-nothing", model([node("Add", ["x", "q"], ["y"], "sum")]), "'q', which nothing makes")
    yield _refused("output-of-nothing", model(two[:1]), "outputs that nothing makes: 'y'")
    yield _refused("value-made-twice", model([*two, node("Neg", ["x"], ["y"])]), "twice: 'y'")
    yield _refused("node-makes-the-input", model([node("Relu", ["x"], ["x"]), node("Abs", ["x"], ["y"])]), "'x'")
    yield _refused("node-names-twice", model([node("Relu", ["x"], ["z"], "n"), node("Abs", ["z"], ["y"], "n")]), "(n)")
    yield _refused("inputs-twice", model(two, [value("x"), value("x")]), "same name: 'x'")
    yield _refused("outputs-twice", model(two, outputs=[value("y"), value("y")]))
    yield _refused("weights-twice", model([node("Add", ["x", "w"], ["y"])], weights=[array([1]), array([2])]), "'w'")
    yield _either("weight-as-output", model([node("Relu", ["x"], ["y"])], outputs=[value("y"), value("w", dims=[1])],
                                            weights=[array([1])]))  # fmt: skip
    yield _either("input-as-output", model([node("Relu", ["x"], ["y"])], outputs=[value("y"), value("x")]))
    yield _either("unused-input", model(two, [value("x"), value("never")]))
    yield _accepted("unused-weight", model(two, weights=[array([1, 2], name="never")]))
    yield _accepted("dead-node", model([*two, node("Neg", ["x"], ["nowhere"])]))
    yield _accepted("weight-is-an-input", model([node("Mul", ["x", "w"], ["y"])], [value("x"), value("w", dims=[4])],
                                                weights=[array([1, 2, 3, 4])], ir=3, opsets=[("", 8)]))  # fmt: skip
    yield _accepted("weight-may-be-overridden",
                    model([node("Mul", ["x", "w"], ["y"])], [value("x"), value("w", dims=[4])],
                          weights=[array([1, 2, 3, 4])]))  # fmt: skip


def _values() -> Iterator[Odd]:
    def of_dims(*dims: Any) -> ModelProto:
        return model([node("Relu", ["x"], ["y"])], [value("x", dims=dims)], [value("y", dims=dims)])

    yield _accepted("free-as-minus-one", of_dims(-1, 4))
    yield _refused("negative", of_dims(2, -3), "negative")
    yield _refused("zero", of_dims(0, 4), "holds no value")
    yield _refused("zero-inside", of_dims("n", 0), "holds no value")
    yield _refused("absurd", of_dims(2**40, 2**20), "no machine holds")
    yield _refused("absurd-for-each-sample", of_dims("n", 2**30, 2**30), "no machine holds")
    yield _refused("overflowing", of_dims(2**62, 4), "no machine holds")
    yield _refused("scalar-input", of_dims(), "no batch dimension")
    yield _refused("no-shape", model([node("Relu", ["x"], ["y"])], [value("x", dims=None)], [value("y", dims=None)]))
    yield _either("dimension-without-name", of_dims(None, 4))
    yield _either("rank-20", of_dims("n", *[1] * 19))
    yield _refused("input-without-type", model([node("Relu", ["x"], ["y"])], [ValueInfoProto(name="x")]))
    yield _either("output-without-type", model([node("Relu", ["x"], ["y"])], outputs=[ValueInfoProto(name="y")]))
    yield _refused("output-of-another-type", model([node("Relu", ["x"], ["y"])], outputs=[value("y", INT64)]))
    yield _either("output-of-another-shape", model([node("Relu", ["x"], ["y"])], outputs=[value("y", dims=["n", 9])]))
    yield _refused("type-0", model([node("Relu", ["x"], ["y"])], [value("x", 0)]))
    yield _refused("type-99", model([node("Relu", ["x"], ["y"])], [value("x", 99)]))
    yield _refused("input-without-name", model([node("Relu", [""], ["y"])], [value("")]))
    yield _refused("ranks-do-not-fit", model([node("Conv", ["x", "w"], ["y"])], weights=[array(np.ones((2, 4, 1, 1)))]))
    yield _refused("shapes-do-not-fit", model([node("MatMul", ["x", "w"], ["y"])], weights=[array(np.ones((5, 4)))]))
    yield _refused("types-do-not-fit", model([node("Add", ["x", "w"], ["y"])], weights=[array([1], np.int64)]))
    for i, name in enumerate(("input:0", "onnx::Conv_1", "/a/b", "имя 名", 'a"b\\c', "a\nb", "x" * 5000, "😀", "a\0b")):
        renamed = model([node("Relu", [name], ["y"])], [value(name)])
        yield _either(f"name-{i}", renamed) if name in ("a\0b", "x" * 5000) else _accepted(f"name-{i}", renamed)
    for place in (b"xqx", b"yqy", b"nqn", b"gqg", b"dqd"):
        named = model([node("Relu", ["xqx"], ["yqy"], "nqn")], [value("xqx", dims=["dqd", 4])], [value("yqy")])
        named.graph.name = "gqg"
        data = named.SerializeToString().replace(place, place[:1] + b"\xff" + place[2:])
        yield _either(f"no-utf8-{place.decode()}", data)


def _weights() -> Iterator[Odd]:
    yield _refused("nan", added(array([1, np.nan, 3, 4])), "NaN")
    yield _refused("nan-float16", _cast_and_add(array([1, np.nan, 3, 4], np.float16)), "NaN")
    yield _refused("nan-double", _cast_and_add(array([1, np.nan, 3, 4], np.float64)), "NaN")
    yield _refused("nan-as-float_data", added(helper.make_tensor("w", FLOAT, [2], [1.0, float("nan")])), "NaN")
    yield _refused("nan-in-a-constant", model([node("Constant", [], ["w"], value=array([np.nan] * 4)),
                                               node("Add", ["x", "w"], ["y"])]), "NaN")  # fmt: skip
    yield _refused("nan-in-a-large-weight", model([node("Gather", ["w", "x"], ["y"])], [value("x", INT64, ["n"])],
                                                  [value("y", dims=["n", 64])], [_large_nan()]), "NaN")  # fmt: skip
    yield _accepted("infinite", added(array([0, 0, -np.inf, 0]), "Min"))
    for name, tensor in {
        "shorter": TensorProto(name="w", data_type=1, dims=[4], raw_data=bytes(12)),
        "longer": TensorProto(name="w", data_type=1, dims=[4], raw_data=bytes(20)),
        "no-whole-number": TensorProto(name="w", data_type=1, dims=[4], raw_data=bytes(3)),
        "far-shorter": TensorProto(name="w", data_type=1, dims=[1 << 40], raw_data=bytes(12)),
        "overflowing-shape": TensorProto(name="w", data_type=1, dims=[1 << 32, 1 << 32], raw_data=bytes(16)),
        "negative-shape": TensorProto(name="w", data_type=1, dims=[-4], raw_data=bytes(16)),
        "two-negatives": TensorProto(name="w", data_type=1, dims=[-2, -2], raw_data=bytes(16)),
        "too-few-values": TensorProto(name="w", data_type=1, dims=[4], float_data=[1.0]),
        "too-many-values": TensorProto(name="w", data_type=1, dims=[1], float_data=[1.0, 2.0]),
        "no-data": TensorProto(name="w", data_type=1, dims=[4]),
        "no-type": TensorProto(name="w", dims=[4], raw_data=bytes(16)),
        "type-77": TensorProto(name="w", data_type=77, dims=[4], raw_data=bytes(16)),
        "data-of-another-type": TensorProto(name="w", data_type=1, dims=[4], int64_data=[1, 2, 3, 4]),
        "strings-as-raw": TensorProto(name="w", data_type=8, dims=[1], raw_data=b"abcd"),
        "large-and-shorter": TensorProto(name="w", data_type=1, dims=[1 << 16, 4], raw_data=bytes(1 << 17)),
    }.items():
        yield _refused(f"weight-{name}", added(tensor))
    both = TensorProto(name="w", data_type=1, dims=[1], raw_data=bytes(4), float_data=[1.0])
    yield _either("weight-raw-and-values", added(both))
    yield _either("weight-in-segments", added(_segmented()))
    yield _accepted("weight-scalar", added(array(2.0)))
    yield _either("weight-without-elements", model([node("Concat", ["x", "w"], ["y"], axis=0)],
                                                   weights=[array(np.ones((0, 4)))]))  # fmt: skip
    yield _either("weight-without-name", added(array([1, 2, 3, 4], name="")))
    yield _either("sparse", _sparse([0, 3]))
    for name, places in {"beyond": [0, 99], "negative": [-5, 2], "unsorted": [3, 0], "twice": [1, 1]}.items():
        yield _either(f"sparse-{name}", _sparse(places))


def _cast_and_add(weight: TensorProto) -> ModelProto:
    return model([node("Cast", ["w"], ["f"], to=FLOAT), node("Add", ["x", "f"], ["y"])], weights=[weight])


def _large_nan() -> TensorProto:
    values = np.zeros((1024, 64), np.float32)
    values[1023, 63] = np.nan
    return array(values)


def _segmented() -> TensorProto:
    weight = array([1, 2, 3, 4])
    weight.segment.begin, weight.segment.end = 0, 4
    return weight


def _sparse(places: Sequence[int]) -> ModelProto:
    made = model([node("Add", ["x", "w"], ["y"])])
    values, indices = array([1.0] * len(places)), array(places, np.int64, "w_indices")
    made.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [4]))
    return made


def _external() -> Iterator[Odd]:
    def odd(name: str, verdict: Verdict, words: str = "", **place: str) -> Odd:
        def write(path: Path) -> None:
            (path.parent / "data").mkdir(exist_ok=True)
            (path.parent / "data/weights.bin").write_bytes(np.arange(40, dtype=np.float32).tobytes())
            (path.parent / "link.bin").symlink_to("/etc/passwd")
            weight = TensorProto(name="w", data_type=1, dims=[4], data_location=TensorProto.EXTERNAL)
            for key, text in {"location": "data/weights.bin", **place}.items():
                weight.external_data.add(key=key, value=text)
            path.write_bytes(added(weight).SerializeToString())

        return Odd(f"external-{name}", write, verdict, words)

    refused = Verdict.REFUSED
    yield odd("good", Verdict.ACCEPTED, offset="16", length="16")
    yield odd("without-length", Verdict.ACCEPTED)
    yield odd("unknown-key", Verdict.EITHER, flavour="mild")
    yield odd("missing", refused, "not there", location="gone.bin")
    yield odd("above", refused, "outside", location="../model.onnx")
    yield odd("above-and-back", refused, "outside", location="data/../../x/weights.bin")
    yield odd("absolute", refused, "outside", location="/etc/passwd")
    yield odd("link", refused, "outside", location="link.bin")
    yield odd("nowhere", refused, "no file", location="")
    yield odd("folder", refused, location="data")
    yield odd("itself", Verdict.EITHER, location=FILE)
    yield odd("nul", refused, location="a\0b")
    yield odd("long-name", refused, location="a" * 5000)
    yield odd("beyond", refused, "the file has 160", offset="152", length="16")
    yield odd("far-beyond", refused, "the file has 160", offset=str(2**63), length="16")
    yield odd("short", refused, "takes 16 bytes", offset="0", length="8")
    yield odd("long", refused, "takes 16 bytes", offset="0", length="32")
    yield odd("negative-offset", refused, offset="-4", length="16")
    yield odd("offset-in-words", refused, offset="four", length="16")
    yield odd("length-in-words", refused, offset="0", length="1e3")


def _types() -> Iterator[Odd]:
    def through(kind: int) -> ModelProto:
        return model([node("Identity", ["x"], ["y"])], [value("x", kind)], [value("y", kind)])

    for name in ("STRING", "BFLOAT16", "COMPLEX64", "COMPLEX128", "FLOAT8E4M3FN", "FLOAT8E5M2", "INT4", "UINT4"):
        made = through(getattr(TensorProto, name))
        made.opset_import[0].version, made.ir_version = 21, 10
        yield _refused(f"type-{name.lower()}", made)
    for name in ("FLOAT16", "DOUBLE", "INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64", "BOOL"):
        yield _accepted(f"type-{name.lower()}", through(getattr(TensorProto, name)))
    bf16 = [value(name, TensorProto.BFLOAT16) for name in ("x", "y")]
    yield _refused("bf16-product", model([node("Mul", ["x", "x"], ["y"], "product")], bf16[:1], bf16[1:]), "product")
    inside = [node("Cast", ["x"], ["b"], to=TensorProto.BFLOAT16), node("Mul", ["b", "b"], ["c"], "product"),
              node("Cast", ["c"], ["y"], to=FLOAT)]  # fmt: skip
    yield _refused("bf16-inside", model(inside), "product")
    text = [node("Cast", ["x"], ["t"], to=TensorProto.STRING), node("Cast", ["t"], ["y"], to=FLOAT)]
    yield _either("strings-inside", model(text))
    sequence = helper.make_tensor_sequence_value_info("y", FLOAT, None)
    yield _refused("sequence-output", model([node("SequenceConstruct", ["x"], ["y"])], outputs=[sequence]), "seq(")
    optional = helper.make_value_info("y", helper.make_optional_type_proto(helper.make_tensor_type_proto(FLOAT, None)))
    yield _refused("optional-output", model([node("Optional", ["x"], ["y"])], outputs=[optional]))
    yield _refused("zipmap", zipmap(), "zipmap")
    yield _accepted("sequence-inside", model([node("SequenceConstruct", ["x", "x"], ["s"]),
                                              node("ConcatFromSequence", ["s"], ["y"], axis=0)]))  # fmt: skip
    yield _either("scalar-output", model([node("ReduceSum", ["x"], ["y"], keepdims=0)], outputs=[value("y", dims=[])]))
    yield _either("output-without-batch", model([node("ReduceSum", ["x", "a"], ["y"], keepdims=0)],
                                                outputs=[value("y", dims=[4])],
                                                weights=[array([0], np.int64, "a")]))  # fmt: skip
    nothing = model([node("Slice", ["x", "s", "s"], ["y"])], outputs=[value("y", dims=[0, 4])],
                    weights=[array([0], np.int64, "s")])  # fmt: skip
    yield _either("output-without-elements", nothing)
    yield _either(
        "output-of-the-datas-shape", model([node("NonZero", ["x"], ["y"])], outputs=[value("y", INT64, [2, "k"])])
    )


def zipmap() -> ModelProto:
    maps = helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(FLOAT, None))
    output = helper.make_value_info("y", helper.make_sequence_type_proto(maps))
    zipped = helper.make_node("ZipMap", ["x"], ["y"], "zip", domain="ai.onnx.ml", classlabels_int64s=[0, 1, 2, 3])
    return model([zipped], outputs=[output], opsets=[("", 17), ("ai.onnx.ml", 1)])


def _bodies() -> Iterator[Odd]:
    yield _accepted("if", _if(node("Relu", ["x"], ["a"]), node("Neg", ["x"], ["b"])))
    # Rows of these depend on one another, which the gate finds out.
    yield _either("if-of-different-rank", _if(node("Squeeze", ["x"], ["a"]), node("Identity", ["x"], ["b"]), dims=None))
    yield _refused("if-unknown-operator", _if(node("Foo", ["x"], ["a"], "inner"), node("Neg", ["x"], ["b"])), "Foo")
    yield _refused("if-undefined", _if(node("Relu", ["q"], ["a"]), node("Neg", ["x"], ["b"])), "'q'")
    yield _refused("if-without-output", _if(node("Relu", ["x"], ["z"]), node("Neg", ["x"], ["b"])), "'a'")
    yield _refused("if-of-different-type", _if(node("Cast", ["x"], ["a"], to=INT64), node("Neg", ["x"], ["b"])))
    yield _refused("if-without-else", changed(lambda m: m.graph.node[1].attribute.pop(), _plain_if))
    yield _refused("if-on-numbers", changed(lambda m: m.graph.node[1].input.__setitem__(0, "x"), _plain_if))
    yield _refused("if-attribute-is-no-graph", model([node("If", ["x"], ["y"], then_branch=1, else_branch=2)]))
    for depth in (5, 20):
        yield _accepted(f"if-nested-{depth}", _nested(depth))
    for depth in (28, 31, 34, 60, 400, 5000):
        yield _either(f"if-nested-{depth}", _deeply_nested(depth))
    yield _accepted("loop", _loop(node("Add", ["v", "x"], ["w"])))
    yield _refused("loop-unknown-operator", _loop(node("Foo", ["v"], ["w"], "inner")), "Foo")
    yield _refused("loop-undefined", _loop(node("Add", ["v", "q"], ["w"])), "'q'")
    yield _either("scan", _scan("Add"))  # as do those of this one
    yield _refused("scan-unknown-operator", _scan("Foo"), "Foo")


def _if(then: NodeProto, other: NodeProto, dims: Sequence[Any] | None = ("n", 4)) -> ModelProto:
    branches = {
        f"{name}_branch": helper.make_graph([body], name, [], [value(out, dims=dims)])
        for name, body, out in (("then", then, "a"), ("else", other, "b"))
    }
    nodes = [_constant_condition(), node("If", ["c"], ["y"], "choose", **branches)]
    return model(nodes, outputs=[value("y", dims=dims)])


def _plain_if() -> ModelProto:
    return _if(node("Relu", ["x"], ["a"]), node("Neg", ["x"], ["b"]))


def _constant_condition() -> NodeProto:
    return node("Constant", [], ["c"], value=array(True, np.bool_, "c"))


def _nested(depth: int) -> ModelProto:
    inner, name = node("Relu", ["x"], ["v0"]), "v0"
    for i in range(1, depth + 1):
        then = helper.make_graph([inner], f"t{i}", [], [value(name)])
        other = helper.make_graph([node("Neg", ["x"], [f"e{i}"])], f"e{i}", [], [value(f"e{i}")])
        name = f"v{i}"
        inner = node("If", ["c"], [name], then_branch=then, else_branch=other)
    inner.output[0] = "y"
    return model([_constant_condition(), inner])


def _deeply_nested(depth: int) -> bytes:
    """Written by hand: protobuf makes no message that is as deep as this."""
    output = _field(12, value("v").SerializeToString())
    graph = _field(1, node("Relu", ["x"], ["v"]).SerializeToString()) + _field(2, b"g") + output
    flat = _field(1, node("Neg", ["x"], ["v"]).SerializeToString()) + _field(2, b"g") + output
    for _ in range(depth):
        branches = [
            _field(1, name) + _field(6, inner) + b"\xa0\x01\x05"  # an attribute that is a graph
            for name, inner in ((b"then_branch", graph), (b"else_branch", flat))
        ]
        made = _field(1, b"c") + _field(2, b"v") + _field(4, b"If") + b"".join(_field(5, b) for b in branches)
        graph = _field(1, made) + _field(2, b"g") + output
    outer = _field(1, _constant_condition().SerializeToString()) + graph
    outer += _field(11, value("x").SerializeToString())
    return b"\x08\x09" + _field(8, helper.make_opsetid("", 17).SerializeToString()) + _field(7, outer)


def _field(number: int, payload: bytes) -> bytes:
    length, size = bytearray(), len(payload)
    while size > 0x7F:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([number << 3 | 2, *length, size]) + payload


def _loop(step: NodeProto) -> ModelProto:
    body = helper.make_graph(
        [step, node("Identity", ["go"], ["on"])],
        "body",
        [value("i", INT64, []), value("go", TensorProto.BOOL, []), value("v")],
        [value("on", TensorProto.BOOL, []), value("w")],
    )
    nodes = [node("Loop", ["times", "yes", "x"], ["y"], "repeat", body=body)]
    return model(nodes, weights=[array(3, np.int64, "times"), array(True, np.bool_, "yes")])


def _scan(op: str) -> ModelProto:
    body = helper.make_graph(
        [node(op, ["s", "e"], ["t"], "inner"), node("Identity", ["t"], ["o"])],
        "body",
        [value("s", dims=[4]), value("e", dims=[4])],
        [value("t", dims=[4]), value("o", dims=[4])],
    )
    nodes = [node("Scan", ["start", "x"], ["last", "y"], "scan", body=body, num_scan_inputs=1)]
    return model(nodes, weights=[array(np.zeros(4), name="start")])


def _functions() -> Iterator[Odd]:
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]

    def function(name: str, *nodes: NodeProto) -> Any:
        return helper.make_function("own", name, ["a"], ["b"], list(nodes), opsets)

    def calling(*functions: Any) -> ModelProto:
        made = model([helper.make_node("F", ["x"], ["y"], "call", domain="own")], opsets=[("", 17), ("own", 1)])
        made.functions.extend(functions)
        return made

    own = {op: helper.make_node(op, ["a"], ["b"], domain="own") for op in "FG"}
    yield _accepted("function", calling(function("F", node("Relu", ["a"], ["b"]))))
    yield _accepted("function-in-function", calling(function("F", own["G"]), function("G", node("Relu", ["a"], ["b"]))))
    yield _refused("function-calls-itself", calling(function("F", own["F"])), "without end")
    yield _refused(
        "functions-call-each-other", calling(function("F", own["G"]), function("G", own["F"])), "without end"
    )
    yield _refused("function-undefined", calling(), "own:F")
    yield _refused("function-twice", calling(*[function("F", node("Relu", ["a"], ["b"]))] * 2), "one name")
    yield _refused("function-of-unknown-operator", calling(function("F", node("Foo", ["a"], ["b"]))), "Foo")
    yield _refused("function-of-undefined-value", calling(function("F", node("Relu", ["q"], ["b"]))), "'q'")


def _nodes() -> Iterator[Odd]:
    def of(*nodes: NodeProto, weights: Sequence[TensorProto] = (), **more: Any) -> ModelProto:
        return model(nodes, weights=weights, **more)

    custom = helper.make_node("FancyNorm", ["x"], ["y"], "fancy", domain="acme.ops")
    gelu = helper.make_node("Gelu", ["x"], ["y"], domain="com.microsoft")
    with_microsoft = [("", 17), ("com.microsoft", 1)]
    yield _refused("unknown-operator", of(node("Foo", ["x"], ["y"], "n7")), "ai.onnx:Foo")
    yield _refused("unknown-domain", of(custom, opsets=[("", 17), ("acme.ops", 1)]), "acme.ops:FancyNorm")
    yield _refused("domain-not-imported", of(custom), "acme.ops")
    yield _accepted("microsoft-operator", of(gelu, opsets=with_microsoft))
    yield _either("microsoft-not-imported", of(gelu))
    lacking = helper.make_node("NoSuchThing", ["x"], ["y"], domain="com.microsoft")
    yield _refused("unknown-microsoft-operator", of(lacking, opsets=with_microsoft), "NoSuchThing")
    yield _refused("operator-without-name", of(node("", ["x"], ["y"])))
    yield _refused("operator-of-a-later-opset", of(node("Gelu", ["x"], ["y"], "g"), opsets=[("", 13)]), "Gelu")
    yield _either(
        "operator-that-was-removed", of(node("Upsample", ["x", "s"], ["y"]), weights=[array([1, 1], name="s")])
    )
    yield _refused("too-few-inputs", of(node("Add", ["x"], ["y"])))
    yield _refused("too-many-inputs", of(node("Relu", ["x", "x", "x"], ["y"])))
    yield _refused("too-many-outputs", of(node("Relu", ["x"], ["y", "z"])))
    yield _refused("no-outputs", of(node("Relu", ["x"], []), node("Relu", ["x"], ["y"])))
    yield _refused("attribute-missing", of(node("Cast", ["x"], ["y"])))
    yield _refused("attribute-unknown", of(node("Relu", ["x"], ["y"], slope=2.0)))
    yield _refused("attribute-of-another-type", of(node("Softmax", ["x"], ["y"], axis="last")))
    yield _refused("attribute-without-type", of(_untyped()))
    yield _either("attribute-twice", of(_twice()))
    yield _either("reference-outside-of-a-function", of(_reference()))
    yield _refused("axis-beyond", of(node("Softmax", ["x"], ["y"], axis=7)))
    yield _refused("permutation-wrong", of(node("Transpose", ["x"], ["y"], perm=[0, 5])))
    yield _refused("cast-to-nothing", of(node("Cast", ["x"], ["y"], to=99)))
    yield _refused("constant-without-value", of(node("Constant", [], ["w"]), node("Add", ["x", "w"], ["y"])))
    two = node("Constant", [], ["w"], value_float=1.0, value_int=2)
    yield _either("constant-of-two-values", of(two, node("Add", ["x", "w"], ["y"])))
    yield _either("reshape-impossible", of(node("Reshape", ["x", "s"], ["y"]), weights=[array([7, 3], np.int64, "s")]))
    yield _either("gather-beyond", of(node("Gather", ["x", "i"], ["y"], axis=1),
                                      weights=[array([9, 9, 9, 9], np.int64, "i")]))  # fmt: skip
    yield _either("divide-by-zero", of(node("Div", ["x", "w"], ["y"]), weights=[array([0, 0, 0, 0])]))
    huge = array([1 << 20, 1 << 22], np.int64, "s")
    yield _refused("a-constant-of-terabytes", of(node("ConstantOfShape", ["s"], ["z"]), node("ReduceSum", ["z"], ["r"]),
                                                 node("Add", ["x", "r"], ["y"]), weights=[huge]))  # fmt: skip
    yield _refused("conv-of-huge-pads", _conv(pads=[1 << 40, 1, 1, 1]), "no machine holds that")
    yield _either("random-numbers", of(node("RandomUniformLike", ["x"], ["y"], "dice")))
    yield _either("conv-of-stride-0", _conv(strides=[0, 0]))
    yield _either("conv-of-negative-pads", _conv(pads=[-9, -9, -9, -9]))
    yield _either("conv-of-no-groups", _conv(group=0))
    yield _refused("conv-of-wrong-kernel", _conv(kernel_shape=[9, 9, 9]))
    yield _refused("conv-of-huge-dilation", _conv(dilations=[1 << 40, 1]))


def _untyped() -> NodeProto:
    made = node("Softmax", ["x"], ["y"], axis=1)
    made.attribute[0].ClearField("type")
    made.attribute[0].ClearField("i")
    return made


def _twice() -> NodeProto:
    made = node("Softmax", ["x"], ["y"], axis=1)
    made.attribute.append(made.attribute[0])
    return made


def _reference() -> NodeProto:
    made = node("Softmax", ["x"], ["y"])
    made.attribute.append(AttributeProto(name="axis", ref_attr_name="outer", type=AttributeProto.INT))
    return made


def _conv(**attributes: Any) -> ModelProto:
    return model(
        [node("Conv", ["x", "w"], ["y"], "conv", **attributes)],
        [value("x", dims=["n", 2, 8, 8])],
        [value("y", dims=None)],
        [array(np.ones((2, 2, 3, 3)))],
    )


def _large() -> Iterator[Odd]:
    chain = [node("Relu", ["x" if i == 0 else f"v{i}"], [f"v{i + 1}"], f"n{i}") for i in range(3000)]
    chain[-1].output[0] = "y"
    yield _accepted("3000-nodes", model(chain))
    yield Odd("100000-nodes-of-which-one-is-unknown", _write_hundred_thousand, Verdict.REFUSED, "Foo")
    many = [value(f"x{i}") for i in range(300)]
    yield _accepted("300-inputs", model([node("Sum", [v.name for v in many], ["y"])], many))
    constant = node("Constant", [], ["w"], value=array(np.ones((1 << 20, 4)), name="w"))
    first = [node("Slice", ["w", "a", "b"], ["f"]), node("Add", ["x", "f"], ["y"])]
    ends = [array([0], np.int64, "a"), array([1], np.int64, "b")]
    yield _accepted("constant-of-16-megabytes", model([constant, *first], weights=ends))


def _write_hundred_thousand(path: Path) -> None:
    """By hand: helper makes one node in 20 microseconds, and this many only once."""
    nodes = [
        NodeProto(op_type="Relu", input=["x" if i == 0 else f"v{i}"], output=[f"v{i + 1}"]) for i in range(100_000)
    ]
    nodes[50_000].op_type = "Foo"
    nodes[-1].output[0] = "y"
    path.write_bytes(model(nodes).SerializeToString())


def _mutated() -> Iterator[Odd]:
    for name, data, refused in mutations():
        yield Odd(name, _writer(data), Verdict.REFUSED if refused else Verdict.EITHER)


def save(odd: Odd, folder: Path) -> Path:
    folder.mkdir()
    path = folder / FILE
    odd.write(path)
    return path
