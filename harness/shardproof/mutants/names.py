"""What the names of a program stand for, read from its source without importing it."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from shardproof.mutants.communication import GROUP, operation_of

Meaning = str | ast.expr
"""A full name, or an expression of the same scope that stands for one."""

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
_COMPREHENSIONS: Final = {
    ast.ListComp: "<listcomp>",
    ast.SetComp: "<setcomp>",
    ast.DictComp: "<dictcomp>",
    ast.GeneratorExp: "<genexpr>",
}
_INLINED: Final = sys.version_info >= (3, 12)
"""Comprehensions have no frame of their own (PEP 709)."""


@dataclass(eq=False)
class Scope:
    """A module, class or function, and what its names may stand for.

    ``qualname`` is what the code object of it is called, ``prefix`` what the names of those inside
    begin with; ``stars`` are modules of which all names are imported, and ``outer`` tells the scope
    of names that are bound elsewhere. An empty list of meanings is a value of its own, which hides
    an outer name.
    """

    kind: Literal["module", "class", "function"]
    module: str
    file: str
    qualname: str = "<module>"
    prefix: str = ""
    parent: Scope | None = None
    is_named: bool = True
    names: dict[str, list[Meaning]] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)
    outer: dict[str, Scope] = field(default_factory=dict)
    bases: Sequence[ast.expr] = ()

    @property
    def key(self) -> str:
        """The full name, by which others know it."""
        return self.module if self.kind == "module" else f"{self.module}.{self.qualname}"

    def bind(self, name: str, *meanings: Meaning) -> None:
        """Let ``name`` stand for these too."""
        self.outer.get(name, self).names.setdefault(name, []).extend(meanings)

    def around(self) -> Iterator[Scope]:
        """Scopes in which a name is looked up: methods don't see the names of their class."""
        yield self
        scope = self.parent
        while scope is not None:
            if scope.kind != "class":
                yield scope
            scope = scope.parent


