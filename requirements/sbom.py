"""Writes the bill of materials of an image: what uv exports of the lock as CycloneDX, without what differs each time.

    uv export --format cyclonedx1.5 ... | python requirements/sbom.py operator > requirements/operator.cdx.json

`make lock` calls it. Addresses of files go, their hashes are in requirements/<image>.txt; packages of the base image
are in its own database (/var/lib/dpkg), which scanners read.
"""

from __future__ import annotations

import json
import sys
from typing import Any

Json = dict[str, Any]


def reduced(found: Json, image: str) -> Json:
    """Of what uv exports. A package of which the lock has several versions stands there with each, and its marker."""
    subject = found["metadata"]["component"]
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.5.schema.json",
        **{key: found[key] for key in ("bomFormat", "specVersion", "version")},
        "metadata": {
            "tools": found["metadata"]["tools"],
            "component": {**subject, "type": "container", "name": f"trtmodel-{image}"},
        },
        "components": [
            {key: value for key, value in component.items() if key != "externalReferences"}
            for component in found["components"]
        ],
        "dependencies": found["dependencies"],
    }


if __name__ == "__main__":
    json.dump(reduced(json.load(sys.stdin), sys.argv[1]), sys.stdout, indent=1)
    sys.stdout.write("\n")
