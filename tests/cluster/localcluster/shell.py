"""Running programs, telling progress, waiting for conditions."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from .settings import ClusterError

_START = time.monotonic()
_TAIL_LINES = 15


def say(message: str) -> None:
    """One progress line with the seconds since the command began, on standard error."""
    print(f"{time.monotonic() - _START:7.1f}s  {message}", file=sys.stderr, flush=True)


def tail(path: Path) -> str:
    """The last lines of a log, for an error message."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-_TAIL_LINES:])


def run(
    args: Sequence[str | Path],
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: str | None = None,
    log: Path | None = None,
) -> str:
    """Run a program to its end and return its standard output.

    With `log`, both outputs are appended there instead and "" is returned. Raises ClusterError when the
    program is missing, fails or takes more than `timeout` seconds, with the last lines that it wrote.
    """
    argv = [str(a) for a in args]
    output: int | IO[bytes] = subprocess.PIPE
    try:
        with ExitStack() as stack:
            if log is not None:
                log.parent.mkdir(parents=True, exist_ok=True)
                output = stack.enter_context(log.open("ab"))
            done = subprocess.run(
                argv,
                check=False,
                input=stdin,
                stdin=subprocess.DEVNULL if stdin is None else None,
                stdout=output,
                stderr=output,
                text=True,
                timeout=timeout,
                env={**os.environ, **(env or {})},
                cwd=cwd,
            )
    except FileNotFoundError as e:
        raise ClusterError(f"{argv[0]} is not installed or {cwd} does not exist") from e
    except subprocess.TimeoutExpired as e:
        raise ClusterError(f"{' '.join(argv[:3])} ... took more than {timeout:.0f} s") from e
    if done.returncode:
        said = f"{tail(log)}\n(whole log: {log})" if log else (done.stderr or done.stdout).strip()[-3000:]
        raise ClusterError(f"{' '.join(argv[:4])} ... failed ({done.returncode}): {said}")
    return done.stdout or ""


def succeeds(args: Sequence[str | Path], *, timeout: float = 10, env: Mapping[str, str] | None = None) -> bool:
    """Whether a program ends with 0 within `timeout` seconds."""
    try:
        run(args, timeout=timeout, env=env)
    except ClusterError:
        return False
    return True


def wait_for(what: str, condition: Callable[[], bool], *, seconds: float, check: Callable[[], None]) -> None:
    """Poll until `condition` holds. `check` raises when waiting is hopeless (a component died)."""
    deadline = time.monotonic() + seconds
    while not condition():
        check()
        if time.monotonic() > deadline:
            raise ClusterError(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.1)
    say(what)
