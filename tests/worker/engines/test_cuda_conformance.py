"""Does what we call of the CUDA runtime exist in cuda-python, with as many arguments?"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent / "bindings"
PACKAGE = Path(__file__).parents[3] / "worker" / "trtmodel_worker" / "engines" / "tensorrt"
VERSION = "13.0.3"
SECONDS = 100

sys.path.append(str(HERE))
import install  # noqa: E402


@pytest.fixture(scope="module")
def check() -> Any:
    """`check(folder)` -> what the checker says."""
    try:
        bindings = install.cuda_python(VERSION)
    except install.Unavailable as e:
        pytest.fail(f"cuda-bindings {VERSION} is not to be had here: {e}")

    def run(folder: Path) -> dict[str, Any]:
        done = subprocess.run(
            [bindings.python, str(HERE / "cuda_checker.py"), str(folder)],
            capture_output=True, text=True, timeout=SECONDS, env=bindings.environment(HERE), check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    return run


def test_every_call_of_the_cuda_runtime_exists_and_is_given_its_arguments(check: Any) -> None:
    found = check(PACKAGE)
    assert found["problems"] == []
    assert {"cudaMalloc", "cudaMemcpyAsync", "cudaStreamBeginCapture", "cudaMemcpyHostToDevice"} <= set(found["names"])


def test_a_wrong_call_of_the_cuda_runtime_is_found(check: Any, tmp_path: Path) -> None:
    wrong = ["cuda.call('cudaMalloc', 1, 2)", "cuda.runtime.cudaMallocate(1)", "cuda.call('cudaFree')"]
    (tmp_path / "wrong.py").write_text("\n".join(wrong))
    assert [problem.partition(": ")[2] for problem in check(tmp_path)["problems"]] == [
        "cudaMalloc takes 1 arguments and is given 2",
        "the CUDA runtime has no cudaMallocate",
        "cudaFree takes 1 arguments and is given 0",
    ]
