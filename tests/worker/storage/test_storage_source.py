"""Sources of several files: which belong to them, where they come to lie, and what is refused."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from storage_servers import Answer, Stub, objects, ranged
from trtmodel_contract.identity import Storage, source_identity
from trtmodel_contract.jobs import Reason
from trtmodel_worker.storage import NotFound, Source, StorageError, fetch_source, source
from trtmodel_worker.storage.external import external_files

NOWHERE = Storage("engines")
WEIGHTS = np.arange(12, dtype=np.float32).reshape(4, 3)


def model(folder: Path, location: str | None = "model.onnx.data", name: str = "model.onnx") -> Path:
    """y = x W, with W in the file `location` beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    weight = numpy_helper.from_array(WEIGHTS, "w")
    if location is not None:
        weight.ClearField("raw_data")
        weight.data_location = TensorProto.EXTERNAL
        for key, value in (("location", location), ("offset", "0"), ("length", str(WEIGHTS.nbytes))):
            weight.external_data.add(key=key, value=value)
        path = folder / location
        if location and ".." not in location and not location.startswith("/"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(WEIGHTS.tobytes())
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3])],
        [weight],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    (folder / name).write_bytes(made.SerializeToString())
    return folder / name


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def identity(folder: Path) -> str:
    files = [p for p in folder.rglob("*") if p.is_file()]
    return source_identity((str(p.relative_to(folder)), sha256(p)) for p in files)


def get(uri: str, tmp_path: Path, known: str = "") -> Source:
    return fetch_source(uri, NOWHERE, None, tmp_path / "cache", known)


def cached(tmp_path: Path) -> list[str]:
    cache = tmp_path / "cache"
    return sorted(str(p.relative_to(cache)) for p in cache.rglob("*") if p.is_file())


def runs(path: Path) -> None:
    """For the runtime and for onnx: that the data is found, and may be read where it lies."""
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    x = np.ones((1, 4), np.float32)
    assert np.array_equal(session.run(None, {"x": x})[0], x @ WEIGHTS)
    assert np.array_equal(numpy_helper.to_array(onnx.load(path).graph.initializer[0]), WEIGHTS)
    onnx.checker.check_model(str(path))


def test_one_file_is_its_own_identity(tmp_path: Path) -> None:
    path = model(tmp_path / "m", None)
    found = get(f"file://{path}", tmp_path)
    assert (found.digest, found.size) == (sha256(path), path.stat().st_size)
    assert cached(tmp_path) == [f"sha256/{found.digest}"]
    assert get(f"file://{path.parent}/", tmp_path) == found


def test_A13_a_prefix_is_a_model_with_all_its_files(tmp_path: Path) -> None:
    model(tmp_path / "m", "weights/w.bin")
    (tmp_path / "m/README.md").write_text("read me")
    found = get(f"file://{tmp_path}/m/", tmp_path)
    assert found.digest == identity(tmp_path / "m")
    assert found.size == sum(p.stat().st_size for p in (tmp_path / "m").rglob("*") if p.is_file())
    assert found.path == tmp_path / "cache/sources" / found.digest / "model.onnx"
    assert len(cached(tmp_path)) == 3
    runs(found.path)


def test_A13_the_files_that_a_model_names_beside_it_come_with_it(tmp_path: Path) -> None:
    path = model(tmp_path / "m", "./weights/w.bin")
    (tmp_path / "m/README.md").write_text("not named, so not part of it")
    found = get(f"file://{path}", tmp_path)
    runs(found.path)
    (tmp_path / "m/README.md").unlink()
    assert found.digest == identity(tmp_path / "m") == get(f"file://{tmp_path}/m/", tmp_path).digest


def test_any_file_of_a_source_changes_its_identity(tmp_path: Path) -> None:
    model(tmp_path / "m")
    uri = f"file://{tmp_path}/m/"
    first = get(uri, tmp_path).digest
    data = tmp_path / "m/model.onnx.data"
    data.write_bytes((WEIGHTS + 1).tobytes())
    second = get(uri, tmp_path).digest
    data.rename(tmp_path / "m/other.data")
    model(tmp_path / "m", "other.data")
    assert len({first, second, get(uri, tmp_path).digest}) == 3


