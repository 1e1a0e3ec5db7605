"""The matrix: what becomes of a pair, when a fault counts as uncaught, and what the page says."""

from dataclasses import dataclass, replace

import pytest

from fathom.model.errors import Tripwire
from fathom.probes.fault import Fault
from fathom.probes.finding import HeatMap, Report, at_most, judged, measured, vacuous
from fathom.probes.matrix import Cell, Outcome, row, uncaught
from fathom.probes.subject import Subject
from fathom.scripts.parts.faults_page import page


@dataclass(frozen=True)
class Fake:
    between_ranks = False
    in_variants = False
    in_drafts = False
    of_llama = False
    of_v41 = False
    name: str
    report: Report | Tripwire
    idle: bool = False
    question = "does it?"

    def needs(self, subject):
        del subject

    def vacuous(self, subject):
        assert subject.fault in {None, FAULT}
        return "too short" if self.idle else None

    def measure(self, subject, progress):
        progress(0.5, "half")
        assert subject.fault is FAULT
        if isinstance(self.report, Tripwire):
            raise self.report
        return self.report


FAULT = Fault("broken", "Something is broken.", "a thread")
GOOD = Report("fine", (judged("error", 0.5, at_most(1)), measured("size", 3)))
BAD = Report("bad", (judged("size", 0.5, at_most(1)), judged("error", 2, at_most(1), layer=3)))


@pytest.mark.parametrize(
    ("probe", "cell"),
    [
        (Fake("a", GOOD), Cell(Outcome.MISSED, "")),
        (Fake("a", BAD), Cell(Outcome.CAUGHT, "error, layer 3")),
        (Fake("a", Report("", (vacuous("rows", "none"),))), Cell(Outcome.CAUGHT, "rows")),
        (Fake("a", Report("", (measured("size", 3),))), Cell(Outcome.CAUGHT, "nothing was judged")),
        (
            Fake("a", Tripwire("streams", 2, 7, "NaN", "finite")),
            Cell(Outcome.TRIPPED, "streams of layer 2 at position 7: NaN, expected finite"),
        ),
        (Fake("a", GOOD, idle=True), Cell(Outcome.NOT_APPLICABLE, "too short")),
    ],
)
def test_cells(probe, cell):
    assert row(Subject(fault=FAULT), (probe,)) == {"a": cell}


def test_a_fault_that_the_model_cannot_express_is_not_run():
    fault = replace(FAULT, inapplicable=lambda _: "no such layer")
    cells = row(Subject(fault=fault), (Fake("a", BAD),))
    assert cells == {"a": Cell(Outcome.NOT_APPLICABLE, "no such layer")}


def test_a_fault_of_a_variant_is_run_by_probes_that_run_variants_alone():
    fault = replace(FAULT, in_variants=True)
    assert row(Subject(fault=fault), (Fake("a", BAD),))["a"].outcome is Outcome.NOT_APPLICABLE


def test_a_fault_of_drafts_is_run_by_probes_that_draft_alone():
    fault = replace(FAULT, in_drafts=True)
    assert row(Subject(fault=fault), (Fake("a", BAD),))["a"].outcome is Outcome.NOT_APPLICABLE


def cells(*outcomes):
    return {name: Cell(outcome, "here") for name, outcome in zip("abc", outcomes, strict=False)}


CAUGHT, TRIPPED, MISSED, NA = Outcome.CAUGHT, Outcome.TRIPPED, Outcome.MISSED, Outcome.NOT_APPLICABLE


@pytest.mark.parametrize(
    ("outcomes", "lost"),
    [
        ((MISSED, CAUGHT), False),
        ((MISSED, TRIPPED), False),
        ((NA, NA), False),
        ((MISSED, NA), True),
        ((MISSED, MISSED), True),
    ],
)
def test_uncaught(outcomes, lost):
    assert uncaught({"broken": cells(*outcomes)}) == (["broken"] if lost else [])


def made(clean=(MISSED, MISSED), **matrix):
    """A page of faults that exist, see `FAULTS`."""
    rows = {name.replace("_", "-"): cells(*outcomes) for name, outcomes in matrix.items()}
    return page("faults", rows, cells(*clean), {"commit": "0123456789ab"}, "Oh.")


@pytest.mark.parametrize(
    ("outcomes", "clean", "verdict"),
    [
        ((CAUGHT, MISSED), (MISSED, MISSED), "Pass: 1 of 1 faults are caught, 0 of them by a tripwire"),
        ((TRIPPED, TRIPPED), (MISSED, MISSED), "Pass: 1 of 1 faults are caught, 1 of them by a tripwire"),
        ((MISSED, MISSED), (MISSED, MISSED), "Fail: 0 of 1 faults are caught"),
        ((CAUGHT, MISSED), (MISSED, CAUGHT), "Fail: 1 of 1 faults are caught"),
    ],
)
def test_the_page_opens_with_the_verdict(outcomes, clean, verdict):
    text = made(clean, relu_dropped=outcomes).markdown()
    assert f"\n\n**{verdict}" in text
    assert ("Caught by nothing: relu-dropped." in text) == (outcomes == (MISSED, MISSED))
    assert ("False alarms: b." in text) == (clean == (MISSED, CAUGHT))
    assert f'\nverdict: "{verdict[:4].lower()}"\ncommit: "0123456789ab"\n' in text
    assert "## What surprised us\n\nOh.\n" in text


def test_the_page_shows_each_cell_and_counts_what_each_probe_catches():
    found = made(relu_dropped=(CAUGHT, NA), keys_lost=(CAUGHT, CAUGHT), top_k_halved=(TRIPPED, CAUGHT))
    heat = next(part for part in found.parts if isinstance(part, HeatMap))
    assert heat.rows == ("no fault", "relu-dropped", "keys-lost", "top-k-halved")
    assert heat.values == [[None, None], [1, 0], [1, 1], [0.75, 1]]
    text = found.markdown()
    assert "| a | 2 | 1 |\n| b | 2 | 0 |" in text
    assert (
        "| keys-lost | One key in twenty scores -inf, as a NaN byte made them. | vllm#52109 | a, b | a: here |" in text
    )
    assert "| b, tripwire in 1 | b: here |" in text
    assert found.data["keys-lost"]["b"] == {"outcome": "caught", "evidence": "here"}
    assert list(found.data) == ["", "relu-dropped", "keys-lost", "top-k-halved"]
    assert made(top_k_halved=(TRIPPED, TRIPPED)).markdown().count("| tripwire in 2 | tripwire: here |") == 1
