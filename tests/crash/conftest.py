"""The simulator's passes read the same documents again and again: what they come to is remembered."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from trtmodel_operator import spec as specs
from trtmodel_operator.adapters import observe


@pytest.fixture(autouse=True, scope="module")
def _documents_are_read_once() -> Iterator[None]:
    """Pure functions of text, whose values nobody changes: a pass takes half the time."""
    decode, parse = observe.decode, specs.parse

    @functools.lru_cache(maxsize=20_000)
    def decoded(cls: type[Any], text: str, where: str) -> Any:
        return decode(cls, json.loads(text), where)

    @functools.lru_cache(maxsize=1000)
    def parsed(text: str) -> Any:
        return parse(json.loads(text))

    level = logging.getLogger("trtmodel_operator").level
    logging.getLogger("trtmodel_operator").setLevel(logging.CRITICAL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(observe, "decode", lambda cls, data, where="": decoded(cls, json.dumps(data), where))
        patch.setattr(observe, "loads", functools.lru_cache(maxsize=20_000)(observe.loads))
        patch.setattr(
            observe.manifests, "read_pointer", functools.lru_cache(maxsize=20_000)(observe.manifests.read_pointer)
        )
        patch.setattr(observe.specs, "parse", lambda raw: parsed(json.dumps(raw)))
        yield
    logging.getLogger("trtmodel_operator").setLevel(level)