def test_what_was_fetched_can_be_fetched_again_from_the_cache(tmp_path: Path) -> None:
    model(tmp_path / "m")
    (tmp_path / "m/README.md").write_text("read me")
    found = get(f"file://{tmp_path}/m/", tmp_path)
    assert get(found.uri, tmp_path) == found
    for path in (tmp_path / "m").iterdir():
        path.unlink()
    assert get(f"file://{tmp_path}/m/", tmp_path, known=found.digest) == found
    with pytest.raises(NotFound):
        get(f"file://{tmp_path}/m/", tmp_path, known="0" * 64)


def test_a_damaged_source_in_the_cache_is_fetched_anew(tmp_path: Path) -> None:
    model(tmp_path / "m")
    uri = f"file://{tmp_path}/m/"
    found = get(uri, tmp_path)
    data = found.path.with_name("model.onnx.data")
    data.write_bytes(b"\0" * WEIGHTS.nbytes)
    assert get(uri, tmp_path, found.digest) == found
    runs(found.path)
    data.unlink()
    assert get(uri, tmp_path) == found
    runs(found.path)
    assert len(cached(tmp_path)) == 2


def test_equal_files_are_all_there(tmp_path: Path) -> None:
    model(tmp_path / "m")
    for n in range(6):
        (tmp_path / f"m/equal-{n}").write_bytes(b"same")
    found = get(f"file://{tmp_path}/m/", tmp_path)
    assert found.digest == identity(tmp_path / "m") == identity(found.path.parent)


def test_external_data_behind_https_comes_from_beside_the_model(tmp_path: Path, stub: Stub) -> None:
    path = model(tmp_path / "m", "w 1+é.bin")
    data = WEIGHTS.tobytes()

    def answer(_method: str, where: str, headers: Mapping[str, str]) -> Answer:
        if where == "/a%20b/w%201%2B%C3%A9.bin":
            return ranged(data, headers)
        return ranged(path.read_bytes(), headers) if where == "/a%20b/model.onnx?download=1" else Answer(404)

    stub.answer = answer
    found = get(f"{stub.url}/a%20b/model.onnx?download=1", tmp_path)
    runs(found.path)
    assert found.digest == identity(tmp_path / "m")


def test_external_data_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = model(tmp_path / "m")
    (tmp_path / "m/model.onnx.data").unlink()
    with pytest.raises(NotFound) as absent:
        get(f"file://{path}", tmp_path)
    assert "model.onnx.data: no such file" in absent.value.message
    assert "upload it beside the model" in absent.value.message
    with pytest.raises(StorageError, match=r"'w' of model\.onnx lies in 'model\.onnx\.data', which is not there") as e:
        get(f"file://{tmp_path}/m/", tmp_path)
    assert e.value.reason is Reason.MODEL_INVALID
    assert cached(tmp_path) == []


@pytest.mark.parametrize(
    "location", ["../secret", "/etc/passwd", "a/../../secret", "..", "", "a\\b", "C:\\secret", "ok/../../m/../secret"]
)
@pytest.mark.parametrize("form", ["{}/m/", "{}/m/model.onnx"])
def test_data_outside_of_the_models_folder_is_refused(tmp_path: Path, location: str, form: str) -> None:
    (tmp_path / "secret").write_bytes(b"do not read")
    model(tmp_path / "m", location)
    with pytest.raises(StorageError, match="not below the model's own folder") as e:
        get("file://" + form.format(tmp_path), tmp_path)
    assert e.value.reason is Reason.MODEL_INVALID
    assert cached(tmp_path) == []


@pytest.mark.parametrize(
    ("names", "words", "reason"),
    [
        (["a.onnx", "b.onnx"], "several models: a.onnx, b.onnx.*name one of them", Reason.MODEL_INVALID),
        (
            ["sub/a.onnx", "README.md"],
            r"no \.onnx file at its top, but README\.md, sub/a\.onnx",
            Reason.SOURCE_NOT_FOUND,
        ),
        ([], "no file below it", Reason.SOURCE_NOT_FOUND),
    ],
)
def test_a_prefix_without_exactly_one_model_is_refused(
    tmp_path: Path, names: list[str], words: str, reason: Reason
) -> None:
    (tmp_path / "m").mkdir()
    for name in names:
        (tmp_path / "m" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "m" / name).write_bytes(b"x")
    with pytest.raises(StorageError, match=words) as e:
        get(f"file://{tmp_path}/m/", tmp_path)
    assert e.value.reason is reason
    assert not e.value.transient


