"""Probes that measure nothing, one for each way in which a run can come out."""

from dataclasses import dataclass
from typing import ClassVar

from fathom.model.errors import Tripwire
from fathom.model.observe import sites
from fathom.probes.finding import Finding, Part, Report, at_least, broken, judged, measured, vacuous
from fathom.probes.probe import Probe, run_probe, silent


@dataclass(frozen=True)
class Fake(Probe):
    reads: ClassVar[tuple] = (sites.SELECTED, sites.INDEX_QUERY)
    background: ClassVar[str] = "What it is, and what goes wrong in silence."
    noticed: ClassVar[str] = "The third layer keeps 0.997 of the mass."
    name: str
    findings: tuple[Finding, ...] = ()
    parts: tuple[Part, ...] = ()
    why: str | None = None
    lacks: str | None = None
    trips: bool = False
    breaks: Exception | None = None
    of_fathom: bool = False
    summary: str = "Mean recall is 0.997 over 2 layers."
    not_claimed: str = "That it is fast."

    @property
    def question(self):
        return f"Does {self.name} hold?"

    def needs(self, subject):
        del subject
        return self.lacks

    def vacuous(self, subject):
        del subject
        return self.why

    def measure(self, subject, progress):
        progress(0.5, f"seed {subject.seed}")
        if self.trips:
            raise Tripwire("logits", 3, 17, "4 of 8 values not finite", "finite")
        if self.breaks is not None:
            raise self.breaks
        return Report(self.summary, self.findings, self.parts, self.not_claimed)


GOOD = judged("recall, worst row", 0.997, at_least(0.99), layer=1)
BAD = judged("recall, worst row", 0.42, at_least(0.99), layer=2, position=4511, missing_entries=[7, 8])

PASSING = Fake("passing", (GOOD,))
FAILING = Fake("failing", (GOOD, BAD, vacuous("recall at 64", "16 entries, top-k 32"), broken("census", "no tensor")))
HOLLOW = Fake("hollow", (GOOD,), why="the model has no CSA layer")
PARTLY_HOLLOW = Fake("partly-hollow", (GOOD, vacuous("recall at 64", "16 entries, top-k 32")))
TRIPPING = Fake("tripping", (GOOD,), trips=True)
UNJUDGED = Fake("unjudged", (measured("mass kept", 0.9),))
FAKES = (PASSING, FAILING, HOLLOW, PARTLY_HOLLOW, TRIPPING, UNJUDGED)


def run_fake(probe, subject):
    return run_probe(probe, subject, silent)
