"""The Open Inference Protocol v2 over REST: request bodies in, answer bodies out. JSON, and binary tensors.

    Inference-Header-Content-Length: 151
    {"inputs":[{"name":"x","datatype":"FP32","shape":[1,4],"parameters":{"binary_data_size":16}}]}<16 bytes>

Choices where the protocol leaves one: numbers are never converted between kinds (1.0 is no INT64, 1 no BOOL); FP16 has
no JSON form, so such outputs are always binary; a value that JSON does not have (NaN, infinity, bytes that are no text)
is an error, never a missing element; `parameters.timeout` is in microseconds and can only shorten the model's limit;
parameters that are not known are ignored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson
from trtmodel_contract.manifest import TensorSpec

from trtmodel_worker.engines.base import DTYPES
from trtmodel_worker.front.calls import Body, Failed, Outputs, Shape
from trtmodel_worker.front.jsoncodec import (
    BadJson,
    may_hold_booleans,
    numbers_to_json,
    parse_object,
    short,
    strings_to_json,
)
from trtmodel_worker.front.models import BYTES, Admission, InputRule, Invalid, binary_only
from trtmodel_worker.front.request import JSON_HEAD
from trtmodel_worker.front.sharedmemory import MemoryRef, Regions, memory_ref

HEADER_LENGTH = b"inference-header-content-length"
_CACHED_PLANS = 64
_CACHED_BYTES = 2048
_BINARY_HEAD = b"content-type: application/octet-stream\r\ninference-header-content-length: %d\r\n"


class Plan:
    """What a request's JSON part says, but for its id. `places` has, for each input in the model's order, where its
    bytes are: in the binary data (from, to), in a shared memory region, or here. `given`: some are here, so it is no
    plan for another request. `outputs`: index, whether as binary data, and the region that it goes to."""

    __slots__ = (
        "answer", "checked", "fixed", "given", "outputs", "places", "shapes", "simple", "tail_bytes", "timeout",
    )  # fmt: skip

    def __init__(self) -> None:
        self.timeout: float | None = None
        self.shapes: list[Shape] = []
        self.places: list[tuple[int, int] | MemoryRef | memoryview] = []
        self.tail_bytes = 0
        self.given = False
        self.simple: list[tuple[int, int]] | None = None  # `places`, if all of them are in the binary data
        self.checked: list[InputRule] = []  # inputs whose content is looked at, too
        self.outputs: list[tuple[int, bool, MemoryRef | None]] = []
        self.fixed = False  # the answer's JSON part follows from the shapes
        self.answer: tuple[list[Shape], bytes] | None = None  # what its JSON part says of outputs of these shapes

    def bodies(self, tail: memoryview, regions: Regions) -> list[Body]:
        """Bytes of each input, in the model's order. Those in shared memory stay there, unless their content is looked
        at: what was looked at is what runs. Raises Invalid."""
        if len(tail) != self.tail_bytes:
            raise Invalid(
                f"{len(tail)} bytes of binary data follow the JSON part, its binary_data_size add up to "
                f"{self.tail_bytes}"
            )
        if self.simple is not None:
            return [tail[start:end] for start, end in self.simple]
        found: list[Body] = []
        for place in self.places:
            if isinstance(place, tuple):
                found.append(tail[place[0] : place[1]])
            else:
                found.append(place if isinstance(place, memoryview) else regions.at(place))
        for rule in self.checked:
            place = self.places[rule.index]
            view = regions.read(place) if isinstance(place, MemoryRef) else found[rule.index]
            assert isinstance(view, memoryview)
            rule.check_content(self.shapes[rule.index], view)
            found[rule.index] = view
        return found

    def memory_bytes(self) -> int:
        """Of the inputs that lie in shared memory."""
        return sum(place.size for place in self.places if isinstance(place, MemoryRef))


class Codec:
    """Requests and answers of one loaded engine."""

    def __init__(self, model: str, revision: str, admission: Admission) -> None:
        self._admission = admission
        self._plans: dict[bytes | tuple[bytes, bytes], Plan] = {}
        self._prefix = b'{"model_name":%b,"model_version":%b,' % (orjson.dumps(model), orjson.dumps(revision))
        self._outputs = [_OutputForm(spec) for spec in admission.outputs]

    def plan(self, headers: Mapping[bytes, bytes], body: bytes | memoryview) -> tuple[Plan, str | None, memoryview]:
        """What is asked, the request's id, and the binary data that came with it. Raises Invalid, with `request_id`
        where one could be read."""
        head, tail = _split(headers, body)
        if len(head) > _CACHED_BYTES:
            return *self._plan(head), tail
        plan = self._plans.get(head)  # clients send the same few headers again and again
        if plan is not None:
            return plan, None, tail
        key, written_id = _without_id(head)
        plan = self._plans.get(key)
        if plan is not None:
            return plan, written_id, tail
        plan, request_id = self._plan(head)
        if not plan.given and request_id == written_id:
            if len(self._plans) >= _CACHED_PLANS:
                self._plans.clear()
            self._plans[key] = plan
        return plan, request_id, tail

    def answer(self, plan: Plan, request_id: str | None, outputs: Outputs, regions: Regions) -> tuple[bytes, bytes]:
        """(header lines, body), after what belongs into shared memory was written there. Raises Failed if an output
        has no JSON form, or does not fit into its region."""
        cached = plan.answer
        if cached is not None and cached[0] == [shape for shape, _ in outputs]:
            text = self._text(request_id, cached[1])
            return _BINARY_HEAD % len(text), b"".join([text, *[outputs[index][1] for index, _, _ in plan.outputs]])
        parts, blobs = [], []
        for index, binary, region in plan.outputs:
            shape, view = outputs[index]
            form = self._outputs[index]
            if region is not None:
                _write(regions, region, form.name, view)
                parts.append(form.elsewhere(shape, region, len(view)))
            elif binary:
                parts.append(form.binary(shape, len(view)))
                blobs.append(view)
            else:
                parts.append(form.json(shape, view))
        said = b",".join(parts)
        text = self._text(request_id, said)
        if not blobs:
            return JSON_HEAD, text
        if plan.fixed:
            plan.answer = ([shape for shape, _ in outputs], said)
        return _BINARY_HEAD % len(text), b"".join((text, *blobs))

    def _text(self, request_id: str | None, outputs: bytes) -> bytes:
        if request_id is None:
            return b'%b"outputs":[%b]}' % (self._prefix, outputs)
        return b'%b"id":%b,"outputs":[%b]}' % (self._prefix, orjson.dumps(request_id), outputs)

    def _plan(self, head: bytes) -> tuple[Plan, str | None]:
        plan = Plan()
        document = parse_request(head)
        request_id = document.get("id")
        if request_id is not None and not isinstance(request_id, str):
            raise Invalid("id must be a string")
        try:
            parameters = _object(document.get("parameters"), "parameters")
            plan.timeout = _timeout(parameters)
            self._read_inputs(document.get("inputs"), plan, head)
            self._read_outputs(document.get("outputs"), _flag(parameters, "binary_data_output"), plan)
        except Invalid as e:
            e.request_id = request_id
            raise
        return plan, request_id

    def _read_inputs(self, inputs: Any, plan: Plan, head: bytes) -> None:
        admission = self._admission
        if type(inputs) is not list or not inputs:
            raise Invalid(f"inputs must be an array of tensors: the model takes {_names(admission.by_name)}")
        shapes: dict[int, Shape] = {}
        places: dict[int, tuple[int, int] | MemoryRef | memoryview] = {}
        for item in inputs:
            tensor = _object(item, "each of inputs")
            name = tensor.get("name")
            rule = admission.by_name.get(name) if isinstance(name, str) else None
            if rule is None:
                raise Invalid(f"the model has no input {short(name)}: it takes {_names(admission.by_name)}")
            if rule.index in shapes:
                raise Invalid(f"input {rule.name!r} is given twice")
            shapes[rule.index] = shape = rule.check(tensor.get("datatype"), tensor.get("shape"))
            place = _place(rule, shape, tensor, plan.tail_bytes)
            if place is None:
                plan.given = True
                places[rule.index] = rule.from_json(shape, tensor["data"], may_hold_booleans(head))
            else:
                places[rule.index] = place
            if isinstance(place, tuple):
                plan.tail_bytes = place[1]
            if rule.datatype == BYTES:
                plan.checked.append(rule)
        missing = [rule.name for rule in admission.rules if rule.index not in shapes]
        if missing:
            raise Invalid(f"the request lacks {_names(missing)}")
        plan.shapes = [shapes[rule.index] for rule in admission.rules]
        plan.places = [places[rule.index] for rule in admission.rules]
        simple = [place for place in plan.places if isinstance(place, tuple)]
        if len(simple) == len(plan.places) and not plan.checked:
            plan.simple = simple
        admission.check_together(plan.shapes)

    def _read_outputs(self, wanted: Any, binary: bool, plan: Plan) -> None:
        index_of = self._admission.output_index
        if wanted is None:
            plan.outputs = [(i, binary or form.always_binary, None) for i, form in enumerate(self._outputs)]
        elif type(wanted) is not list:
            raise Invalid("outputs must be an array of tensors")
        else:
            for item in wanted:
                tensor = _object(item, "each of outputs")
                name = tensor.get("name")
                index = index_of.get(name) if isinstance(name, str) else None
                if index is None:
                    raise Invalid(f"the model has no output {short(name)}: it has {_names(index_of)}")
                if any(index == i for i, _, _ in plan.outputs):
                    raise Invalid(f"output {name!r} is asked for twice")
                parameters = _object(tensor.get("parameters"), f"parameters of output {name!r}")
                if parameters.get("classification"):
                    raise Invalid("the classification extension is not supported: ask for the output itself")
                flag = _flag(parameters, "binary_data", binary) or self._outputs[index].always_binary
                plan.outputs.append((index, flag, _memory(parameters, f"output {name!r}")))
            if not plan.outputs:
                raise Invalid(f"outputs is empty: leave it out for all of {_names(index_of)}")
        plan.fixed = all(flag and region is None and self._outputs[index].fixed for index, flag, region in plan.outputs)


class _OutputForm:
    def __init__(self, spec: TensorSpec) -> None:
        self.name = spec.name
        self.always_binary = binary_only(spec.datatype)
        self.fixed = spec.datatype != BYTES
        self._dtype = DTYPES[spec.datatype] if self.fixed else None
        self._prefix = b'{"name":%b,"datatype":"%b","shape":' % (orjson.dumps(spec.name), spec.datatype.encode())

    def binary(self, shape: Shape, size: int) -> bytes:
        return b'%b%b,"parameters":{"binary_data_size":%d}}' % (self._prefix, orjson.dumps(shape), size)

    def elsewhere(self, shape: Shape, region: MemoryRef, size: int) -> bytes:
        # Triton's C++ client, once there are parameters, demands to be told how many bytes of the body are its: none.
        parameters = {"shared_memory_region": region.name, "shared_memory_byte_size": size, "binary_data_size": 0}
        if region.offset:
            parameters["shared_memory_offset"] = region.offset
        return b'%b%b,"parameters":%b}' % (self._prefix, orjson.dumps(shape), orjson.dumps(parameters))

    def json(self, shape: Shape, view: memoryview) -> bytes:
        try:
            return b'%b%b,"data":%b}' % (self._prefix, orjson.dumps(shape), self._data(shape, view))
        except BadJson as e:
            way = "ask for it as binary data (outputs[].parameters.binary_data)"
            raise Failed(500, f"output {self.name!r} {e}: {way}") from e

    def _data(self, shape: Shape, view: memoryview) -> bytes:
        if self._dtype is None:
            return strings_to_json(view, math.prod(shape))
        values = np.frombuffer(view, self._dtype)
        if self._dtype.kind == "f" and not np.isfinite(values).all():
            raise BadJson("holds non-finite values (NaN or infinity), which JSON cannot carry")
        return numbers_to_json(values)


def parse_request(text: bytes) -> dict[str, Any]:
    """The JSON part of an inference request. Raises Invalid."""
    if not text:
        raise Invalid("the body is empty: send an inference request, a JSON object with inputs")
    try:
        return parse_object(text)
    except BadJson as e:
        raise Invalid(f"the JSON part of the request {e}. If binary data follows it, the header "
                      "Inference-Header-Content-Length must say how long the JSON part is") from e  # fmt: skip


def _split(headers: Mapping[bytes, bytes], body: bytes | memoryview) -> tuple[bytes, memoryview]:
    """JSON part and what follows it."""
    text = headers.get(HEADER_LENGTH)
    if text is None:
        return bytes(body), _NOTHING
    length = int(text) if text.isdigit() and len(text) < 20 else -1
    if not 0 < length <= len(body):
        raise Invalid(f"Inference-Header-Content-Length is {short(text.decode(errors='replace'))}: it must be the "
                      f"length of the JSON part, between 1 and the body's {len(body)} bytes")  # fmt: skip
    return bytes(body[:length]), memoryview(body)[length:]


def _without_id(head: bytes) -> tuple[bytes | tuple[bytes, bytes], str | None]:
    """What is before and behind the text of the id, and the id, if the text has one key of that name and no escapes:
    the same around another id means the same. (head, None) otherwise."""
    found = _ID.findall(head)
    if len(found) != 1 or b"\\" in head:
        return head, None
    before, _, behind = head.partition(found[0])
    mark = found[0].index(b":")
    text = found[0][mark + 1 :].strip()
    try:
        return (before, behind), text[1:-1].decode()
    except UnicodeDecodeError:
        return head, None


def _place(rule: InputRule, shape: Shape, tensor: Mapping[str, Any], at: int) -> tuple[int, int] | MemoryRef | None:
    """Where an input's bytes are; `at`: where the next binary data begins. None: they are its data. Raises Invalid."""
    what = f"input {rule.name!r}"
    parameters = _object(tensor.get("parameters"), f"parameters of {what}")
    size, region = parameters.get("binary_data_size"), _memory(parameters, what)
    if (size is not None) + (region is not None) + ("data" in tensor) != 1:
        raise Invalid(f"{what} must have one of data, parameters.binary_data_size and parameters.shared_memory_region")
    if region is not None:
        rule.check_size(shape, region.size)
        return region
    if size is None:
        return None
    if type(size) is not int or size < 0:
        raise Invalid(f"{what}: binary_data_size must be a number of bytes, not {short(size)}")
    rule.check_size(shape, size)
    return at, at + size


