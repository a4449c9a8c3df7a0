"""Call sites that communicate, found by reading the source of the system under test.

Nothing is imported. What a reader can't tell (a function out of a table, a method of an object that
was passed in) is left to the run: :mod:`shardproof.mutants.coverage` names what it finds there.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shardproof.mutants.communication import PLAIN_METHODS
from shardproof.mutants.names import Binder, Names, Scope, Walker

Kind = Literal["operation", "method", "passed on", "wrapper"]


class ReadingError(ValueError):
    """The system under test can't be read."""


@dataclass(frozen=True, order=True)
class CallSite:
    """One place in the source from which ranks communicate.

    ``file`` is relative to the working directory where it is below, as in the ledger's texts;
    ``line`` is where the operation's name stands, ``first`` to ``last`` are the lines of the call.
    ``function`` is the qualified name of what calls, ``name`` that of the operation or wrapper.
    ``kind`` says whether an operation is called by its name, as a method, or passed on to what may
    call it (then the lines are those of the whole call that it is passed to); a *wrapper* is a
    function of the subject whose body holds such a place, and ``home`` is its file. As ranks tell
    lines and not columns, two calls of the same on one line are one.
    """

    file: str
    line: int
    first: int
    last: int
    function: str
    name: str
    kind: Kind
    home: str = ""

    @property
    def is_told(self) -> bool:
        """Whether ranks can tell that it was reached: they name callers of one folder alone."""
        return not self.home or os.path.dirname(self.file) == os.path.dirname(self.home)  # noqa: PTH120

    def __str__(self) -> str:
        return f"{self.name} at {self.file}:{self.line} in {self.function}"


@dataclass(frozen=True)
class _Module:
    scope: Scope
    tree: ast.Module
    package: str
    names: tuple[str, ...]


def read_sites(paths: Iterable[str | Path], root: Path | None = None) -> tuple[CallSite, ...]:
    """Every call site that communicates in files and folders, by file and line.

    Calls of wrappers count one level deep: one more, and every public function of a trainer would
    be a call site, since all of them communicate in the end. ``paths`` are relative to ``root``,
    the working directory by default.

    Raises:
        ReadingError: no path, one that does not exist or holds no source, or source that is none.
    """
    above = root or Path.cwd()
    modules = [_read(path, above) for path in _files(paths, above)]
    known = {name: one.scope for one in modules for name in one.names}
    scopes: dict[ast.AST, Scope] = {}
    for one in modules:
        scopes[one.tree] = one.scope
        Binder(one.scope, scopes, one.package).visit(one.tree)
    names = Names(known, scopes.values())
    readers = [_Reader(one.scope, scopes, names) for one in modules]
    for reader, one in zip(readers, modules, strict=True):
        reader.visit(one.tree)
    wrappers = {key for reader in readers for key in reader.wrappers}
    found = {site for reader in readers for site in reader.sites}
    for reader in readers:
        found |= {site for key, site in reader.calls if key in wrappers}
    return tuple(sorted(found))


