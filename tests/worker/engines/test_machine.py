"""The load key and the CPU quota, as files of other machines state them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from trtmodel_worker.engines import registry
from trtmodel_worker.engines.onnxruntime import machine


@pytest.mark.parametrize(
    ("cpuinfo", "level"),
    [
        ("flags\t\t: fpu sse avx avx2 fma avx512f avx512bw avx512dq avx512vl avx512_vnni\n", "avx512-vnni"),
        ("flags\t\t: fpu sse avx avx2 fma avx512f avx512bw avx512dq avx512vl\n", "avx512"),
        ("flags\t\t: fpu sse avx avx2 fma avx_vnni\n", "avx2-vnni"),
        ("flags\t\t: fpu sse avx avx2 fma\n", "avx2"),
        ("Features\t: fp asimd asimddp i8mm\n", "i8mm"),
        ("Features\t: fp asimd\n", "asimd"),
        ("nothing here\n", "base"),
    ],
)
def test_the_instruction_set_level_is_part_of_the_load_key(tmp_path: Path, cpuinfo: str, level: str) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    assert machine.device_and_level(tmp_path / "cpuinfo")[1] == level


@pytest.mark.parametrize(("content", "cpus"), [("50000 100000\n", 1), ("100000 100000\n", 1), ("max 100000\n", None)])
def test_the_cgroup_quota_limits_threads(tmp_path: Path, content: str, cpus: int | None) -> None:
    (tmp_path / "cpu.max").write_text(content)
    assert machine.cpu_quota(tmp_path) == (cpus or machine.cpu_quota(tmp_path / "absent"))


def test_asking_for_the_load_key_does_not_import_onnx_runtime() -> None:
    code = (
        "import sys; from trtmodel_worker.engines.registry import runtime; "
        "key = runtime('ONNXRuntime').load_key(); assert key.runtime == 'ONNXRuntime'; "
        "assert not {'onnxruntime', 'onnx'} & set(sys.modules), 'imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_an_unknown_runtime_names_those_that_exist() -> None:
    with pytest.raises(ValueError, match="ONNXRuntime"):
        registry.runtime("OpenVINO")
    with pytest.raises(ValueError, match="ONNXRuntime"):
        registry.builder("OpenVINO")
