"""Every use of TensorRT in a package, held against the bindings of one version.

    python checker.py FOLDER OF THE PACKAGE        with the bindings on PYTHONPATH; prints a JSON document

What an expression is, is followed from annotations, from what the package's own functions return and from the
signatures that the bindings carry. Branches that the capabilities close for this version are left out.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import sys
from pathlib import Path
from typing import Any

from heirs import check_heir
from package import Class, Function, Module, Package
from signatures import property_type, signatures
from values import (
    FOREIGN,
    PLAIN,
    Container,
    Either,
    Fixed,
    Foreign,
    Instance,
    Known,
    Many,
    Method,
    OurFunction,
    OurModule,
    Ours,
    Plain,
)

# Attributes of TensorRT's classes that other things have, too: on something unknown they prove nothing.
ELSEWHERE = {
    "name", "shape", "dtype", "value", "type", "size", "nbytes", "log", "location", "keys", "copy", "reset", "parse",
    "update", "metadata", "mode", "kind", "input", "index", "values", "clear", "serialize", "itemsize", "combine",
    "numpy", "insert", "append", "extend", "pop", "remove", "count", "engine", "profiler", "logger", "stride", "op",
    "strides", "axis", "axes", "scale", "start", "shift", "min", "max", "alpha", "beta", "code", "desc", "line", "file",
    "node", "func", "flags", "precision", "deallocate", "allocate", "free", "read", "seek", "write", "get_shape", "add",
    "runtime", "error_recorder", "major", "minor", "data", "opt",
}  # fmt: skip


class Checker:
    def __init__(self, package: Package, trt: Any, capabilities: Any) -> None:
        self._package, self._trt, self._capabilities = package, trt, capabilities
        self._classes = {n: c for n in dir(trt) if isinstance(c := getattr(trt, n), type)}
        theirs = {a for c in self._classes.values() for a in dir(c) if not a.startswith("_")}
        self._theirs = theirs - ELSEWHERE - set(dir(str)) - set(dir(dict)) - set(dir(list)) - set(dir(int))
        self._module: Module = next(iter(package.modules.values()))
        self._class: Class | None = None
        self.problems: list[str] = []
        self.uses: set[str] = set()
        self._silent = False

    def run(self) -> None:
        self._silent = True
        for _ in range(3):  # attributes may come from those of another class
            self._all()
        self._silent = False
        self.uses.clear()
        self._all()

    def _all(self) -> None:
        for module in self._package.modules.values():
            self._module, self._class = module, None
            self._block(module.tree.body, dict(module.names))

    # statements

    def _block(self, body: list[ast.stmt], names: dict[str, Any]) -> bool:
        """False if what follows is never reached in this version."""
        return all(self._statement(statement, names) for statement in body)

    def _statement(self, node: ast.stmt, names: dict[str, Any]) -> bool:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._function(node, names)
            case ast.ClassDef():
                self._heir_or_class(node, names)
            case ast.If():
                return self._if(node, names)
            case ast.Assert():
                condition = self._value(node.test, names)
                return not (isinstance(condition, Known) and not condition.value)
            case ast.Return() | ast.Raise():
                self._children(node, names)
                return False
            case ast.Continue() | ast.Break():
                return False
            case ast.Assign():
                value = self._value(node.value, names)
                for target in node.targets:
                    self._bind(target, value, names)
            case ast.AnnAssign():
                value = self._value(node.value, names) if node.value is not None else None
                meaning = self._package.meaning(self._module, node.annotation)
                self._bind(node.target, meaning or value, names)
            case ast.For():
                self._bind(node.target, self._item(self._value(node.iter, names)), names)
                self._block(node.body, names)
                self._block(node.orelse, names)
            case ast.While():
                self._value(node.test, names)
                self._block(node.body, names)
            case ast.With():
                for item in node.items:
                    value = self._value(item.context_expr, names)
                    if item.optional_vars is not None:
                        self._bind(item.optional_vars, value, names)
                return self._block(node.body, names)
            case ast.Try():
                going = self._block(node.body, names)
                for handler in node.handlers:
                    inner = {**names, handler.name: self._value(handler.type, names)} if handler.name else dict(names)
                    going = self._block(handler.body, inner) or going
                self._block(node.orelse, names)
                self._block(node.finalbody, names)
                return going
            case _:
                self._children(node, names)
        return True

    def _if(self, node: ast.If, names: dict[str, Any]) -> bool:
        condition = self._value(node.test, names)
        if isinstance(condition, Known):
            return self._block(node.body if condition.value else node.orelse, names)
        first = self._block(node.body, names)
        return self._block(node.orelse, names) or first

    def _function(self, node: Function, names: dict[str, Any]) -> None:
        inner = dict(names)
        arguments = node.args
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            inner[argument.arg] = self._package.meaning(self._module, argument.annotation)
        if self._class is not None and arguments.args and arguments.args[0].arg == "self":
            inner["self"] = Ours(f"{self._class.module.name}.{self._class.node.name}")
        elif self._class is None and arguments.args and arguments.args[0].arg == "self":
            inner["self"] = PLAIN  # an heir: what it has of TensorRT's is what it defines
        self._block(node.body, inner)

    def _heir_or_class(self, node: ast.ClassDef, names: dict[str, Any]) -> None:
        outer = self._class
        bases = [self._value(base, names) for base in node.bases]
        for base in bases:
            for option in base.options if isinstance(base, Either) else (base,):
                if isinstance(option, Known) and isinstance(option.value, type) and self._is_theirs(option.value):
                    self._note(f"heir of {option.value.__name__}")
                    for text in check_heir(self._trt, option.value, node):
                        self._problem(node, text)
        self._class = self._package.classes.get(f"{self._module.name}.{node.name}")
        inner = dict(names)
        if self._class is not None and (not self._silent or not self._class.attributes):
            self._fields(self._class)
        for statement in node.body:
            self._statement(statement, inner)
        self._class = outer

    def _fields(self, cls: Class) -> None:
        for statement in cls.node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                cls.attributes[statement.target.id] = self._package.meaning(cls.module, statement.annotation)

    def _bind(self, target: ast.expr, value: Any, names: dict[str, Any]) -> None:
        match target:
            case ast.Name(id=name):
                names[name] = value
            case ast.Tuple(elts=parts):
                items = value.items if isinstance(value, Fixed) else (self._item(value),) * len(parts)
                for part, item in zip(parts, items, strict=False):
                    self._bind(part, item, names)
            case ast.Attribute(value=owner, attr=name):
                holder = self._value(owner, names)
                if isinstance(holder, Ours):
                    attributes = self._package.classes[holder.name].attributes
                    if value is not None or name not in attributes:
                        attributes[name] = value
                else:
                    self._attribute(target, holder, store=True)
            case _:
                self._children(target, names)

    # expressions

    def _value(self, node: ast.AST | None, names: dict[str, Any]) -> Any:
        match node:
            case None:
                return None
            case ast.Name(id=name):
                return names.get(name)
            case ast.Constant(value=value):
                return Known(value)
            case ast.Attribute(value=owner):
                value = self._attribute(node, self._value(owner, names), store=False)
                if isinstance(value, Method):
                    self._problem(node, f"{value.cls.__name__}.{node.attr} is a method, and is not called")
                return value
            case ast.Call():
                return self._call(node, names)
            case ast.BoolOp(op=operator, values=parts):
                return self._boolean(isinstance(operator, ast.And), parts, names)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                value = self._value(operand, names)
                return Known(not value.value) if isinstance(value, Known) else PLAIN
            case ast.Compare():
                return self._compare(node, names)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                condition = self._value(test, names)
                if isinstance(condition, Known):
                    return self._value(body if condition.value else orelse, names)
                return Either(tuple(o for o in (self._value(body, names), self._value(orelse, names)) if o is not None))
            case ast.Tuple(elts=parts):
                values = tuple(self._value(part, names) for part in parts)
                known = values and all(isinstance(v, Known) for v in values)
                return Known(tuple(v.value for v in values)) if known else Fixed(values)
            case ast.List(elts=parts) | ast.Set(elts=parts):
                values = tuple(self._value(part, names) for part in parts)
                return Many(values[0] if values else None)
            case ast.Subscript(value=owner, slice=index):
                self._value(index, names)
                value = self._value(owner, names)
                if isinstance(value, Fixed) and isinstance(index, ast.Constant) and isinstance(index.value, int):
                    return value.items[index.value]
                return self._item(value)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                return self._comprehension(node, names)
            case ast.Lambda(args=arguments, body=body):
                self._value(body, {**names, **{argument.arg: None for argument in arguments.args}})
                return None
            case ast.NamedExpr(target=target, value=inner):
                value = self._value(inner, names)
                self._bind(target, value, names)
                return value
        self._children(node, names)
        return PLAIN if isinstance(node, (ast.JoinedStr, ast.BinOp)) else None

    def _children(self, node: ast.AST, names: dict[str, Any]) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                self._statement(child, names)
            elif isinstance(child, ast.AST):
                self._value(child, names)

    def _comprehension(self, node: Any, names: dict[str, Any]) -> Any:
        inner = dict(names)
        for generator in node.generators:
            self._bind(generator.target, self._item(self._value(generator.iter, inner)), inner)
            for condition in generator.ifs:
                self._value(condition, inner)
        if isinstance(node, ast.DictComp):
            self._value(node.key, inner)
            return Many(self._value(node.value, inner))
        return Many(self._value(node.elt, inner))

    def _boolean(self, every: bool, parts: list[ast.expr], names: dict[str, Any]) -> Any:
        """What follows a part that decides is not reached, as in Python itself."""
        open_ends = False
        for part in parts:
            value = self._value(part, names)
            if not isinstance(value, Known):
                open_ends = True
            elif (bool(value.value) != every and not open_ends) or bool(value.value) != every:
                return Known(not every)
        return PLAIN if open_ends else Known(every)

    def _compare(self, node: ast.Compare, names: dict[str, Any]) -> Any:
        values = [self._value(part, names) for part in (node.left, *node.comparators)]
        if not all(isinstance(v, Known) for v in values) or any(v.value is self._trt for v in values):
            return PLAIN
        if not any(self._of_capabilities(part) for part in (node.left, *node.comparators)):
            return PLAIN
        source = ast.Expression(
            ast.Compare(ast.Constant(values[0].value), node.ops, [ast.Constant(v.value) for v in values[1:]])
        )
        compiled = compile(ast.fix_missing_locations(source), "condition", "eval")
        return Known(bool(eval(compiled)))

    def _of_capabilities(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Attribute) and node.attr in {f.name for f in dataclasses.fields(self._capabilities)}

    # what belongs to whom

    def _attribute(self, node: ast.Attribute, owner: Any, *, store: bool) -> Any:
        name = node.attr
        match owner:
            case Either(options):
                found = tuple(self._attribute(node, option, store=store) for option in options)
                return Either(tuple(f for f in found if f is not None)) if any(found) else None
            case Known(value) if value is self._capabilities:
                return Known(getattr(value, name)) if hasattr(value, name) else None
            case Known(value) if value is self._trt or (isinstance(value, type) and self._is_theirs(value)):
                what = getattr(value, "__name__", "trt") if isinstance(value, type) else "trt"
                return self._known(node, value, name, what)
            case Known(value) if self._is_theirs(type(value)):
                return self._of_instance(node, type(value), name, store=store)
            case Instance(cls):
                return self._of_instance(node, cls, name, store=store)
            case Ours(key):
                return self._of_ours(key, name)
            case OurModule(module):
                return self._package.member(module, name)
            case Foreign():
                return FOREIGN
            case Many(item):
                return Container(name, item)
            case None if name in self._theirs:
                text = f"'.{name}' is TensorRT's, but of what? Annotate what stands before it with a name of compat"
                self._problem(node, text)
        return None

    def _known(self, node: ast.Attribute, owner: Any, name: str, what: str) -> Any:
        self._note(f"{what}.{name}")
        if not hasattr(owner, name):
            self._problem(node, f"{what} has no {name}")
            return PLAIN
        value = getattr(owner, name)
        if inspect.isroutine(value) and isinstance(owner, type):
            return Method(owner, f"static {name}")
        return Known(value)

    def _of_instance(self, node: ast.Attribute, cls: type, name: str, *, store: bool) -> Any:
        what = f"{cls.__name__}.{name}"
        self._note(what)
        found = inspect.getattr_static(cls, name, None)
        if found is None or not hasattr(cls, name):
            self._problem(node, f"{what} does not exist")
            return PLAIN
        if isinstance(found, property):
            if store and found.fset is None:
                self._problem(node, f"{what} cannot be set")
            if not store and found.fget is None:
                self._problem(node, f"{what} can only be set")
            return self._type(property_type(found))
        if store:
            self._problem(node, f"{what} is no attribute that can be set")
        member = getattr(cls, name)
        return Method(cls, name) if callable(member) and not isinstance(member, type) else Known(member)

    def _of_ours(self, key: str, name: str) -> Any:
        cls = self._package.classes.get(key)
        if cls is None:
            return None
        if name in cls.attributes:
            return cls.attributes[name]
        method = cls.method(name)
        if method is None:
            return None
        if any(isinstance(d, ast.Name) and d.id in ("property", "cached_property") for d in method.decorator_list):
            return self._package.meaning(cls.module, method.returns)
        return OurFunction(f"{key}.{name}")

    def _call(self, node: ast.Call, names: dict[str, Any]) -> Any:
        function = self._called(node.func, names)
        arguments = [self._value(argument, names) for argument in node.args]
        keywords = {k.arg: self._value(k.value, names) for k in node.keywords if k.arg is not None}
        starred = any(isinstance(a, ast.Starred) for a in node.args) or any(k.arg is None for k in node.keywords)
        if isinstance(function, Either):
            function = next((f for f in function.options if not isinstance(f, Plain)), None)
        match function:
            case OurFunction("compat.capabilities"):
                return Known(self._capabilities)
            case OurFunction(key):
                return self._returned(key)
            case Ours():
                return function
            case Foreign():
                return FOREIGN
            case Container("items", item):
                return Many(Fixed((PLAIN, item)))
            case Container("values", item):
                return Many(item)
            case Container("get" | "pop", item):
                return item
            case Method(cls, name):
                static = name.startswith("static ")
                plain = name.removeprefix("static ")
                if static and plain == "__init__":
                    arguments = arguments[1:]
                found = signatures(getattr(cls, plain))
                return self._checked(node, f"{cls.__name__}.{plain}", found, arguments, keywords, starred)
            case Known(value) if isinstance(value, type) and self._is_theirs(value):
                self._checked(node, value.__name__, signatures(value.__init__), arguments, keywords, starred)
                return Instance(value)
            case Known(value) if callable(value) and getattr(value, "__module__", "").startswith("tensorrt"):
                return PLAIN
        if isinstance(node.func, ast.Name) and node.func.id in ("list", "sorted", "tuple", "reversed", "iter"):
            return arguments[0] if arguments else Many(None)
        if isinstance(node.func, ast.Name) and node.func.id == "next":
            return self._item(arguments[0]) if arguments else None
        return PLAIN if isinstance(node.func, ast.Name) and node.func.id in ("int", "str", "bool", "bytes") else None

    def _called(self, node: ast.expr, names: dict[str, Any]) -> Any:
        if not isinstance(node, ast.Attribute):
            return self._value(node, names)
        owner = self._value(node.value, names)
        if isinstance(owner, Instance) and isinstance(inspect.getattr_static(owner.cls, node.attr, None), property):
            self._problem(node, f"{owner.cls.__name__}.{node.attr} is a property, and is called")
        return self._attribute(node, owner, store=False)

    def _checked(
        self,
        node: ast.Call,
        what: str,
        found: list[Any],
        arguments: list[Any],
        keywords: dict[str, Any],
        starred: bool,
    ) -> Any:
        self._note(f"{what}()")
        if not found:
            return PLAIN
        fitting = [s for s in found if starred or s.takes(len(arguments), set(keywords))]
        fitting = [s for s in fitting if starred or self._types_fit(s, arguments, keywords)]
        if not fitting:
            given = [
                *(self._describe(a) for a in arguments),
                *(f"{k}={self._describe(v)}" for k, v in keywords.items()),
            ]
            wanted = " or ".join("(" + ", ".join(f"{p.name}: {p.type}" for p in s.parameters) + ")" for s in found)
            self._problem(node, f"{what} is called with ({', '.join(given)}), it takes {wanted}")
            return PLAIN
        return self._type(fitting[0].returns)

    def _types_fit(self, signature: Any, arguments: list[Any], keywords: dict[str, Any]) -> bool:
        given = list(zip(signature.parameters, arguments, strict=False))
        given += [(p, keywords[p.name]) for p in signature.parameters if p.name in keywords]
        for parameter, value in given:
            wanted = self._type(parameter.type)
            got = value
            if isinstance(got, Known) and self._is_theirs(type(got.value)):
                got = Instance(type(got.value))
            if isinstance(wanted, Instance) and isinstance(got, Instance) and not issubclass(got.cls, wanted.cls):
                return False
            if isinstance(wanted, Plain) and isinstance(got, Instance) and parameter.type in ("int", "str", "bool"):
                return False
        return True

    def _returned(self, key: str) -> Any:
        if key in self._package.functions:
            module, node = self._package.functions[key]
            return self._package.meaning(module, node.returns)
        cls = self._package.classes.get(key.rpartition(".")[0])
        method = cls.method(key.rpartition(".")[2]) if cls is not None else None
        return self._package.meaning(cls.module, method.returns) if cls is not None and method is not None else None

    def _type(self, text: str) -> Any:
        """A type as a signature writes it: `tensorrt.tensorrt.X`, `nvinfer1::IX`, `List[...]`."""
        head, bracket, inner = text.partition("[")
        if bracket and head.rpartition(".")[2] in ("List", "list", "Sequence"):
            return Many(self._type(inner.rstrip("]")))
        last = text.replace("::", ".").split(".")[-1]
        cls = self._classes.get(last) or self._classes.get(last.removeprefix("I"))
        return Instance(cls) if cls is not None and self._is_theirs(cls) else PLAIN

    def _item(self, value: Any) -> Any:
        match value:
            case Many(item):
                return item
            case Fixed(items):
                return items[0] if items and all(i == items[0] for i in items) else None
            case Plain():
                return PLAIN
            case Foreign():
                return FOREIGN
        return None

    def _is_theirs(self, cls: type) -> bool:
        return cls.__module__.startswith("tensorrt")

    def _describe(self, value: Any) -> str:
        match value:
            case Instance(cls):
                return cls.__name__
            case Known(known):
                return repr(known)
        return "?"

    def _note(self, what: str) -> None:
        self.uses.add(what)

    def _problem(self, node: ast.AST, text: str) -> None:
        if not self._silent:
            self.problems.append(f"{self._module.path.name}:{getattr(node, 'lineno', 0)}: {text}")


def main(folder: Path) -> None:
    try:
        trt = importlib.import_module("tensorrt")
    except ImportError:
        trt = importlib.import_module("tensorrt_bindings")
    compat = importlib.import_module("trtmodel_worker.engines.tensorrt.compat")
    capabilities = compat.capabilities(trt)
    checker = Checker(Package(folder, trt, capabilities), trt, capabilities)
    checker.run()
    answer = {
        "version": trt.__version__,
        "capabilities": dataclasses.asdict(capabilities),
        "uses": sorted(checker.uses),
        "problems": sorted(set(checker.problems)),
    }
    json.dump(answer, sys.stdout, default=str)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
