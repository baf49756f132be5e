"""The commands of `cluster`."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from typing import Protocol

from . import host
from .current import Current
from .kind import Kind
from .local import Local
from .settings import S3_ACCESS_KEY, S3_REGION, S3_SECRET_KEY, ClusterError, from_environment

DOWN = 3  # exit status of `status` when a part is not well


class Cluster(Protocol):
    """What every mode offers."""

    def up(self) -> None: ...
    def down(self, *, purge: bool) -> None: ...
    def load(self, what: str) -> None: ...
    def images(self) -> dict[str, str]: ...
    def environment(self) -> dict[str, str]: ...
    def status(self) -> list[tuple[str, bool, str]]: ...


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("up", help="start or heal the cluster; returns when it serves")
    down = commands.add_parser("down", help="end it and put the host back")
    down.add_argument("--purge", action="store_true", help="delete its state too; only the cache stays")
    load = commands.add_parser("load", help="load an image into the cluster")
    load.add_argument("image", help="an archive's path, or the name of an image that was built here")
    commands.add_parser("images", help="build and load the product's images, print their references")
    commands.add_parser("env", help="print shell exports: KUBECONFIG, KUBECTL, HELM, S3_ENDPOINT ...")
    commands.add_parser("status", help=f"what runs and answers now; exit status {DOWN} when something does not")
    return parser


def _cluster() -> Cluster:
    settings = from_environment()
    if settings.mode == "kind":
        return Kind(settings)
    if settings.mode == "current":
        return Current(settings)
    return Local(settings)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; an expected failure is one message on standard error and exit status 1."""
    args = _parser().parse_args(argv)
    host.add_system_paths()
    try:
        cluster = _cluster()
        if args.command == "up":
            cluster.up()
        elif args.command == "down":
            cluster.down(purge=args.purge)
        elif args.command == "load":
            cluster.load(args.image)
        elif args.command == "images":
            for name, ref in cluster.images().items():
                print(f"{name}={ref}")
        elif args.command == "env":
            keys = {"AWS_ACCESS_KEY_ID": S3_ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": S3_SECRET_KEY, "AWS_REGION": S3_REGION}
            for name, value in {**keys, **cluster.environment()}.items():
                print(f"export {name}={shlex.quote(value)}")
        else:
            rows = cluster.status()
            for name, well, detail in rows:
                print(f"{'ok ' if well else 'BAD'}  {name:<24} {detail}")
            return 0 if all(well for _, well, _ in rows) else DOWN
    except ClusterError as e:
        print(f"cluster: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("cluster: interrupted", file=sys.stderr)
        return 130
    return 0
