"""How parity cases are collected, named, chosen and refused, before any rank starts."""

from __future__ import annotations

import pytest

from shardproof.cells import read_options

CASES = """
    import pytest

    @pytest.mark.parity("cp2", "xcp2dp2".replace("xcp2dp2", "cp2xdp2"))
    @pytest.mark.parametrize("sharing", ["none", "full"])
    def test_readout(rank, sharing):
        raise RuntimeError("no rank may start")

    class TestGroup:
        @pytest.mark.parity("CP4", "cp4", "cp2×tp2")
        def test_method(self, rank):
            raise RuntimeError("no rank may start")

    @pytest.mark.parity
    def test_defaults():
        raise RuntimeError("no rank may start")

    def test_plain():
        pass
"""


def _ids(result: pytest.RunResult) -> list[str]:
    return [line for line in result.outlines if "::" in line]


def test_ids_carry_the_canonical_topology_first(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_it=CASES)
    result = pytester.runpytest("--collect-only", "-q", "--strict-markers")
    assert result.ret == 0
    assert _ids(result) == [
        # Those of one reference side by side.
        "test_it.py::test_readout[cp2-none]",
        "test_it.py::test_readout[dp2xcp2-none]",
        "test_it.py::test_readout[cp2-full]",
        "test_it.py::test_readout[dp2xcp2-full]",
        "test_it.py::TestGroup::test_method[cp4]",
        "test_it.py::TestGroup::test_method[tp2xcp2]",
        "test_it.py::test_defaults[cp2]",
        "test_it.py::test_defaults[cp4]",
        "test_it.py::test_defaults[dp2xcp2]",
        "test_it.py::test_defaults[tp2xcp2]",
        "test_it.py::test_plain",
    ]


def test_a_mark_of_a_module_reaches_its_tests_alone(pytester: pytest.Pytester) -> None:
    """Fixtures, helpers and imported functions beside them are left as they are."""
    pytester.makepyfile(
        aid="""
        def imported():
            pass
        """,
        test_it="""
        import pytest
        from aid import imported

        pytestmark = pytest.mark.parity("cp2")

        @pytest.fixture
        def trainer(rank):
            return rank

        def helper():
            pass

        def test_through_a_fixture(trainer):
            raise RuntimeError("no rank may start")

        class TestGroup:
            @pytest.fixture
            def own(self, rank):
                return rank

            def test_method(self, own):
                raise RuntimeError("no rank may start")

        def test_unmarked():
            raise RuntimeError("no rank may start")
        """,
        test_other="""
        import test_it

        def test_marks():
            assert not hasattr(test_it.imported, "pytestmark")
            assert not hasattr(test_it.helper, "pytestmark")
        """,
    )
    result = pytester.runpytest("--collect-only", "-q")
    assert _ids(result) == [
        "test_it.py::test_through_a_fixture[cp2]",
        "test_it.py::TestGroup::test_method[cp2]",
        "test_it.py::test_unmarked[cp2]",
        "test_other.py::test_marks",
    ]
    pytester.runpytest("test_other.py", "test_it.py", "-k", "marks").assert_outcomes(
        passed=1, deselected=3
    )


def test_topology_option_replaces_what_cases_declare(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_it=CASES)
    result = pytester.runpytest(
        "--collect-only", "-q", "--topology", "tp2", "--topology", "CP2×DP2", "--topology", "tp2"
    )
    assert "test_it.py::test_readout[tp2-none]" in _ids(result)
    assert "test_it.py::TestGroup::test_method[dp2xcp2]" in _ids(result)
    assert "test_it.py::test_plain" in _ids(result)
    assert len(_ids(result)) == 4 + 2 + 2 + 1


