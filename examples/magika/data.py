"""Data sets for Magika's file-type classifier, made of real files of known types that a Debian machine has.

    python examples/magika/data.py OUT

writes to OUT
    model.onnx        the model of the PyPI package `magika`, unchanged
    eval.npz          about 1,000 labelled samples for the accuracy gate
    calib.npz         64 other samples, to find the ranges of INT8
    requests.npz      64 of the evaluation's samples about which the model is sure and right: what load.py sends

A sample is what the package itself would feed the model: the first and the last 1,024 bytes of a file. Its label is
the type that the file's name promises and its first bytes do not deny, so the model is not right about all of them.
The same files give the same data sets, byte for byte.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sysconfig
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from filetypes import LABELS, known_type
from numpy.typing import NDArray

INPUT = "bytes"
ROOTS = ("/usr/share", "/usr/lib", "/usr/include", "/usr/bin", "/etc", "/var/lib/dpkg")
MOST_FILES = 300_000  # looked at, by name only
LARGEST_FILE = 64 << 20
SMALLEST_FILE = 64
BLOCK, PART, PADDING = 4096, 1024, 256
LEAST = 8  # bytes after the spaces at the begin: the package does not ask the model about fewer
CALIBRATION = REQUESTS = 64
BATCH = 32
MARGIN = 0.9  # between the best and the second best score of a request: far beyond what INT8 may shift

Rows = NDArray[np.int32]


@dataclass(frozen=True)
class Sample:
    features: Rows
    label: int
    key: str  # hash of the features: the order of everything, and what makes two files the same


@dataclass(frozen=True)
class DataSets:
    evaluation: list[Sample]
    calibration: list[Sample]
    requests: list[Sample]


def model_directory() -> Path:
    """Where the PyPI package keeps its newest model."""
    spec = find_spec("magika")
    if spec is None or spec.origin is None:
        raise SystemExit("the PyPI package magika is not installed: pip install magika")
    models = sorted((Path(spec.origin).parent / "models").glob("*/model.onnx"))
    if not models:
        raise SystemExit("the PyPI package magika holds no ONNX model")
    return models[-1].parent


def target_labels() -> list[str]:
    """The model's labels, in the order of its scores."""
    config = json.loads((model_directory() / "config.min.json").read_text())
    if (config["beg_size"], config["mid_size"], config["end_size"]) != (PART, 0, PART):
        raise SystemExit("this model of magika takes other parts of a file than the first and last 1,024 bytes")
    return list(config["target_labels_space"])


def features(path: Path) -> Rows:
    """A file as the package shows it to the model: stripped at the outer end of each block, padded to 1,024."""
    with path.open("rb") as file:
        begin = file.read(BLOCK)
        file.seek(max(0, file.seek(0, os.SEEK_END) - BLOCK))
        end = file.read(BLOCK)
    row = np.full(2 * PART, PADDING, np.int32)
    head, tail = begin.lstrip()[:PART], end.rstrip()[-PART:]
    row[: len(head)] = np.frombuffer(head, np.uint8)
    row[2 * PART - len(tail) :] = np.frombuffer(tail, np.uint8)
    return row


def files(roots: Iterable[str]) -> Iterator[Path]:
    """Regular files below the roots, in a fixed order."""
    seen = 0
    for root in roots:
        for directory, below, names in os.walk(root):
            below.sort()
            for name in sorted(names):
                seen += 1
                if seen > MOST_FILES:
                    return
                yield Path(directory, name)


def collect(roots: Iterable[str], labels: list[str], per_label: int) -> dict[str, list[Sample]]:
    """At most `per_label` different samples of each type, chosen by the hash of the file's path."""
    candidates: dict[str, list[Path]] = {}
    for path in files(roots):
        label = known_type(path.name)
        if label in labels:
            candidates.setdefault(label, []).append(path)
    return {label: _choose(paths, labels, per_label) for label, paths in sorted(candidates.items())}


