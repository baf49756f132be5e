"""``trtmodel check | build | verify | serve``: what the Jobs and workers of a cluster do, on this machine, and
``cache list | copy | revoke | collect``: to keep a bucket in order.

Progress and errors go to standard error. Exit codes: 0 done; 1 something outside failed, try again; 2 the command line
cannot be used; 42 the model cannot be used so, or the gate failed; 44 the gate needs more samples; 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trtmodel_contract.gate import Task, Thresholds
from trtmodel_contract.version import product_version

from trtmodel_worker.alone import artifacts, serve
from trtmodel_worker.alone.home import Home, default_home
from trtmodel_worker.alone.say import say
from trtmodel_worker.storage import StorageError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
END_SECONDS = 10.0
PRECISIONS = ("FP32", "FP16", "BF16", "INT8", "FP8")
MOST_BATCH = 4096
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def main(arguments: list[str] | None = None) -> int:
    """Console entry. Returns the exit code."""
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(message)s")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of models and files are of any script
    try:
        cache = options.cache.expanduser().absolute()
    except RuntimeError:
        say(f"{options.cache}: no such home directory is known: name a directory with --cache")
        return EXIT_USAGE
    home = Home(cache)
    try:
        with home.in_use():
            code = _run(options, home)
        sys.stdout.flush()
    except KeyboardInterrupt:
        say("interrupted")
        code = EXIT_INTERRUPTED
    except StorageError as e:
        say(e.message)
        code = EXIT_FAILED
    except BrokenPipeError:  # who reads the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python still flushes at its end
        code = EXIT_FAILED
    except OSError as e:
        where = f" ({e.filename})" if e.filename else ""
        say(f"{e.strerror or e}{where}: is there space and permission, in {cache} and where the output goes?")
        code = EXIT_FAILED
    return code


def _run(options: argparse.Namespace, home: Home) -> int:
    if options.command == artifacts.COMMAND:
        return artifacts.run(options, home)
    return _serve(options, home) if options.command == "serve" else _of_engine(options, home)


def _of_engine(options: argparse.Namespace, home: Home) -> int:
    try:
        from trtmodel_worker.alone import commands  # ONNX and its runtime, which what serves does without
    except ModuleNotFoundError as e:
        say(f"{e.name} is not installed, which {options.command} needs: pip install '.[builder]' in a clone")
        return EXIT_USAGE
    return commands.run(options, home)


def _serve(options: argparse.Namespace, home: Home) -> int:
    name = options.name or _name_of(options.model)
    if not _NAME.fullmatch(name):
        say(f"{name!r} cannot name a model: give up to 63 letters, digits, '.', '_' and '-' with --name")
        return EXIT_USAGE
    serving = serve.Serving(
        name, options.host, options.http, options.grpc, options.metrics, options.contexts, options.hosts
    )
    try:
        serve.require_ports(serving)
        code, digest = _built(options)
        if code:
            return code
        return serve.run(serving, digest, home.store().get_manifest(digest), home)
    except serve.Unusable as e:
        say(str(e))
        return EXIT_USAGE


def _built(options: argparse.Namespace) -> tuple[int, str]:
    """(exit code, digest). In a process of its own: what builds needs much memory, and what serves should not keep
    it."""
    command = [sys.executable, "-m", "trtmodel_worker.alone.main", "build", *_of_build(options)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        said, _ = process.communicate()
    except KeyboardInterrupt:
        process.terminate()  # it removes its files
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
        raise
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        return process.returncode if process.returncode > 0 else EXIT_FAILED, ""
    return 0, said.split()[-1]


def _of_build(options: argparse.Namespace) -> list[str]:
    """The command line that builds what `options` serve."""
    values = {
        "--cache": options.cache,
        "--runtime": options.runtime,
        "--precision": options.precision,
        "--max-batch": options.max_batch,
        "--calibration": options.calibration,
    }
    named = [f"{name}={value}" for name, value in values.items() if value]
    listed = [
        f"--{name}={text}"
        for name in ("shape", "keep", "keep-operator")
        for text in getattr(options, name.replace("-", "_"))
    ]
    return [*named, *listed, "--", options.model]


def _name_of(model: str) -> str:
    """The file's name without its end, in characters that a URL needs no escapes for."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(model.partition("?")[0]).stem).strip("-._")[:63] or "model"


