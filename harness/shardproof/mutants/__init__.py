"""Mutants: what a run would have caught, shown by breaking one collective at a time.

A mutant is one call site that communicates, and one way in which its result may be wrong
(:mod:`shardproof.mutants.kinds`). The system under test stays as it is: the operation runs, and the
ledger then hands out something else (:mod:`shardproof.mutants.mutation`). The controller runs the
mutants of a cell after the cell itself has passed (:mod:`shardproof.mutants.campaign`), and puts
them in a matrix (:mod:`shardproof.mutants.matrix`). Call sites that no case reaches have no
mutants: they are found in the source (:mod:`shardproof.mutants.reading`) and named
(:mod:`shardproof.mutants.coverage`).
"""

from __future__ import annotations
