"""The package that is checked: its modules, classes and functions, and what annotations in it mean."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from values import FOREIGN, PLAIN, Either, Fixed, Foreign, Instance, Known, Many, OurFunction, OurModule, Ours

PACKAGE = "trtmodel_worker.engines.tensorrt"
MODULE_ALIAS = "Trt"
_LISTS = {"list", "Sequence", "Iterable", "Iterator", "set", "frozenset", "deque", "WeakSet"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Module:
    name: str
    path: Path
    tree: ast.Module
    names: dict[str, Any] = field(default_factory=dict)


@dataclass
class Class:
    module: Module
    node: ast.ClassDef
    attributes: dict[str, Any] = field(default_factory=dict)

    def method(self, name: str) -> Function | None:
        found = (n for n in self.node.body if isinstance(n, Function) and n.name == name)
        return next(found, None)


class Package:
    """Files of `folder`, with `trt` and its `aliases` (annotations that stand for classes of TensorRT)."""

    def __init__(self, folder: Path, trt: Any, capabilities: Any) -> None:
        self.trt, self._capabilities = trt, capabilities
        self.modules: dict[str, Module] = {}
        self.classes: dict[str, Class] = {}
        self.functions: dict[str, tuple[Module, Function]] = {}
        for path in sorted(folder.glob("*.py")):
            tree = ast.parse(path.read_text(), str(path))
            self.modules[path.stem] = Module(path.stem, path, tree)
        self.aliases = self._aliases()
        for module in self.modules.values():
            for node in module.tree.body:
                if isinstance(node, ast.ClassDef):
                    self.classes[f"{module.name}.{node.name}"] = Class(module, node)
                elif isinstance(node, Function):
                    self.functions[f"{module.name}.{node.name}"] = (module, node)
        for module in self.modules.values():
            module.names.update(self._own(module))
            for node in ast.walk(module.tree):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
                    module.names.update(self._imported(node))
                elif isinstance(node, (ast.Import, ast.ImportFrom)):
                    names = {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
                    module.names.update(dict.fromkeys(names - {"Any"}, FOREIGN))

    def _aliases(self) -> set[str]:
        found = set()
        for node in self.modules["compat"].tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id == "Any":
                found.update(target.id for target in node.targets if isinstance(target, ast.Name))
        return found

    def _own(self, module: Module) -> dict[str, Any]:
        names: dict[str, Any] = {}
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef):
                names[node.name] = Ours(f"{module.name}.{node.name}")
            elif isinstance(node, Function):
                names[node.name] = OurFunction(f"{module.name}.{node.name}")
        return names

    def _imported(self, node: ast.ImportFrom) -> dict[str, Any]:
        names: dict[str, Any] = {}
        inner = (node.module or "")[len(PACKAGE) :].strip(".")
        for alias in node.names:
            key = alias.asname or alias.name
            if not inner:
                names[key] = OurModule(alias.name)
            else:
                names[key] = self.member(inner, alias.name)
        return names

    def member(self, module: str, name: str) -> Any:
        if f"{module}.{name}" in self.classes:
            return Ours(f"{module}.{name}")
        if f"{module}.{name}" in self.functions:
            return OurFunction(f"{module}.{name}")
        return None

    def meaning(self, module: Module, annotation: ast.expr | None) -> Any:
        """The value that a variable of that annotation holds; None if it says nothing."""
        match annotation:
            case ast.Constant(value=str() as text):
                return self.meaning(module, ast.parse(text, mode="eval").body)
            case ast.Constant(value=None):
                return PLAIN
            case ast.Name(id=name) | ast.Attribute(attr=name):
                return self._named(module, annotation, name)
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                options = tuple(o for o in (self.meaning(module, left), self.meaning(module, right)) if o != PLAIN)
                return options[0] if len(options) == 1 else Either(options) if all(options) and options else None
            case ast.Subscript(value=ast.Name(id="tuple"), slice=ast.Tuple(elts=parts)):
                if len(parts) == 2 and isinstance(parts[1], ast.Constant) and parts[1].value is Ellipsis:
                    return Many(self.meaning(module, parts[0]))
                return Fixed(tuple(self.meaning(module, part) for part in parts))
            case ast.Subscript(value=ast.Name(id=name) | ast.Attribute(attr=name), slice=inner) if name in _LISTS:
                return Many(self.meaning(module, inner))
            case ast.Subscript(value=ast.Name(id="dict" | "Mapping"), slice=ast.Tuple(elts=[_, value])):
                return Many(self.meaning(module, value))
        return None

    def _named(self, module: Module, annotation: ast.expr, name: str) -> Any:
        if name in ("int", "str", "bool", "float", "bytes"):
            return PLAIN
        if name == MODULE_ALIAS:
            return Known(self.trt)
        if name == "Capabilities":
            return Known(self._capabilities)
        if name in self.aliases:
            # A class that this version lacks has no instance, so nothing is asked of one.
            cls = getattr(self.trt, name, None)
            return Instance(cls) if isinstance(cls, type) else PLAIN
        if isinstance(annotation, ast.Attribute) and isinstance(annotation.value, ast.Name):
            owner = module.names.get(annotation.value.id)
            return self.member(owner.name, name) if isinstance(owner, OurModule) else None
        found = module.names.get(name)
        return found if isinstance(found, (Ours, Foreign)) else None
