"""``trtmodel`` and ``kubectl trtmodel``: one entry, which loads what the command needs and nothing else.

Commands of the worker's package (check, build, serve ...) and of the operator's (get, status, promote ...) stand beside
each other here by name only: the two packages do not import each other, and one may be absent.

Runs on Python 3.10, as the worker's commands do.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

EXIT_USAGE = 2

ALONE = "trtmodel_worker.alone.main"
CLUSTER: Mapping[str, str] = {
    "get": "TRTModels, as kubectl get shows them",
    "status": "one as a tree: step, figures, Jobs, workers, why it waits. -w redraws it, --timeout waits for its end",
    "explain": "what its conditions mean and what to do",
    "history": "how its rollouts ended, and by which figures",
    "events": "what was said about it",
    "report": "the page of its accuracy gate, from the bucket",
    "bench": "how fast it answers, through a port-forward or at --url",
    "promote": "promote the revision on trial without the steps that are left",
    "abort": "take back the revision that is on trial or being built",
    "rollback": "go back: to stable during a rollout, afterwards to the revision before",
    "retry": "one new attempt of what failed or was rejected",
    "skip-step": "go on to the next step without waiting for this one",
    "pause": "stop the rollout where it is; repair and rollback go on",
    "resume": "go on with a paused rollout",
    "refresh": "look again at what lies at the source's address",
    "lint": "check a manifest without a cluster, or with --server by one",
}
LOCAL: Mapping[str, str] = {
    "check": "can a model be built and served?",
    "build": "build its engine into a local store",
    "verify": "measure the engine against the original on your data",
    "serve": "build if need be, and serve",
    "cache": "the bucket: cache list|copy|revoke|collect",
}
BUILDER = ("check", "build", "verify", "serve")
CACHE = ("list", "copy", "revoke", "collect")
OTHERS: Mapping[str, str] = {
    "completion": "completion bash|zsh|fish: a script for your shell",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Console entry. Returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    prog = "kubectl trtmodel" if Path(sys.argv[0]).name.startswith("kubectl") else "trtmodel"
    command = words[0] if words else "--help"
    if command in ("-h", "--help", "help"):
        print(usage(prog))
        return 0
    if command == "--version":
        from trtmodel_contract.version import product_version

        print(product_version())
        return 0
    if command in CLUSTER:
        return _call("cli", "trtmodel_operator.cli.run", "run", words, prog)
    if command in LOCAL:
        return _call("builder" if command in BUILDER else "worker", ALONE, "main", words)
    if command in ("completion", "__complete"):
        return _call("cli", "trtmodel_operator.cli.complete", "main", words)
    hint = "the command comes first, then its options" if command.startswith("-") else "there is no such command"
    print(f"{prog}: {command!r}: {hint}. See {prog} --help", file=sys.stderr)
    return EXIT_USAGE


def usage(prog: str) -> str:
    """The page of --help."""
    parts = [f"usage: {prog} <command> [options]      {prog} <command> --help"]
    for title, names in (
        ("in a cluster", CLUSTER),
        ("on this machine, without a cluster", LOCAL),
        ("", OTHERS),
    ):
        parts.append("\n".join([f"{title}:"] * bool(title) + [f"  {name:11} {text}" for name, text in names.items()]))
    return "\n\n".join(parts)


def _call(extra: str, module: str, function: str, *arguments: object) -> int:
    """`extra` is what pip installs for it."""
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as e:
        print(f"trtmodel: {e.name} is not installed: pip install '.[{extra}]' in a clone", file=sys.stderr)
        return EXIT_USAGE
    code: int = getattr(loaded, function)(*arguments)
    return code


if __name__ == "__main__":
    sys.exit(main())
