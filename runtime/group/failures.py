"""What a rank sees of the others, and when that means that one of them died or hangs. No processes here, only rules.

Every rank posts heartbeats. A heartbeat says how many collectives the rank has entered, and which was last; all ranks
enter the same ones, and none leaves one before all have entered it. So the rank to blame is one that posts no
heartbeats, or one whose count stands while others wait at the next collective. A false alarm is worse than a late one:
silence alone, or a count that stands alone, is no reason.
"""

from collections.abc import Sequence
from typing import NamedTuple

DEAD = 10.0  # seconds without a heartbeat, from a thread that only needs a moment's attention twice a second
GONE = 4.0  # the same once a collective failed, so that the run is over and the only question is who is to blame
# times the timeout, for a rank that loads: disks differ, kernels are compiled, and nothing is known of how far it is
LOADS = 10.0

LONGEST = 1.0  # seconds that count between two looks: after a pause of this process the others' silence means nothing

LOADING, RUNNING = "loading", "running"
FAILED = "failed"  # in a collective, and does not know yet which rank is to blame
DONE, LEFT = "done", "left"  # ended well, and waits for the others; does not
ENDED, TERMINATED = "ended", "terminated"  # knowing why the run ended; by the launcher's signal
CLOSING = (FAILED, DONE, LEFT, ENDED, TERMINATED)


class Heartbeat(NamedTuple):
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
    def decode(cls, line: str) -> "Heartbeat":
        """Read what `encode` wrote."""
        number, phase, status, collectives, at = line.split(" ", 4)
        return cls(int(number), phase, int(status), int(collectives), at)

    @property
    def place(self) -> str:
        """Where the rank was, in words."""
        if self.phase == LOADING:
            return "while loading"
        return f"at collective {self.collectives} ({self.at})" if self.collectives else "before the first collective"


class LastSeen:
    """What was seen of one rank."""

    def __init__(self) -> None:
        self.heartbeat: Heartbeat | None = None  # none came yet
        self.silent = 0.0  # seconds since the last one that was new
        self.stood = 0.0  # seconds since it entered a collective, or another phase

    def look(self, heartbeat: Heartbeat | None, elapsed: float) -> None:
        """Take in the latest heartbeat, `elapsed` seconds after the last look, of which at most LONGEST count."""
        self.silent += min(elapsed, LONGEST)
        self.stood += min(elapsed, LONGEST)
        if heartbeat is None or heartbeat == self.heartbeat:
            return
        if self.heartbeat is None or (heartbeat.phase, heartbeat.collectives) != (
            self.heartbeat.phase,
            self.heartbeat.collectives,
        ):
            self.stood = 0.0
        self.heartbeat, self.silent = heartbeat, 0.0


def verdict(own: int, all_seen: Sequence[LastSeen], timeout: float, *, failed: bool) -> str | None:
    """Say which rank ended the run without a word, and how; None while there is no reason to think so.

    Parameters
    ----------
    own
        This rank.
    all_seen
        What was seen of each rank, by rank.
    timeout
        Seconds that a rank may keep others waiting.
    failed
        Whether a collective failed here, as it does when a peer is gone.

    """
    return _died(own, all_seen, timeout, failed=failed) or _hangs(all_seen, timeout)


def _died(own: int, all_seen: Sequence[LastSeen], timeout: float, *, failed: bool) -> str | None:
    limit = min(GONE if failed else DEAD, timeout)
    for rank, seen in enumerate(all_seen):
        if seen.heartbeat is None and seen.silent >= timeout and rank != own:
            return f"rank {rank} never came, {timeout:g} s after rank {own}"
    if not failed and all_seen[own].stood < limit:
        return None  # the others' silence does no harm yet
    gone = [
        (seen.heartbeat.phase == TERMINATED, -seen.silent, rank)  # who ended at a signal followed another rank
        for rank, seen in enumerate(all_seen)
        if rank != own
        and seen.heartbeat is not None
        and seen.silent >= limit
        and seen.heartbeat.phase not in {DONE, LEFT}
    ]
    if not gone:
        return None
    terminated, silent, rank = min(gone)
    heartbeat = all_seen[rank].heartbeat
    assert heartbeat is not None
    if terminated:
        return f"rank {rank} was terminated by a signal"
    return f"rank {rank} died or was stopped, last seen {heartbeat.place}: no heartbeat for {-silent:.0f} s"


def _hangs(all_seen: Sequence[LastSeen], timeout: float) -> str | None:
    heartbeats = [seen.heartbeat for seen in all_seen if seen.heartbeat is not None]
    front = max(heartbeats, key=lambda heartbeat: heartbeat.collectives, default=None)
    if front is None:
        return None
    waiting = [s.stood for s in all_seen if s.heartbeat is not None and s.heartbeat.collectives == front.collectives]
    behind = [
        (seen.heartbeat.collectives, rank)
        for rank, seen in enumerate(all_seen)
        if seen.heartbeat is not None
        and seen.heartbeat.collectives < front.collectives
        and seen.heartbeat.phase != FAILED
        and min(seen.stood, *waiting) >= timeout * (LOADS if seen.heartbeat.phase == LOADING else 1)
    ]
    if not behind:
        return None
    entered, rank = min(behind)
    name = f" ({front.at})" if front.collectives == entered + 1 else ""  # later ones need not be alike
    seconds = min(all_seen[rank].stood, *waiting)
    return f"rank {rank} hangs: it did not reach collective {entered + 1}{name}, others have waited {seconds:.0f} s"
