"""First of a fork server's preloaded modules: imports are redirected from here on."""

from __future__ import annotations

from shardproof.against.redirect import install

install()
