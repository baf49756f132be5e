"""The demo's data sets and models: real files, the package's own features, and variants that are what they claim."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import data
import numpy as np
import onnx
import onnxruntime as ort
import pytest
import variants
from filetypes import LABELS, known_type
from magika import Magika
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

ROOTS = [str(Path(np.__file__).parent), str(Path(onnx.__file__).parent)]  # python, C, ELF, numpy, protobuf ... files
WANTED = 150


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("magika")
    data.make(out, WANTED, ROOTS)
    variants.write(out / "model.onnx", out)
    return out


@pytest.fixture(scope="module")
def rows(made: Path) -> np.ndarray[Any, Any]:
    with np.load(made / "eval.npz") as archive:
        return archive["bytes"]


def session(path: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def scores(path: Path, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return session(path).run(None, {data.INPUT: rows})[0]


CONTENTS = {
    "short": b"import os\nprint(os)\n",
    "spaces around": b"\n \t" * 900 + b"#!/bin/sh\necho hello\n" * 3 + b" \n" * 700,
    "almost a block of spaces": b" " * 4_000 + b"int main(void) { return 0; }\n" * 9 + b"\n" * 4_000,
    "exactly one part": b"x" * 1_024,
    "exactly one block": b"{" + b'"a": 1,' * 585 + b"}",
    "long": bytes(range(256)) * 400,
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS.keys())
def test_the_model_sees_what_the_package_would_show_it(content: bytes, made: Path, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    theirs = Magika().identify_path(path)
    ours = scores(made / "model.onnx", data.features(path)[None])[0]
    assert data.target_labels()[int(ours.argmax())] == theirs.dl.label
    assert float(ours.max()) == pytest.approx(theirs.score, abs=1e-6)


def test_real_files_are_labelled_and_the_model_is_mostly_right(made: Path) -> None:
    with np.load(made / "eval.npz") as archive:
        rows, labels = archive["bytes"], archive["labels"]
    assert rows.shape == (WANTED, 2048)
    assert rows.dtype == np.int32
    assert len(set(labels.tolist())) >= 4
    assert (scores(made / "model.onnx", rows).argmax(axis=1) == labels).mean() > 0.9


def test_no_sample_is_twice_in_anything_and_calibration_is_apart(made: Path) -> None:
    with np.load(made / "eval.npz") as evaluation, np.load(made / "calib.npz") as calibration:
        seen = [row.tobytes() for row in (*evaluation["bytes"], *calibration["bytes"])]
        assert calibration.files == ["bytes"]
        assert len(calibration["bytes"]) == 64
    assert len(set(seen)) == len(seen)


def test_requests_are_samples_that_the_model_is_sure_of(made: Path, rows: np.ndarray[Any, Any]) -> None:
    with np.load(made / "requests.npz") as archive:
        asked, labels = archive["bytes"], archive["labels"]
    answers = np.sort(scores(made / "model.onnx", asked), axis=1)
    assert len(asked) == 64
    assert (answers[:, -1] - answers[:, -2] > data.MARGIN).all()
    assert (scores(made / "model.onnx", asked).argmax(axis=1) == labels).all()
    assert {row.tobytes() for row in asked} <= {row.tobytes() for row in rows}


def test_the_same_files_give_the_same_bytes(made: Path, tmp_path: Path) -> None:
    data.make(tmp_path, WANTED, ROOTS)
    for name in ("eval.npz", "calib.npz", "requests.npz", "model.onnx"):
        assert (tmp_path / name).read_bytes() == (made / name).read_bytes()


def test_a_machine_with_fewer_files_is_told_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = data.make(tmp_path, 100_000, [str(Path(np.__file__).parent / "_core")])
    assert "100,000 were wanted: this machine has no more files" in capsys.readouterr().out
    assert 64 < len(sets.evaluation) < 1_000


def test_a_machine_without_files_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="only 0 files of known types"):
        data.make(tmp_path, 10, [str(tmp_path)])


def test_types_are_balanced(made: Path) -> None:
    with np.load(made / "eval.npz") as archive:
        counts = np.bincount(archive["labels"])
    assert counts.max() < WANTED // 2


def test_every_label_is_one_of_the_models() -> None:
    assert set(LABELS) <= set(data.target_labels())


@pytest.mark.parametrize(
    ("name", "head", "label"),
    [
        ("a.py", b"import os", "python"),
        ("A.PY", b"import os", "python"),
        ("a.py", b"\0\0", None),
        ("a.h", b"#define A 1", "c"),
        ("a.h", b"namespace a {", None),
        ("libc.so.6", b"\x7fELF\2", "elf"),
        ("libc.so", b"/* GNU ld script */", None),
        ("ls", b"\x7fELF\2", "elf"),
        ("tool", b"#!/usr/bin/env perl\n", "perl"),
        ("tool", b"#!/bin/sh -e\n", "shell"),
        ("tool", b"#!\n", None),
        ("tool", b"hello", None),
        ("a.svg", b"<?xml version='1.0'?><svg>", "svg"),
        ("a.xml", b"<?xml version='1.0'?><svg>", None),
        ("a.json", b"// not json", None),
        ("a.unknown", b"hello", None),
        ("Makefile", b"all:\n", "makefile"),
    ],
)
def test_a_type_is_known_where_name_and_bytes_agree(name: str, head: bytes, label: str | None) -> None:
    assert known_type(name, head) == label


@pytest.mark.parametrize("name", ["damaged", "slow", "tagged"])
def test_a_variant_gives_the_same_answers_bit_for_bit_in_fp32(
    name: str, made: Path, rows: np.ndarray[Any, Any]
) -> None:
    assert np.array_equal(scores(made / f"{name}.onnx", rows[:64]), scores(made / "model.onnx", rows[:64]))
    assert (made / f"{name}.onnx").read_bytes() != (made / "model.onnx").read_bytes()


class Calibration(CalibrationDataReader):
    def __init__(self, path: Path) -> None:
        with np.load(path) as archive:
            self._rows: Iterator[np.ndarray[Any, Any]] = iter(archive["bytes"][:16])

    def get_next(self) -> dict[str, np.ndarray[Any, Any]] | None:
        row = next(self._rows, None)
        return None if row is None else {data.INPUT: row[None]}


@pytest.mark.long
@pytest.mark.parametrize(("name", "least", "most"), [("model", 0.97, 1.0), ("slow", 0.97, 1.0), ("damaged", 0.0, 0.5)])
def test_int8_destroys_the_damaged_graph_and_only_that(
    name: str, least: float, most: float, made: Path, rows: np.ndarray[Any, Any], tmp_path: Path
) -> None:
    quantised = tmp_path / "int8.onnx"
    quantize_static(
        made / f"{name}.onnx",
        quantised,
        Calibration(made / "calib.npz"),
        quant_format=QuantFormat.QDQ,
        op_types_to_quantize=["Conv", "MatMul", "Gemm"],
        per_channel=True,
        activation_type=QuantType.QInt8,
        weight_type=QuantType.QInt8,
        extra_options={"ActivationSymmetric": True, "WeightSymmetric": True, "QuantizeBias": False},
    )
    same = scores(quantised, rows).argmax(axis=1) == scores(made / "model.onnx", rows).argmax(axis=1)
    assert least <= same.mean() <= most


def test_fp16_cannot_hold_the_damaged_graph(made: Path, rows: np.ndarray[Any, Any]) -> None:
    """What goes into the last MatMul passes the largest half-precision number."""
    model = onnx.load(made / "damaged.onnx")
    model.graph.output.append(onnx.helper.make_tensor_value_info("outliers/hidden", onnx.TensorProto.FLOAT, None))
    hidden = ort.InferenceSession(model.SerializeToString()).run(["outliers/hidden"], {data.INPUT: rows[:32]})[0]
    assert np.abs(hidden).max() > np.finfo(np.float16).max


def test_the_slow_graph_takes_at_least_twice_the_time(made: Path, rows: np.ndarray[Any, Any]) -> None:
    def cpu_seconds(path: Path) -> float:
        running = session(path)
        best = []
        for _ in range(12):
            begin = time.process_time()
            running.run(None, {data.INPUT: rows[:1]})
            best.append(time.process_time() - begin)
        return min(best)

    assert cpu_seconds(made / "slow.onnx") > 2 * cpu_seconds(made / "model.onnx")


def test_a_graph_without_a_layer_to_damage_is_refused() -> None:
    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    empty = onnx.helper.make_model(onnx.helper.make_graph([], "empty", [value], [value]))
    with pytest.raises(ValueError, match="no MatMul by constants"):
        variants.damaged(empty)