class Walker(ast.NodeVisitor):
    """Visits a module with the scope that each expression is evaluated in; annotations left out."""

    def __init__(self, module: Scope, scopes: dict[ast.AST, Scope]) -> None:
        self.scope = module
        self.scopes = scopes

    def within(self, node: ast.AST, name: str, body: Iterable[ast.AST]) -> None:
        """Visit what belongs to a scope of its own."""
        outer = self.scope
        inner = self.scopes.get(node)
        if inner is None:
            inner = self.scopes[node] = _inside(outer, node, name)
        self.scope = inner
        for part in body:
            self.visit(part)
        self.scope = outer

    def visit_FunctionDef(self, node: _Function) -> None:
        """Decorators and defaults are evaluated outside."""
        self._visit_all(node.decorator_list)
        self._visit_all((*node.args.defaults, *filter(None, node.args.kw_defaults)))
        self.within(node, node.name, node.body)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        """As any other function."""
        self.visit_FunctionDef(node)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        """A function without a name."""
        self._visit_all((*node.args.defaults, *filter(None, node.args.kw_defaults)))
        self.within(node, "<lambda>", [node.body])

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Bases are evaluated outside."""
        self._visit_all((*node.decorator_list, *node.bases))
        self._visit_all(keyword.value for keyword in node.keywords)
        self.within(node, node.name, node.body)

    def _comprehension(self, node: _Comprehension) -> None:
        first, *others = node.generators
        self.visit(first.iter)
        result = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        loops = [first.target, *first.ifs, *others]
        self.within(node, _COMPREHENSIONS[type(node)], [*loops, *result])

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _comprehension

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """The annotation calls nothing."""
        self._visit_all(part for part in (node.target, node.value) if part is not None)

    def _visit_all(self, nodes: Iterable[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)


def _inside(outer: Scope, node: ast.AST, name: str) -> Scope:
    inlined = _INLINED and isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp)
    qualname = outer.qualname if inlined else outer.prefix + name
    is_function = isinstance(node, _Function | ast.Lambda)
    is_class = isinstance(node, ast.ClassDef)
    return Scope(
        "class" if is_class else "function",
        outer.module,
        outer.file,
        qualname,
        outer.prefix if inlined else f"{qualname}.<locals>." if is_function else f"{qualname}.",
        outer,
        is_named=isinstance(node, _Function | ast.ClassDef),
        bases=node.bases if isinstance(node, ast.ClassDef) else (),
    )


class Binder(Walker):
    """Takes down what each name of a module may stand for."""

    def __init__(self, module: Scope, scopes: dict[ast.AST, Scope], package: str) -> None:
        super().__init__(module, scopes)
        self._module = module
        self._package = package.split(".") if package else []

    def within(self, node: ast.AST, name: str, body: Iterable[ast.AST]) -> None:
        """Bind the scope outside, and its parameters inside."""
        inner = self.scopes[node] = _inside(self.scope, node, name)
        if isinstance(node, _Function | ast.ClassDef):
            self.scope.bind(name, inner.key)
        if isinstance(node, _Function | ast.Lambda):
            _bind_parameters(node, inner, self.scope)
        super().within(node, name, body)

    def visit_Import(self, node: ast.Import) -> None:
        """``import a.b`` binds a, ``import a.b as c`` binds c to a.b."""
        for alias in node.names:
            if alias.asname:
                self.scope.bind(alias.asname, alias.name)
            else:
                first = alias.name.partition(".")[0]
                self.scope.bind(first, first)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Relative to the package of this module where there are dots."""
        above = self._package[: len(self._package) - node.level + 1] if node.level else []
        source = ".".join((*above, *([node.module] if node.module else [])))
        for alias in node.names:
            if alias.name == "*":
                self.scope.stars.append(source)
            else:
                self.scope.bind(alias.asname or alias.name, f"{source}.{alias.name}")

    def visit_Global(self, node: ast.Global) -> None:
        """Assignments are to names of the module."""
        self.scope.outer.update(dict.fromkeys(node.names, self._module))

    def visit_Nonlocal(self, node: ast.Nonlocal) -> None:
        """Assignments are to names of a function around."""
        _, *around = self.scope.around()
        for name in node.names:
            known = (scope for scope in around if name in scope.names)
            self.scope.outer[name] = next(known, around[0])

    def visit_Assign(self, node: ast.Assign) -> None:
        """A name may stand for what is assigned."""
        for target in node.targets:
            if isinstance(target, ast.Name):
                self.scope.bind(target.id, node.value)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Also with an annotation."""
        if isinstance(node.target, ast.Name) and node.value is not None:
            self.scope.bind(node.target.id, node.value)
        super().visit_AnnAssign(node)

    def visit_Name(self, node: ast.Name) -> None:
        """Bound in any other way, a name is a value of its own."""
        if not isinstance(node.ctx, ast.Load):
            self.scope.bind(node.id)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        """Binds a name."""
        if node.name:
            self.scope.bind(node.name)
        self.generic_visit(node)


def _bind_parameters(node: _Function | ast.Lambda, inner: Scope, outer: Scope) -> None:
    args = node.args
    listed = [*args.posonlyargs, *args.args]
    for arg in (*listed, *args.kwonlyargs, *filter(None, (args.vararg, args.kwarg))):
        inner.bind(arg.arg)
        if arg.annotation is not None and arg not in (args.vararg, args.kwarg):
            inner.names[arg.arg] += [ast.Call(one, [], []) for one in _types(arg.annotation)]
    if outer.kind != "class" or not listed or not isinstance(node, _Function):
        return
    kinds = {one.id for one in node.decorator_list if isinstance(one, ast.Name)}
    if "staticmethod" not in kinds:
        inner.bind(listed[0].arg, outer.key if "classmethod" in kinds else f"{outer.key}()")


def _types(annotation: ast.expr) -> list[ast.expr]:
    """The types that an annotation names, without those inside brackets but for ``Optional``."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        try:
            return _types(ast.parse(annotation.value, mode="eval").body)
        except SyntaxError:
            return []
    if isinstance(annotation, ast.BinOp):
        return _types(annotation.left) + _types(annotation.right)
    if isinstance(annotation, ast.Subscript) and "Optional" in ast.dump(annotation.value):
        return _types(annotation.slice)
    return [annotation] if isinstance(annotation, ast.Name | ast.Attribute) else []