def test_keyword_selects_by_topology(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_it=CASES)
    result = pytester.runpytest("--collect-only", "-q", "-k", "dp2xcp2 and full")
    assert _ids(result) == ["test_it.py::test_readout[dp2xcp2-full]"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--topology", "cpx"), "--topology: topology 'cpx': expected 'single' or axes with sizes"),
        (("--topology", "zz2"), "unknown axis 'zz', known are tp, cp, dp, pp"),
        (("--topology", "cp32"), "--topology cp32: needs 32 ranks, at most 16 are allowed"),
        (("--parity-seed", "x"), "--parity-seed: expected a whole number, or FIRST:END with"),
        (("--parity-seed", "3:3"), "and at most 10000 seeds, got '3:3'"),
        (("--parity-seed", "0:10001"), "and at most 10000 seeds, got '0:10001'"),
        (("--parity-seed", "1:"), "and at most 10000 seeds, got '1:'"),
        (("--parity-timeout", "0"), "--parity-timeout: expected seconds above 0, got 0.0"),
        (("--parity-timeout", "nan"), "--parity-timeout: expected seconds above 0, got nan"),
        (("--parity-dtype", "float8"), "argument --parity-dtype: invalid choice: 'float8'"),
        (("-o", "shardproof_groups=mine"), "shardproof_groups: expected 'keep' or 'new'"),
        (("-o", "shardproof_max_ranks=no"), "shardproof_max_ranks: expected a whole number"),
        (("-o", "shardproof_axes=ep"), "axis declaration 'ep': expected NAME:data or NAME:model"),
        (("-o", "shardproof_preload=no_such"), "shardproof_preload: cannot find module 'no_such'"),
        (("--pdb",), "--pdb can't be used with parity cases yet"),
        (("--trace",), "--trace can't be used with parity cases yet"),
        (("--setup-plan",), "--setup-plan can't be used with parity cases yet"),
        (("--setup-only",), "--setup-only can't be used with parity cases yet"),
    ],
)
def test_bad_settings_are_usage_errors_before_anything_starts(
    pytester: pytest.Pytester, args: tuple[str, ...], says: str
) -> None:
    pytester.makepyfile(test_it=CASES)
    result = pytester.runpytest(*args)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    text = result.stderr.str() + result.stdout.str()
    assert says in text
    assert "no rank may start" not in text


