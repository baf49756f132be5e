"""``trtmodel cache list | copy | revoke | collect``: what lies in a bucket, for people who keep it in order.

Where artifacts are is the bucket, the prefix and the namespace in one: s3://bucket/prefix/namespace, or a directory.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from trtmodel_contract import storelayout as layout
from trtmodel_contract.codec import DocumentError, loads, sha256_hex
from trtmodel_contract.exitcodes import JobExit
from trtmodel_contract.identity import Storage
from trtmodel_contract.jobs import Reason
from trtmodel_contract.keeping import Cause, Revocation
from trtmodel_contract.manifest import Manifest

from trtmodel_worker.alone.home import Home, default_home
from trtmodel_worker.alone.say import name, say
from trtmodel_worker.builder import collect, copying
from trtmodel_worker.engines.building import Rejected
from trtmodel_worker.storage import ArtifactStore, NotFound, StorageError

COMMAND = "cache"
GRACE = "2d"
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def add_parsers(of_all: Any) -> None:
    text = "keep a bucket in order"
    commands = of_all.add_parser(COMMAND, help=text, description=text).add_subparsers(
        required=True, dest="action", metavar="list|copy|revoke|collect"
    )
    listed = _command(commands, "list", "list the engines of a namespace")
    _where(listed, "where", "")
    copied = _command(commands, "copy", "copy an engine with its gate figures to another namespace, bucket or cluster")
    copied.add_argument("digest", type=_digest, help="of the engine's manifest, as `trtmodel cache list` lists it")
    _where(copied, "source", "from-")
    _where(copied, "destination", "to-")
    revoked = _command(commands, "revoke", "take an engine out of use for new rollouts: the next Job builds anew")
    _where(revoked, "where", "")
    revoked.add_argument("digest", type=_digest)
    revoked.add_argument("--reason", required=True, help="kept in the bucket beside the engine")
    collected = _command(commands, "collect", "show what no pin needs, and with --delete remove it")
    _where(collected, "where", "")
    collected.add_argument("--delete", action="store_true", help="without it nothing is changed")
    collected.add_argument(
        "--grace",
        type=_duration,
        default=GRACE,
        metavar="TIME",
        help="what is younger stays; more than the deadline of any build (default: %(default)s)",
    )
    collected.add_argument(
        "--without-pins", action="store_true", help="there are no pins and that is right: nothing is in use"
    )


def run(options: argparse.Namespace, home: Home) -> int:
    """The exit code. Raises StorageError."""
    command = {"list": _list, "copy": _copy, "revoke": _revoke, "collect": _collect}[options.action]
    try:
        return command(options, home)
    except Rejected as e:
        say(e.message)
        return JobExit.REJECTED


def open_at(where: str, endpoint: str, region: str, credentials: str, ca_bundle: str = "") -> ArtifactStore:
    """The artifacts at ``s3://bucket/prefix/namespace`` or in a directory. `ca_bundle`: PEM certificates that are
    trusted, too. Raises StorageError."""
    if where.startswith("s3://"):
        bucket, *parts = [part for part in where.removeprefix("s3://").split("/") if part] or [""]
        address = endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    else:
        path = Path(where.removeprefix("file://")).expanduser().absolute()
        if len(path.parts) < 4 or not path.is_dir():
            text = f"{where}: there is no such directory, or it is no <bucket>/<prefix>/<namespace>"
            raise StorageError(Reason.BUCKET_NOT_FOUND, text)
        address, bucket, parts = f"file://{path.parents[2]}", path.parts[-3], list(path.parts[-2:])
    if not bucket or not parts:
        text = f"{where}: it must be s3://<bucket>/<prefix>/<namespace>, the prefix being spec.storage.prefix"
        raise StorageError(Reason.BUCKET_NOT_FOUND, text)
    *prefix, namespace = parts
    storage = Storage(bucket, "/".join(prefix), address, region or os.environ.get("AWS_REGION") or "", ca_bundle)
    try:
        return ArtifactStore(storage, namespace, credentials or None)
    except ValueError as e:
        raise StorageError(Reason.BUCKET_NOT_FOUND, f"{where}: {e}") from e


def _list(options: argparse.Namespace, _home: Home) -> int:
    store = _open(options, "where", "")
    markers = set[layout.BuildKey]()
    found = []
    for key in store.objects.list(layout.engines_prefix(store.root)):
        build = layout.parse_build(store.root, key)
        if build is not None and build.marker:
            markers.add(build)
        elif build is not None:
            found.append((build, key))
    engines = []
    for build, key in sorted(found, key=lambda item: (item[0].revision, item[0].load_key, item[0].number)):
        data = store.read(key)
        made, size = _of_manifest(data)
        revoked = layout.BuildKey(build.revision, build.load_key, build.number, True) in markers
        engine = {
            "digest": sha256_hex(data),
            "revision": build.revision,
            "loadKey": build.load_key,
            "number": build.number,
            "createdAt": made,
            "bytes": size,
            "revoked": revoked,
        }
        engines.append(engine)
        about = "unreadable" if size is None else f"{name(made or '')} {size:,} bytes"
        text = f"{engine['digest']} {build.revision} {build.load_key} {build.number} {about}"
        if options.output != "json":
            print(f"{text} revoked" if revoked else text)
    if options.output == "json":
        print(json.dumps({"engines": engines}, indent=2))
    return JobExit.DONE


def _of_manifest(data: bytes) -> tuple[str | None, int | None]:
    """(when it was made, the plan's bytes); None of one that cannot be read."""
    try:
        manifest = loads(Manifest, data)
    except DocumentError:
        return None, None
    return manifest.created_at, manifest.plan.size


def _copy(options: argparse.Namespace, home: Home) -> int:
    source, destination = _open(options, "source", "from_"), _open(options, "destination", "to_")
    with tempfile.TemporaryDirectory(dir=home.root, prefix="work-") as work:
        done = copying.copy(source, destination, options.digest, Path(work), say)
    what = f"revision {done.manifest.revision} for {done.manifest.load_key} is number {done.number} there"
    document = {
        "digest": options.digest,
        "revision": done.manifest.revision,
        "loadKey": str(done.manifest.load_key),
        "number": done.number,
        "files": done.sent,
        "bytes": done.sent_bytes,
        "figures": done.figures,
    }
    text = f"{what}: {done.sent} files of {done.sent_bytes:,} bytes sent, figures: {done.figures}"
    return _told(options, document, text)


def _revoke(options: argparse.Namespace, _home: Home) -> int:
    store = _open(options, "where", "")
    why = Revocation(Cause.BY_HAND, options.reason)
    for key in store.objects.list(layout.engines_prefix(store.root)):
        build = layout.parse_build(store.root, key)
        if build is None or build.marker or sha256_hex(store.read(key)) != options.digest:
            continue
        done = store.revoke(build.revision, build.load_key, options.digest, why)
        what = f"{build.revision} for {build.load_key} number {build.number}"
        document = {
            "digest": options.digest,
            "revision": build.revision,
            "loadKey": build.load_key,
            "number": build.number,
            "before": not done,
        }
        return _told(options, document, f"{what} is revoked" if done else f"{what} was revoked before")
    raise NotFound(f"{options.where}: there is no engine with the digest {options.digest}")


def _collect(options: argparse.Namespace, _home: Home) -> int:
    store = _open(options, "where", "")
    rules = collect.Rules(options.grace, options.delete, options.without_pins)
    lines: list[str] = []
    try:
        done = collect.collect(store, rules, lines.append if options.output == "json" else print)
    except collect.NothingIsPinned as e:
        say(f"{e}. If that is right, say --without-pins")
        return JobExit.REJECTED
    for problem in done.problems:
        say(problem)
    verb = "removed" if options.delete else "would be removed"
    what = f"engines {done.deleted}, objects {done.objects}, bytes {done.freed_bytes:,}"
    document = {
        "kept": done.kept,
        "removed": options.delete,
        "engines": done.deleted,
        "objects": done.objects,
        "bytes": done.freed_bytes,
        "waiting": done.waiting,
        "lines": lines,
        "problems": list(done.problems),
    }
    text = f"kept: engines {done.kept}; {verb}: {what}"
    if done.waiting:
        minutes = collect.SETTLE_SECONDS / 60
        text += f"\nout of use: engines {done.waiting}; they go in a run that is {minutes:.0f} minutes later"
    return _told(options, document, text)


def _told(options: argparse.Namespace, document: dict[str, Any], text: str) -> int:
    print(json.dumps(document, indent=2) if options.output == "json" else text)
    return JobExit.DONE


def _command(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.add_argument("-o", "--output", choices=("json",), default="", help="for programs")
    parser.add_argument(
        "--cache", type=Path, default=default_home(), metavar="DIR", help="for files under way (default: %(default)s)"
    )
    return parser


def _where(parser: argparse.ArgumentParser, name: str, prefix: str) -> None:
    parser.add_argument(name, help="s3://bucket/prefix/namespace, or a directory")
    parser.add_argument(f"--{prefix}endpoint", default="", metavar="URL", help="of an S3 that is not Amazon's")
    parser.add_argument(f"--{prefix}region", default="")
    parser.add_argument(
        f"--{prefix}credentials", default="", metavar="DIR", help="files AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    )


def _open(options: argparse.Namespace, name: str, prefix: str) -> ArtifactStore:
    values = vars(options)
    return open_at(values[name], values[f"{prefix}endpoint"], values[f"{prefix}region"], values[f"{prefix}credentials"])


def _digest(text: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{64}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no digest: 64 hex digits, as `trtmodel cache list` lists them")
    return text


def _duration(text: str) -> float:
    match = re.fullmatch(r"([0-9]{1,9})([smhd])", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: say 90m, 36h or 2d")
    return float(int(match[1]) * _UNITS[match[2]])
