"""The page of `scripts.fault_matrix`, and its rows: a fault, and what each probe saw of it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import torch

from fathom.probes.catalogue import QUICK
from fathom.probes.faults import FAULTS
from fathom.probes.finding import JSON, HeatMap, Part, Table, Text
from fathom.probes.matrix import Cell, Outcome, Row, row, uncaught
from fathom.probes.report import Page
from fathom.probes.subject import Subject
from fathom.runtime.options import RunOptions

SEEN: Final = {Outcome.CAUGHT, Outcome.TRIPPED}
KINDS: Final = {  # in the heat map: value, marker, meaning; a cell of a probe that passed is empty
    Outcome.CAUGHT: (1.0, "o", "a finding of the probe failed"),
    Outcome.TRIPPED: (0.75, "^", "a tripwire ended the run"),
    Outcome.NOT_APPLICABLE: (0.0, "_", "the probe cannot tell"),
}
HEALTHY: Final = "no fault"

HEAD: Final = """\
Each row is a runtime with one fault in it, each column a probe that was run on it: every cell is a run, none a claim.
Empty: the probe passed, it does not look at this. A probe cannot tell where one rank shows no fault between ranks,
where several ranks share a fault that each of them has, where a full cache has no fault of a variant, where nothing is
drafted, where the model cannot express the fault, or where the probe does not apply to the model. The first row is the
runtime without a fault: anything in it would be a false alarm."""

NOTICED: Final = """\
**Answers hide faults.** Of the {asked} faults that `needle` could see and that no tripwire stops there, it catches
{caught} and passes {passed}. Swapped nibbles, a transposed mixing of the streams, a ring read one row off, no clamp:
the demo goes on finding the codes that it is asked for. Fluent and even right answers say next to nothing about a
runtime.

**The cheapest check found what was thought to need a golden vector.** Doubly stochastic is what all wrong Sinkhorns
nearly are, but this checkpoint has learned matrices that the iterations do not finish, and those of a row-first one
leave columns that are too far off at the very first token. The tripwire ends that run right there.

**A dropped clamp in the shared expert shows in one place only**: where the experts are pushed beyond the limit on
purpose. No prompt that we ran gets there.

**A stale frontier shows in probes that never look at state**, rope and quantisation among them: they run two prompts,
and the second comes out differently."""

NOT_CLAIMED: Final = """\
Probes run here with their quick settings, on short prompts: a fault that a quick run misses may be caught by the full
one, and a fault of another size (two keys lost instead of one in twenty) may pass where this one does not. The faults
are our own re-enactments of what the named threads report; the originals sat in other code. Faults that one process
cannot express (an int32 offset in a kernel) stand here in the closest form that it can.

Which probes see *stale-frontier* depends on the probes that ran before them in the same process: in `scripts.probe` one
of them that is run alone may pass.

