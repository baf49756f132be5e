"""Documents as frozen dataclasses, with one canonical JSON form.

Field names are camelCase in JSON. Canonical means: keys sorted, no spaces, UTF-8 as it is, no NaN, whole numbers
without a fraction. The bytes are the same on every Python version and for every insertion order, and equal documents
have equal bytes, so that they can be hashed and signed.

A document carries `schema` (``trtmodel.io/<kind>/v<n>``). Within one version a reader ignores fields that it does
not know (an older worker under a newer operator) and refuses one that is missing. A field that a version of the
product adds to a document is marked with `LATER`, so that documents without it keep their bytes.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import json
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

LATER: Mapping[str, bool] = types.MappingProxyType({"later": True})
"""Metadata of a field with a default that a document did not always have: it is written only where it is not at its
default. What was hashed or signed before the field existed stays valid, and so it does under a reader without it."""

_EXACT = 2.0**53  # below it every whole number is a float and every float a whole number
_WHOLE = re.compile(r"0|-?[1-9][0-9]{0,18}")
_SHOWN = 80  # characters of foreign data that an error repeats


class DocumentError(ValueError):
    """The bytes are not the document that was expected. The text names the field and what was found there."""


def canonical(value: Any) -> bytes:
    """The one JSON form of plain data. Raises ValueError for NaN and infinities, which JSON does not have, and for
    text that is no Unicode (half of a surrogate pair, as in a file name that is no UTF-8)."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def sha256_hex(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def encode(value: Any, *, omit_defaults: bool = False) -> Any:
    """Plain JSON data of a dataclass. Fields at their default are left out where they are marked `LATER`, and with
    `omit_defaults` everywhere, so that a field added later with a default changes no hash that was computed before it
    existed."""
    kind: type = type(value)
    if kind is str or kind is int or value is None:
        return value
    fields = _written(kind)
    if fields is not None:
        return {
            key: encode(getattr(value, f.name), omit_defaults=omit_defaults)
            for key, f in fields
            if not ((omit_defaults or "later" in f.metadata) and _is_default(f, getattr(value, f.name)))
        }
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(k): encode(v, omit_defaults=omit_defaults) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(v, omit_defaults=omit_defaults) for v in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
        return int(
            value
        )  # 1 and 1.0 are equal: a document that was written as one and read as the other keeps its hash
    return value


def decode(cls: type[T], data: Any, where: str = "") -> T:
    """The dataclass `cls` from plain JSON data. Raises DocumentError with the path of what does not fit.

    Nearly every document fits, and an operator reads ten in each pass: so it is first read without keeping the path,
    by functions that are made once for each type. What does not fit is read again, for its error."""
    try:
        return typing.cast("T", _reader(typing.cast("Any", cls))(data))
    except (_Unfit, ValueError):
        return typing.cast("T", _decode(cls, data, where or cls.__name__))


def dumps(document: Any) -> bytes:
    """Canonical bytes of a document whose class has SCHEMA."""
    return canonical({"schema": document.SCHEMA, **encode(document)})


def loads(cls: type[T], data: bytes | str) -> T:
    """A document of class `cls` (which has SCHEMA) from bytes. Raises DocumentError."""
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise DocumentError(f"{cls.__name__} is not JSON: {e}") from e
    expected = cls.SCHEMA  # type: ignore[attr-defined]
    found = raw.get("schema") if isinstance(raw, dict) else None
    if found != expected:
        raise DocumentError(
            f"expected a document of schema {expected}, found {_shown(found)}: its writer has another version"
        )
    return decode(cls, raw)


@functools.cache
def _written(cls: type) -> tuple[tuple[str, dataclasses.Field[Any]], ...] | None:
    """The fields of a dataclass with their names in JSON; None for any other class."""
    if not dataclasses.is_dataclass(cls):
        return None
    return tuple((_camel(f.name), f) for f in dataclasses.fields(cls))


def _camel(name: str) -> str:
    head, *tail = name.split("_")
    return head + "".join(part.title() for part in tail)


def _is_default(f: dataclasses.Field[Any], value: Any) -> bool:
    if f.default is not dataclasses.MISSING:
        return bool(value == f.default)
    if f.default_factory is not dataclasses.MISSING:
        return bool(value == f.default_factory())
    return False


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


class _Unfit(Exception):
    """The data is not what its type wants; `_decode` says why."""


