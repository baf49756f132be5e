"""Classes that TensorRT calls: does an heir have the methods that this version looks for, with its arguments?"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from signatures import documented_callbacks, signatures

# Its base answers it; an heir need not.
_ANSWERED = {"get_algorithm", "get_interface_info"}
# Looked for in C++ under a name that the class does not have: it must stand in the binary.
_HIDDEN = {"IErrorRecorder": {"get_num_errors": 0}}


def check_heir(trt: Any, base: type, node: ast.ClassDef) -> list[str]:
    """What is wrong with it, in words."""
    found = {n.name: n for n in node.body if isinstance(n, ast.FunctionDef)}
    problems = []
    for name, count in sorted(wanted(trt, base).items()):
        if name not in found:
            problems.append(f"heir of {base.__name__} lacks {name}, which TensorRT {trt.__version__} calls")
        elif not _takes(found[name], count):
            problems.append(f"{base.__name__}.{name} is called with {count} arguments")
    if "__init__" in found and not _calls_base(found["__init__"]):
        problems.append(f"heir of {base.__name__} has to call the base's __init__ by name")
    return problems


def wanted(trt: Any, base: type) -> dict[str, int]:
    """Callbacks: name -> number of arguments without `self`."""
    callbacks = {}
    for name in dir(base):
        member = getattr(base, name)
        if name.startswith("_") or name in _ANSWERED or isinstance(member, (type, property)) or not callable(member):
            continue
        overloads = signatures(member)
        if overloads:
            callbacks[name] = len(overloads[0].parameters)
    callbacks.update(documented_callbacks(base))
    for name, count in _HIDDEN.get(base.__name__, {}).items():
        if name.encode() not in _binary(trt):
            raise AssertionError(f"TensorRT {trt.__version__} does not know {name}: what does it call instead?")
        callbacks[name] = count
    return callbacks


def _binary(trt: Any) -> bytes:
    return Path(trt.tensorrt.__file__).read_bytes()


def _takes(node: ast.FunctionDef, count: int) -> bool:
    arguments = node.args
    most = len(arguments.posonlyargs) + len(arguments.args) - 1
    least = most - len(arguments.defaults)
    return arguments.vararg is not None or least <= count <= most


def _calls_base(node: ast.FunctionDef) -> bool:
    calls = (n for n in ast.walk(node) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute))
    return any(call.func.attr == "__init__" for call in calls if isinstance(call.func, ast.Attribute))
