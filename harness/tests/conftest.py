"""What tests that run pytest inside pytest need."""

from __future__ import annotations

# An inner session forgets what it imported. torch can't be imported twice in one process, so it
# (and what holds on to its classes) is imported before the first inner session.
import shardproof.controller.protocol
import shardproof.rank.session  # noqa: F401
