"""A small API server, and the command as somebody types it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "operator")]

from cli_scene import Typed  # noqa: E402 - found by the line above
from fakes.api_server import FakeApiServer  # noqa: E402
from trtmodel_operator.cli import dispatch, show  # noqa: E402

Type = Callable[..., Typed]


@pytest.fixture
def api_server() -> Iterator[FakeApiServer]:
    with FakeApiServer() as server:
        yield server


@pytest.fixture
def trtmodel(
    api_server: FakeApiServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Type:
    """`trtmodel("status", "magika")` in the namespace ml of the small API server."""
    monkeypatch.setenv("KUBECONFIG", str(api_server.kubeconfig(tmp_path)))
    monkeypatch.setattr(show, "POLL_SECONDS", 0.02)

    def type_(*words: str) -> Typed:
        capsys.readouterr()
        try:
            code = dispatch.main([*words, "-n", "ml"] if words[0] != "lint" else list(words))
        except SystemExit as e:
            code = int(e.code or 0)
        said = capsys.readouterr()
        return Typed(code, said.out, said.err)

    return type_
