"""The matrix of faults against probes is what audits/faults.json says, and leaves no fault uncaught.

Every cell in which a probe catches a fault is run again here, and the healthy row whole. The cells in which a probe
passes, and the many in which the same tripwire ends the run, are the slow test's.
"""

import json
from pathlib import Path

import pytest

from probes.catalogue import FULL, QUICK
from probes.faults import FAULTS
from probes.matrix import Outcome, row
from probes.subject import Subject

ROOT = Path(__file__).resolve().parents[2]
SAID = json.loads((ROOT / "audits" / "faults.json").read_text(encoding="utf-8"))
NAMES = [probe.name for probe in QUICK]
# Its noise is drawn afresh in every run: only the probe that looks for that can be relied on.
DRAWN = {"unrepeatable": {"determinism"}}


def outcomes(cells):
    return {name: cell.outcome.value for name, cell in cells.items()}


def said(fault):
    return {name: cell["outcome"] for name, cell in SAID[fault].items() if name in DRAWN.get(fault, NAMES)}


def test_the_matrix_names_every_fault_and_every_probe():
    assert list(SAID) == ["", *FAULTS]
    assert all(list(cells) == NAMES for cells in SAID.values())
    assert [probe.name for probe in FULL] == NAMES
    assert len(NAMES) == 17


def test_no_fault_is_uncaught_and_no_probe_fires_on_a_healthy_run():
    assert set(said("").values()) == {Outcome.MISSED.value}
    for fault in FAULTS:
        assert {Outcome.CAUGHT.value, Outcome.TRIPPED.value} & set(said(fault).values()), fault


def test_no_fault_needs_transformers_to_be_caught():
    for fault in FAULTS:
        others = {outcome for name, outcome in said(fault).items() if name != "parity"}
        assert {Outcome.CAUGHT.value, Outcome.TRIPPED.value} & others, fault


@pytest.mark.parametrize("probe", QUICK, ids=NAMES)
def test_a_healthy_run_passes(probe):
    assert outcomes(row(Subject(), (probe,), lambda: None)) == {probe.name: Outcome.MISSED.value}


# those of the variants alone are injected one by one in test_variants_probe
@pytest.mark.parametrize("fault", [name for name, fault in FAULTS.items() if not fault.in_variants])
def test_a_fault_is_caught_by_the_probes_that_the_matrix_names(fault):
    caught = [name for name, outcome in said(fault).items() if outcome == Outcome.CAUGHT.value]
    tripped = [name for name, outcome in said(fault).items() if outcome == Outcome.TRIPPED.value]
    again = {*caught, *tripped[:1]} - {
        "variants"
    }  # which sees some of them too, and takes longest: the slow test asks it
    found = row(Subject(fault=FAULTS[fault]), [probe for probe in QUICK if probe.name in again], lambda: None)
    assert found
    assert outcomes(found) == {name: outcome for name, outcome in said(fault).items() if name in again}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_every_cell_is_as_the_matrix_says(fault):
    found = outcomes(row(Subject(fault=FAULTS[fault]), QUICK, lambda: None))
    assert {name: outcome for name, outcome in found.items() if name in said(fault)} == said(fault)
