"""The command line of what speaks with a cluster. Loads neither client nor terminal library."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from trtmodel_operator.cli.dispatch import CLUSTER
from trtmodel_operator.cli.orders import ORDERS
from trtmodel_operator.cli.words import seconds_of

SHOW = ("get", "status", "history", "explain", "events", "report")
EXITS = """exit codes of status --timeout and --wait: 0 the newest spec serves; 3 it ended otherwise (gate failed,
rolled back, rejected); 4 it waits for a person; 124 the time is over. Of all commands: 1 something failed; 2 the
command line cannot be used; 130 interrupted."""
WAIT_SECONDS = 600.0


def build(prog: str) -> argparse.ArgumentParser:
    """Of all commands that dispatch gives to `run`."""
    parser = argparse.ArgumentParser(prog=prog, epilog=EXITS, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command", metavar="command")
    for name in SHOW:
        one = _command(commands, name, outputs=("json", "wide") if name == "get" else ("json",))
        one.add_argument("name", nargs="?" if name == "get" else None, default="", help="of the TRTModel")
        if name == "get":
            one.add_argument("-A", "--all-namespaces", action="store_true")
            one.add_argument("-l", "--selector", default="", help="labels, as kubectl takes them")
        elif name == "status":
            one.add_argument("-w", "--watch", action="store_true", help="draw it again with every change, until Ctrl-C")
            one.add_argument("--no-workers", action="store_true", help="do not ask the workers what they serve")
            text = "wait so long for the newest spec to serve or to end; 0: look once (the default)"
            one.add_argument("--timeout", type=_seconds, default=0.0, metavar="TIME", help=text)
        elif name == "report":
            _report(one)
    for order in ORDERS:
        one = _command(commands, order.verb)
        one.add_argument("name", help="of the TRTModel")
        text = "the revision it is for (default: what status names); for another one it does nothing"
        one.add_argument("--revision", default="", help=text)
        how = one.add_mutually_exclusive_group()
        how.add_argument("--wait", action="store_true", help="until it had its effect")
        how.add_argument("--async", dest="detached", action="store_true", help="do not wait for the operator's answer")
        text = "of --wait (default: 10m)"
        one.add_argument("--timeout", type=_seconds, default=WAIT_SECONDS, metavar="TIME", help=text)
    _bench(_command(commands, "bench"))
    lint = _command(commands, "lint")
    lint.add_argument("files", nargs="+", metavar="FILE", help="YAML or JSON; - is standard input")
    lint.add_argument(
        "--server", action="store_true", help="also by a dry run of the API server, which has the last word"
    )
    return parser


def _report(one: argparse.ArgumentParser) -> None:
    one.add_argument("--target", default="", help="of several")
    one.add_argument("--revision", default="", help="default: the newest that has a report")
    one.add_argument(
        "-f", "--file", default="", metavar="FILE", help="write it there (default: <name>-<revision>.html)"
    )
    one.add_argument("--open", action="store_true", help="in the browser")
    one.add_argument("--endpoint", default="", metavar="URL", help="of the storage, as this machine reaches it")
    text = "files AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (default: as the AWS tools find them)"
    one.add_argument("--credentials", default="", metavar="DIR", help=text)


def _bench(one: argparse.ArgumentParser) -> None:
    one.add_argument("name", help="of the TRTModel")
    text = "where it answers, such as http://magika.ml:8080; without it, through kubectl port-forward to one worker"
    one.add_argument("--url", default="", help=text)
    one.add_argument(
        "--concurrency", type=_number(1, 256), default=4, metavar="N", help="clients (default: %(default)s)"
    )
    one.add_argument("--duration", type=_seconds, default=10.0, metavar="TIME", help="default: 10s")
    one.add_argument(
        "--rows", type=_number(1, 100_000), default=1, metavar="N", help="of a request (default: %(default)s)"
    )
    text = "of an input, such as x:1x3x224x224, where neither model nor profile says it"
    one.add_argument("--shape", type=_shape, action="append", default=[], metavar="NAME:SIZES", help=text)
    one.add_argument("--data", default="", metavar="FILE", help="a request as JSON, instead of zeros")
    one.add_argument("--request-timeout", type=_seconds, default=30.0, metavar="TIME", help="default: 30s")


def _number(low: int, high: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {low} to {high}")
        return int(text)

    return read


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    """The name may hold colons itself."""
    name, _, sizes = text.rpartition(":")
    parts = sizes.split("x")
    if not name or not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no NAME:SIZES, such as x:1x3x224x224")
    return name, tuple(int(part) for part in parts)


def _command(commands: Any, name: str, *, outputs: tuple[str, ...] = ("json",)) -> argparse.ArgumentParser:
    one: argparse.ArgumentParser = commands.add_parser(
        name,
        help=CLUSTER[name],
        description=CLUSTER[name],
        epilog=EXITS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    one.add_argument("-o", "--output", choices=outputs, default="", help="for programs")
    one.add_argument("-n", "--namespace", default="", help="default: that of the context")
    one.add_argument("--context", default="", help="of the kubeconfig")
    one.add_argument("--kubeconfig", default="", metavar="FILE")
    return one


def _seconds(text: str) -> float:
    try:
        return seconds_of(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from e
