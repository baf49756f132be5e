"""The thin layer over CUDA: what it asks, and how it says no."""

from __future__ import annotations

import sys

import pytest
from trt_world import NEW, World
from trtmodel_worker.engines.base import CannotLoad
from trtmodel_worker.engines.tensorrt import run
from trtmodel_worker.engines.tensorrt.device import Cuda, CudaError
from trtmodel_worker.engines.tensorrt.runtime import TensorRtRuntime

KERNEL = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23 10:11:16 UTC 2026\nGCC version:  gcc 12\n"
)
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder)\n"


@pytest.fixture
def world(monkeypatch):
    return World(monkeypatch, NEW)


@pytest.mark.parametrize("text", [KERNEL, OPEN], ids=["closed", "open"])
def test_the_drivers_version_is_what_the_kernel_says(world, text, tmp_path):
    (tmp_path / "version").write_text(text)
    assert Cuda().driver(tmp_path / "version") == "580.95.05"


def test_where_the_kernel_does_not_say_it_the_newest_cuda_stands_for_the_driver(world, tmp_path):
    assert Cuda().driver(tmp_path / "none") == "cuda-13.0"


def test_a_call_that_fails_tells_its_name_and_code(world):
    with pytest.raises(CudaError, match=r"cudaMalloc: cudaErrorMemoryAllocation \(2\): out of memory") as seen:
        Cuda().allocate(1 << 46)
    assert seen.value.code == 2


def test_without_cuda_python_the_way_out_is_said(world, monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    with pytest.raises(CannotLoad, match="install cuda-bindings"):
        TensorRtRuntime().load_key()


def test_without_tensorrt_the_way_out_is_said(world, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(CannotLoad, match="ONNXRuntime"):
        world.load()


def test_the_probe_finds_a_lost_device_and_leaves_nothing_behind(world):
    cuda = Cuda()
    assert cuda.probe() == 0
    assert (world.gpu.used(), len(world.gpu.streams)) == (0, 0)
    world.gpu.sticky = 719
    assert cuda.probe() == 719


@pytest.mark.parametrize(("processors", "sleeps"), [(2, True), (16, False)])
def test_lanes_wait_without_spinning_where_processors_are_few(world, monkeypatch, processors, sleeps):
    asked = []
    monkeypatch.setattr(run, "cpu_quota", lambda: processors)
    monkeypatch.setattr(Cuda, "wait_by_sleeping", lambda _: asked.append(True))
    world.load(lanes=4)
    assert bool(asked) is sleeps
