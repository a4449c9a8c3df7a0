"""Faults go in and come out without a trace, and what can't be one is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

from cases.controls import controls
from subjects.trainer import gather
from subjects.trainer.faults import FAMILIES, FAULTS, OF_FAMILY, Fault, chosen, inject, replaced
from subjects.trainer.faults.fault import merged


class Base:
    def method(self) -> str:
        return "own"

    @staticmethod
    def static() -> str:
        return "own"

    @classmethod
    def of_class(cls) -> str:
        return f"own of {cls.__name__}"


class Derived(Base):
    pass


def fault(module: Any, name: str, function: Any, **options: Any) -> Fault:
    given = {"axis": "cp", "case": "test_outputs.test_logits", "shows": "*"} | options
    return Fault(module=module, name=name, function=function, **given)


def test_a_function_is_replaced_within_the_block_alone() -> None:
    before = gather.scatter_rows
    with inject("one row zeroed"):
        assert gather.scatter_rows is FAULTS["one row zeroed"].function
    assert gather.scatter_rows is before


def test_it_comes_out_when_the_block_raises() -> None:
    before = gather.scatter_rows
    with pytest.raises(RuntimeError, match="inside"), inject("one row zeroed"):
        raise RuntimeError("inside")
    assert gather.scatter_rows is before


def test_methods_of_every_kind_are_replaced() -> None:
    with replaced(fault(Base, "method", lambda self: f"other of {type(self).__name__}")):
        assert Base().method() == "other of Base"
        assert Derived().method() == "other of Derived"
    with replaced(fault(Base, "static", lambda: "other")):
        assert Base.static() == Base().static() == "other"
    with replaced(fault(Base, "of_class", lambda cls: f"other of {cls.__name__}")):
        assert Derived.of_class() == "other of Derived"
    assert [Base().method(), Base.static(), Base.of_class()] == ["own", "own", "own of Base"]


def test_an_inherited_method_is_the_base_class_s_again() -> None:
    with replaced(fault(Derived, "method", lambda _: "other")):
        assert [Derived().method(), Base().method()] == ["other", "own"]
    assert "method" not in vars(Derived)
    assert Derived().method() == "own"


def test_an_unknown_fault_is_refused() -> None:
    with pytest.raises(KeyError, match="no fault 'two rows'"):
        inject("two rows")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("scatter_row", {}, r"gather\.scatter_row, which does not exist"),
        ("scatter_rows", {"axis": "pp"}, "axis is 'pp'; expected one of cp, tp, dp, any"),
        ("scatter_rows", {"case": "test_outputs"}, "expected 'test_module.test_function'"),
        ("scatter_rows", {"shows": ""}, "shows is empty"),
    ],
)
def test_what_can_t_be_a_fault_is_refused(name: str, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fault(gather, name, gather.scatter_rows, **options)


def test_where_a_fault_is_shown() -> None:
    def shown(**options: Any) -> tuple[str, ...]:
        return fault(gather, "scatter_rows", gather.scatter_rows, **options).topologies

    assert [shown(axis=axis) for axis in ("cp", "tp", "dp", "any")] == [
        ("cp2",),
        ("tp2",),
        ("dp2",),
        ("cp2",),
    ]
    assert shown(topology="cp4") == ("cp4",)
    assert shown(topology=["cp4", "tp2"]) == ("cp4", "tp2")


def test_a_name_in_two_families_is_refused() -> None:
    one = FAULTS["one row zeroed"]
    with pytest.raises(ValueError, match="'zeroed' is in rows and in weights"):
        merged({"rows": {"zeroed": one}, "weights": {"zeroed": one}})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"case": "test_output.test_logits"}, "fault 'lost': there is no test_output.py in cases/"),
        ({"case": "test_outputs.test_logit"}, r"'lost': cases/test_outputs.py has no case test_lo"),
        ({"params": {"plan": "empty"}}, r"'lost': .*test_logits has no parameter \['plan'\]"),
        (
            {"case": "test_outputs.test_plans", "params": {"plan": "full"}},
            r"'lost': no parameter set of its case has \{'plan': 'full'\}",
        ),
    ],
)
def test_a_control_of_no_case_is_refused(options: Any, message: str) -> None:
    lost = fault(gather, "scatter_rows", gather.scatter_rows, **options)
    with pytest.raises(LookupError, match=message):
        controls({"lost": lost}, module="here")


def test_a_control_keeps_the_options_of_its_case() -> None:
    from cases import test_outputs

    lost = fault(gather, "scatter_rows", gather.scatter_rows)
    plan = fault(
        gather,
        "scatter_rows",
        gather.scatter_rows,
        case="test_outputs.test_plans",
        params={"plan": "interleaved"},
        axis="dp",
    )
    found = controls({"lost": lost, "plan": plan}, module="here")
    assert sorted(found) == [
        "test_outputs__test_logits",
        "test_outputs__test_plans__plan_interleaved",
    ]
    marks = {mark.name: mark for mark in found["test_outputs__test_logits"].pytestmark}
    (own,) = [mark for mark in [test_outputs.pytestmark.mark] if mark.name == "parity"]
    assert marks["parity"].args == ("cp2",)
    assert marks["parity"].kwargs == {**own.kwargs, "reference_ignores": ["fault"]}
    values = [
        mark.args[1][0].values
        for mark in found["test_outputs__test_plans__plan_interleaved"].pytestmark
        if mark.name == "parametrize" and mark.args[0] == "plan"
    ]
    assert values == [("interleaved",)]


def test_fixtures_of_one_name_in_two_modules_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from cases import test_metrics, test_outputs

    @pytest.fixture
    def drawn() -> int:
        return 1

    @pytest.fixture
    def other() -> int:
        return 2

    monkeypatch.setattr(test_outputs, "drawn", drawn, raising=False)
    monkeypatch.setattr(test_metrics, "drawn", other, raising=False)
    metric = "test_metrics.test_metrics_over_data_parallel_ranks"
    both = {
        "one": fault(gather, "scatter_rows", gather.scatter_rows),
        "two": fault(gather, "scatter_rows", gather.scatter_rows, case=metric),
    }
    assert controls({"one": both["one"]}, module="here")["drawn"] is drawn
    with pytest.raises(ValueError, match="two modules of cases have a fixture 'drawn'"):
        controls(both, module="here")


def test_a_sample_has_some_of_every_family_and_every_fault_comes_up() -> None:
    assert chosen(OF_FAMILY, "all") == FAULTS
    once = chosen(OF_FAMILY, "sample:1")
    assert list(once) == list(chosen(OF_FAMILY, "sample:1"))
    seen: set[str] = set()
    for seed in range(120):
        some = chosen(OF_FAMILY, f"sample:{seed}")
        assert len(some) < len(FAULTS) / 2
        for family in FAMILIES:
            assert len(some.keys() & OF_FAMILY[family].keys()) >= len(OF_FAMILY[family]) / 8
        seen |= set(some)
    assert seen == set(FAULTS)


@pytest.mark.parametrize("words", ["", "sample", "sample:", "some", "all:1"])
def test_a_choice_that_is_none_is_refused(words: str) -> None:
    with pytest.raises(ValueError, match=r"CONTROLS=all or CONTROLS=sample:SEED"):
        chosen(OF_FAMILY, words)
