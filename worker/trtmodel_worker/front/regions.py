"""Who may use which part of the shared memory now."""

from __future__ import annotations

import logging

from trtmodel_contract.identity import Profile
from trtmodel_contract.manifest import Manifest, TensorSpec

from trtmodel_worker.front.disposal import dispose
from trtmodel_worker.host.arena import Arena, Layout, plan_layout

log = logging.getLogger(__name__)
NONE = -1
SLOTS_PER_LANE = 4  # stable and candidate run, one drains, one was just replaced: never short of a region in a swap


class SharedArena:
    """One memory file with its free regions. The last one given back is taken first, so that few pages are touched."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.memory = Arena.create("trtmodel-arena", layout.size)
        self.users = 0
        self._free_inputs = list(range(layout.slots - 1, -1, -1))
        self._free_outputs = list(range(layout.slots - 1, -1, -1))

    def take_input(self) -> int:
        """A free input slot, or NONE."""
        return self._free_inputs.pop() if self._free_inputs else NONE

    def take_output(self) -> int:
        return self._free_outputs.pop() if self._free_outputs else NONE

    def give_input(self, slot: int) -> None:
        self._free_inputs.append(slot)

    def give_output(self, slot: int) -> None:
        self._free_outputs.append(slot)

    @property
    def in_use(self) -> int:
        """Regions that are not free, of both kinds."""
        return 2 * self.layout.slots - len(self._free_inputs) - len(self._free_outputs)


Signature = tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...], tuple[Profile, ...]]


class Arenas:
    """One arena per input and output signature: engines of one signature share it, so that a batch can be run again
    by another engine's host without being copied."""

    def __init__(self, lanes: int, max_output_bytes: int) -> None:
        self._slots = SLOTS_PER_LANE * lanes
        self._max_output_bytes = max_output_bytes
        self._arenas: list[tuple[Signature, SharedArena]] = []

    def acquire(self, manifest: Manifest) -> SharedArena:
        """Raises Unservable."""
        signature = (manifest.inputs, manifest.outputs, manifest.profiles)
        arena = next((a for s, a in self._arenas if s == signature), None)
        if arena is None:
            layout = plan_layout(*signature, self._slots, self._max_output_bytes)
            arena = SharedArena(layout)
            self._arenas.append((signature, arena))
        arena.users += 1
        return arena

    def release(self, arena: SharedArena) -> None:
        """The hosts that used it were reaped: the last user's release unmaps it."""
        arena.users -= 1
        if arena.users:
            return
        self._arenas = [(s, a) for s, a in self._arenas if a is not arena]
        if arena.in_use:
            log.error("%d regions of an arena were never given back", arena.in_use)
        dispose(arena.memory.close)

    @property
    def total_bytes(self) -> int:
        return sum(a.layout.size for _, a in self._arenas)