def _memory(parameters: Mapping[str, Any], what: str) -> MemoryRef | None:
    try:
        return memory_ref(parameters)
    except Invalid as e:
        raise Invalid(f"{what}: {e}") from e


def _write(regions: Regions, region: MemoryRef, output: str, view: memoryview) -> None:
    try:
        regions.write(region, view)
    except Invalid as e:
        raise Failed(400, f"output {output!r}: {e}") from e


def _timeout(parameters: Mapping[str, Any]) -> float | None:
    value = parameters.get("timeout")
    if value is None:
        return None
    if type(value) is not int or value < 1:
        raise Invalid(f"parameters.timeout must be a positive whole number of microseconds, not {short(value)}")
    return value / 1e6


def _object(value: Any, what: str) -> Mapping[str, Any]:
    if value is None and not what.startswith("each"):
        return {}
    if type(value) is not dict:
        raise Invalid(f"{what} must be an object, not {short(value)}")
    return value


def _flag(parameters: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = parameters.get(name, default)
    if type(value) is not bool:
        raise Invalid(f"parameters.{name} must be true or false, not {short(value)}")
    return value


def _names(names: Any) -> str:
    return ", ".join(repr(name) for name in names)


_ID = re.compile(rb'"id"\s*:\s*"[^"\x00-\x1f]*"')
_NOTHING = memoryview(b"")
