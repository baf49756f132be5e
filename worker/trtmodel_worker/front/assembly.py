"""A batch's bytes: rows of several requests side by side in an input region, and each one's part of the outputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trtmodel_contract.manifest import TensorSpec

from trtmodel_worker.engines.base import DTYPES
from trtmodel_worker.front.calls import Batch, Call, Outputs, Unreadable
from trtmodel_worker.front.regions import SharedArena
from trtmodel_worker.host.reading import ALONE_BYTES, MOST_READS, WORTH_BYTES
from trtmodel_worker.host.wire import Answer, MessageError


class CannotFill(Exception):
    """The bytes of `call` cannot be read; the text says why."""

    def __init__(self, call: Call, message: str) -> None:
        super().__init__(message)
        self.call = call


def fill(batch: Batch, arena: SharedArena, *, alone: bool = False) -> None:
    """Copy the rows of all calls, tensor by tensor; what pads the batch repeats its first row. What is large and lies
    elsewhere is left to the host; of a request that is here `alone`, so that nobody waits for this loop, only what is
    very large. Raises CannotFill."""
    least = ALONE_BYTES if alone else WORTH_BYTES
    base, view = arena.layout.input_region(batch.input_slot), arena.memory.view
    for index, offset in enumerate(arena.layout.input_offsets):
        at = start = base + offset
        batch.places.append(at)
        told = len(batch.reads) + len(batch.calls) + batch.padded - batch.rows <= MOST_READS
        for call in batch.calls:
            body = call.bodies[index]
            end = at + len(body)
            if isinstance(body, memoryview):
                view[at:end] = body
            elif told and len(body) >= least:
                batch.reads.append((body, 0, at, len(body)))
            else:
                try:
                    body.read_into(view[at:end])
                except Unreadable as e:
                    raise CannotFill(call, str(e)) from e
            at = end
        if batch.padded != batch.rows:
            first = batch.calls[0].bodies[index]
            size = len(first) // batch.calls[0].rows
            left = not isinstance(first, memoryview) and any(body is first for body, *_ in batch.reads)
            for place in range(at, at + (batch.padded - batch.rows) * size, size or 1):
                if left and not isinstance(first, memoryview):
                    batch.reads.append((first, 0, place, size))
                else:
                    view[place : place + size] = view[start : start + size]


class OutputCheck:
    """What a host may say of its outputs."""

    def __init__(self, specs: Sequence[TensorSpec], arena: SharedArena) -> None:
        self._specs = [(s.shape, 0 if s.datatype == "BYTES" else DTYPES[s.datatype].itemsize) for s in specs]
        self._arena = arena
        self.count = len(specs)

    def outputs(self, answer: Answer, slot: int) -> Outputs:
        """The outputs that a host names, if they lie within its attempt's region. Raises MessageError."""
        low = self._arena.layout.output_region(slot)
        high = low + self._arena.layout.output_bytes
        view = self._arena.memory.view
        outputs = []
        for (offset, shape), (expected, itemsize) in zip(answer.outputs, self._specs, strict=False):
            size = itemsize
            if len(shape) != len(expected):
                raise MessageError(f"an output of shape {list(shape)} where {list(expected)} was expected")
            for have, want in zip(shape, expected, strict=True):
                if have < 0 or (have != want and want != -1):
                    raise MessageError(f"an output of shape {list(shape)} where {list(expected)} was expected")
                size *= have
            if offset < low or offset + size > high:
                raise MessageError("an output lies outside its region")
            outputs.append((shape, view[offset : offset + size] if itemsize else _texts(view[offset:high], shape)))
        return outputs


def _texts(view: memoryview, shape: tuple[int, ...]) -> memoryview:
    """The part of `view` that holds a BYTES tensor of `shape`: each element after its length in four bytes. Raises
    MessageError."""
    count, at = 1, 0
    for dim in shape:
        count *= dim
    if 4 * count > len(view):
        raise MessageError("a BYTES output has more elements than its region can hold")
    for _ in range(count):
        at += 4 + int.from_bytes(view[at : at + 4], "little")
        if at > len(view):
            raise MessageError("a BYTES output ends outside its region")
    return view[:at]


def parts(batch: Batch, outputs: Outputs) -> Iterator[tuple[Call, Outputs]]:
    """Each call with its rows of the outputs, which are valid until the next one is asked for."""
    widths = [len(view) // batch.padded for _, view in outputs]
    row = 0
    for call in batch.calls:
        end = row + call.rows
        part = [
            ((call.rows, *shape[1:]), view[row * width : end * width])
            for (shape, view), width in zip(outputs, widths, strict=True)
        ]
        yield call, part
        for _, view in part:
            view.release()
        row = end
