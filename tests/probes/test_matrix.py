"""The matrix: what becomes of a pair, when a fault counts as uncaught, and what the page says."""

from dataclasses import dataclass, replace

import pytest

from model.errors import Tripwire
from probes.fault import Fault
from probes.finding import Report, at_most, judged, measured, vacuous
from probes.matrix import Cell, Outcome, markdown, row, uncaught
from probes.subject import Subject


@dataclass(frozen=True)
class Fake:
    between_ranks = False
    in_variants = False
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
    done = []
    cells = row(Subject(fault=FAULT), (probe,), lambda: done.append(1))
    assert cells == {"a": cell}
    assert done == [1]


def test_a_fault_that_the_model_cannot_express_is_not_run():
    fault = replace(FAULT, inapplicable=lambda _: "no such layer")
    cells = row(Subject(fault=fault), (Fake("a", BAD),), lambda: None)
    assert cells == {"a": Cell(Outcome.NOT_APPLICABLE, "no such layer")}


def test_a_fault_of_a_variant_is_run_by_probes_that_run_variants_alone():
    fault = replace(FAULT, in_variants=True)
    assert row(Subject(fault=fault), (Fake("a", BAD),), lambda: None)["a"].outcome is Outcome.NOT_APPLICABLE


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


@pytest.mark.parametrize(
    ("outcomes", "clean", "verdict"),
    [
        ((CAUGHT, MISSED), (MISSED, MISSED), "PASS: 1 of 1 faults are caught, 0 of them by a tripwire"),
        ((TRIPPED, TRIPPED), (MISSED, MISSED), "PASS: 1 of 1 faults are caught, 1 of them by a tripwire"),
        ((MISSED, MISSED), (MISSED, MISSED), "FAIL: 0 of 1 faults are caught"),
        ((CAUGHT, MISSED), (MISSED, CAUGHT), "FAIL: 1 of 1 faults are caught"),
    ],
)
def test_the_page_opens_with_the_verdict(outcomes, clean, verdict):
    page = markdown({"broken": cells(*outcomes)}, cells(*clean), {"broken": FAULT}, ("a", "b"), {"seed": "0"}, "Oh.")
    assert f"**{verdict}" in page
    assert page.startswith(f"---\nverdict: {verdict[:4].lower()}\nseed: 0\n---\n")
    marks = {CAUGHT: "●", TRIPPED: "T", MISSED: "·"}
    assert f"| broken | {' | '.join(marks[o] for o in outcomes)} |" in page
    assert f"| *none* | {' | '.join(marks[o] for o in clean)} |" in page
    assert "| broken | Something is broken. | a thread | " in page
    assert "## What surprised us\n\nOh.\n" in page


def test_the_page_counts_what_each_probe_catches_and_what_it_alone_catches():
    matrix = {"x": cells(CAUGHT, MISSED), "y": cells(CAUGHT, CAUGHT), "z": cells(TRIPPED, CAUGHT)}
    clean = cells(MISSED, MISSED)
    page = markdown(matrix, clean, dict.fromkeys(matrix, FAULT), ("a", "b"), {}, "")
    assert "| *caught* | 2 | 2 |\n| *by it alone* | 1 | 0 |" in page
    assert "surprised" not in page
