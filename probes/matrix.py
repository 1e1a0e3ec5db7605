"""The matrix of faults against probes: which probe sees which fault, found by running every pair."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from fathom.probes.fault import Fault
from fathom.probes.finding import JSON, TRIPWIRE
from fathom.probes.probe import Probe, attempt, lacks, silent
from fathom.probes.subject import Subject


class Outcome(StrEnum):
    """What one probe made of one fault."""

    CAUGHT = "caught"  # a finding of the probe failed
    TRIPPED = "tripwire"  # the run ended before the probe could measure
    MISSED = "missed"
    NOT_APPLICABLE = "not applicable"  # the model cannot express the fault, or the probe does not apply to the model


@dataclass(frozen=True, slots=True)
class Cell:
    """One pair."""

    outcome: Outcome
    evidence: str  # the first finding that failed, or the tripwire; "" when missed

    def to_json(self) -> dict[str, JSON]:
        """Return the fields as JSON values."""
        return {"outcome": self.outcome.value, "evidence": self.evidence}


Row = dict[str, Cell]  # by probe


def row(subject: Subject, probes: Sequence[Probe]) -> Row:
    """Run each probe on `subject`, whose fault (or none) makes the row."""
    return {probe.name: _cell(probe, subject) for probe in probes}


def _cannot_show(probe: Probe, fault: Fault) -> str | None:
    """Why no run of this probe could tell the fault from a healthy one."""
    if fault.between_ranks and not probe.between_ranks:
        return "on one rank the fault does nothing"
    if probe.between_ranks and not fault.between_ranks:
        return "several ranks have the fault as one has it"
    if fault.in_variants and not probe.in_variants:
        return "in full caches the fault does nothing"
    if fault.in_runtime and not probe.in_runtime:
        return "the fault is in how messages become ids, or logits a token"
    if fault.in_drafts and not probe.in_drafts:
        return "where no token is drafted the fault does nothing"
    return None


def _cell(probe: Probe, subject: Subject) -> Cell:
    why = None
    if subject.fault is not None:
        why = _cannot_show(probe, subject.fault) or subject.fault.inapplicable(subject.config)
    if why is None:
        healthy = replace(subject, fault=None)
        why = lacks(probe, healthy) or probe.vacuous(healthy)
    if why is not None:
        return Cell(Outcome.NOT_APPLICABLE, why)
    ran = attempt(probe, subject, silent)  # one that breaks down is a failure, and the other cells are run
    if not ran.report.failed:
        return Cell(Outcome.MISSED, "")
    failed = [finding for finding in ran.report.findings if finding.failed]
    if not failed:
        return Cell(Outcome.CAUGHT, "nothing was judged")
    if failed[0].what.startswith(TRIPWIRE):  # nothing that the probe measured before has failed
        return Cell(Outcome.TRIPPED, str(failed[0].evidence["why"]))
    where = "" if failed[0].layer is None else f", layer {failed[0].layer}"
    return Cell(Outcome.CAUGHT, f"{failed[0].what}{where}")


def uncaught(matrix: Mapping[str, Row]) -> list[str]:
    """Names of faults that the model can express and that neither a probe nor a tripwire saw."""
    outcomes = {name: {cell.outcome for cell in cells.values()} for name, cells in matrix.items()}
    seen = {Outcome.CAUGHT, Outcome.TRIPPED}
    return [name for name, found in outcomes.items() if not found & seen and found != {Outcome.NOT_APPLICABLE}]
