"""What the tests of the plugin share: the beginning of their cases, and how to read a run."""

from __future__ import annotations

import json
from typing import Any

import pytest

LAYER = """
    import os
    import sys
    import pytest
    import torch
    import torch.distributed as dist

    def summed(rank, value, axis):
        if not rank.is_reference:
            dist.all_reduce(value, group=rank.group(axis))
        return value
"""


def read_run(pytester: pytest.Pytester) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    lines = (pytester.path / "reports/latest/run.jsonl").read_text("utf-8").splitlines()
    header, *cells = [json.loads(line) for line in lines]
    return header, cells


def outcomes(pytester: pytest.Pytester) -> dict[str, str]:
    return {
        f"{c['case'].partition('::')[2]} {c['topology']}": c["outcome"]
        for c in read_run(pytester)[1]
    }
