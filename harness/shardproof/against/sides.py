"""The two sides of a control, as the processes of each need them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardproof.against.redirect import VARIABLE
from shardproof.against.subject import Subject, to_data

_SHOWN = 5


class WrongCodeError(Exception):
    """A rank imported the subject from elsewhere than its side says: the control proves nothing."""


@dataclass
class Side:
    """One of the two sides.

    Attributes:
        name: ``here`` or ``there``.
        subject: where its modules come from; None where nothing says so
            (a release, no ini setting).
        redirected: whether imports of the subject must be answered from elsewhere.
        modules: the most modules of the subject that a rank had imported, None before any told.
    """

    name: str
    subject: Subject | None
    redirected: bool = False
    modules: int | None = None

    @property
    def path(self) -> tuple[str, ...]:
        """What stands before ``sys.path`` on its ranks: a release."""
        return self.subject.distributions if self.subject is not None else ()

    @property
    def environment(self) -> dict[str, str]:
        """What the fork server of a redirected side is started with."""
        if self.subject is None:
            return {}
        # The worktree goes away, and a release is checked by its files: no bytecode beside them.
        return {VARIABLE: json.dumps(to_data(self.subject)), "PYTHONDONTWRITEBYTECODE": "1"}

    def preload(self, modules: Sequence[str]) -> list[str]:
        """What the fork server of a redirected side imports: none of the subject's modules."""
        subject = self.subject
        own = [name for name in modules if subject is None or subject.belongs(name) is None]
        return ["shardproof.against.preload", *own]

    def data(self) -> dict[str, Any] | None:
        """The subject as JSON-able data, for ranks."""
        return to_data(self.subject) if self.subject is not None else None

    def look(self, loads: Iterable[Mapping[str, Any] | None]) -> None:
        """Take over what the ranks of a run had imported when it ended.

        Raises:
            WrongCodeError: some of it came from elsewhere; the text names modules and files.
        """
        for rank, load in enumerate(loads):
            if load is None or self.subject is None:
                continue
            self.modules = max(self.modules or 0, int(load["right"]))
            if load["wrong"]:
                raise WrongCodeError(self._wrong(rank, load["wrong"], self.subject))

    def _wrong(self, rank: int, wrong: Sequence[Sequence[str]], subject: Subject) -> str:
        lines = [f"wrong code under test: {self.name}, on rank {rank}"]
        for module, file in wrong[:_SHOWN]:
            name = subject.belongs(module)
            place = subject.target(name) if name is not None else None
            place = place or subject.there(file) or ", ".join(subject.targets)
            lines.append(f"  {module} was imported from {file}, expected from {place}")
        if len(wrong) > _SHOWN:
            lines.append(f"  and {len(wrong) - _SHOWN} more")
        lines.append(
            "so the case did not judge the code that the control is about, and the run stops. Let "
            "that module be imported by its name alone: not by its file, by a finder put before "
            "all others, from an installed copy, or as the interpreter starts (.pth, sitecustomize)"
        )
        return "\n".join(lines)
