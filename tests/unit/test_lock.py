"""The lock resolves to sane versions, and the images install what it says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib  # type: ignore[no-redef]

ROOT = Path(__file__).parents[2]
LOCK = tomllib.loads((ROOT / "uv.lock").read_text())
VERSIONS: dict[str, set[str]] = {}
for package in LOCK["package"]:
    if "version" in package:
        VERSIONS.setdefault(package["name"], set()).add(package["version"])
IMAGES = ("operator", "worker")


def parsed(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def pinned(image: str) -> dict[str, set[str]]:
    text = (ROOT / "requirements" / f"{image}.txt").read_text()
    found: dict[str, set[str]] = {}
    for name, version in re.findall(r"^([A-Za-z0-9_.-]+)(?:\[[^]]*\])?==(\S+)", text, re.MULTILINE):
        found.setdefault(name.lower(), set()).add(version)
    return found


@pytest.mark.parametrize(
    ("name", "least", "below"),
    [
        ("kubernetes", (37,), (37, 0, 2)),  # 37.0.2 wants python-dateutil >= 3, botocore < 3
        ("boto3", (1, 40), (2,)),  # unpinned, the resolver walked back to 1.2, of 2015
        ("botocore", (1, 40), (2,)),  # the first with conditional writes and checksums by default is 1.36
        ("python-dateutil", (2, 8), (3,)),
        ("aiohttp", (3, 14), (4,)),
        ("kopf", (1, 45, 2), (1, 46)),
        ("cryptography", (45,), (99,)),
        ("urllib3", (2,), (3,)),
    ],
)
def test_the_lock_resolves_to_a_sane_version(name: str, least: tuple[int, ...], below: tuple[int, ...]) -> None:
    assert VERSIONS[name], f"{name} is not in uv.lock"
    for version in VERSIONS[name]:
        assert least <= parsed(version) < below, f"{name} {version}"


def test_operator_and_builder_can_live_in_one_environment() -> None:
    """boto3 and kubernetes meet in the developer's environment only: one dateutil must do for both."""
    assert len(VERSIONS["python-dateutil"]) == 1


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_installs_what_the_lock_says(image: str) -> None:
    pins = pinned(image)
    assert pins
    for name, versions in pins.items():
        assert versions <= VERSIONS.get(name, set()), f"{name} {versions}: run make lock"


@pytest.mark.parametrize("image", IMAGES)
def test_every_requirement_of_an_image_has_a_hash(image: str) -> None:
    text = (ROOT / "requirements" / f"{image}.txt").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    assert lines
    assert [line for line in lines if "--hash=sha256:" not in line] == []


def test_each_image_has_its_own_libraries_and_not_the_other_ones() -> None:
    operator, worker = pinned("operator"), pinned("worker")
    assert {"kopf", "kubernetes", "aiohttp", "cryptography"} <= operator.keys()
    assert {"boto3", "numpy", "onnxruntime", "onnx", "httptools", "uvloop", "cryptography"} <= worker.keys()
    assert {"boto3", "onnxruntime", "numpy"}.isdisjoint(operator)
    assert {"kopf", "kubernetes", "aiohttp"}.isdisjoint(worker)


def test_no_package_comes_from_anywhere_but_an_index() -> None:
    """No git checkout, no local wheel: whoever has the lock can install it."""
    odd = [p["name"] for p in LOCK["package"] if not {"registry", "editable"} & p["source"].keys()]
    assert odd == []


@pytest.mark.parametrize("image", IMAGES)
def test_the_bill_of_materials_of_an_image_lists_what_it_installs(image: str) -> None:
    bill = json.loads((ROOT / "requirements" / f"{image}.cdx.json").read_text())
    listed: dict[str, set[str]] = {}
    for component in bill["components"]:
        assert component["purl"] == f"pkg:pypi/{component['name']}@{component['version']}"
        listed.setdefault(component["name"], set()).add(component["version"])
    assert (bill["bomFormat"], bill["metadata"]["component"]["name"]) == ("CycloneDX", f"trtmodel-{image}")
    assert listed == pinned(image), "run make lock"


def test_ci_asks_what_is_known_against_the_packages() -> None:
    assert "make audit" in (ROOT / ".ci" / "run").read_text().splitlines()
