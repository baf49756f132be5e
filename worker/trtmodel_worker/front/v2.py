"""The Open Inference Protocol v2 over REST: request bodies in, answer bodies out. JSON, and binary tensors.

    Inference-Header-Content-Length: 151
    {"inputs":[{"name":"x","datatype":"FP32","shape":[1,4],"parameters":{"binary_data_size":16}}]}<16 bytes>

Choices where the protocol leaves one: numbers are never converted between kinds (1.0 is no INT64, 1 no BOOL); FP16 has
no JSON form, so such outputs are always binary; a value that JSON does not have (NaN, infinity) is an error, never a
missing element; `parameters.timeout` is in microseconds and can only shorten the model's limit; parameters that are not
known are ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from trtmodel_contract.manifest import TensorSpec

from trtmodel_worker.engines.base import DTYPES
from trtmodel_worker.front.calls import Failed, Outputs
from trtmodel_worker.front.models import Admission, InputRule, Invalid, Shape, binary_only, short
from trtmodel_worker.front.request import JSON_HEAD

HEADER_LENGTH = b"inference-header-content-length"
_CACHED_PLANS = 64
_CACHED_BYTES = 2048
_BINARY_HEAD = b"content-type: application/octet-stream\r\ninference-header-content-length: %d\r\n"


class Plan:
    """What a request's JSON part says. `tail` has, for each input that comes as binary data, its index and size in
    the order of the request; the others are in `given`."""

    __slots__ = ("given", "id", "outputs", "shapes", "tail", "tail_bytes", "timeout")

    def __init__(self) -> None:
        self.id: str | None = None
        self.timeout: float | None = None
        self.shapes: list[Shape] = []
        self.given: dict[int, memoryview] = {}
        self.tail: list[tuple[int, int]] = []
        self.tail_bytes = 0
        self.outputs: list[tuple[int, bool]] = []

    def bodies(self, tail: memoryview) -> list[memoryview]:
        """Bytes of each input, in the model's order. Raises Invalid."""
        if len(tail) != self.tail_bytes:
            raise Invalid(
                f"{len(tail)} bytes of binary data follow the JSON part, its binary_data_size add up to "
                f"{self.tail_bytes}"
            )
        at, found = 0, dict(self.given)
        for index, size in self.tail:
            found[index] = tail[at : at + size]
            at += size
        return [found[index] for index in range(len(self.shapes))]


class Codec:
    """Requests and answers of one loaded engine."""

    def __init__(self, model: str, revision: str, admission: Admission) -> None:
        self._admission = admission
        self._plans: dict[bytes, Plan] = {}
        self._prefix = f'{{"model_name":{json.dumps(model)},"model_version":{json.dumps(revision)},'
        self._outputs = [_OutputForm(spec) for spec in admission.outputs]

    def parse(self, headers: Mapping[bytes, bytes], body: bytes) -> tuple[Plan, list[memoryview]]:
        """Raises Invalid, with `request_id` where one could be read."""
        head, tail = _split(headers, body)
        plan = self._plans.get(head)
        if plan is None:
            plan = self._plan(head)
            if not plan.given and len(head) <= _CACHED_BYTES:  # clients send the same few headers again and again
                if len(self._plans) >= _CACHED_PLANS:
                    self._plans.clear()
                self._plans[head] = plan
        try:
            return plan, plan.bodies(tail)
        except Invalid as e:
            e.request_id = plan.id
            raise

    def answer(self, plan: Plan, outputs: Outputs) -> tuple[bytes, bytes]:
        """(header lines, body). Raises Failed if the answer has no JSON form."""
        parts, blobs = [], []
        for index, binary in plan.outputs:
            shape, view = outputs[index]
            form = self._outputs[index]
            parts.append(form.binary(shape, len(view)) if binary else form.json(shape, view))
            if binary:
                blobs.append(view)
        identity = f'"id":{json.dumps(plan.id)},' if plan.id is not None else ""
        text = f'{self._prefix}{identity}"outputs":[{",".join(parts)}]}}'.encode()
        if not blobs:
            return JSON_HEAD, text
        return _BINARY_HEAD % len(text), b"".join((text, *blobs))

    def _plan(self, head: bytes) -> Plan:
        plan = Plan()
        document = parse_json(head)
        request_id = document.get("id")
        if request_id is not None and not isinstance(request_id, str):
            raise Invalid("id must be a string")
        plan.id = request_id
        try:
            parameters = _object(document.get("parameters"), "parameters")
            plan.timeout = _timeout(parameters)
            self._read_inputs(document.get("inputs"), plan)
            self._read_outputs(document.get("outputs"), _flag(parameters, "binary_data_output"), plan)
        except Invalid as e:
            e.request_id = request_id
            raise
        return plan

    def _read_inputs(self, inputs: Any, plan: Plan) -> None:
        admission = self._admission
        if type(inputs) is not list or not inputs:
            raise Invalid(f"inputs must be an array of tensors: the model takes {_names(admission.by_name)}")
        shapes: dict[int, Shape] = {}
        for item in inputs:
            tensor = _object(item, "each of inputs")
            name = tensor.get("name")
            rule = admission.by_name.get(name) if isinstance(name, str) else None
            if rule is None:
                raise Invalid(f"the model has no input {short(name)}: it takes {_names(admission.by_name)}")
            if rule.index in shapes:
                raise Invalid(f"input {rule.name!r} is given twice")
            shapes[rule.index] = shape = rule.check(tensor.get("datatype"), tensor.get("shape"))
            _read_data(rule, shape, tensor, plan)
        missing = [rule.name for rule in admission.rules if rule.index not in shapes]
        if missing:
            raise Invalid(f"the request lacks {_names(missing)}")
        plan.shapes = [shapes[rule.index] for rule in admission.rules]
        admission.check_together(plan.shapes)

    def _read_outputs(self, wanted: Any, binary: bool, plan: Plan) -> None:
        index_of = self._admission.output_index
        if wanted is None:
            plan.outputs = [(i, binary or form.always_binary) for i, form in enumerate(self._outputs)]
            return
        if type(wanted) is not list:
            raise Invalid("outputs must be an array of tensors")
        for item in wanted:
            tensor = _object(item, "each of outputs")
            name = tensor.get("name")
            index = index_of.get(name) if isinstance(name, str) else None
            if index is None:
                raise Invalid(f"the model has no output {short(name)}: it has {_names(index_of)}")
            if any(index == i for i, _ in plan.outputs):
                raise Invalid(f"output {name!r} is asked for twice")
            parameters = _object(tensor.get("parameters"), f"parameters of output {name!r}")
            if "classification" in parameters:
                raise Invalid("the classification extension is not supported: ask for the output itself")
            flag = _flag(parameters, "binary_data", binary)
            plan.outputs.append((index, flag or self._outputs[index].always_binary))
        if not plan.outputs:
            raise Invalid(f"outputs is empty: leave it out for all of {_names(index_of)}")


