"""shardproof: a pytest plugin that proves sharding is invisible.

PYTEST_DONT_REWRITE: ranks import it before pytest can rewrite assertions, and it has none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardproof.rank.context import Rank

__version__ = "0.1.0"
__all__ = ["Rank", "__version__"]


def __getattr__(name: str) -> object:
    """``shardproof.Rank`` is the type of the ``rank`` fixture; torch is imported with it."""
    if name == "Rank":
        from shardproof.rank.context import Rank

        return Rank
    raise AttributeError(f"module 'shardproof' has no attribute {name!r}")