The column *same* was made with transformers as one of the other sides. Without transformers it would be emptier; no
fault needs it to be caught (a test holds that)."""


def page(name: str, matrix: Mapping[str, Row], healthy: Row, facts: Mapping[str, JSON], surprises: str) -> Page:
    """Return the page.

    Parameters
    ----------
    name
        The page's file, without its ending.
    matrix
        A row for each of `FAULTS`, by its name.
    healthy
        The row of the run without a fault; its probes are the columns.
    facts
        What decides the numbers.
    surprises
        What surprised us, Markdown; "" for a run of which nobody has noticed anything yet.

    """
    missing, wrong = uncaught(matrix), [name for name, cell in healthy.items() if cell.outcome is not Outcome.MISSED]
    trips = [name for name, cells in matrix.items() if _mostly_tripped(cells)]
    verdict = (
        f"{'Fail' if missing or wrong else 'Pass'}: {len(matrix) - len(missing)} of {len(matrix)} faults are caught,"
        f" {len(trips)} of them by a tripwire under every probe; {len(wrong)} of {len(healthy)} probes fail on a"
        " healthy run"
    )
    told = " ".join(
        f"{what}: {', '.join(names)}."
        for what, names in (("Caught by nothing", missing), ("False alarms", wrong))
        if names
    )
    rows = {HEALTHY: healthy} | dict(matrix)
    parts: list[Part] = [
        HeatMap(
            "What each probe sees of each fault",
            "probe",
            "fault",
            tuple(healthy),
            tuple(rows),
            [[_kind(cells[probe]) for probe in healthy] for cells in rows.values()],
            HEAD,
            tuple(KINDS.values()),
        ),
        _counts(matrix, list(healthy)),
        _faults(matrix),
        *([Text("What surprised us", surprises)] if surprises else []),
        Text("What this does not claim", NOT_CLAIMED),
    ]
    data = {fault: {probe: cell.to_json() for probe, cell in cells.items()} for fault, cells in rows.items()}
    data = {"" if fault == HEALTHY else fault: cells for fault, cells in data.items()}
    facts = {"verdict": "fail" if missing or wrong else "pass"} | dict(facts)
    return Page(name, "Faults against probes: would anybody have noticed?", verdict, told, parts, facts, data)


def _kind(cell: Cell) -> float | None:
    return KINDS[cell.outcome][0] if cell.outcome in KINDS else None


def _counts(matrix: Mapping[str, Row], probes: Sequence[str]) -> Table:
    """How many faults each probe catches itself, and how many that no other probe and no tripwire shows."""
    seen = {name: [probe for probe in probes if cells[probe].outcome in SEEN] for name, cells in matrix.items()}
    rows: list[list[float | str | None]] = []
    for probe in probes:
        caught = [name for name, cells in matrix.items() if cells[probe].outcome is Outcome.CAUGHT]
        rows.append([probe, len(caught), sum(seen[name] == [probe] for name in caught)])
    return Table("How many faults each probe catches", ("probe", "caught", "by it alone"), rows)


def _faults(matrix: Mapping[str, Row]) -> Table:
    rows = [[name, FAULTS[name].what, FAULTS[name].seen, *_shown(cells)] for name, cells in matrix.items()]
    columns = ("fault", "what is wrong", "seen in", "caught by", "first shown by")
    return Table("The faults, and what shows them", columns, rows)


def _shown(cells: Row) -> tuple[str, str]:
    """The probes that see a fault, and the first of them in its own words; a tripwire where it ends most runs."""
    tripped = [cell.evidence for cell in cells.values() if cell.outcome is Outcome.TRIPPED]
    caught = {probe: cell.evidence for probe, cell in cells.items() if cell.outcome is Outcome.CAUGHT}
    names = [*caught, *([f"tripwire in {len(tripped)}"] if tripped else [])]
    words = [f"{probe}: {evidence}" for probe, evidence in caught.items()]
    trips = [f"tripwire: {evidence}" for evidence in tripped]
    # a tripwire in one column may be that of what the probe did to the run
    first = [*trips, *words] if _mostly_tripped(cells) else [*words, *trips]
    return ", ".join(names) or "nothing", (*first, "nothing")[0]


def _mostly_tripped(cells: Row) -> bool:
    return sum(cell.outcome is Outcome.TRIPPED for cell in cells.values()) > len(cells) / 2


def noticed(matrix: Mapping[str, Row]) -> str:
    """What surprised us, with the counts of this matrix."""
    outcomes = [cells["needle"].outcome for cells in matrix.values()]
    caught, passed = outcomes.count(Outcome.CAUGHT), outcomes.count(Outcome.MISSED)
    return NOTICED.format(asked=caught + passed, caught=caught, passed=passed)


def row_of(model: Path, options: RunOptions, fault: str | None, kept: Row) -> Row:
    """Run the probes that have no cell yet on one fault; one thread, as several processes may run."""
    torch.set_num_threads(1)
    subject = Subject(directory=model, options=options, fault=None if fault is None else FAULTS[fault])
    made = row(subject, [probe for probe in QUICK if probe.name not in kept])
    return {probe.name: made[probe.name] if probe.name in made else kept[probe.name] for probe in QUICK}
