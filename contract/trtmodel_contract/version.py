"""Which version of the product this is."""

from __future__ import annotations

import importlib.metadata


def product_version() -> str:
    """Of the installed package. Images carry the packages without their metadata: there it is unknown."""
    try:
        return importlib.metadata.version("trtmodel")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
