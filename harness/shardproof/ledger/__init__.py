"""The ledger: what every rank of a case said to the others, in which order, and from where.

A rank records each operation of each process group (:mod:`shardproof.ledger.kernels` puts itself
below the operations, :mod:`shardproof.ledger.book` writes). The controller reads the files
(:mod:`shardproof.ledger.page`), compares them (:mod:`shardproof.ledger.compare`), finds ranks that
wait for each other (:mod:`shardproof.ledger.deadlock`) and puts it into words
(:mod:`shardproof.ledger.words`). Only the first two import torch.
"""

from __future__ import annotations
