"""shardproof: a pytest plugin that proves sharding is invisible.

PYTEST_DONT_REWRITE: ranks import it before pytest can rewrite assertions, and it has none.
"""

from __future__ import annotations

__version__ = "0.1.0"
