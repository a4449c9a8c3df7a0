"""Which mutants a run tries: what ``--mutants`` says."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from shardproof.mutants.target import KINDS, Mutant, share_of

EXAMPLES = "all, sample:SEED, sample:SEED:SHARE (0 < SHARE <= 1), or words of a mutant's name"
SHARE = 0.1


class ChoiceError(ValueError):
    """``--mutants`` can't be read."""


@dataclass(frozen=True)
class Choice:
    """Mutants by name, or a part of them that a seed draws."""

    pattern: str = "*"
    seed: str = ""
    share: float = 1.0

    def takes(self, mutant: Mutant) -> bool:
        """Whether this one is tried."""
        if not fnmatchcase(mutant.name.lower(), self.pattern):
            return False
        return self.share >= 1 or share_of(mutant.name, self.seed) < self.share


def read_choice(text: str) -> Choice:
    """The choice that ``text`` makes.

    Raises:
        ChoiceError: an empty text, or a sample without a seed or with a share that is none.
    """
    words = text.strip()
    if words == "all":
        return Choice()
    if words == "sample" or words.startswith("sample:"):
        _, _, rest = words.partition(":")
        seed, _, share = rest.partition(":")
        try:
            part = float(share) if share else SHARE
        except ValueError:
            part = 0.0
        if not seed or not 0 < part <= 1:
            raise ChoiceError(f"expected {EXAMPLES}, got {text!r}")
        return Choice(seed=seed, share=part)
    if not words:
        kinds = ", ".join(f"'{kind}'" for kind in KINDS)
        raise ChoiceError(f"expected {EXAMPLES}, got nothing; kinds are {kinds}")
    pattern = words.lower()
    return Choice(pattern if "*" in pattern else f"*{pattern}*")