def _files(paths: Iterable[str | Path], root: Path) -> list[Path]:
    """Each file of source once."""
    found: dict[Path, None] = {}
    for path in paths:
        declared = Path(os.path.abspath(root / path))  # noqa: PTH100 - links stay as they are
        if not declared.exists():
            raise ReadingError(
                f"cannot read {path}: expected a file or folder of Python source at {declared}; "
                "mend shardproof_subject, whose paths are relative to the rootdir"
            )
        files = sorted(declared.rglob("*.py")) if declared.is_dir() else [declared]
        files = [one for one in files if not _is_hidden(one.relative_to(declared))]
        if not files:
            raise ReadingError(
                f"nothing to read in {path}: expected *.py below {declared}; let "
                "shardproof_subject name the folder with the source of the system under test"
            )
        found.update(dict.fromkeys(files))
    if not found:
        raise ReadingError(
            "nothing to read: expected paths of the system under test; name them in "
            "shardproof_subject"
        )
    return list(found)


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _read(path: Path, root: Path) -> _Module:
    file = str(path).removeprefix(f"{root}{os.sep}")  # as the ledger writes files
    try:
        tree = ast.parse(path.read_bytes(), file)
    except (OSError, SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        where = file if line is None else f"{file}:{line}"
        raise ReadingError(
            f"cannot read {where}: expected source of this Python, got {error}; mend the file, or "
            "take it out of shardproof_subject"
        ) from error
    scope = Scope("module", _dotted(path, Path(path.anchor)), file)
    package = scope.module if path.name == "__init__.py" else scope.module.rpartition(".")[0]
    return _Module(scope, tree, package, tuple(_import_names(path)))


def _import_names(path: Path) -> Iterator[str]:
    """What the module may be called where it is imported, the most likely first.

    Folders without ``__init__.py`` may be packages too, or be searched themselves.
    """
    top = path.parent
    while (top / "__init__.py").exists():
        top = top.parent
    for folder in (top, *top.parents):
        yield _dotted(path, folder)


def _dotted(path: Path, folder: Path) -> str:
    parts = path.relative_to(folder).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return f"{folder}{name}" if folder == Path(path.anchor) else name


class _Reader(Walker):
    """Finds what communicates in one module; ``calls`` are those of functions of the subject."""

    def __init__(self, module: Scope, scopes: dict[ast.AST, Scope], names: Names) -> None:
        super().__init__(module, scopes)
        self._names = names
        self._outermost: ast.Call | None = None
        self.sites: list[CallSite] = []
        self.wrappers: list[str] = []
        self.calls: list[tuple[str, CallSite]] = []

    def within(self, node: ast.AST, name: str, body: Iterable[ast.AST]) -> None:
        """A function has calls of its own."""
        outer, self._outermost = self._outermost, None
        super().within(node, name, body)
        self._outermost = outer

    def visit_Call(self, node: ast.Call) -> None:
        """An operation, a method of a group, or a function of the subject."""
        outer, self._outermost = self._outermost, self._outermost or node
        meant = self._names.of(node.func, self.scope)
        called = [key for key in map(self._function, meant) if key is not None]
        operation = self._names.operation(node.func, self.scope)
        attribute = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if operation is not None:
            self._add(node, node.func, operation, "operation")
        elif attribute in PLAIN_METHODS and not called:
            self._add(node, node.func, attribute, "method")
        for key in called:
            function = self._names.functions[key]
            site = self._site(node, node.func, function.qualname, "wrapper", function.file)
            self.calls.append((key, site))
        if isinstance(node.func, ast.Attribute):
            # An overload of an operator is an attribute of it.
            if self._names.operation(node.func.value, self.scope) is None:
                self.visit(node.func.value)
        elif not isinstance(node.func, ast.Name):
            self.visit(node.func)
        # batch_isend_irecv runs what a P2POp names.
        named = any(name.rpartition(".")[2] == "P2POp" for name in meant)
        self._visit_arguments(node, also_operations=not named)
        self._outermost = outer

    def visit_Name(self, node: ast.Name) -> None:
        """An operation that is passed on."""
        self._passed(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """An operation that is passed on; what is asked of one (its name) calls nothing."""
        if not self._passed(node) and self._names.operation(node.value, self.scope) is None:
            self.visit(node.value)

    def visit_Compare(self, node: ast.Compare) -> None:
        """An operation that is compared is not called."""
        self._visit_all(
            one
            for one in (node.left, *node.comparators)
            if self._names.operation(one, self.scope) is None
        )

    def visit_Assign(self, node: ast.Assign) -> None:
        """Another name of an operation counts where it is called."""
        self._visit_all(node.targets)
        self._assigned(node.value, all(isinstance(one, ast.Name) for one in node.targets))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Also with an annotation."""
        if node.value is not None:
            self._assigned(node.value, isinstance(node.target, ast.Name))

    def _assigned(self, value: ast.expr, to_names: bool) -> None:  # noqa: FBT001
        if not to_names or self._names.operation(value, self.scope) is None:
            self.visit(value)
        elif isinstance(value, ast.Call):
            self._visit_arguments(value, also_operations=False)

    def _visit_arguments(self, node: ast.Call, *, also_operations: bool) -> None:
        for one in (*node.args, *(keyword.value for keyword in node.keywords)):
            if also_operations or self._names.operation(one, self.scope) is None:
                self.visit(one)

    def _passed(self, node: ast.Name | ast.Attribute) -> bool:
        if not isinstance(node.ctx, ast.Load):
            return False
        operation = self._names.operation(node, self.scope)
        if operation is not None:
            self._add(self._outermost or node, node, operation, "passed on")
        return operation is not None

    def _function(self, name: str) -> str | None:
        """The function of the subject that a call of ``name`` runs."""
        instance = name.removesuffix("()")
        tried = [name]
        if instance != name:
            tried = [f"{instance}.__call__", f"{instance}.forward"]
        elif self._names.is_class(name):
            tried = [f"{name}.__init__"]
        elif name.endswith(".apply"):
            # Of an autograd function: its backward is called by whoever asks for gradients.
            tried = [name, f"{name.removesuffix('apply')}forward"]
        return next((one for one in tried if one in self._names.functions), None)

    def _add(self, node: ast.expr, named: ast.expr, name: str, kind: Kind) -> None:
        self.sites.append(self._site(node, named, name, kind))
        self.wrappers += [scope.key for scope in _functions_around(self.scope)]

    def _site(
        self, node: ast.expr, named: ast.expr, name: str, kind: Kind, home: str = ""
    ) -> CallSite:
        line = named.end_lineno or named.lineno
        last = node.end_lineno or node.lineno
        scope = self.scope
        return CallSite(scope.file, line, node.lineno, last, scope.qualname, name, kind, home)


def _functions_around(scope: Scope) -> Iterator[Scope]:
    around: Scope | None = scope
    while around is not None:
        if around.kind == "function" and around.is_named:
            yield around
        around = around.parent
