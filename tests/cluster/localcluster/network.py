"""Links, routes, sysctls and packet filter rules of the node, and their way back.

The first `up` records what was there, so that `down` puts back exactly that.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

from . import traces
from .settings import NODE_IP, NODE_LINK, POD_LINK, SERVICE_CIDR, ClusterError, Settings
from .shell import run, succeeds

_SECONDS = 20.0
# The kubelet sets the first five, kube-proxy the sixth, we the rest.
_SYSCTLS = (
    "vm/overcommit_memory",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
    "net/ipv4/conf/all/route_localnet",
    "net/ipv4/ip_forward",
    "net/bridge/bridge-nf-call-iptables",
    "fs/inotify/max_user_instances",
)
_WANTED = {
    "net/ipv4/ip_forward": "1",
    "net/bridge/bridge-nf-call-iptables": "1",
    "fs/inotify/max_user_instances": "8192",
}
# Pods reach pods, Services and the node; nothing else.
_FORWARD = (
    ("-i", POD_LINK, "-o", POD_LINK, "-j", "ACCEPT"),
    ("-i", POD_LINK, "!", "-o", POD_LINK, "-j", "REJECT"),
)
_KUBE_CHAIN = re.compile(r"(KUBE|CNI)-")
_FAMILIES = ("iptables", "ip6tables")


def _snapshot_file(settings: Settings) -> Path:
    return settings.run / "host-before.json"


def _ip(*args: str) -> str:
    return run(["ip", *args], timeout=_SECONDS)


def _link_exists(name: str) -> bool:
    return Path(f"/sys/class/net/{name}").exists()


def _sysctl(name: str) -> Path:
    return Path("/proc/sys") / name


def claim(settings: Settings) -> None:
    """Record the host's state before anything is changed.

    Raises ClusterError when the traces of another cluster are there: this one would break it.
    """
    if _snapshot_file(settings).exists():
        return
    for module in ("br_netfilter", "overlay"):
        succeeds(["modprobe", module])  # built in, on some kernels
    signs = [f"link {n}" for n in (NODE_LINK, POD_LINK) if _link_exists(n)]
    if route := _ip("route", "show", "exact", SERVICE_CIDR).strip():
        signs.append(f"route {route}")
    signs += [f"chain {chain} in {table}" for _, table, chain in _chains() if chain == "KUBE-SERVICES"]
    signs += [f"cgroup {path}" for path in pod_cgroups()]
    if signs:
        raise ClusterError(
            "this machine carries traces of another cluster, which is left alone:\n  "
            + "\n  ".join(signs)
            + "\nStop that one, or use CLUSTER=kind"
        )
    sysctls = {n: _sysctl(n).read_text().strip() for n in _SYSCTLS if _sysctl(n).exists()}
    settings.run.mkdir(parents=True, exist_ok=True)
    before = {"sysctls": sysctls, "chains": _chains(), "paths": traces.present()}
    _snapshot_file(settings).write_text(json.dumps(before) + "\n")


def set_up() -> None:
    """Node address, routes, sysctls, forwarding rules. Idempotent."""
    if not _link_exists(NODE_LINK):
        _ip("link", "add", NODE_LINK, "type", "bridge")
    _ip("addr", "replace", f"{NODE_IP}/32", "dev", NODE_LINK)
    _ip("link", "set", NODE_LINK, "up")
    # Service addresses need a local route: the source address becomes the node's, and an address that no
    # Service has fails here instead of leaving through the default route.
    _ip("route", "replace", SERVICE_CIDR, "dev", NODE_LINK)
    for name, value in _WANTED.items():
        if _sysctl(name).exists() and _sysctl(name).read_text().strip() != value:
            _sysctl(name).write_text(value)
    for rule in _FORWARD:
        if not succeeds(["iptables", "-w", "-C", "FORWARD", *rule]):
            run(["iptables", "-w", "-I", "FORWARD", *rule], timeout=_SECONDS)


def put_back(settings: Settings) -> None:
    """Undo `set_up` and what kubelet, kube-proxy and the CNI plugins left in the kernel."""
    for rule in _FORWARD:
        while succeeds(["iptables", "-w", "-D", "FORWARD", *rule]):
            pass
    for link in (POD_LINK, NODE_LINK):
        if _link_exists(link):
            _ip("link", "del", link)
    try:
        before = json.loads(_snapshot_file(settings).read_text())
    except (OSError, ValueError):
        return
    _delete_chains_except({tuple(c) for c in before["chains"]})
    for name, value in before["sysctls"].items():
        if _sysctl(name).exists() and _sysctl(name).read_text().strip() != value:
            _sysctl(name).write_text(value)
    for path in pod_cgroups():
        for folder in sorted((p for p in path.rglob("*") if p.is_dir()), key=lambda p: -len(p.parts)):
            _remove_folder(folder)
        _remove_folder(path)
    traces.remove_except(before["paths"])
    _snapshot_file(settings).unlink()


def _remove_folder(path: Path) -> None:
    with suppress(OSError):  # a task is still ending in it; the kernel has no forced removal
        path.rmdir()


def pod_cgroups() -> list[Path]:
    """The kubelet's cgroups: one on cgroup v2, one per controller on v1."""
    root = Path("/sys/fs/cgroup")
    found = {p.resolve() for p in [root / "kubepods", *root.glob("*/kubepods")] if p.is_dir()}
    return sorted(found)


def _saved(family: str) -> list[tuple[str, str]]:
    """(table, line) of every chain and rule that the kernel holds."""
    table, lines = "", []
    for line in run([f"{family}-save"], timeout=_SECONDS).splitlines():
        if line.startswith("*"):
            table = line[1:]
        elif line.startswith((":", "-A")):
            lines.append((table, line))
    return lines


def _chains() -> list[tuple[str, str, str]]:
    """(family, table, chain) of the chains that Kubernetes and CNI make."""
    return [
        (family, table, line[1:].split()[0])
        for family in _FAMILIES
        for table, line in _saved(family)
        if line.startswith(":") and _KUBE_CHAIN.match(line[1:])
    ]


def _delete_chains_except(kept: set[tuple[str, ...]]) -> None:
    ours: dict[tuple[str, str], set[str]] = defaultdict(set)
    for family, table, chain in _chains():
        if (family, table, chain) not in kept:
            ours[family, table].add(chain)
    for (family, table), chains in ours.items():
        jumps = [
            "-D" + line[2:]
            for saved_table, line in _saved(family)
            if saved_table == table
            and line.startswith("-A")
            and shlex.split(line)[1] not in chains
            and chains & set(shlex.split(line))
        ]
        batch = [f"*{table}", *jumps, *(f"-F {c}" for c in chains), *(f"-X {c}" for c in chains), "COMMIT", ""]
        run([f"{family}-restore", "--noflush", "-w"], timeout=_SECONDS, stdin="\n".join(batch))
