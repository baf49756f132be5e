"""Carries out one command that speaks with a cluster, or lints. Returns its exit code."""

from __future__ import annotations

import argparse
import io
import os
import sys
from typing import TYPE_CHECKING

from trtmodel_operator.cli import parser
from trtmodel_operator.cli.orders import ORDERS
from trtmodel_operator.cli.outcome import EXIT_INTERRUPTED
from trtmodel_operator.cli.words import Failed, plain

if TYPE_CHECKING:  # the client takes its time to load
    from trtmodel_operator.cli.connection import Connection

EXIT_FAILED = 1
EXIT_USAGE = 2


def run(arguments: list[str], prog: str) -> int:
    """`arguments` begin with the command."""
    options = parser.build(prog).parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that knows few characters gets their numbers
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _run(options)
        sys.stdout.flush()
    except Failed as e:
        print(f"trtmodel: {plain(e)}", file=sys.stderr)
        return e.code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # who reads the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python still flushes at its end
        return EXIT_FAILED
    except ModuleNotFoundError as e:
        if (e.name or "").startswith("trtmodel"):
            raise
        print(
            f"trtmodel: {e.name} is not installed, which {options.command} needs: pip install '.[cli]' in a clone",
            file=sys.stderr,
        )
        return EXIT_USAGE
    return code


def _run(options: argparse.Namespace) -> int:
    if options.command == "lint" and not options.server:
        from trtmodel_operator.cli import lint

        return lint.lint(None, options)
    if options.command == "bench" and options.url:
        from trtmodel_operator.cli import bench

        return bench.bench(None, options)
    from trtmodel_operator.cli.connection import Connection

    at = Connection(options.kubeconfig, options.context, options.namespace)
    try:
        return _with(at, options)
    finally:
        at.close()


def _with(at: Connection, options: argparse.Namespace) -> int:
    if options.command == "lint":
        from trtmodel_operator.cli import lint

        return lint.lint(at, options)
    if options.command == "bench":
        from trtmodel_operator.cli import bench

        return bench.bench(at, options)
    if options.command == "report":
        from trtmodel_operator.cli import report

        return report.fetch(at, options)
    if options.command in [order.verb for order in ORDERS]:
        from trtmodel_operator.cli import act

        return act.act(at, options)
    from trtmodel_operator.cli import show

    handlers = {
        "get": show.get,
        "status": show.status,
        "history": show.history,
        "explain": show.explain,
        "events": show.events,
    }
    return handlers[options.command](at, options)
