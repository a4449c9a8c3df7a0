# `make parity` and `make test` do all set-up themselves; a second run takes none.
#
#   PYTHON=python3.12   the interpreter that .venv is made with (first run only)
#   TORCH=2.14.1        another version of torch
#   ARGS="-k readout"   more arguments for pytest
#   REV=main            what `make against` and `make diagnostics` compare with

PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	if $$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; \
	then echo $$python; break; fi; done)
BIN := .venv/bin
# Parts of the tree that exist; the longest tests come first, so that two processes end together.
TESTED := $(wildcard subjects harness/tests oracles ci/tests)
CHECKED := $(wildcard harness oracles subjects cases ci conftest.py)
# `make test PART=...`: unit, faults (ranks and sessions die), against (the control against a parent),
# controls (faults put into the trainer must be caught) or floors (of what the cases observe). The
# whole check gives each its own lane.
PART ?= all
FAULTS := $(wildcard $(addprefix harness/tests/test_,plugin_faults.py fleet_survivors.py ledger_cells.py))
AGAINST := $(wildcard harness/tests/test_against_*.py ci/tests/test_diagnostics.py)
CONTROL_TESTS := $(wildcard subjects/tests/test_controls.py)
FLOOR_TESTS := $(wildcard subjects/tests/test_floor_of_cases.py)
CHOSEN_all := $(TESTED)
CHOSEN_unit := $(TESTED) $(addprefix --ignore=,$(FAULTS) $(AGAINST) $(CONTROL_TESTS) $(FLOOR_TESTS))
CHOSEN_faults := $(FAULTS)
CHOSEN_against := $(AGAINST)
CHOSEN_controls := $(CONTROL_TESTS)
CHOSEN_floors := $(FLOOR_TESTS)
# `make parity CASES=...`: core (outputs, gradients, metrics, attention, the contract), parts (slots,
# heads and probes, the head, micro-batches, the optimizer, files) or all.
CASES ?= core
PARTS := $(addprefix cases/test_,combinations.py custom.py heads.py micro_batches.py optimizer.py \
	rules.py slots.py weights.py)
CASES_core := cases $(addprefix --ignore=,$(PARTS))
CASES_parts := $(PARTS)
CASES_all := cases
# `make test PART=controls CONTROLS=sample:SEED`: some faults of every family, others for each seed.
# `make test PART=floors FLOORS=sample:SEED`: a third of the cases, in the same way.
CONTROLS ?= all
FLOORS ?= all
export CONTROLS FLOORS
# `make mutants MUTANTS=sample:SEED:SHARE MUTATED=cases/test_x.py`: which mutants of collectives are
# tried, and with which cases. Those without a backward pass come first, they cost least; refusals
# come last, they notice least. Published widths call what narrow ones do, and take minutes. Two
# ranks of an axis call all that four do, and cost a third.
MUTANTS ?= all
FORWARD := cases/test_outputs.py cases/test_metrics.py cases/test_combinations.py
LAST := cases/test_contract.py
WIDE := cases/test_native.py
MUTATED ?= $(FORWARD) $(filter-out $(FORWARD) $(LAST) $(WIDE),$(wildcard cases/test_*.py)) $(LAST)
MUTATED_ON ?= cp2 tp2 dp2xcp2
# `make properties EXAMPLES=...`: how many random forwards.
EXAMPLES ?= 1000
PROGRAMS := ci/benchmark ci/diagnostics ci/ledger_suite ci/lock ci/setup ci/wheel

# One thread a process: a cell runs as many processes as it has ranks.
export OMP_NUM_THREADS ?= 1
# The commit before: the parent of a change that is one commit.
REV ?= HEAD~1
export TORCH

.DEFAULT_GOAL := parity
.PHONY: parity test properties lint style types format lock lock-check wheel benchmark against mutants \
	diagnostics setup clean

parity: setup ## the parity cases, on every topology that they name
	$(BIN)/pytest $(CASES_$(CASES)) -m "not native" $(ARGS)

test: setup ## the project's own tests
	$(BIN)/pytest $(CHOSEN_$(PART)) -m "not native" $(ARGS)

properties: setup ## random forwards on warm ranks against one device, other ones each time
	EXAMPLES=$(EXAMPLES) $(BIN)/pytest subjects/tests/test_properties.py -m properties --hypothesis-show-statistics $(ARGS)

lint: style types ## style, format and types

style: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy $(CHECKED) $(PROGRAMS)

format: setup ## mend style and format where a machine can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock: setup ## write requirements.lock from pyproject.toml
	$(BIN)/python ci/lock

lock-check: setup ## fail when requirements.lock no longer follows from pyproject.toml
	$(BIN)/python ci/lock --check

wheel: setup ## build the wheel, and try it in an empty environment
	$(BIN)/python ci/wheel

benchmark: setup ## seconds per trivial case, beside other ways to run one
	$(BIN)/python ci/benchmark $(ARGS)

against: setup ## the parity cases on the trainer of REV too: which of them catch the difference
	$(BIN)/pytest cases -m "not native" --against "$(REV)" $(ARGS)

mutants: setup ## the cases with one collective broken at a time: which mutants no case notices
	$(BIN)/pytest $(MUTATED) -m "not native" --mutants "$(MUTANTS)" \
		$(addprefix --topology ,$(MUTATED_ON)) $(ARGS)

diagnostics: setup ## fail on lint and type diagnostics that REV does not have
	$(BIN)/python ci/diagnostics "$(REV)" --types $(CHECKED) $(PROGRAMS)

setup:
	@if [ -z "$(PYTHON)" ]; then \
		echo "setup: no Python 3.11, 3.12 or 3.13 found: name one with make PYTHON=..." >&2; exit 1; fi
	@$(PYTHON) ci/setup

clean: ## remove all that set-up, builds, tools and runs wrote
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find reports -mindepth 1 ! -name README.md -delete