class Names:
    """Resolves expressions to full names.

    ``known`` are modules by each name that an import may use, ``scopes`` those of all modules.
    """

    def __init__(self, known: Mapping[str, Scope], scopes: Iterable[Scope]) -> None:
        self._known = known
        everything = {scope.key: scope for scope in scopes if scope.is_named}
        self._spaces = {key: one for key, one in everything.items() if one.kind != "function"}
        self.functions = {key: one for key, one in everything.items() if one.kind == "function"}
        # A name may be assigned what is made of itself, many times over.
        self._meanings: dict[tuple[Scope, str], list[str] | None] = {}
        self._circles = 0
        self._expressions: dict[ast.expr, list[str]] = {}
        self._open: set[str] = set()

    def of(self, node: ast.expr, scope: Scope) -> list[str]:
        """Full names that an expression may stand for; none where that can't be read."""
        known = self._expressions.get(node)
        if known is not None:
            return known
        before = self._circles
        found = list(dict.fromkeys(self._of(node, scope)))
        if self._circles == before:
            self._expressions[node] = found
        return found

    def operation(self, node: ast.expr, scope: Scope) -> str | None:
        """The operation that an expression stands for, if it does."""
        found = (operation_of(name) for name in self.of(node, scope))
        return next((one for one in found if one is not None), None)

    def is_class(self, name: str) -> bool:
        """Whether a full name is that of a class that was read."""
        return name in self._spaces and self._spaces[name].kind == "class"

    def _of(self, node: ast.expr, scope: Scope) -> list[str]:
        if isinstance(node, ast.Name):
            return self._named(node.id, scope)
        if isinstance(node, ast.Attribute):
            return self._attribute(self.of(node.value, scope), node.attr)
        if isinstance(node, ast.IfExp):
            return self.of(node.body, scope) + self.of(node.orelse, scope)
        return self._called(node, scope) if isinstance(node, ast.Call) else []

    def _called(self, node: ast.Call, scope: Scope) -> list[str]:
        """What a call returns: a function with some arguments, an attribute, an instance."""
        if isinstance(node.func, ast.Attribute) and node.func.attr == "get_group":
            return [GROUP]
        functions = self.of(node.func, scope)
        if "functools.partial" in functions and node.args:
            return self.of(node.args[0], scope)
        if isinstance(node.func, ast.Name) and node.func.id == "getattr" and len(node.args) > 1:
            name = node.args[1]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                default = self.of(node.args[2], scope) if len(node.args) > 2 else []
                return self._attribute(self.of(node.args[0], scope), name.value) + default
        groups = [GROUP for name in functions if name.endswith(".new_group")]
        types = (name for name in functions if self.is_class(name) or _is_group(name))
        return groups + [f"{name}()" for name in types]

    def _named(self, name: str, scope: Scope) -> list[str]:
        for around in scope.around():
            if name in around.names:
                return self._meant(around, name)
        module = [one for one in scope.around() if one.kind == "module"]
        return [
            full
            for one in module
            for star in one.stars
            for full in self._attribute([star], name)
            if operation_of(full) or full in self.functions or full in self._spaces
        ]

    def _meant(self, scope: Scope, name: str) -> list[str]:
        if (scope, name) in self._meanings:
            known = self._meanings[scope, name]
            self._circles += known is None
            return known or []
        self._meanings[scope, name] = None
        found: list[str] = []
        for one in scope.names[name]:
            found += self._followed(one) if isinstance(one, str) else self.of(one, scope)
        found = list(dict.fromkeys(found))
        self._meanings[scope, name] = found
        return found

    def _attribute(self, bases: Iterable[str], name: str) -> list[str]:
        return [full for base in bases for full in self._followed(f"{base}.{name}")]

    def _followed(self, full: str) -> list[str]:
        """``full``, or what it stands for in a module or class that was read."""
        if full in self.functions or full in self._spaces or full in self._open:
            return [full]
        if full in self._known:
            return [self._known[full].key]
        base, _, name = full.rpartition(".")
        space = self._known.get(base) or self._spaces.get(base.removesuffix("()"))
        if space is None:
            return [full]
        if name in space.names:
            return self._meant(space, name)
        self._open.add(full)
        try:
            above = [kind for base in space.bases for kind in self.of(base, _outside(space))]
            return self._attribute([*above, *space.stars], name) or [full]
        finally:
            self._open.discard(full)


def _outside(space: Scope) -> Scope:
    return space.parent or space


def _is_group(name: str) -> bool:
    return name.startswith("torch.") and name.rpartition(".")[2].startswith("ProcessGroup")
