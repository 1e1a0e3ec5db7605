"""`Watch`: every rank ends soon after the first one that fails, and only that one's cause is told.

A thread posts this rank's heartbeats and reads the others' (`runtime.group.heartbeat`); another one judges what was
read (`runtime.group.failures`), and can end the process while the main thread is blocked in a collective, where no
exception would reach it. Whoever ends for a reason of its own publishes that reason; the first one to do so writes it
to the console, and nobody else writes anything.
"""

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

from torch.distributed.distributed_c10d import Store

from fathom.model.ranks.ranks import Ranks
from fathom.runtime.group.failures import (
    DEAD,
    DONE,
    ENDED,
    FAILED,
    GONE,
    LEFT,
    LOADING,
    RUNNING,
    TERMINATED,
    Heartbeat,
    LastSeen,
    verdict,
)
from fathom.runtime.group.heartbeat import PERIOD, SOON, HeartbeatThread
from fathom.runtime.group.store import Launch
from fathom.runtime.options import TIMEOUT
from fathom.runtime.output import discard_unfinished

FAREWELL = 5.0  # seconds for the other ranks to read why the run ended
GRACE = 1.0  # seconds for the main thread to end by itself, as it does where all ranks fail alike
INTERRUPT = 2.0  # the same after Ctrl-C, which does not reach a thread that is blocked
INTERRUPTED = 128 + signal.SIGINT  # what a shell reports


