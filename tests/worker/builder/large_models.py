"""Models whose weights are holes in a file: gigabytes to every reader, and nothing on the disk.

By hand, for the figures of the largest ones:

    python tests/worker/builder/large_models.py [--limit BYTES] [directory]

With a limit, check and Jobs run, together with this program, in a control group that has no more memory than that,
files that it caches included. That takes root.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper
from trtmodel_contract.identity import EngineSettings

WIDTH = 4096
_EVERY = WIDTH * WIDTH * 4


def external(folder: Path, layers: int) -> Path:
    """x [n, 4096] through `layers` products of 64 MiB each, in one file beside the model. Its values are 0."""
    weights = []
    for i in range(layers):
        weight = TensorProto(name=f"w{i}", data_type=TensorProto.FLOAT, dims=[WIDTH, WIDTH])
        weight.data_location = TensorProto.EXTERNAL
        for key, value in (("location", "weights"), ("offset", i * _EVERY), ("length", _EVERY)):
            weight.external_data.add(key=key, value=str(value))
        weights.append(weight)
    with (folder / "weights").open("wb") as f:
        f.truncate(layers * _EVERY)
    path = folder / "model.onnx"
    path.write_bytes(_model(layers, weights).SerializeToString())
    return path


def inside(folder: Path, layers: int) -> Path:
    """The same in one file, written without ever being in memory."""
    path = folder / "model.onnx"
    small = _model(layers, [])
    opset, graph = small.opset_import[0], small.graph.SerializeToString()
    heads = [
        TensorProto(name=f"w{i}", data_type=TensorProto.FLOAT, dims=[WIDTH, WIDTH]).SerializeToString()
        + b"\x4a" + _varint(_EVERY)
        for i in range(layers)
    ]  # fmt: skip
    entries = [b"\x2a" + _varint(len(head) + _EVERY) + head for head in heads]
    size = len(graph) + sum(len(entry) + _EVERY for entry in entries)
    with path.open("wb") as f:
        f.write(b"\x08\x09")  # the IR version
        f.write(b"\x42" + _varint(len(opset.SerializeToString())) + opset.SerializeToString())
        f.write(b"\x3a" + _varint(size) + graph)
        for entry in entries:
            f.write(entry)
            f.truncate(f.tell() + _EVERY)
            f.seek(0, 2)
    return path


def put_nan(path: Path, at: int) -> None:
    with path.open("r+b") as f:
        f.seek(at)
        f.write(np.array([np.nan], np.float32).tobytes())


def _model(layers: int, weights: list[TensorProto]) -> onnx.ModelProto:
    names = ["x", *(f"v{i}" for i in range(1, layers)), "y"]
    nodes = [helper.make_node("MatMul", [names[i], f"w{i}"], [names[i + 1]], f"n{i}") for i in range(layers)]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", WIDTH]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "large", values[:1], values[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def build_job(path: Path, folder: Path) -> tuple[str, int, int]:
    """(what the build Job of this model says, the most memory of its processes at one time, its most with the files
    that they map), in bytes. Sampled; what is mapped can be dropped by the kernel at any time, the rest cannot."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from job_harness import make_jobs, profiles, save_npz

    rows = np.random.default_rng(2).normal(size=(16, WIDTH)).astype(np.float32)
    engine = EngineSettings("ONNXRuntime", profiles=profiles("x", WIDTH, batches=(1, 2, 2)), simplify=True)
    jobs = make_jobs(folder, path, save_npz(folder / "eval.npz", x=rows), engine=engine, seconds=3600.0)
    peaks, over = [0, 0], threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            for i, found in enumerate(_memory_of_children()):
                peaks[i] = max(peaks[i], found)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        _, result = jobs.build()
    finally:
        over.set()
        watching.join()
    return f"{result.reason.value}: {result.message}", peaks[0], peaks[1]


def _memory_of_children() -> tuple[int, int]:
    """(what is theirs alone, that and what they map of files), of all processes that this one has started, theirs
    included."""
    parents: dict[int, int] = {}
    memory: dict[int, tuple[int, int]] = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            said = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        except OSError:
            continue  # it ended
        own, files = (int(said.get(name, "0").split()[0]) * 1024 for name in ("RssAnon", "RssFile"))
        parents[int(status.parent.name)], memory[int(status.parent.name)] = int(said["PPid"]), (own, own + files)
    total = [0, 0]
    for pid, found in memory.items():
        above = parents.get(pid)
        while above not in (None, 0, os.getpid()):
            above = parents.get(above)
        if above == os.getpid():
            total = [total[0] + found[0], total[1] + found[1]]
    return total[0], total[1]


@dataclass(frozen=True)
class Group:
    """A control group of this machine, of version 1 or 2."""

    path: Path
    limit_file: str
    kills_file: str

    @classmethod
    def make(cls) -> Group:
        name = f"large-models-{os.getpid()}"
        if (v1 := Path("/sys/fs/cgroup/memory")).is_dir():
            group = cls(v1 / name, "memory.limit_in_bytes", "memory.oom_control")
        else:
            group = cls(Path("/sys/fs/cgroup") / name, "memory.max", "memory.events")
        group.path.mkdir()
        return group

    @contextlib.contextmanager
    def joined(self, limit: int) -> Iterator[None]:
        """This process and those that it starts are in it meanwhile."""
        (self.path / self.limit_file).write_text(str(limit))
        (self.path / "cgroup.procs").write_text(str(os.getpid()))
        try:
            yield
        finally:
            (self.path.parent / "cgroup.procs").write_text(str(os.getpid()))
            self.path.rmdir()

    def kills(self) -> int:
        """How many processes in it ended for lack of memory."""
        told = dict(line.split() for line in (self.path / self.kills_file).read_text().splitlines())
        return int(told["oom_kill"])


def examine(path: Path, folder: Path) -> None:
    from trtmodel_worker.builder.check import examined

    size = sum(file.stat().st_size for file in folder.iterdir())
    started = time.monotonic()
    report = examined(path, path.name, folder, "ONNXRuntime")
    seconds = time.monotonic() - started
    print(f"{folder.name}: {size:,} bytes, check {seconds:.1f} s, peak memory {report.peak_bytes:,} bytes")
    for finding in report.findings:
        print(f"  {finding.severity.value}: {finding.text}")


def build(path: Path, folder: Path) -> None:
    started = time.monotonic()
    said, own, mapped = build_job(path, folder)
    seconds = time.monotonic() - started
    print(f"  resolve and build: {seconds:.0f} s, peak memory {own:,} bytes, {mapped:,} with mapped files")
    print(f"  {said}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, help="bytes")
    parser.add_argument("directory", nargs="?")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        for make, layers in ((external, 48), (inside, 30)):
            folder = Path(directory) / make.__name__
            folder.mkdir()
            path = make(folder, layers)
            group = Group.make() if options.limit else None
            with group.joined(options.limit) if group else contextlib.nullcontext():
                examine(path, folder)
                if make is external:
                    build(path, folder)
                if group:
                    print(f"  within {options.limit:,} bytes: {group.kills()} processes were killed", flush=True)


if __name__ == "__main__":
    main()
