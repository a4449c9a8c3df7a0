"""The limits of `ci/noise_cost.py` are enforced. (The measurement itself is no test.)"""

from __future__ import annotations

import pytest

from ci import noise_cost


@pytest.mark.parametrize(
    ("seconds", "gibibytes", "status"),
    [(3.9, 1.4, 0), (4.1, 1.4, 1), (3.9, 1.6, 1)],
)
def test_the_exit_status_says_whether_the_limits_are_kept(
    seconds: float,
    gibibytes: float,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def child(what: str, dtype: str, tokens: int, repeats: int) -> dict[str, float]:
        assert dtype == "float64"
        assert (tokens, repeats > 0) == (32, True)
        if what == "both":
            return {"plain": 1.0, "noise": seconds}
        return {"bytes": 2.0**30 * (gibibytes if what == "noise" else 1)}

    monkeypatch.setattr(noise_cost, "child", child)
    assert noise_cost.main(["--tokens", "32", "--dtype", "float64"]) == status
    assert ("EXCEEDED" in capsys.readouterr().out) == bool(status)