def test_a_folder_behind_https_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"cannot be listed: name the \.onnx file, or use s3://") as e:
        get("https://localhost/models/", tmp_path)
    assert e.value.reason is Reason.SOURCE_NOT_FOUND


def test_a_model_with_external_data_needs_its_suffix(tmp_path: Path) -> None:
    path = model(tmp_path / "m", name="model.bin")
    with pytest.raises(StorageError, match=r"must end in \.onnx: rename it"):
        get(f"file://{path}", tmp_path)


def test_data_that_changes_while_the_model_is_read_is_not_mixed_with_it(tmp_path: Path, stub: Stub) -> None:
    """Model of the first upload, data of the second: both are whole, and they do not belong together."""
    content = {"model_onnx": model(tmp_path / "m", "w").read_bytes(), "w": WEIGHTS.tobytes()}

    def answer(method: str, path: str, headers: Mapping[str, str]) -> Answer:
        given = objects(**content)(method, path, headers)
        if path == "/w" and len(stub.requests) == 2:
            content["w"] = (WEIGHTS * 2).tobytes()
        return given

    stub.answer = answer
    found = get(f"{stub.url}/model.onnx", tmp_path)
    assert found.path.with_name("w").read_bytes() == (WEIGHTS * 2).tobytes()
    assert len(cached(tmp_path)) == 2


def test_what_is_no_onnx_is_handed_to_the_check(tmp_path: Path) -> None:
    for content in (b"", b"<html>", b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", b"\x3a\x0a\x2a\xff"):
        (tmp_path / "m.onnx").write_bytes(content)
        assert get(f"file://{tmp_path}/m.onnx", tmp_path).size == len(content)


def nested(depth: int) -> onnx.GraphProto:
    inner = onnx.GraphProto()
    tensor = inner.initializer.add(name=f"w{depth}", data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=f"w{depth}.bin")
    node = inner.node.add(op_type="If")
    if depth:
        node.attribute.add(name="then_branch", g=nested(depth - 1))
        node.attribute.add(name="branches", graphs=[nested(depth - 1)])
    return inner


def test_external_data_is_found_wherever_onnx_allows_it(tmp_path: Path) -> None:
    made = onnx.ModelProto(graph=nested(3))
    for place, tensor in (
        ("constant", made.graph.node[0].attribute.add(name="value").t),
        ("list", made.graph.node[0].attribute.add(name="values").tensors.add()),
        ("sparse", made.graph.sparse_initializer.add().values),
        ("indices", made.graph.sparse_initializer.add().indices),
        ("sparse-attribute", made.graph.node[0].attribute.add(name="s").sparse_tensor.values),
        ("function", made.functions.add().node.add().attribute.add(name="value").t),
    ):
        tensor.name, tensor.data_location = place, TensorProto.EXTERNAL
        tensor.external_data.add(key="length", value="4")
        tensor.external_data.add(key="location", value=f"{place}.bin")
    inside = made.graph.initializer.add(name="inside", raw_data=b"\0" * 1000)
    inside.external_data.add(key="location", value="not used")
    path = tmp_path / "m.onnx"
    path.write_bytes(made.SerializeToString())
    named = {"constant", "list", "sparse", "indices", "sparse-attribute", "function", "w0", "w1", "w2", "w3"}
    assert external_files(path, "m") == {f"{name}.bin": name for name in named}


def test_the_fields_that_are_walked_are_those_of_onnx() -> None:
    from trtmodel_worker.storage import external

    messages = {
        "graph": onnx.GraphProto, "function": onnx.FunctionProto, "node": onnx.NodeProto, "tensor": onnx.TensorProto,
        "attribute": onnx.AttributeProto, "sparse": onnx.SparseTensorProto,
    }  # fmt: skip
    for parent, fields in {"model": external._MODEL, **external._INSIDE}.items():
        descriptor = (onnx.ModelProto if parent == "model" else messages[parent]).DESCRIPTOR
        for number, child in fields.items():
            assert descriptor.fields_by_number[number].message_type is messages[child].DESCRIPTOR
    by_name = onnx.TensorProto.DESCRIPTOR.fields_by_name
    assert [by_name[n].number for n in ("name", "external_data", "data_location")] == [8, 13, 14]


def test_a_graph_that_is_nested_without_end_is_not_followed(tmp_path: Path) -> None:
    data = b""
    for _ in range(200):
        for field in (6, 5, 1):  # graph of attribute of node of graph
            data = bytes([field << 3 | 2]) + _varint(len(data)) + data
    (tmp_path / "m.onnx").write_bytes(b"\x3a" + _varint(len(data)) + data)
    with pytest.raises(ValueError, match="nested"):
        external_files(tmp_path / "m.onnx", "m")


def _varint(value: int) -> bytes:
    found = b""
    while value > 0x7F:
        found += bytes([value & 0x7F | 0x80])
        value >>= 7
    return found + bytes([value])


def test_many_that_fetch_one_source_into_one_cache_all_find_it_whole(tmp_path: Path) -> None:
    folder = model(tmp_path / "m").parent

    def fetch_often(_: int) -> None:
        for _ in range(15):
            found = get(f"file://{folder}/", tmp_path)
            assert identity(found.path.parent) == found.digest

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(fetch_often, range(4)))