@functools.cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """What `_decode` does for this type, or raises _Unfit, or ValueError."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        options = [_reader(a) for a in args if a is not type(None)]
        if len(options) == 1 and type(None) in args:
            return lambda data: None if data is None else options[0](data)
    elif _written(kind) is not None:
        return _dataclass_reader(kind)
    elif origin is tuple:
        item = _reader(args[0])
        return lambda data: tuple([item(i) for i in _fit(list, data)])
    elif origin in (Mapping, dict):
        key, value = _reader(args[0]), _reader(args[1])
        if args[0] is str:
            return lambda data: {key(k): value(v) for k, v in _fit(dict, data).items()}
    elif isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind
    elif kind is str:
        return _read_str
    elif kind is float:
        return _read_float
    elif kind is bool or kind is int:
        return functools.partial(_fit, kind)
    return lambda data: _decode(kind, data, "")


def _fit(kind: type, data: Any) -> Any:
    if type(data) is not kind:
        raise _Unfit
    return data


def _read_str(data: Any) -> str:
    if type(data) is not str:
        raise _Unfit
    if not data.isascii():
        data.encode()  # UnicodeEncodeError is a ValueError
    return data


def _read_float(data: Any) -> float:
    if type(data) is int:
        data = _to_float(data)
    if type(data) is not float or not math.isfinite(data):
        raise _Unfit
    return data


def _dataclass_reader(cls: type) -> Callable[[Any], Any]:
    fields: list[tuple[str, str, bool, Callable[[Any], Any]]] = []

    def read(data: Any) -> Any:
        if type(data) is not dict:
            raise _Unfit
        if not fields:  # not before: a class may hold others of its kind
            fields.extend(
                (key, f.name, f.default is f.default_factory is dataclasses.MISSING, _reader(_hints(cls)[f.name]))
                for key, f in _written(cls) or ()
            )
        values = {}
        for key, name, required, reader in fields:
            if key in data:
                values[name] = reader(data[key])
            elif required:
                raise _Unfit
        return cls(**values)

    return read


def _decode(kind: Any, data: Any, where: str) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return data
    if origin in (typing.Union, types.UnionType):
        if data is None and type(None) in args:
            return None
        return _decode_union([a for a in args if a is not type(None)], data, where)
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(typing.cast("type", kind), data, where)
    if origin is tuple:
        if not isinstance(data, list):
            raise DocumentError(f"{where}: expected a list, found {_kind(data)}")
        return tuple(_decode(args[0], item, f"{where}[{i}]") for i, item in enumerate(data))
    if origin in (Mapping, dict):
        if not isinstance(data, dict):
            raise DocumentError(f"{where}: expected an object, found {_kind(data)}")
        return {_decode_key(args[0], k, where): _decode(args[1], v, f"{where}.{k}") for k, v in data.items()}
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        try:
            return kind(data)
        except ValueError as e:
            raise DocumentError(f"{where}: {_shown(data)} is none of {', '.join(str(m.value) for m in kind)}") from e
    return _decode_scalar(kind, data, where)


def _decode_key(kind: Any, key: str, where: str) -> Any:
    if kind is not int:
        _require_unicode(key, where)
        return key
    if not _WHOLE.fullmatch(key):  # int() also takes " 3", "+3", "1_0" and digits of other scripts
        raise DocumentError(f"{where}: the key {_shown(key)} is not a whole number")
    return int(key)


def _decode_union(kinds: list[Any], data: Any, where: str) -> Any:
    errors = []
    for kind in kinds:
        try:
            return _decode(kind, data, where)
        except DocumentError as e:
            errors.append(str(e))
    raise DocumentError("; ".join(errors))


def _decode_dataclass(cls: type, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise DocumentError(f"{where}: expected an object, found {_kind(data)}")
    values = {}
    for key, f in _written(cls) or ():
        if key in data:
            values[f.name] = _decode(_hints(cls)[f.name], data[key], f"{where}.{key}")
        elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise DocumentError(f"{where}.{key} is missing")
    try:
        return cls(**values)
    except ValueError as e:
        raise DocumentError(f"{where}: {e}") from e


def _decode_scalar(kind: Any, data: Any, where: str) -> Any:
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        data = _to_float(data)
    if not isinstance(data, kind) or (isinstance(data, bool) and kind is not bool):
        raise DocumentError(f"{where}: expected {kind.__name__}, found {_kind(data)}")
    if kind is str:
        _require_unicode(data, where)
    if kind is float and not math.isfinite(data):
        raise DocumentError(f"{where}: {data} is not a finite number")
    return data


def _require_unicode(text: str, where: str) -> None:
    """JSON's escapes can write half of a surrogate pair: such a document could be read, but never be written again."""
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise DocumentError(f"{where}: {_shown(text)} is no Unicode text") from e


def _to_float(number: int) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf


def _shown(data: Any) -> str:
    text = repr(data)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _kind(data: Any) -> str:
    return "null" if data is None else type(data).__name__
