"""What a rank sees of the others, and when that means that one of them died or hangs. No processes here, only rules.

Every rank posts beats. A beat says how many collectives the rank has entered, and which was last; all ranks enter the
same ones, and none leaves one before all have entered it. So the rank to blame is one that posts no beats, or one whose
count stands while others wait at the next collective. A false alarm is worse than a late one: silence alone, or a count
that stands alone, is no reason.
"""

from collections.abc import Sequence
from typing import NamedTuple

DEAD = 10.0  # seconds without a beat, from a thread that only needs a moment's attention twice a second
GONE = 4.0  # the same once a collective failed, so that the run is over and the only question is who is to blame
# times the timeout, for a rank that loads: disks differ, and nothing is known of how far it is
LOADS = 10.0

LONGEST = 1.0  # seconds that count between two looks: after a pause of this process the others' silence means nothing

LOADING, RUNNING = "loading", "running"
FAILED = "failed"  # in a collective, and does not know yet which rank is to blame
DONE, LEFT = "done", "left"  # ended well, and waits for the others; does not
ENDED, TERMINATED = "ended", "terminated"  # knowing why the run ended; by the launcher's signal
CLOSING = (FAILED, DONE, LEFT, ENDED, TERMINATED)


class Beat(NamedTuple):
    """A sign of life."""

    number: int
    phase: str
    status: int  # exit status of a rank that is done
    collectives: int  # entered so far
    at: str  # the last of them

    def encode(self) -> str:
        """Return one line."""
        return f"{self.number} {self.phase} {self.status} {self.collectives} {self.at}"

    @classmethod
    def decode(cls, line: str) -> "Beat":
        """Read what `encode` wrote."""
        number, phase, status, collectives, at = line.split(" ", 4)
        return cls(int(number), phase, int(status), int(collectives), at)

    @property
    def place(self) -> str:
        """Where the rank was, in words."""
        if self.phase == LOADING:
            return "while loading"
        return f"at collective {self.collectives} ({self.at})" if self.collectives else "before the first collective"


class Sight:
    """What was seen of one rank."""

    def __init__(self) -> None:
        self.beat: Beat | None = None  # none came yet
        self.silent = 0.0  # seconds since the last one that was new
        self.stood = 0.0  # seconds since it entered a collective, or another phase

    def look(self, beat: Beat | None, elapsed: float) -> None:
        """Take in the latest beat, `elapsed` seconds after the last look, of which at most LONGEST count."""
        self.silent += min(elapsed, LONGEST)
        self.stood += min(elapsed, LONGEST)
        if beat is None or beat == self.beat:
            return
        if self.beat is None or (beat.phase, beat.collectives) != (self.beat.phase, self.beat.collectives):
            self.stood = 0.0
        self.beat, self.silent = beat, 0.0


def verdict(own: int, sights: Sequence[Sight], timeout: float, *, failed: bool) -> str | None:
    """Say which rank ended the run without a word, and how; None while there is no reason to think so.

    Parameters
    ----------
    own
        This rank.
    sights
        What was seen of each rank, by rank.
    timeout
        Seconds that a rank may keep others waiting.
    failed
        Whether a collective failed here, as it does when a peer is gone.

    """
    return _died(own, sights, timeout, failed=failed) or _hangs(sights, timeout)


def _died(own: int, sights: Sequence[Sight], timeout: float, *, failed: bool) -> str | None:
    limit = min(GONE if failed else DEAD, timeout)
    for rank, sight in enumerate(sights):
        if sight.beat is None and sight.silent >= timeout and rank != own:
            return f"rank {rank} never came, {timeout:g} s after rank {own}"
    if not failed and sights[own].stood < limit:
        return None  # the others' silence does no harm yet
    gone = [
        (sight.beat.phase == TERMINATED, -sight.silent, rank)  # who ended at a signal followed another rank
        for rank, sight in enumerate(sights)
        if rank != own and sight.beat is not None and sight.silent >= limit and sight.beat.phase not in {DONE, LEFT}
    ]
    if not gone:
        return None
    terminated, silent, rank = min(gone)
    beat = sights[rank].beat
    assert beat is not None
    if terminated:
        return f"rank {rank} was terminated by a signal"
    return f"rank {rank} died or was stopped, last seen {beat.place}: no beat for {-silent:.0f} s"


def _hangs(sights: Sequence[Sight], timeout: float) -> str | None:
    beats = [sight.beat for sight in sights if sight.beat is not None]
    front = max(beats, key=lambda beat: beat.collectives, default=None)
    if front is None:
        return None
    waiting = [s.stood for s in sights if s.beat is not None and s.beat.collectives == front.collectives]
    behind = [
        (sight.beat.collectives, rank)
        for rank, sight in enumerate(sights)
        if sight.beat is not None
        and sight.beat.collectives < front.collectives
        and sight.beat.phase != FAILED
        and min(sight.stood, *waiting) >= timeout * (LOADS if sight.beat.phase == LOADING else 1)
    ]
    if not behind:
        return None
    entered, rank = min(behind)
    name = f" ({front.at})" if front.collectives == entered + 1 else ""  # later ones need not be alike
    seconds = min(sights[rank].stood, *waiting)
    return f"rank {rank} hangs: it did not reach collective {entered + 1}{name}, others have waited {seconds:.0f} s"
