"""What a shell and kubectl are told to complete."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_scene import Typed, put
from decide_scene import A, serving
from fakes.api_server import FakeApiServer
from trtmodel_operator.cli import complete, dispatch

Type = Callable[..., Typed]


@pytest.mark.parametrize(
    ("before", "word", "found"),
    [
        ([], "st", ["status"]),
        ([], "c", ["check", "cache", "completion"]),
        (["cache"], "", ["list", "copy", "revoke", "collect"]),
        (["completion"], "f", ["fish"]),
        (["get"], "-o", ["-o"]),
        (["get", "-o"], "", ["json", "wide"]),
        (["status", "-o"], "", ["json"]),
        (["status", "--namespace"], "", []),
        (["abort", "x"], "--w", ["--wait"]),
        (["lint"], "", []),
        (["check"], "", []),
        (["nonsense"], "", []),
    ],
)
def test_words_are_completed(before: list[str], word: str, found: list[str]) -> None:
    assert complete.candidates(before, word) == found


def test_names_come_from_the_cluster_and_none_if_it_is_away(
    api_server: FakeApiServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(api_server, serving(A))
    config = str(api_server.kubeconfig(tmp_path))
    before = ["status", "--kubeconfig", config, "-n", "ml"]
    assert complete.candidates(before, "ma") == ["magika"]
    assert complete.candidates(before, "x") == []
    assert complete.candidates(["status", "--kubeconfig", "no-such-file"], "") == []
    dispatch.main(["__complete", *before, ""])
    assert capsys.readouterr().out == "magika\n:4\n"
    dispatch.main(["__complete", "lint", ""])
    assert capsys.readouterr().out == ":0\n"


def test_the_script_for_bash_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch.main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    words = "COMP_WORDS=(trtmodel st); COMP_CWORD=1; trtmodel() { printf 'status\\n:4\\n'; }; "
    done = subprocess.run(
        ["bash", "-c", f'{script}\n{words}_trtmodel; echo "${{COMPREPLY[@]}}"'],
        capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    assert done.stdout == "status\n"
    assert dispatch.main(["completion", "tcsh"]) == 2
