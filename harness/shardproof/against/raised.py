"""What an exception of a rank says: an assertion of the case, a missing API, or another error."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from typing import Any, Final

from shardproof.against.subject import Subject, is_library, real

RAISED: Final = "shardproof_raised"
"""Attribute of a test report that carries what :func:`describe` returns."""

ASSERTION, MISSING, ERROR = "assertion", "missing API", "error"

_HARNESS = str(Path(__file__).resolve().parents[1])
# The words of CPython for a call that does not fit a function's parameters.
_ARGUMENTS = re.compile(
    r"unexpected keyword argument|takes (no|exactly|at (least|most)|from|\d+) .*argument"
    r"|missing \d+ required|got multiple values for|takes no arguments|takes no keyword arguments"
    r"|is an invalid keyword argument|positional-only arguments? passed as keyword"
)
_TEXT_LIMIT = 2000


def describe(error: BaseException, subject: Subject | None) -> dict[str, Any]:
    """Kind, types and text of an exception.

    ``assertion``: the case (a test module, a conftest file, an oracle) asserts what does not hold,
    also by ``pytest.fail`` and ``pytest.raises``. ``missing API``: an import fails, an attribute is
    missing, or arguments do not fit, in the subject's files or where the case uses them.
    ``error``: everything else; an assertion inside the subject too, since the case made none.
    """
    error = _cause(error)
    origin = _origin(error, subject)
    text = "".join(traceback.format_exception_only(error)).strip()
    return {
        "kind": _kind(error, origin),
        "types": [cls.__name__ for cls in type(error).__mro__ if cls is not object],
        "text": text[:_TEXT_LIMIT],
    }


def _cause(error: BaseException) -> BaseException:
    """The exception itself, out of pytest's own for failed imports of tests and conftest files."""
    cause = getattr(error, "cause", None)  # ConftestImportFailure
    if isinstance(cause, BaseException):
        return _cause(cause)
    collected = type(error).__name__ == "CollectError" and error.__cause__ is not None
    return _cause(error.__cause__) if collected and error.__cause__ else error


def _kind(error: BaseException, origin: str) -> str:
    # pytest.fail raises Failed, which is no AssertionError.
    asserted = isinstance(error, AssertionError) or type(error).__name__ == "Failed"
    if asserted:
        return ERROR if origin == "subject" else ASSERTION
    if isinstance(error, ImportError):
        return MISSING
    if isinstance(error, NotImplementedError) and origin == "subject":
        return MISSING
    if origin == "other":
        return ERROR
    if isinstance(error, AttributeError):
        # An attribute of None is a value that is missing, and no API.
        return ERROR if getattr(error, "obj", error) is None else MISSING
    if isinstance(error, TypeError) and _ARGUMENTS.search(str(error)):
        return MISSING
    return ERROR


def _origin(error: BaseException, subject: Subject | None) -> str:
    """Whose code raised: the innermost frame that is neither a library's nor the harness's."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = real(frame.filename)
        if subject is not None and not subject.stays(file) and subject.supplied(file):
            return "subject"
        if not file.startswith(_HARNESS) and not is_library(file) and file.startswith("/"):
            return "case"
    return "other"