class _OutputForm:
    def __init__(self, spec: TensorSpec) -> None:
        self.always_binary = binary_only(spec.datatype)
        self._name = spec.name
        self._dtype = DTYPES[spec.datatype]
        self._template = (0, "")
        self._prefix = f'{{"name":{json.dumps(spec.name)},"datatype":"{spec.datatype}","shape":['

    def binary(self, shape: Shape, size: int) -> str:
        return f'{self._prefix}{",".join(map(str, shape))}],"parameters":{{"binary_data_size":{size}}}}}'

    def json(self, shape: Shape, view: memoryview) -> str:
        values = np.frombuffer(view, self._dtype)
        if self._dtype.kind == "f" and not np.isfinite(values).all():
            raise Failed(
                500,
                f"output {self._name!r} holds non-finite values (NaN or infinity), which JSON cannot carry: "
                "ask for it as binary data (outputs[].parameters.binary_data)",
            )
        return f'{self._prefix}{",".join(map(str, shape))}],"data":{self._numbers(values)}}}'

    def _numbers(self, values: np.ndarray[Any, Any]) -> str:
        if self._dtype != np.float32:
            return _ENCODER.encode(values.tolist())
        # Nine digits give every FP32 back exactly, in half the characters and a third of the time of its FP64 form.
        if self._template[0] != values.size:
            self._template = (values.size, f"[{','.join(['%.9g'] * values.size)}]")
        return self._template[1] % tuple(values.tolist())


_ENCODER = json.JSONEncoder(separators=(",", ":"), check_circular=False, allow_nan=False)


def error_with_id(message: str, request_id: str | None) -> bytes:
    error = {"error": message} if request_id is None else {"error": message, "id": request_id}
    return json.dumps(error).encode()


def parse_json(data: bytes) -> dict[str, Any]:
    """A JSON object, strictly: UTF-8, no NaN, no key twice. Raises Invalid."""
    if not data:
        raise Invalid("the body is empty: send an inference request, a JSON object with inputs")
    try:
        document = _DECODER.decode(data.decode("utf-8"))
    except UnicodeDecodeError as e:
        raise Invalid(f"the JSON part is not UTF-8 (byte {e.start}): is it binary data without the header "
                      "Inference-Header-Content-Length?") from e  # fmt: skip
    except RecursionError as e:
        raise Invalid("the JSON part is nested too deeply") from e
    except ValueError as e:
        raise Invalid(f"the JSON part is not JSON: {str(e)[:200]}. If binary data follows it, the header "
                      "Inference-Header-Content-Length must say how long the JSON part is") from e  # fmt: skip
    if type(document) is not dict:
        raise Invalid(f"the body must be a JSON object with inputs, not {short(document)}")
    return document


def _split(headers: Mapping[bytes, bytes], body: bytes) -> tuple[bytes, memoryview]:
    """JSON part and what follows it."""
    text = headers.get(HEADER_LENGTH)
    if text is None:
        return body, _NOTHING
    length = int(text) if text.isdigit() and len(text) < 20 else -1
    if not 0 < length <= len(body):
        raise Invalid(f"Inference-Header-Content-Length is {short(text.decode(errors='replace'))}: it must be the "
                      f"length of the JSON part, between 1 and the body's {len(body)} bytes")  # fmt: skip
    return body[:length], memoryview(body)[length:]


def _read_data(rule: InputRule, shape: Shape, tensor: Mapping[str, Any], plan: Plan) -> None:
    parameters = _object(tensor.get("parameters"), f"parameters of input {rule.name!r}")
    if "shared_memory_region" in parameters:
        raise Invalid("the shared memory extension is not supported: send the data")
    size = parameters.get("binary_data_size")
    if size is None:
        if "data" not in tensor:
            raise Invalid(f"input {rule.name!r} has neither data nor parameters.binary_data_size")
        plan.given[rule.index] = rule.from_json(shape, tensor["data"])
        return
    if "data" in tensor:
        raise Invalid(f"input {rule.name!r} has both data and parameters.binary_data_size")
    needed = rule.itemsize * math.prod(shape)
    if type(size) is not int or size != needed:
        raise Invalid(f"input {rule.name!r} of shape {list(shape)} and datatype {rule.datatype} is {needed} bytes, "
                      f"binary_data_size says {short(size)}")  # fmt: skip
    plan.tail.append((rule.index, size))
    plan.tail_bytes += size


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


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has the same key twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _names(names: Any) -> str:
    return ", ".join(repr(name) for name in names)


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)
_NOTHING = memoryview(b"")
