"""Images without a registry: the cluster's own, a base from Debian packages, and the product's two.

A tag is the hash of everything that the image is made of, so it is pulled IfNotPresent and never goes stale.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from . import content, host
from .binaries import Binaries
from .settings import HERE, ClusterError, Settings
from .shell import run, say, succeeds
from .store import Store

_BUILD_SECONDS = 1800.0
_SUITE = "bookworm"
# System packages only here; python3-venv since the product's Dockerfiles make a virtual environment;
# libstdc++6 and libgomp1 for onnxruntime.
_BASE_PACKAGES = ("python3", "python3-venv", "ca-certificates", "libstdc++6", "libgomp1")
_REMOVED = (
    "var/cache/apt/archives/*.deb",
    "var/cache/debconf/*",
    "var/lib/apt/lists/*_*",
    "usr/share/doc/*",
    "usr/share/info/*",
    "usr/share/locale/*",
    "usr/share/man/*",
)
# One time stamp for every file of a build context: buildah's layer cache looks at times too, and a fresh
# clone has new ones.
_EPOCH = 1_600_000_000


@dataclass(frozen=True)
class Product:
    """One Dockerfile at the root of the clone, and what it copies."""

    name: str
    dockerfile: str
    requirements: str
    sources: tuple[str, ...]

    @property
    def paths(self) -> tuple[str, ...]:
        """Everything that decides the image."""
        return (self.dockerfile, self.requirements, *self.sources)


PRODUCTS = (
    Product(
        "operator",
        "Dockerfile.operator",
        "requirements/operator.txt",
        ("requirements/operator.cdx.json", "contract/trtmodel_contract", "operator/trtmodel_operator"),
    ),
    Product(
        "worker",
        "Dockerfile.worker",
        "requirements/worker.txt",
        ("requirements/worker.cdx.json", "contract/trtmodel_contract", "worker/trtmodel_worker"),
    ),
)


def product_ref(root: Path, product: Product, base: str) -> str:
    """The content-hash reference of a product image on a base, from the files below `root`."""
    paths = [root / p for p in product.paths]
    return f"localhost/trtmodel-{product.name}:{content.key(paths, base, relative_to=root)}"


class Images:
    """Builds into the store of the cache; what is there is not built again."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._work = settings.cache / "buildah"
        self.store = Store(settings.cache / "images")

    def _buildah(self, command: str) -> list[str | Path]:
        """A buildah command with a storage of its own: nothing is shared with the host's containers."""
        driver = os.environ.get("STORAGE_DRIVER", "overlay")
        return ["buildah", "--root", self._work / "storage", "--runroot", self._work / "run",
                "--storage-driver", driver, command]  # fmt: skip

    def _policy(self) -> list[str | Path]:
        policy = self._work / "policy.json"
        if not policy.exists():
            self._work.mkdir(parents=True, exist_ok=True)
            policy.write_text('{"default":[{"type":"insecureAcceptAnything"}]}')
        return ["--signature-policy", policy]

    def _build(self, ref: str, dockerfile: Path, context: Path, *args: str) -> str:
        log = self._settings.cache / "log" / f"image-{ref.rpartition('/')[2].partition(':')[0]}.log"
        log.unlink(missing_ok=True)
        run(
            [*self._buildah("bud"), *self._policy(), "--layers", "--isolation", "chroot", "--network", "host",
             "--pull-never", *args, "-f", dockerfile, "-t", ref, context],
            timeout=_BUILD_SECONDS, log=log,
        )  # fmt: skip
        self._export(ref)
        for old in self.store.prune(ref.rpartition(":")[0]):
            succeeds([*self._buildah("rmi"), old], timeout=60)
            succeeds([*self._buildah("rmi"), "--prune"], timeout=60)
        return ref

    def _export(self, ref: str) -> None:
        """Copy an image from buildah's storage to the store."""
        target = f"docker-archive:/dev/stdout:{ref}"
        command = [str(a) for a in (*self._buildah("push"), "--quiet", *self._policy(), ref, target)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as push:
            assert push.stdout is not None
            assert push.stderr is not None
            try:
                self.store.add(ref, push.stdout)
            except (tarfile.ReadError, KeyError) as e:
                push.kill()
                raise ClusterError(f"buildah did not hand out {ref}: {push.stderr.read().decode()[-500:]}") from e

    def infrastructure(self, binaries: Binaries) -> dict[str, str]:
        """References of pause, coredns and versitygw: each one static binary from scratch."""
        refs = {}
        for name in ("pause", "coredns", "versitygw"):
            dockerfile = HERE / "images" / f"{name}.Dockerfile"
            folder = binaries.folders[name]
            ref = f"localhost/{name}:{content.key([dockerfile], folder.name, relative_to=HERE)}"
            if self.store.digest(ref) is None:
                say(f"building {ref}")
                self._build(ref, dockerfile, folder)
            refs[name] = ref
        return refs

    def base_ref(self) -> str:
        """The reference of the base image; builds nothing."""
        dockerfile = HERE / "images" / "base.Dockerfile"
        return (
            f"localhost/trtmodel-base:{content.key([dockerfile], _SUITE, *_BASE_PACKAGES, *_REMOVED, relative_to=HERE)}"
        )

    def base(self) -> str:
        """The base image: Debian's minimal system and Python, by debootstrap."""
        ref = self.base_ref()
        if self.store.digest(ref) is None:
            say(f"building {ref} from Debian packages (once, about 1 minute)")
            with tempfile.TemporaryDirectory(dir=self._settings.cache, prefix="base-") as tmp:
                rootfs = Path(tmp) / "rootfs"
                log = self._settings.cache / "log" / "debootstrap.log"
                run(
                    ["debootstrap", "--variant=minbase", f"--include={','.join(_BASE_PACKAGES)}",
                     _SUITE, rootfs, _debian_mirror()],
                    timeout=_BUILD_SECONDS, log=log,
                )  # fmt: skip
                for pattern in _REMOVED:
                    for path in rootfs.glob(pattern):
                        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
                context = Path(tmp) / "context"
                context.mkdir()
                run(["tar", "-C", rootfs, "--exclude=./dev/*", "--exclude=./proc/*", "--exclude=./sys/*",
                     "-cf", context / "rootfs.tar", "."], timeout=300)  # fmt: skip
                shutil.rmtree(rootfs)
                self._build(ref, HERE / "images" / "base.Dockerfile", context)
        elif not succeeds([*self._buildah("inspect"), "--type", "image", ref]):
            # The build storage was deleted: product builds need the base there.
            with tempfile.TemporaryDirectory(dir=self._settings.cache, prefix="base-") as tmp:
                archive = Path(tmp) / "base.tar"
                with archive.open("wb") as out:
                    self.store.write_archive(ref, out, set())
                pulled = run(
                    [*self._buildah("pull"), "--quiet", *self._policy(), f"oci-archive:{archive}"], timeout=300
                )
                run([*self._buildah("tag"), pulled.strip(), ref], timeout=60)
        return ref

    def _wheelhouse(self, requirements: Path) -> Path:
        """The wheels of a requirements file, for the image's Python, downloaded outside of the build."""
        folder = (
            self._settings.cache
            / "wheels"
            / f"{requirements.stem}-{content.key([requirements], relative_to=requirements.parent)}"
        )
        if not folder.exists():
            say(f"downloading the wheels of {requirements.name} (once)")
            venv = self._settings.cache / "pip"
            if not (venv / "bin/pip").exists():
                host.make_venv(venv, host.image_python())
            partial = folder.with_name(folder.name + ".partial")
            shutil.rmtree(partial, ignore_errors=True)
            run(
                [venv / "bin/pip", "download", "-q", "--require-hashes", "--only-binary", ":all:",
                 "-r", requirements, "-d", partial],
                timeout=_BUILD_SECONDS,
            )  # fmt: skip
            partial.rename(folder)
        return folder

    def product(self, product: Product, *, afresh: bool = False) -> str:
        """Build one of the product's images, if it is not there or `afresh` without any layer of before, and return
        its reference."""
        base = self.base_ref()
        with tempfile.TemporaryDirectory(dir=self._settings.cache, prefix="context-") as tmp:
            context = Path(tmp)  # a copy: named by what is built, also while somebody edits
            for name in product.paths:
                _copy(self._settings.clone / name, context / name)
            ref = product_ref(context, product, base)
            if self.store.digest(ref) is not None and not afresh:
                return ref
            self.base()
            wheels = self._wheelhouse(context / product.requirements)
            for path in [*context.rglob("*"), context]:
                os.utime(path, (_EPOCH, _EPOCH))
            say(f"building {ref}")
            return self._build(
                ref, context / product.dockerfile, context, "--timestamp", "0", *(["--no-cache"] if afresh else []),
                "--build-arg", f"BASE={base}",
                "--build-arg", "PIP_NO_INDEX=1", "--build-arg", "PIP_FIND_LINKS=/wheelhouse",
                "--volume", f"{wheels}:/wheelhouse:ro",
            )  # fmt: skip


def _copy(source: Path, target: Path) -> None:
    if not source.exists():
        raise ClusterError(f"the image needs {source}, which is missing")
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    else:
        shutil.copy(source, target)


def _debian_mirror() -> str:
    """DEBIAN_MIRROR, else the mirror that this machine's apt uses, which may be the only one it reaches."""
    if mirror := os.environ.get("DEBIAN_MIRROR"):
        return mirror
    sites = run(
        ["apt-get", "indextargets", "--format", "$(SITE) $(ORIGIN) $(CODENAME)", "Created-By: Packages"], timeout=60
    )
    for line in sites.splitlines():
        site, _, rest = line.partition(" ")
        if rest == f"Debian {_SUITE}":
            return site
    raise ClusterError("apt knows no Debian mirror: set DEBIAN_MIRROR to one's address")
