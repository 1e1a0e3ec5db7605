"""`Probe`: what every probe is, and how one is run."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from fathom.model.errors import Tripwire
from fathom.model.observe.sites import Site
from fathom.probes.finding import Report, Verdict, crashed, raised_at, tripped, vacuous
from fathom.probes.subject import Subject
from fathom.runtime.options import RunOptions
from fathom.runtime.report import commit

# Called as work goes on, with the share done in 0 .. 1 and what is being done.
Progress = Callable[[float, str], None]


class Probe(Protocol):
    """A frozen dataclass of knobs and one measurement."""

    name: ClassVar[str]  # as the command takes it; the page is audits/<name>.md
    question: ClassVar[str]  # what it answers, in one line
    reads: ClassVar[tuple[Site, ...]]  # sites it attaches to
    background: ClassVar[str]  # Markdown: what the thing is, and what goes wrong there in silence; opens the page
    between_ranks: ClassVar[bool] = False  # sees what differs between ranks, and nothing that is wrong on one alone
    in_variants: ClassVar[bool] = False  # runs the cache variants; all others run full caches
    in_runtime: ClassVar[bool] = False  # reads messages and draws tokens; all others are given ids
    in_drafts: ClassVar[bool] = False  # drafts tokens and takes them back; all others run each token once
    by_name: ClassVar[bool] = False  # an experiment that takes long or needs more than a model: never in `all`
    of_llama: ClassVar[bool] = False  # runs Llama-family checkpoints
    of_v41: ClassVar[bool] = False  # runs DeepSeek-V4.1
    options: ClassVar[RunOptions] = RunOptions()  # of the run whose page is in audits
    of_fathom: ClassVar[bool] = False  # asks about Fathom, hardly about a checkpoint: in `all` of the demo alone
    noticed: ClassVar[str] = ""  # Markdown: what surprised us on the demo checkpoint, in words; shown for it alone

    def needs(self, subject: Subject) -> str | None:
        """What this probe needs and the model or the prompt lacks; None, as most probes say, where it applies.

        Such a probe is left out of `all`; asked for by name, it fails as a vacuous one.
        """
        del subject
        return None

    def vacuous(self, subject: Subject) -> str | None:
        """Why this run could not show the fault (and must fail), from config and knobs alone; None when it could.

        What a prompt must hold follows from the config, the knobs only add to it: a model without the positions for it
        has an unmet need.
        """
        del subject
        return None

    def measure(self, subject: Subject, progress: Progress) -> Report:
        """Run the model and measure."""
        ...


def one_rank(subject: Subject, why: str) -> str | None:
    """What a probe that cannot run on several ranks needs, and why, for `Probe.needs`; None on one rank."""
    return None if subject.group.size == 1 else f"it runs on one rank, and there are {subject.group.size}: {why}"


def room(subject: Subject, needed: int) -> str | None:
    """Say that a run of `needed` positions is more than the model has, for `Probe.needs`; None where it is not."""
    most = subject.config.max_position_embeddings
    return None if needed <= most else f"the run takes {needed} positions, the model has {most}"


@dataclass(frozen=True, slots=True)
class Run:
    """One probe, run."""

    probe: Probe
    report: Report
    seconds: float
    tripped: bool  # a tripwire ended it
    commit: str = field(default_factory=lambda: str(commit()))  # of what ran

    @property
    def headline(self) -> str:
        """The verdict in a few words, without a full stop."""
        judged = self.report.judged
        failed, hollow = (sum(finding.verdict is v for finding in judged) for v in (Verdict.FAIL, Verdict.VACUOUS))
        count = f"{len(judged)} finding{'' if len(judged) == 1 else 's'}"
        if not judged:
            text = "Fail: nothing was judged, and a probe that cannot fail shows nothing"
        elif self.tripped:
            text = "Fail: a tripwire ended the run"
        elif self.report.verdict is Verdict.ERROR:
            text = "Error: the probe broke down, and found nothing"
        elif failed:
            text = f"Fail: {failed} of {count} failed{f', {hollow} more vacuous' if hollow else ''}"
        elif hollow == len(judged):
            text = "Vacuous: this run could not have shown a fault, which counts as a failure"
        elif hollow:
            text = f"Vacuous: {hollow} of {count} could not have come out otherwise, a failure"
        else:
            text = f"Pass: {'all ' if len(judged) > 1 else ''}{count} within bounds"
        return text


def run_probe(probe: Probe, subject: Subject, progress: Progress) -> Run:
    """Run one probe; a vacuous run and a tripwire are reports that fail."""
    started = time.perf_counter()
    why = lacks(probe, subject) or probe.vacuous(subject)
    ended = False
    if why is not None:
        report = Report(f"Nothing was shown: {why}.", (vacuous(probe.question, why),))
    else:
        try:
            report = probe.measure(subject, progress)
        except Tripwire as trip:
            ended = True
            report = Report(f"A tripwire ended the run: {trip}.", (tripped(trip),))
    return Run(probe, report, time.perf_counter() - started, ended)


def lacks(probe: Probe, subject: Subject) -> str | None:
    """`Probe.needs`; and a V4, of a probe that is not built for V4.1."""
    if not probe.of_v41 and not probe.of_llama and subject.config.v41 is not None:
        return "it is not built for DeepSeek-V4.1"
    return probe.needs(subject)


def unmet(probe: Probe, subject: Subject) -> str | None:
    """`Probe.needs`; None where it breaks down, which `attempt` will tell."""
    try:
        return lacks(probe, subject)
    except Exception:  # noqa: BLE001 -- see `attempt`
        return None


def attempt(probe: Probe, subject: Subject, progress: Progress) -> Run:
    """`run_probe`, where a probe that breaks down is a report that fails, so that others can go on.

    On several ranks the error is raised: none of them can go on alone.
    """
    started = time.perf_counter()
    try:
        return run_probe(probe, subject, progress)
    except Exception as error:
        if subject.group.size > 1:
            raise
        finding = crashed(error, raised_at(error))
        report = Report(f"It broke down, at {finding.evidence['where']}: {finding.what}.", (finding,))
        return Run(probe, report, time.perf_counter() - started, tripped=False)


def silent(share: float, what: str) -> None:
    """Ignore progress."""
    del share, what
