"""`HeartbeatThread`: the thread that posts this rank's signs of life to the store, and reads the others'."""

import threading
from collections.abc import Callable

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from fathom.model.ranks.ranks import Ranks
from fathom.runtime.group.failures import CLOSING, LOADING, Heartbeat

PERIOD, SOON = 0.5, 0.05  # seconds between heartbeats: in a run, and at its end
NOTHING = "-"  # in place of a value that is not there


class HeartbeatThread:
    """What this rank shows and what it reads, one request to the store after the other.

    Anybody may read the fields that the thread writes: each is replaced as a whole.
    """

    def __init__(self, store: Store, rank: int, size: int, news: Callable[[], None]) -> None:
        self.others = [other for other in range(size) if other != rank]
        # What this rank shows
        self.phase, self.status = LOADING, 0
        self._followed: list[tuple[Ranks, int]] = []  # and how many collectives it had entered when last looked at
        self._at = "start"
        # What the thread wrote
        self.posted = ""  # the last phase that the others can read
        self.rounds = 0
        self.read: dict[int, Heartbeat | None] = {}  # of the others, None before the first one came
        self.cause = ""  # why the run ends, as the first rank that knew has published it; "" while it goes on
        self.lost = False  # the store
        self._store, self._rank, self._news = store, rank, news
        self._nudge, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Post and read from now on."""
        self._thread.start()

    def stop(self, timeout: float) -> None:
        """End the thread."""
        self._stop.set()
        self._nudge.set()
        self._thread.join(timeout)

    def show(self, phase: str) -> None:
        """Tell the others soon in which phase this rank is; in those of CLOSING, listen more often."""
        self.phase = phase
        self._nudge.set()

    def follow(self, ranks: Ranks) -> None:
        """Let the others see the collectives that these ranks enter."""
        self._followed.append((ranks, 0))

    def own(self) -> Heartbeat:
        """Return the next heartbeat of this rank."""
        total = 0
        for i, (ranks, before) in enumerate(list(self._followed)):
            entered, at = ranks.collectives, ranks.at
            if entered != before:
                self._followed[i], self._at = (ranks, entered), at
            total += entered
        return Heartbeat(self.rounds + 1, self.phase, self.status, total, self._at)

    def publish(self, cause: str, patience: float) -> bool:
        """Say why the run ends; whether this rank is the first to.

        Also true when the store is gone, or does not answer for `patience` seconds: better told twice than never.
        """
        own_cause = f"{self._rank} {cause}"
        first = [self.lost]

        def ask() -> None:
            try:
                first[0] = self._store.compare_set("cause", "", own_cause).decode() == own_cause
            except DistError:
                first[0] = self.lost = True

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(patience)
        return first[0] or asking.is_alive()

    def tell(self, key: str, text: str) -> None:
        """Let the other ranks read `text`, which is not empty, under a key of this run."""
        try:
            self._store.set(f"told {key}", text)
        except DistError:
            self.lost = True

    def told(self, key: str) -> str:
        """What a rank told under a key; "" as long as none has."""
        try:
            return self._value(f"told {key}")
        except DistError:
            self.lost = True
            return ""

    def is_in(self, rank: int, *phases: str) -> bool:
        """Whether another rank was last seen in one of these phases."""
        heartbeat = self.read.get(rank)
        return heartbeat is not None and heartbeat.phase in phases

    def _run(self) -> None:
        while not self._stop.is_set() and not self.lost:
            heartbeat = self.own()
            try:
                self._store.set(f"heartbeat {self._rank}", heartbeat.encode())
                self.posted = heartbeat.phase
                self.read = {rank: self._beat_of(rank) for rank in self.others}
                self.cause = self._value("cause")
            except DistError:
                self.lost = True
            self.rounds = heartbeat.number
            if self.lost or self.cause:
                self._news()
            self._nudge.wait(SOON if heartbeat.phase in CLOSING else PERIOD)
            self._nudge.clear()

    def _beat_of(self, rank: int) -> Heartbeat | None:
        line = self._value(f"heartbeat {rank}")
        return Heartbeat.decode(line) if line else None

    def _value(self, key: str) -> str:
        """The value of a key, "" where there is none: unlike `get`, which would wait for it."""
        value: str = self._store.compare_set(key, NOTHING, NOTHING).decode()
        return "" if value == NOTHING else value
