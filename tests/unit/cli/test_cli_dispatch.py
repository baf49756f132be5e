"""One entry for all commands: it loads what a command needs, and says what is missing."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from cli_scene import Typed
from trtmodel_operator.cli import dispatch, parser
from trtmodel_operator.cli.orders import ORDERS

HEAVY = ("kubernetes", "rich", "numpy", "onnxruntime", "onnx", "boto3", "jsonschema", "celpy", "yaml", "argparse")


def test_help_loads_no_library_and_lists_every_command() -> None:
    code = "import sys; from trtmodel_operator.cli import dispatch; dispatch.main(['--help']); "
    code += f"print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    *page, loaded = done.stdout.splitlines()
    assert loaded == "[]"
    listed = {line.split()[0] for line in page if line.startswith("  ")}
    assert listed == {*dispatch.CLUSTER, *dispatch.LOCAL, *dispatch.OTHERS}


def test_every_command_has_a_page_of_help(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (*dispatch.CLUSTER, *dispatch.LOCAL):
        with pytest.raises(SystemExit) as ended:
            dispatch.main([command, "--help"])
        assert ended.value.code == 0
        assert command in capsys.readouterr().out


def test_commands_of_the_cluster_are_those_of_its_parser() -> None:
    assert set(dispatch.CLUSTER) == {*parser.SHOW, *(order.verb for order in ORDERS), "lint", "bench"}


def test_the_commands_about_a_bucket_have_one_name(capsys: pytest.CaptureFixture[str]) -> None:
    for action in dispatch.CACHE:
        with pytest.raises(SystemExit) as ended:
            dispatch.main(["cache", action, "--help"])
        assert ended.value.code == 0
        assert f"trtmodel cache {action}" in capsys.readouterr().out
        if action != "list":
            assert dispatch.main([action]) == 2
            assert "there is no such command" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        dispatch.main(["cache", "burn"])
    assert ended.value.code == 2


def test_every_command_can_answer_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    """But for serve, which answers requests."""
    commands = [[name] for name in (*dispatch.CLUSTER, *dispatch.LOCAL) if name not in ("cache", "serve")]
    for words in [*commands, *(["cache", action] for action in dispatch.CACHE)]:
        with pytest.raises(SystemExit):
            dispatch.main([*words, "--help"])
        page = capsys.readouterr().out
        assert "-o " in page, words
        assert "json" in page, words


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["stauts"], "there is no such command"),
        (["-n", "ml", "status"], "the command comes first"),
        (["status"], "name"),
    ],
)
def test_a_command_line_that_cannot_be_used_is_told(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = dispatch.main(words)
    except SystemExit as e:
        code = int(e.code or 0)
    assert code == 2
    assert says in capsys.readouterr().err


def test_a_package_that_is_not_installed_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "trtmodel_worker.alone.main", None)
    assert dispatch.main(["check", "model.onnx"]) == 2
    assert "pip install '.[builder]' in a clone" in capsys.readouterr().err
    assert dispatch.main(["cache", "list", "s3://a/b"]) == 2
    assert "pip install '.[worker]' in a clone" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    monkeypatch.delitem(sys.modules, "trtmodel_operator.cli.connection", raising=False)
    assert dispatch.main(["status", "magika"]) == 2
    assert "kubernetes is not installed, which status needs: pip install '.[cli]' in a clone" in capsys.readouterr().err


def test_without_a_cluster_it_says_how_to_name_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", "no-such-file")
    assert dispatch.main(["status", "magika", "--kubeconfig", "no-such-file"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("trtmodel: no cluster: no-such-file: ")
    assert said.endswith(". Name one with --kubeconfig, KUBECONFIG or --context\n")


@pytest.mark.parametrize(
    "text",
    [
        b"a: [b",
        b"[1, 2]",
        b"\x00\xff",
        b"contexts: 3\nclusters: 5\n",
        b"contexts: [7]\nclusters: []\nusers: []\ncurrent-context: x\n",
        b"clusters: [{name: c, cluster: {server: 'http://['}}]\nusers: [{name: u, user: {}}]\n"
        b"contexts: [{name: x, context: {cluster: c, user: u}}]\ncurrent-context: x\n",
    ],
)
def test_a_file_that_is_no_kubeconfig_is_named_with_what_is_wrong(
    text: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config"
    file.write_bytes(text)
    assert dispatch.main(["status", "magika", "--kubeconfig", str(file)]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"trtmodel: no cluster: {file}: ")
    assert said.count("\n") == 1


def test_an_output_that_knows_few_characters_gets_their_numbers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wire = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(wire, encoding="ascii"))
    assert dispatch.main(["status", "magika", "--kubeconfig", str(tmp_path / "\u7121")]) == 1
    sys.stderr.flush()
    assert b"\\u7121" in wire.getvalue()


@pytest.mark.parametrize("body", [b"[]", b"null", b"7", b"<html>", b"[" * 100_000])
def test_an_answer_of_something_that_is_no_api_server_is_told(
    body: bytes, trtmodel: Callable[..., Typed], monkeypatch: pytest.MonkeyPatch
) -> None:
    from trtmodel_operator.cli.connection import Connection

    monkeypatch.setattr(Connection, "_call", lambda *_: SimpleNamespace(data=body))
    said = trtmodel("status", "magika")
    assert (said.code, said.err.count("\n")) == (1, 1)
    assert "is it an API server?" in said.err
