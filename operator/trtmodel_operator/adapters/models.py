"""The TRTModels as the API server told of them last: by kopf's watch, and in the answers to our own writes.

So a pass asks for nothing. What is kept may be a moment behind what people write: the memory is written with the
resourceVersion of what was read, and a refusal has the model asked for anew. That the watch delivers at all, the resync
sees: what a list shows in another version than the one kept is not believed any more.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import orjson

from trtmodel_operator.ports import Json, Key


class KeptModels:
    """By namespace and name; as compressed text, which takes a tenth of the memory of the objects."""

    def __init__(self) -> None:
        self._texts: dict[Key, tuple[int, bytes]] = {}
        self.drops = 0  # how often anything was dropped: what was asked for before a drop may be gone since

    def __len__(self) -> int:
        return len(self._texts)

    def get(self, key: Key) -> Json | None:
        held = self._texts.get(key)
        return None if held is None else dict(orjson.loads(zlib.decompress(held[1])))

    def version(self, key: Key) -> str:
        """The resourceVersion of what is kept; '' if nothing is."""
        held = self._texts.get(key)
        return "" if held is None else str(held[0])

    def put(self, model: Mapping[str, Any]) -> None:
        """Unless it is older than what is kept."""
        meta = model["metadata"]
        key, version = (meta["namespace"], meta["name"]), int(meta["resourceVersion"])
        held = self._texts.get(key)
        if held is None or held[0] < version:
            less = {**model, "metadata": {name: value for name, value in meta.items() if name != "managedFields"}}
            self._texts[key] = version, zlib.compress(orjson.dumps(less, default=dict), 1)

    def answered(self, model: Mapping[str, Any]) -> None:
        """The answer to a write of ours. It may come after the event that tells that the model is gone, so what is not
        kept any more stays so: passes over a dead model would make children without an owner."""
        meta = model["metadata"]
        if (meta["namespace"], meta["name"]) in self._texts:
            self.put(model)

    def drop(self, key: Key) -> None:
        """The next pass asks for it."""
        self._texts.pop(key, None)
        self.drops += 1

    def compare(self, listed: Mapping[Key, str]) -> None:
        """Drop what a list shows in another version, or not at all: no watch is sure to tell everything."""
        for key in [key for key in self._texts if listed.get(key) != self.version(key)]:
            self.drop(key)
