"""Does what we ask of TensorRT exist in each version that we name, and is it asked as that version wants it? Against
the real bindings, which take neither a GPU nor TensorRT's libraries."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent / "bindings"
ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "worker" / "trtmodel_worker" / "engines" / "tensorrt"
SECONDS = 100

sys.path.append(str(HERE))
import install  # noqa: E402

# What issue a version settles; a new field of Capabilities has to be decided here, too.
CAPABILITIES = {
    "8.6.0": {"explicit_batch", "weak_types", "calibrators", "profile_sharing_by_feature"},
    "10.16.1.11": {
        "strong_typing_by_flag", "weak_types", "calibrators", "allocation_strategies", "sized_device_memory",
        "progress_monitor", "parser_names_nodes", "data_shaped_outputs", "contexts_beside_serving",
    },
    "11.4.0.106": {
        "allocation_strategies", "sized_device_memory", "progress_monitor", "parser_names_nodes",
        "data_shaped_outputs", "contexts_beside_serving",
    },
}  # fmt: skip
CORE = {
    "Builder.build_serialized_network()",
    "OnnxParser.parse_from_file()",
    "IBuilderConfig.set_timing_cache()",
    "Runtime.deserialize_cuda_engine()",
    "IExecutionContext.set_input_shape()",
    "IExecutionContext.execute_async_v3()",
    "heir of IErrorRecorder",
    "heir of ILogger",
    "heir of IOutputAllocator",
}


@dataclass(frozen=True)
class Version:
    name: str
    bindings: install.Bindings

    def run(self, program: str, *arguments: str) -> Any:
        """What the program printed, in a process with these bindings."""
        environment = self.bindings.environment(ROOT / "worker", ROOT / "contract", HERE)
        command = [self.bindings.python, str(HERE / program), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment, check=False)
        assert done.returncode == 0, f"{program} with {self.name} ended with {done.returncode}\n{done.stderr}"
        return json.loads(done.stdout)


@pytest.fixture(scope="module", params=install.VERSIONS)
def version(request: pytest.FixtureRequest) -> Version:
    try:
        return Version(request.param, install.bindings(request.param))
    except install.Unavailable as e:
        pytest.fail(f"the bindings of TensorRT {request.param} are not to be had here: {e}")


@pytest.fixture(scope="module")
def checked(version: Version) -> Any:
    return version.run("checker.py", str(PACKAGE))


def test_every_use_of_tensorrt_exists_and_is_called_as_the_version_wants_it(checked: dict[str, Any]) -> None:
    assert checked["problems"] == []


def test_the_check_follows_the_code_and_not_a_list(version: Version, checked: dict[str, Any]) -> None:
    assert checked["version"] == version.name
    assert set(checked["uses"]) >= CORE


def test_the_capabilities_are_those_of_the_version(version: Version, checked: dict[str, Any]) -> None:
    found = {name for name, value in checked["capabilities"].items() if value is True}
    assert found == CAPABILITIES[version.name]


def test_objects_that_tensorrt_calls_can_be_made_and_answer(version: Version, checked: dict[str, Any]) -> None:
    got = version.run("instances.py")
    assert got["logger"] == ["no memory"]
    assert got["recorder"] == [1, "lost", [["FAILED_EXECUTION", "lost"]], 0]
    assert got["place"] == [8192, [2, 3]]
    assert got["code"] == "UNSUPPORTED_NODE"
    assert got.get("progress", [["Building (7 steps)"], True]) == [["Building (7 steps)"], True]
    if checked["capabilities"]["calibrators"]:
        assert got["Entropy"] == ["ENTROPY_CALIBRATION_2", 8, [4096]]
        assert got["MinMax"] == ["MINMAX_CALIBRATION", 8, None]


WRONG = {
    "a name of another version": ("config.max_workspace_size = 1", "max_workspace_size"),
    "a name that never was": ("builder.create_networks()", "create_networks"),
    "arguments in the wrong order": ("builder.build_serialized_network(config, network)", "is called with"),
    "a keyword that is none": ("config.set_flag(flags=trt.BuilderFlag.TF32)", "is called with"),
    "a member that is none": ("config.set_flag(trt.BuilderFlag.HALF)", "has no HALF"),
    "something of TensorRT's on who knows what": ("self._other.set_input_shape()", "of what?"),
    "a method that is not called": ("size = network.get_input", "is a method, and is not called"),
    "a property that is called": ("network.num_inputs()", "is a property, and is called"),
    "what only older ones have, with no look at the version": ("trt.IInt8EntropyCalibrator()", "IInt8EntropyCalib"),
}


@pytest.fixture(scope="module")
def problems_of_wrong_uses(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Found in a copy of the package with one wrong use of each kind, by the bindings of 11."""
    try:
        newest = Version("11.4.0.106", install.bindings("11.4.0.106"))
    except install.Unavailable as e:
        pytest.fail(f"the bindings of TensorRT 11.4.0.106 are not to be had here: {e}")
    folder = tmp_path_factory.mktemp("wrong") / "tensorrt"
    shutil.copytree(PACKAGE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    build = (folder / "build.py").read_text()
    anchor = "        if options.version_compatible:\n"
    assert anchor in build
    wrong = "".join(f"        {use}\n" for use, _ in WRONG.values())
    (folder / "build.py").write_text(build.replace(anchor, wrong + anchor))
    listening = (folder / "listening.py").read_text()
    assert ", parent_phase: str | None" in listening
    (folder / "listening.py").write_text(listening.replace(", parent_phase: str | None", ""))
    return list(newest.run("checker.py", str(folder))["problems"])


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_use_is_found(kind: str, problems_of_wrong_uses: list[str]) -> None:
    _, said = WRONG[kind]
    assert any("build.py" in problem and said in problem for problem in problems_of_wrong_uses), problems_of_wrong_uses


def test_a_callback_with_other_arguments_is_found(problems_of_wrong_uses: list[str]) -> None:
    assert any("phase_start is called with 3 arguments" in problem for problem in problems_of_wrong_uses)
