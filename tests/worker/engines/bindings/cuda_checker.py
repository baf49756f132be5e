"""Every name of the CUDA runtime in a package, held against cuda-python: ``python cuda_checker.py FOLDER``. Prints a
JSON document."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

_NAME = re.compile(r"cuda[A-Z]\w+")


def problems_of(path: Path, runtime: Any) -> tuple[list[str], set[str]]:
    problems, names = [], set()
    members = {n for e in vars(runtime).values() if hasattr(e, "__members__") for n in e.__members__}

    def check(node: ast.AST, name: str, arguments: int | None) -> None:
        names.add(name)
        if not hasattr(runtime, name) and name not in members:
            problems.append(f"{path.name}:{getattr(node, 'lineno', 0)}: the CUDA runtime has no {name}")
        elif arguments is not None:
            wanted = len(inspect.signature(getattr(runtime, name)).parameters)
            if wanted != arguments:
                text = f"{name} takes {wanted} arguments and is given {arguments}"
                problems.append(f"{path.name}:{getattr(node, 'lineno', 0)}: {text}")

    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Call(func=ast.Attribute(attr="call"), args=[ast.Constant(value=str() as name), *rest]):
                if _NAME.fullmatch(name) and not any(isinstance(a, ast.Starred) for a in rest):
                    check(node, name, len(rest))
            case ast.Call(func=ast.Attribute(attr=name), args=rest) if _NAME.fullmatch(name):
                check(node, name, len(rest))
            case ast.Constant(value=str() as name) | ast.Attribute(attr=name) if _NAME.fullmatch(name):
                check(node, name, None)
    return problems, names


def main(folder: Path) -> None:
    runtime = importlib.import_module("cuda.bindings.runtime")
    problems, names = [], set()
    for path in sorted(folder.glob("*.py")):
        found, used = problems_of(path, runtime)
        problems += found
        names |= used
    json.dump({"problems": list(dict.fromkeys(problems)), "names": sorted(names)}, sys.stdout)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