def _choose(paths: list[Path], labels: list[str], most: int) -> list[Sample]:
    chosen: dict[str, Sample] = {}
    for path in sorted(paths, key=lambda p: hashlib.sha256(os.fsencode(p)).digest())[: 4 * most]:
        if len(chosen) == most:
            break
        try:
            if path.is_symlink() or not SMALLEST_FILE <= path.stat().st_size <= LARGEST_FILE:
                continue
            with path.open("rb") as file:
                found = known_type(path.name, file.read(BLOCK))
            if found is None:
                continue
            row = features(path)
        except OSError:
            continue
        if row[LEAST - 1] == PADDING:
            continue
        key = hashlib.sha256(row.tobytes()).hexdigest()
        chosen.setdefault(key, Sample(row, labels.index(found), key))
    return list(chosen.values())


def balance(found: dict[str, list[Sample]], wanted: int) -> list[Sample]:
    """`wanted` samples, or all: the same number of each type, as far as there are enough, in the order of the keys."""
    share = next((n for n in range(1, wanted + 1) if sum(min(n, len(s)) for s in found.values()) >= wanted), wanted)
    chosen = {sample.key: sample for samples in found.values() for sample in samples[:share]}
    return [chosen[key] for key in sorted(chosen)][:wanted]


def split(samples: list[Sample], session: ort.InferenceSession) -> DataSets:
    """Disjoint calibration and evaluation, and the requests out of the evaluation."""
    calibration, evaluation = samples[:CALIBRATION], samples[CALIBRATION:]
    scores = score(session, evaluation)
    best = np.sort(scores, axis=1)
    sure = best[:, -1] - best[:, -2] > MARGIN
    right = scores.argmax(axis=1) == np.array([s.label for s in evaluation])
    requests = [s for s, use in zip(evaluation, sure & right, strict=True) if use]
    return DataSets(evaluation, calibration, requests[:REQUESTS])


def score(session: ort.InferenceSession, samples: list[Sample]) -> NDArray[np.float32]:
    rows = np.stack([s.features for s in samples])
    return np.concatenate([session.run(None, {INPUT: rows[i : i + BATCH]})[0] for i in range(0, len(rows), BATCH)])


def write_npz(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    """np.savez_compressed, but with the same bytes each time: it writes the time of day into the archive."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            member = zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0))
            member.compress_type = zipfile.ZIP_DEFLATED
            with archive.open(member, "w") as file:
                np.lib.format.write_array(file, np.ascontiguousarray(array))


def write(out: Path, sets: DataSets) -> None:
    def arrays(samples: list[Sample]) -> dict[str, NDArray[Any]]:
        return {
            INPUT: np.stack([s.features for s in samples]),
            "labels": np.array([s.label for s in samples], np.int64),
        }

    write_npz(out / "eval.npz", arrays(sets.evaluation))
    write_npz(out / "requests.npz", arrays(sets.requests))
    write_npz(out / "calib.npz", {INPUT: np.stack([s.features for s in sets.calibration])})


def make(out: Path, wanted: int = 1_000, roots: Iterable[str] = ()) -> DataSets:
    """Write model and data sets to `out`, and say what they are made of."""
    out.mkdir(parents=True, exist_ok=True)
    source = model_directory() / "model.onnx"
    shutil.copyfile(source, out / "model.onnx")
    labels = target_labels()
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    found = collect(tuple(roots) or (*ROOTS, sysconfig.get_paths()["purelib"]), labels, max(1, wanted // 4))
    samples = balance(found, wanted + CALIBRATION)
    if len(samples) < 2 * CALIBRATION:
        raise SystemExit(f"only {len(samples)} files of known types were found: not enough for data sets")
    sets = split(samples, session)
    write(out, sets)
    _tell(sets, labels, wanted)
    return sets


def _tell(sets: DataSets, labels: list[str], wanted: int) -> None:
    counts: dict[str, int] = {}
    for sample in sets.evaluation:
        counts[labels[sample.label]] = counts.get(labels[sample.label], 0) + 1
    print(", ".join(f"{name} {n}" for name, n in sorted(counts.items(), key=lambda item: (-item[1], item[0]))))
    print(
        f"{len(sets.evaluation):,} labelled samples of {len(counts)} types, {len(sets.calibration)} for calibration, "
        f"{len(sets.requests)} requests"
    )
    if len(sets.evaluation) < wanted:
        print(f"{wanted:,} were wanted: this machine has no more files of known types")
    absent = sorted(set(LABELS) - counts.keys())
    if absent:
        print(f"no file of: {', '.join(absent)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--samples", type=int, default=1_000, help="labelled samples to aim for")
    arguments = parser.parse_args()
    make(arguments.out, arguments.samples)