def _interrupt(_number: int, _frame: Any) -> None:
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    _, _, rest = (__doc__ or "").partition("\n\n")
    what = "What the Jobs and workers of a cluster do, on this machine."
    parser = argparse.ArgumentParser(prog="trtmodel", description=what, epilog=rest)
    parser.add_argument("--version", action="version", version=product_version())
    commands = parser.add_subparsers(required=True, dest="command", metavar="command")
    check = _model_command(commands, "check", "can it be built and served? Shows what is wrong or odd, and shapes")
    check.add_argument("--task", choices=[task.value for task in Task], default=Task.RAW.value, help="of verify")
    _model_command(commands, "build", "build the engine into the local store, and print its digest")
    verify = _model_command(commands, "verify", "measure the engine against the original on your data")
    verify.add_argument(
        "--dataset",
        required=True,
        type=_named,
        help="npz, or a folder of them: arrays named as the inputs, optional labels; path or URI",
    )
    verify.add_argument("--report", type=Path, metavar="FILE", help="write what was measured: HTML, or *.json")
    verify.add_argument("--samples", type=_number(1, 10_000_000), default=2000, metavar="N")
    verify.add_argument("--task", choices=[task.value for task in Task], default=Task.RAW.value)
    limits = Thresholds()
    verify.add_argument("--top1-delta", type=_limit(1, above=True), default=limits.top1_delta, metavar="SHARE")
    verify.add_argument("--rmse-increase", type=_limit(10), default=limits.rmse_increase, metavar="SHARE")
    verify.add_argument("--cosine", type=_limit(1), default=limits.cosine, metavar="LEAST")
    server = _model_command(commands, "serve", "build if need be, and answer the Open Inference Protocol v2")
    server.description = (
        "Serves the model until Ctrl-C. No signature of an operator is checked, as there is none. Other settings of "
        "workers are environment variables TRTMODEL_*."
    )
    server.add_argument("--name", default="", help="of the model in URLs (default: that of the file)")
    server.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    server.add_argument("--http", type=_number(1, 65535), default=8080, metavar="PORT", help="default: %(default)s")
    server.add_argument(
        "--grpc", type=_number(0, 65535), default=9000, metavar="PORT", help="default: %(default)s; 0: none"
    )
    server.add_argument("--metrics", type=_number(1, 65535), default=8082, metavar="PORT", help="default: %(default)s")
    server.add_argument("--contexts", type=_contexts, default="1", metavar="N|Auto", help="batches at the same time")
    server.add_argument("--hosts", type=_number(1, 8), default=1, metavar="N", help="engine processes")
    artifacts.add_parsers(commands)
    return parser


def _model_command(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.add_argument("model", type=_named, help="an ONNX file: a path, or an s3://, https:// or file:// URI")
    if name != "serve":
        parser.add_argument("-o", "--output", choices=("json",), default="", help="the result for programs")
    parser.add_argument("--runtime", default="ONNXRuntime", help="default: %(default)s")
    parser.add_argument("--precision", choices=PRECISIONS, default="FP32", help="default: %(default)s")
    parser.add_argument("--calibration", default="", metavar="NPZ", help="data for INT8, as --dataset")
    parser.add_argument(
        "--keep", action="append", default=[], metavar="PATTERN", help="of names of nodes that keep FP32"
    )
    parser.add_argument(
        "--keep-operator", action="append", default=[], metavar="TYPE", help="of nodes that keep FP32, such as Softmax"
    )
    parser.add_argument(
        "--shape", action="append", default=[], metavar="NAME:SIZES", help="of an input, such as x:1-32x3x224x224"
    )
    parser.add_argument(
        "--max-batch", type=_number(1, MOST_BATCH), default=32, metavar="N", help="where free (default: %(default)s)"
    )
    parser.add_argument(
        "--cache", type=Path, default=default_home(), metavar="DIR", help="files and engines (default: %(default)s)"
    )
    return parser


def _number(low: int, high: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {low} to {high}")
        return int(text)

    return read


def _limit(most: float, *, above: bool = False) -> Callable[[str], float]:
    """As the CRD has it: from 0 to `most`; not 0 itself where `above`."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 <= value <= most or (above and value == 0):  # NaN is in no range
            raise argparse.ArgumentTypeError(f"{text!r} is not a number {'above' if above else 'from'} 0 to {most:g}")
        return value

    return read


def _named(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("it is empty: name a file")
    return text


def _contexts(text: str) -> str:
    return text if text == "Auto" else str(_number(1, 64)(text))


if __name__ == "__main__":
    sys.exit(main())
