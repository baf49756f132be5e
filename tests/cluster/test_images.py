"""The product's images: small, labelled, without rights, with a list of what is in them, and the same each time."""

from __future__ import annotations

import json
import re
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from packaging.markers import Marker

sys.path.insert(0, str(Path(__file__).parent))

from localcluster.images import PRODUCTS, Images, Product
from localcluster.settings import from_environment

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

LARGEST = {"operator": 200_000_000, "worker": 560_000_000}  # bytes of all layers, not compressed
OPERATOR, _ = PRODUCTS
Json = dict[str, Any]


@dataclass(frozen=True)
class Image:
    """An image in the store of the cache."""

    product: Product
    digest: str
    blobs: Path

    def _blob(self, digest: str) -> Path:
        return self.blobs / digest.replace(":", "/")

    def _json(self, digest: str) -> Json:
        found: Json = json.loads(self._blob(digest).read_text())
        return found

    @property
    def config(self) -> Json:
        found: Json = self._json(self._json(self.digest)["config"]["digest"])["config"]
        return found

    @property
    def layers(self) -> list[Path]:
        return [self._blob(layer["digest"]) for layer in self._json(self.digest)["layers"]]

    def files(self, pattern: str) -> Iterator[tuple[str, bytes]]:
        """(path, content) of what a layer brings and no later one is asked about."""
        wanted = re.compile(pattern)
        for layer in self.layers:
            with tarfile.open(layer) as archive:
                for member in archive:
                    content = archive.extractfile(member) if wanted.fullmatch(member.name) else None
                    if content is not None:
                        yield member.name, content.read()


@pytest.fixture(scope="module")
def images() -> Images:
    return Images(from_environment())


@pytest.fixture(scope="module", params=PRODUCTS, ids=lambda p: p.name)
def image(request: pytest.FixtureRequest, images: Images) -> Image:
    digest = images.store.digest(images.product(request.param))
    assert digest is not None
    return Image(request.param, digest, images.store.path / "blobs")


def test_it_is_small(image: Image) -> None:
    assert sum(layer.stat().st_size for layer in image.layers) < LARGEST[image.product.name]


def test_it_says_what_it_is_and_runs_without_rights_as_one_process(image: Image) -> None:
    labels = image.config["Labels"]
    prefix = "org.opencontainers.image."
    assert labels[f"{prefix}title"] == f"trtmodel-{image.product.name}"
    assert labels[f"{prefix}licenses"] == "Apache-2.0"
    assert labels[f"{prefix}version"] == "0.1.0"
    assert image.config["User"] == "10001:10001"
    assert image.config["Entrypoint"][:2] == ["python", "-m"]  # no shell, no supervisor before it


def test_its_bill_of_materials_lists_what_is_installed_and_nothing_else(image: Image) -> None:
    ((_, file),) = image.files(rf"usr/share/sbom/trtmodel-{image.product.name}\.cdx\.json")
    bill = json.loads(file)
    assert (bill["bomFormat"], bill["metadata"]["component"]["name"]) == ("CycloneDX", f"trtmodel-{image.product.name}")
    listed = {(normal(c["name"]), c["version"]) for c in bill["components"] if applies(c)}
    own = {"pip", "setuptools"}  # of the virtual environment
    installed = set()
    for path, content in image.files(r"opt/.*\.dist-info/METADATA"):
        if "/site-packages/setuptools/_vendor/" in path:
            continue
        fields = dict(line.split(": ", 1) for line in content.decode().splitlines()[:40] if ": " in line)
        if normal(fields["Name"]) not in own:
            installed.add((normal(fields["Name"]), fields["Version"]))
    assert installed == listed


@pytest.mark.long
def test_the_same_sources_give_the_same_bytes(images: Images) -> None:
    ref = images.product(OPERATOR)
    before = images.store.digest(ref)
    assert images.product(OPERATOR, afresh=True) == ref
    assert images.store.digest(ref) == before


def applies(component: Json) -> bool:
    """To the Python of the image."""
    markers = [p["value"] for p in component.get("properties", ()) if p["name"] == "uv:package:marker"]
    where = {
        "python_full_version": "3.11.2", "python_version": "3.11", "platform_python_implementation": "CPython",
        "sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64",
    }  # fmt: skip
    return all(Marker(marker).evaluate(where) for marker in markers)


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
