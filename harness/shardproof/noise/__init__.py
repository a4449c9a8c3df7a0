"""Monte Carlo arithmetic: the noise floor of a run is measured, not guessed.

``NoiseMode`` perturbs and reassociates floating arithmetic; how far a value moves between seeds
is what rounding can do to it. See Parker, "Monte Carlo Arithmetic: exploiting randomness in
floating-point arithmetic" (UCLA CSD-970002, 1997).
"""

from __future__ import annotations

from .mode import NoiseMode
from .precision import Fall

__all__ = ["Fall", "NoiseMode"]
