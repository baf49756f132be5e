"""Tests on a real GPU with a real TensorRT: README.md says how they are run. Elsewhere they are not collected.

Each test writes what it measured into `$OUT/gpu-report.json` (default tests/gpu/out). What has a bar is listed at the
end, one line each: a figure that misses its bar fails no test, an answer that is wrong does.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent
OUT = Path(os.environ.get("OUT", HERE / "out"))


def _has_gpu():
    try:
        if importlib.util.find_spec("tensorrt") is None or importlib.util.find_spec("cuda.bindings") is None:
            return False
    except ModuleNotFoundError:
        return False
    from cuda.bindings import runtime

    error, count = runtime.cudaGetDeviceCount()
    return not error and count > 0


if _has_gpu():
    root = HERE.parents[1]
    found = (HERE, HERE / "plugin", root / "contract", root / "worker", root / "tests", root / "tests/worker")
    sys.path[:0] = map(str, found)
else:
    collect_ignore_glob = ["test_*.py"]


class Report:
    """Figures by test, on disk after each: a run that is cut short has told what it saw."""

    def __init__(self, path):
        self._path = path
        self._found = {"about": self._about(), "bars": [], "tests": {}}

    def add(self, test, figures):
        self._found["tests"].setdefault(test, {}).update(figures)
        self._write()
        print(f"\n{test}: {json.dumps(figures, default=str)}", flush=True)

    def bar(self, line):
        self._found["bars"].append(line)
        self._write()
        print(f"\n{line}", flush=True)

    @property
    def bars(self):
        return self._found["bars"]

    def _write(self):
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self._found, indent=1, default=str))

    def _about(self):
        from trtmodel_worker.engines.tensorrt.device import Cuda
        from trtmodel_worker.engines.tensorrt.runtime import TensorRtRuntime

        machine = TensorRtRuntime()
        key = machine.load_key()
        return {
            "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()), "device": key.device,
            "capability": key.capability, "mig": key.mig, "tensorrt": key.version, "driver": machine.driver(),
            "python": platform.python_version(), "cpus": len(os.sched_getaffinity(0)),
            "free_device_mib": Cuda().memory()[0] >> 20, "command": " ".join(sys.argv),
        }  # fmt: skip


_reports = pytest.StashKey()


@pytest.fixture(scope="session")
def report(request):
    path = OUT / "gpu-report.json"
    if path.exists():
        path.rename(OUT / f"gpu-report-{path.stat().st_mtime_ns}.json")
    request.config.stash[_reports] = Report(path)
    return request.config.stash[_reports]


def pytest_terminal_summary(terminalreporter, config):
    found = config.stash.get(_reports, None)
    if found is not None and found.bars:
        terminalreporter.section("figures and bars")
        for line in found.bars:
            terminalreporter.write_line(line)


@pytest.fixture
def figures(request, report):
    """`figures(name=value, ...)` writes them under the test's name."""
    name = request.node.name

    def add(**found):
        report.add(name, found)

    return add


@pytest.fixture
def bar(report):
    """`bar(what, figure, limit, unit)`: the figure may be at most the limit, or must reach it (`least=True`). Without a
    limit it is only told."""

    def add(what, figure, limit=None, unit="", *, least=False):
        if limit is None:
            report.bar(f"BAR told     {what}: {figure:.6g} {unit}")
            return
        met = figure >= limit if least else figure <= limit
        asked = f"asked {'>=' if least else '<='} {limit:.6g} {unit}"
        report.bar(f"BAR {'met     ' if met else 'NOT MET '} {what}: {figure:.6g} {unit} ({asked})")

    return add


@pytest.fixture(scope="session")
def magika(report):
    import gpu_models

    model = gpu_models.magika()
    report.add("build", {model.name: f"{model.build_seconds:.1f} s at level {model.level}"})
    return model


@pytest.fixture(scope="session")
def resnet(report):
    import gpu_models

    model = gpu_models.resnet50()
    report.add("build", {model.name: f"{model.build_seconds:.1f} s at level {model.level}"})
    return model


@pytest.fixture(scope="session")
def resnet_engine(resnet):
    """In this process. Its lanes are made by the tests."""
    import gpu_serving

    return gpu_serving.load(resnet, lanes=4)


@pytest.fixture(scope="session")
def magika_engine(magika):
    import gpu_serving

    return gpu_serving.load(magika, lanes=4)
