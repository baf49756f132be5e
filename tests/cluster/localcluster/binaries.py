"""The programs of the cluster, built once from their Go modules and kept in the cache."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from . import content, host
from .settings import HERE, KUBERNETES_VERSION, Settings
from .shell import run, say

_BUILD_TIMEOUT = 3600.0
_VERSION = "k8s.io/component-base/version"


@dataclass(frozen=True)
class Module:
    """One Go module below go/, its packages, and about how long a first build takes on two cores."""

    name: str
    packages: tuple[str, ...]
    takes: str
    stamp: str = ""


_KUBERNETES = Module(
    "kubernetes",
    (
        *(
            f"k8s.io/kubernetes/cmd/{n}"
            for n in (
                "kube-apiserver",
                "kube-controller-manager",
                "kube-scheduler",
                "kubelet",
                "kube-proxy",
                "kubectl",
            )
        ),
        "go.etcd.io/etcd/server/v3",  # its binary is called "server"
    ),
    "5 minutes",
    f" -X {_VERSION}.gitVersion={KUBERNETES_VERSION} -X {_VERSION}.gitMajor=1"
    f" -X {_VERSION}.gitMinor={KUBERNETES_VERSION.split('.')[1]}",
)
MODULES = (
    Module("pause", (".",), "5 seconds"),
    _KUBERNETES,
    Module("coredns", (".",), "1 minute"),
    Module("versitygw", ("github.com/versity/versitygw/cmd/versitygw",), "75 seconds"),
    Module("helm", ("helm.sh/helm/v4/cmd/helm",), "2 minutes"),
)


@dataclass(frozen=True)
class Binaries:
    """Folders of the built modules by name; the folder's name carries the hash of what it was built from."""

    folders: dict[str, Path]

    def path(self, module: str, program: str) -> Path:
        return self.folders[module] / program

    def kubernetes(self, program: str) -> Path:
        return self.folders["kubernetes"] / ("server" if program == "etcd" else program)


def _folder(settings: Settings, module: Module) -> Path:
    source = HERE / "go" / module.name
    return settings.cache / "bin" / f"{module.name}-{content.key([source], module.stamp, relative_to=source)}"


def located(settings: Settings) -> Binaries:
    """Where the programs are or would be; builds nothing."""
    return Binaries({m.name: _folder(settings, m) for m in MODULES})


def build(settings: Settings, names: Collection[str] = ()) -> Binaries:
    """Build what the cache lacks of the named modules, or of all. Raises ClusterError with the end of the log."""
    go = ""
    for module in MODULES:
        folder = _folder(settings, module)
        if folder.exists() or (names and module.name not in names):
            continue
        go = go or host.go_toolchain(settings)
        say(f"building {module.name} from its Go module (once, about {module.takes})")
        log = settings.cache / "log" / f"go-{module.name}.log"
        log.unlink(missing_ok=True)
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        run(
            ["nice", go, "build", "-trimpath", "-mod=readonly", "-ldflags", "-s -w" + module.stamp,
             "-o", f"{partial}/", *module.packages],
            cwd=HERE / "go" / module.name,
            env={"CGO_ENABLED": "0", "GOFLAGS": "-buildvcs=false", "GOTOOLCHAIN": "local", "GOWORK": "off"},
            timeout=_BUILD_TIMEOUT,
            log=log,
        )  # fmt: skip
        partial.rename(folder)
    return located(settings)
