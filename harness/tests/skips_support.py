"""How tests are skipped or expected to fail, read from their source; what strings hold is not read.

A skip and an xfail say why. An xfail is a mark, for ``pytest.xfail()`` ends a test that may pass by
now; it is strict, and names the exception, so that no other failure hides behind it.
"""

from __future__ import annotations

import ast

_MARKS = ("skip", "skipif", "xfail")


def problems(source: str) -> list[str]:
    """What falls short, each with its line."""
    tree = ast.parse(source)
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name, call = _dotted(node), called.get(id(node))
            if name in {f"pytest.mark.{mark}" for mark in _MARKS}:
                found += [f"{node.lineno}: {name} {wrong}" for wrong in _of_mark(node.attr, call)]
            elif name == "pytest.skip" and not (call and _reason(call, positional=True)):
                found.append(f"{node.lineno}: {name} without a reason")
            elif name == "pytest.xfail":
                found.append(f"{node.lineno}: {name} ends the test; mark it instead")
    return found


def needed(source: str) -> set[str]:
    """Modules without which tests are skipped."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return {
        ast.literal_eval(call.args[0] if call.args else call.keywords[0].value)
        for call in calls
        if _dotted(call.func) == "pytest.importorskip"
    }


def _of_mark(mark: str, call: ast.Call | None) -> list[str]:
    """What a mark lacks; ``call`` is None where it has no arguments."""
    options = {one.arg: one.value for one in call.keywords} if call else {}
    wrong = []
    if not (call and _reason(call, positional=mark == "skip")):
        wrong.append("without a reason")
    if mark == "xfail" and "raises" not in options:
        wrong.append("without raises=")
    strict = options.get("strict")
    if strict is not None and not (isinstance(strict, ast.Constant) and strict.value is True):
        wrong.append("that is not strict")
    return wrong


def _reason(call: ast.Call, *, positional: bool) -> bool:
    """Whether a reason is given that is not an empty text."""
    given = [one.value for one in call.keywords if one.arg == "reason"]
    given += call.args[:1] if positional else []
    return any(not isinstance(one, ast.Constant) or one.value for one in given)


def _dotted(node: ast.expr) -> str:
    """``a.b.c`` of names and attributes; empty for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""