def test_debugger_is_left_alone_where_no_parity_case_is_selected(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(test_it=CASES)
    result = pytester.runpytest("--pdb", "-m", "not parity")
    result.assert_outcomes(passed=1, deselected=10)


def test_own_axes_are_declared_in_the_ini(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nshardproof_axes = fsdp:data expert:model\n")
    pytester.makepyfile(test_it=CASES)
    result = pytester.runpytest("--collect-only", "-q", "--topology", "expert2xfsdp2")
    assert "test_it.py::test_defaults[fsdp2xexpert2]" in _ids(result)


def test_bad_input_fails_its_own_cell_and_no_other(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.parity("cp2xfoo", 7)
        def test_names(rank): ...

        @pytest.mark.parity("cp3", multiple_of={"cp": 2})
        def test_fit(rank): ...

        @pytest.mark.parity("tp3", divisor_of={"tp": 4})
        def test_divides(rank): ...

        @pytest.mark.parity("cp2", spam=1)
        def test_keyword(rank): ...

        @pytest.mark.parity("cp2", timeout=-1)
        def test_timeout(rank): ...

        @pytest.mark.parity("cp2", requires="torch")
        def test_requires(rank): ...

        @pytest.mark.parity("cp2", multiple_of={"zz": 2})
        def test_sizes(rank): ...

        def test_without_marker(rank): ...

        def test_plain(): ...
        """
    )
    result = pytester.runpytest("-v")
    result.assert_outcomes(errors=9, passed=1)
    text = result.stdout.str()
    for says in (
        "invalid: parity marker: topology 'cp2xfoo': expected 'single' or axes with sizes",
        "invalid: parity marker: a topology is a name like 'cp2', got 7",
        "cp3 does not fit: this case needs cp to be a multiple of 2, got cp3",
        "tp3 does not fit: this case needs tp to divide 4, got tp3",
        "parity marker: expected keywords among timeout, requires,",
        "parity marker: timeout must be seconds above 0, got -1",
        "parity marker: requires must be a list of names, got one string",
        "parity marker: multiple_of must map axes (cp, dp, pp, tp) to whole numbers",
        "has no parity marker; add @pytest.mark.parity('cp2')",
        "_no_other.py::test_fit[cp3]' --topology cp3",
    ):
        assert says in text, says


def test_a_unittest_method_is_refused(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import unittest
        import pytest

        class TestOld(unittest.TestCase):
            @pytest.mark.parity("cp2")
            def test_method(self): ...
        """
    )
    result = pytester.runpytest()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "not on unittest.TestCase methods" in result.stderr.str() + result.stdout.str()


def test_skips_are_decided_before_a_rank_starts(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.parity("cp2", requires=["no-such-distribution>=3"])
        def test_requires(rank): ...

        @pytest.mark.parity("cp2", requires=["pytest>=999"])
        def test_version(rank): ...

        @pytest.mark.parity("cp2")
        @pytest.mark.skipif(True, reason="by mark")
        def test_mark(rank): ...

        @pytest.mark.parity("cp20")
        def test_ranks(rank): ...

        @pytest.mark.parity("cp2")
        @pytest.mark.xfail(run=False, reason="known")
        def test_not_run(rank): ...
        """
    )
    pytester.makeconftest(
        """
        def pytest_sessionfinish(session):
            controller = session.config.pluginmanager.getplugin("shardproof-controller")
            assert controller._pool._server is None
            print("no fork server was started")
        """
    )
    result = pytester.runpytest("-rs", "-s")
    result.assert_outcomes(skipped=4, xfailed=1)
    result.stdout.fnmatch_lines_random(
        [
            "*needs no-such-distribution>=3, which is not installed*",
            "*needs pytest>=999, but pytest * is installed*",
            "*by mark*",
            "*cp20 needs 20 ranks, at most 16 are allowed (shardproof_max_ranks)*",
            "*no fork server was started*",
        ]
    )


def test_plain_runs_do_not_import_torch(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys

        def test_plain():
            assert "torch" not in sys.modules
        """
    )
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(passed=1)


def test_option_surface(pytester: pytest.Pytester) -> None:
    """A new option is a decision: add it here, to the README and to the changelog."""
    result = pytester.runpytest("--help")
    ours = ("  --parity", "  --against", "  --mutants")
    options = [line.split()[0] for line in result.outlines if line.startswith(ours)]
    assert options == [
        "--parity-dtype={float64,float32,bfloat16}",
        "--parity-seed=N",
        "--parity-timeout=SECONDS",
        "--parity-fresh",
        "--parity-report=DIR",
        "--parity-ledger={on,off}",
        "--mutants=WHICH",
        "--against=REV",
    ]
    settings = [line.split()[0] for line in result.outlines if line.startswith("  shardproof_")]
    assert settings == [
        "shardproof_subject",
        "shardproof_survivors",
        "shardproof_preload",
        "shardproof_axes",
        "shardproof_topologies",
        "shardproof_max_ranks",
        "shardproof_groups",
    ]


def test_fixes_alone_adds_to_the_marker_around_it(pytester: pytest.Pytester) -> None:
    """On one value of a parameter, or on a method of a class whose marker has the topologies."""
    items = pytester.getitems(
        """
        import pytest

        @pytest.mark.parity("cp2", "cp4", timeout=7, fixes="#1")
        @pytest.mark.parametrize(
            "n",
            [
                1,
                pytest.param(2, marks=pytest.mark.parity(fixes="#2", fixes_raises=KeyError)),
                pytest.param(3, marks=pytest.mark.parity(timeout=9)),
            ],
        )
        def test_values(rank, n):
            pass

        @pytest.mark.parity("dp2", timeout=8)
        class TestClass:
            @pytest.mark.parity(fixes="#3", fixes_raises=("KeyError", ValueError))
            def test_method(self, rank):
                pass
        """
    )
    found = {item.name: read_options(item) for item in items}
    assert {name: (one.timeout, one.fixes, one.raises_there) for name, one in found.items()} == {
        "test_values[cp2-1]": (7, "#1", ()),
        "test_values[cp4-1]": (7, "#1", ()),
        "test_values[cp2-2]": (7, "#2", ("KeyError",)),
        "test_values[cp4-2]": (7, "#2", ("KeyError",)),
        "test_values[cp2-3]": (7, "#1", ()),
        "test_values[cp4-3]": (7, "#1", ()),
        "test_method[dp2]": (8, "#3", ("KeyError", "ValueError")),
    }
