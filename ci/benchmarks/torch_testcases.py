"""The trivial case under PyTorch's own test classes for several processes.

    torch_testcases.py CLASS RANKS CASES    prints a JSON list: seconds of each case

CLASS is MultiProcessTestCase (processes and a group for each test) or MultiProcContinuousTest
(both live as long as the class, so that the first case carries the start-up).
"""

from __future__ import annotations

import json
import os
import sys
import time
import unittest

import torch
import torch.distributed as dist
from collective import all_reduce_case, in_new_group
from torch.testing._internal.common_distributed import (
    MultiProcContinuousTest,
    MultiProcessTestCase,
)

# The processes that the classes spawn import this module again: they learn its arguments from here.
RANKS = int(os.environ.get("SHARDPROOF_BENCHMARK_RANKS", "2"))
CASES = int(os.environ.get("SHARDPROOF_BENCHMARK_CASES", "1"))


class EachTestSpawns(MultiProcessTestCase):
    """Processes and a process group for each test."""

    @property
    def world_size(self) -> int:
        """Ranks of each test."""
        return RANKS

    @property
    def destroy_pg_upon_exit(self) -> bool:
        """The case destroys its group itself."""
        return False

    def setUp(self) -> None:
        """Start the ranks."""
        super().setUp()
        self._spawn_processes()

    def _case(self) -> None:
        in_new_group(self.rank, RANKS, self.file_name)


class ClassSpawns(MultiProcContinuousTest):
    """Processes and one process group for all tests."""

    world_size = RANKS

    @classmethod
    def backend_str(cls) -> str:
        """Return the backend of the group."""
        return "gloo"

    @classmethod
    def device_type(cls) -> str:
        """Return the device that the cases run on."""
        return "cpu"

    def _case(self) -> None:
        torch.set_num_threads(1)
        all_reduce_case(rank=dist.get_rank(), size=dist.get_world_size())


def _named(index: int) -> str:
    return f"test_{index:03d}"


for _index in range(CASES):
    for _class in (EachTestSpawns, ClassSpawns):
        # MultiProcContinuousTest wraps what a test class has when the instance is made.
        setattr(_class, _named(_index), lambda self: self._case())


class Stopwatch(unittest.TestResult):
    """Measures each test, its setUp and tearDown included."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self._started = 0.0

    def startTest(self, test: unittest.TestCase) -> None:  # noqa: N802 (unittest's name)
        """Start the clock."""
        super().startTest(test)
        self._started = time.perf_counter()

    def stopTest(self, test: unittest.TestCase) -> None:  # noqa: N802 (unittest's name)
        """Stop the clock."""
        self.seconds.append(time.perf_counter() - self._started)
        super().stopTest(test)


def main() -> int:
    """Run the cases in a process that knows its arguments, and return its exit status."""
    name, ranks, cases = sys.argv[1:4]
    if (int(ranks), int(cases)) != (RANKS, CASES):
        os.environ["SHARDPROOF_BENCHMARK_RANKS"] = ranks
        os.environ["SHARDPROOF_BENCHMARK_CASES"] = cases
        os.execv(sys.executable, [sys.executable, *sys.argv])
    chosen: type[unittest.TestCase] = {
        "MultiProcessTestCase": EachTestSpawns,
        "MultiProcContinuousTest": ClassSpawns,
    }[name]
    result = Stopwatch()
    unittest.TestSuite(chosen(_named(index)) for index in range(CASES)).run(result)
    if not result.wasSuccessful() or result.skipped or result.testsRun != CASES:
        for _, text in (*result.errors, *result.failures, *result.skipped):
            print(text, file=sys.stderr)
        return 1
    print(json.dumps(result.seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
