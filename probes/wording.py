"""What pages and console say alike: the verdict on a run, and its findings in the order and the words to read."""

import json
import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from probes.finding import FAILURES, JSON, Finding, Report, Verdict, number
from probes.probe import Run

ALIKE = 2  # findings that differ in the layer alone, from which they share a row
LONGEST = 160  # characters of one piece of evidence; the JSON has all of it


def verdict(report: Report) -> Verdict:
    """PASS, or the worst of what failed; FAIL where nothing was judged."""
    if not report.failed:
        return Verdict.PASS
    return next((finding.verdict for finding in worst_first(report.findings) if finding.failed), Verdict.FAIL)


def headline(run: Run) -> str:
    """The verdict in a few words, without a full stop."""
    judged = [finding for finding in run.report.findings if finding.verdict is not Verdict.MEASURED]
    failed, hollow = (sum(finding.verdict is v for finding in judged) for v in (Verdict.FAIL, Verdict.VACUOUS))
    if not judged:
        return "Fail: nothing was judged, and a probe that cannot fail shows nothing"
    if run.tripped or verdict(run.report) is Verdict.ERROR:
        return "Fail: a tripwire ended the run" if run.tripped else "Error: the probe broke down, and found nothing"
    if failed:
        also = f", {hollow} more vacuous" if hollow else ""
        return f"Fail: {failed} of {_findings(len(judged))} failed{also}"
    if hollow == len(judged):
        return "Vacuous: this run could not have shown a fault, which counts as a failure"
    if hollow:
        return f"Vacuous: {hollow} of {_findings(len(judged))} could not have come out otherwise, a failure"
    return f"Pass: {'all ' if len(judged) > 1 else ''}{_findings(len(judged))} within bounds"


def _findings(count: int) -> str:
    return f"{count} finding{'' if count == 1 else 's'}"


class Row(NamedTuple):
    """One row of a table of findings: a finding, or several that differ in the layer alone."""

    layer: str
    what: str
    measured: str
    bound: str
    verdict: Verdict


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Errors, failures, vacuous findings, then the rest, each in the probe's order."""
    return sorted(findings, key=lambda finding: (*FAILURES, finding.verdict).index(finding.verdict))


def rows(findings: Sequence[Finding], *, shared: bool) -> list[Row]:
    """Rows of a table, worst first; with `shared`, findings that differ in the layer alone share one."""
    if not shared:
        return [_row([finding]) for finding in worst_first(findings)]
    alike: dict[object, list[Finding]] = {}
    for at, finding in enumerate(worst_first(findings)):
        alone = finding.failed or finding.layer is None
        key = at if alone else (finding.what, finding.unit, finding.bound, finding.verdict, finding.rank)
        alike.setdefault(key, []).append(finding)
    grouped = [[group] if len(group) >= ALIKE else [[finding] for finding in group] for group in alike.values()]
    return [_row(group) for groups in grouped for group in groups]


def _row(group: Sequence[Finding]) -> Row:
    first = group[0]
    ends = [measured(end(group, key=lambda finding: finding.measured or 0.0)) for end in (min, max)]
    shown = ends[0] if ends[0] == ends[1] else " .. ".join(ends)
    layers = ranges([finding.layer for finding in group if finding.layer is not None])
    return Row(layers + (f", rank {first.rank}" if first.rank else ""), first.what, shown, bound(first), first.verdict)


def ranges(layers: Sequence[int]) -> str:
    """1, 2, 3, 5 as "1-3, 5"."""
    runs = [list(run) for _, run in groupby(enumerate(sorted(layers)), key=lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0][1]}" + (f"-{run[-1][1]}" if len(run) > 1 else "") for run in runs)


def measured(finding: Finding) -> str:
    """What was measured, with its unit, empty if nothing was; enough digits to tell it from a bound that it breaks."""
    if finding.measured is None:
        return ""
    text = number(finding.measured)
    if finding.failed and finding.bound is not None and text == number(finding.bound.value):
        text = repr(finding.measured)
    return f"{text} {finding.unit}".rstrip()


def bound(finding: Finding) -> str:
    """The bound with its unit, empty where there is none."""
    return "" if finding.bound is None else f"{finding.bound} {finding.unit}".rstrip()


def where(finding: Finding) -> str:
    """Layer and rank before a finding's name, where it has them."""
    layer = "" if finding.layer is None else f"layer {finding.layer}, "
    return layer + (f"rank {finding.rank}, " if finding.rank else "")


def evidence(finding: Finding) -> list[tuple[str, str]]:
    """Names and values of a finding's evidence, as text of one line each."""
    return [(name.replace("_", " "), _value(value)) for name, value in finding.evidence.items()]


def _value(value: JSON) -> str:
    if isinstance(value, str):
        text = " ".join(value.split())
    elif isinstance(value, int | float) and not isinstance(value, bool):
        text = number(value)
    elif isinstance(value, list | tuple) and all(isinstance(item, int | float | str) for item in value):
        text = ", ".join(map(_value, value))
    else:
        text = json.dumps(finite(value))
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def finite(value: JSON) -> JSON:
    """JSON values with every NaN and infinity as a string: JSON has no such numbers."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value