def test_a_source_that_another_process_has_just_put_there_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model(tmp_path / "m").parent
    theirs = get(f"file://{folder}/", tmp_path)
    seen = theirs.path.stat().st_ino
    looked = source._lookup
    answers = [None]  # ours had looked before theirs was there
    monkeypatch.setattr(source, "_lookup", lambda *args: answers.pop() if answers else looked(*args))
    assert get(f"file://{folder}/", tmp_path) == theirs
    assert theirs.path.stat().st_ino == seen


@pytest.mark.parametrize("form", ["file://{}/m/model.onnx", "file://{}/m/"])
def test_a_link_out_of_the_models_folder_is_refused_and_one_within_it_followed(tmp_path: Path, form: str) -> None:
    uri = form.format(tmp_path)
    path = model(tmp_path / "m")
    secret = tmp_path / "secret"
    secret.write_bytes(WEIGHTS.tobytes())
    data = path.with_name("model.onnx.data")
    data.unlink()
    data.symlink_to(secret)
    with pytest.raises(StorageError, match=r"is a link to .*secret, outside of the model's folder") as e:
        get(uri, tmp_path)
    assert (e.value.reason, e.value.transient) == (Reason.MODEL_INVALID, False)
    # As a ConfigMap is mounted: names are links into a folder that is replaced as a whole.
    inside = tmp_path / "m" / "..2026" / "model.onnx.data"
    inside.parent.mkdir()
    data.unlink()
    secret.rename(inside)
    data.symlink_to("..2026/model.onnx.data")
    if uri.endswith(".onnx"):
        assert get(uri, tmp_path).size == path.stat().st_size + WEIGHTS.nbytes


def test_the_links_of_a_hubs_cache_are_followed(tmp_path: Path) -> None:
    """Each name is a link to a file that is named by its digest."""
    path = model(tmp_path / "snapshots")
    (tmp_path / "blobs").mkdir()
    for number, file in enumerate(sorted((tmp_path / "snapshots").iterdir())):
        file.rename(tmp_path / "blobs" / f"sha-{number}")
        file.symlink_to(tmp_path / "blobs" / f"sha-{number}")
    found = get(f"file://{path}", tmp_path)
    assert get(f"file://{tmp_path}/snapshots/", tmp_path).digest == found.digest


def test_a_model_that_is_named_may_be_a_link_to_anywhere(tmp_path: Path) -> None:
    path = model(tmp_path / "m", location=None)
    (tmp_path / "here.onnx").symlink_to(path)
    assert get(f"file://{tmp_path}/here.onnx", tmp_path).digest == sha256(path)