class Watch:
    """The others, as seen from this rank, and this rank, as the others see it."""

    def __init__(self, launch: Launch, store: Store) -> None:
        self.launch, self.timeout = launch, TIMEOUT
        self._heartbeats = HeartbeatThread(store, launch.rank, launch.size, self._wake)
        self._all_seen = [LastSeen() for _ in range(launch.size)]  # written by the guard alone
        self._ending = threading.Event()  # a thread is ending the process
        self._telling, self._told = threading.Lock(), False
        self._closed = False
        self._interrupted, self._signalled = False, float("inf")  # the main thread; when SIGINT came
        self._waiting, self._waker = socket.socketpair()
        self._guard = threading.Thread(target=self._watch, daemon=True)

    # ---- for the main thread, in a run

    def start(self) -> None:
        """Watch from now on. Signals wake the guard too, for the main thread may be blocked in a collective."""
        self._waker.setblocking(False)  # noqa: FBT003
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda *_: None)  # the guard sees to it
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._interrupt)
        self._heartbeats.start()
        self._guard.start()

    @contextlib.contextmanager
    def loading(self) -> Iterator[Callable[[Ranks], None]]:
        """Wait longer for this rank inside the ``with``; call what is yielded with the ranks of the model loaded."""
        self._heartbeats.show(LOADING)
        yield self._heartbeats.follow
        self._heartbeats.show(RUNNING)

    def tell(self, key: str, text: str) -> None:
        """Give the other ranks a text, which is not empty: what the user typed, say, which only one of them reads."""
        self._heartbeats.tell(key, text)

    def hear(self, key: str) -> str:
        """Wait for what another rank tells, as long as it takes: no rank waits in a collective meanwhile."""
        self._wait(lambda: bool(self._heartbeats.told(key)))
        if self._heartbeats.lost:
            time.sleep(FAREWELL)  # the guard ends the process
        return self._heartbeats.told(key)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Raise KeyboardInterrupt once: a launcher passes on the Ctrl-C that its processes had already."""
        del number, frame
        if not self._interrupted:
            self._interrupted = True
            raise KeyboardInterrupt

    # ---- for the main thread, at the end

    def close(self, status: int) -> int:
        """End well: wait until all ranks are done, and return the highest of their statuses.

        Until then this rank still watches: one that fails after another is done ends the run for both.
        """
        heartbeats = self._heartbeats
        heartbeats.status = status
        heartbeats.show(DONE)
        self._wait(lambda: all(heartbeats.is_in(rank, DONE, LEFT) for rank in heartbeats.others))
        if heartbeats.lost:
            time.sleep(FAREWELL)  # the guard ends the process
        status = max([status, *(heartbeat.status for heartbeat in heartbeats.read.values() if heartbeat is not None)])
        heartbeats.show(LEFT)
        self._wait(lambda: heartbeats.posted == LEFT, FAREWELL)
        if self.launch.keeps_store:
            self._wait(lambda: all(heartbeats.is_in(rank, LEFT) for rank in heartbeats.others), FAREWELL)
        self._closed = True
        self._wake()
        self._guard.join(FAREWELL)
        heartbeats.stop(FAREWELL)
        signal.set_wakeup_fd(-1)
        return status

    def end(self, status: int, text: str | None) -> NoReturn:
        """End the process and the run for a reason of this rank's own, told where it is the first.

        Parameters
        ----------
        status
            Of this process.
        text
            What the console shows, without a final newline; None to end in silence.

        """
        self._ending.set()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with contextlib.suppress(OSError, ValueError):  # whoever read it may be gone, and it may be closed
            sys.stdout.flush()
        self._end(status, text)

    def someone_else_failed(self) -> None:
        """Wait for the cause of a collective that failed here, which ends the process; return where there is none."""
        self._heartbeats.show(FAILED)
        self._wait(lambda: False, GONE + FAREWELL)

    # ---- how a process ends

    def _end(self, status: int, text: str | None) -> NoReturn:
        first = self._tell(text)
        self._heartbeats.show(ENDED)
        if first or self.launch.keeps_store:
            self._wait(lambda: all(self._knows(rank) for rank in self._heartbeats.others), FAREWELL)
        else:
            self._wait(lambda: self._heartbeats.posted == ENDED, GRACE)
            time.sleep(GRACE / 2)  # a launcher takes the first process that ends for the culprit
        self._leave(status)

    def _leave(self, status: int) -> NoReturn:
        discard_unfinished()
        if os.isatty(2):
            os.write(2, b"\x1b[?25h")  # the cursor, which progress hides
        os._exit(status)

    def _tell(self, text: str | None) -> bool:
        """Publish a reason and, where it is the first of all ranks, show it; whether it is."""
        with self._telling:
            if self._told:
                return False
            self._told = True
        first = self._heartbeats.publish(text or "ended", FAREWELL)
        if first and text is not None:
            _show(text)
        return first

    def _knows(self, rank: int) -> bool:
        """Whether a rank has read why the run ended, or never will."""
        silent = self._all_seen[rank].silent >= min(GONE, self.timeout) / 2
        return silent or self._heartbeats.is_in(rank, ENDED, LEFT, TERMINATED)

    def _wait(self, until: Callable[[], bool], timeout: float = float("inf")) -> None:
        """Wait until something is seen, the store is lost, or time is up."""
        deadline = time.monotonic() + timeout
        while not until() and not self._heartbeats.lost and time.monotonic() < deadline:
            time.sleep(SOON)

    # ---- the thread that judges

    def _watch(self) -> None:
        heartbeats, last, store, waited = self._heartbeats, time.monotonic(), LastSeen(), 0.0
        while not self._closed:
            signals = self._signals()
            now = time.monotonic()
            elapsed, last = now - last, now
            if self._ending.is_set() or heartbeats.phase == LEFT:
                continue
            if signal.SIGTERM in signals:
                self._terminated()
            if signal.SIGINT in signals:
                self._signalled = min(self._signalled, now)
            if now - self._signalled > INTERRUPT:
                self._end_from_here(INTERRUPTED, "interrupted")
            if heartbeats.cause:
                self._follow_out()
            self._all_seen[self.launch.rank].look(heartbeats.own(), elapsed)
            store.look(Heartbeat(heartbeats.rounds, "", 0, 0, ""), elapsed)
            waited += elapsed
            if not store.silent:  # without news from the store, silence of the others means nothing
                for rank in heartbeats.others:
                    self._all_seen[rank].look(heartbeats.read.get(rank), waited)
                waited = 0.0
            self._judge(store.silent)

    def _judge(self, mute: float) -> None:
        """End the process where what was seen is reason to; `mute`: seconds without an answer from the store."""
        own_rank, failed, limit = self.launch.rank, self._heartbeats.phase == FAILED, min(DEAD, self.timeout)
        if self._heartbeats.lost:
            self._without_store("is gone")
        elif mute >= limit and (failed or self._all_seen[own_rank].stood >= limit):
            self._without_store(f"did not answer for {mute:.0f} s")
        elif why := verdict(own_rank, self._all_seen, self.timeout, failed=failed):
            self._end_from_here(1, why)

    def _signals(self) -> bytes:
        ready, _, _ = select.select([self._waiting], [], [], PERIOD)
        return self._waiting.recv(4096) if ready else b""

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it will wake up
            self._waker.send(b"\0")

    def _terminated(self) -> None:
        """End at SIGTERM, with which a launcher ends the ranks after one that failed: in silence, but leaving word."""
        self._heartbeats.show(TERMINATED)
        self._wait(lambda: self._heartbeats.posted == TERMINATED, GRACE)
        self._leave(128 + signal.SIGTERM)

    def _follow_out(self) -> None:
        """End because another rank did, unless the main thread does so by itself."""
        if self._heartbeats.phase != FAILED:
            self._wait(self._ending.is_set, GRACE)
        self._end_from_here(1 if self._signalled == float("inf") else INTERRUPTED, None)

    def _end_from_here(self, status: int, text: str | None) -> None:
        if not self._ending.is_set():
            self._ending.set()
            self._end(status, text)

    def _without_store(self, what: str) -> None:
        """End without being able to ask anybody: the lowest of the other ranks that lived when last seen tells why."""
        if self._ending.is_set() or self._heartbeats.phase == LEFT:
            return
        self._ending.set()
        launcher = self.launch.kept_by_launcher
        living = [  # this rank's own heartbeats have stopped arriving with everybody's
            rank
            for rank, seen in enumerate(self._all_seen)
            if (launcher or rank) and (rank == self.launch.rank or seen.silent < DEAD)
        ]
        if self.launch.rank == min(living) and not self._heartbeats.cause:
            heartbeat = self._all_seen[0].heartbeat
            keeper = "the launcher's store" if launcher else "rank 0 died: the store that it kept"
            seen = "" if launcher or heartbeat is None else f"; it was last seen {heartbeat.place}"
            _show(f"{keeper} {what}{seen}")
        self._leave(1)


def _show(text: str) -> None:
    """Write to the console itself: `sys.stderr` may be silenced, or held by a thread that is blocked."""
    line = f"{text}\n"
    if os.isatty(2):
        line = f"\r\x1b[K{line}"  # over a line of progress
    with contextlib.suppress(OSError):
        os.write(2, line.encode(errors="replace"))
