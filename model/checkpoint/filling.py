"""Memory that is allocated first and filled from files by several threads: how weights get onto a device.

A thread reads a piece of up to `PIECE` bytes into a buffer, past the mapped files, and copies it from there. Each has
two buffers: while one is copied, the other is read into. Of a GPU the buffers are pinned and each thread copies on a
stream of its own. Pieces are cut out of large targets and joined from small sources: the scales of a layer's experts,
which lie apart in the file and one behind another in memory, cost one copy.
"""

import contextlib
import os
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor

from fathom.model.errors import CheckpointError
from fathom.model.files import regular_file_size

PIECE: Final = 16 << 20  # bytes of a buffer: a millisecond of PCIe or a few of a disk, a submission is some us
THREADS: Final = 4  # of each rank; one copies out of the page cache at 3 to 6 GB/s
BUFFERS: Final = 2  # of each thread
HOST_BYTES: Final = THREADS * BUFFERS * PIECE  # what all buffers take


class Source(NamedTuple):
    """Bytes of a file."""

    path: Path
    start: int
    nbytes: int


class Done(Protocol):
    """A copy that was asked for."""

    def synchronize(self) -> None:
        """Wait until it is done."""


class Lane(Protocol):
    """Where one thread's copies run, in the order in which they are asked for."""

    def entered(self) -> contextlib.AbstractContextManager[object]:
        """What the thread works inside of."""

    def buffer(self) -> Tensor:
        """Return memory [PIECE] uint8 to read into."""

    def copy(self, target: Tensor, source: Tensor, ready: torch.cuda.Event | None) -> Done:
        """Copy [n] uint8 out of a buffer, when `target` is `ready`; the buffer is free once that is done."""


class HostLane:
    """Copies into the host's memory, each done when it is asked for."""

    def entered(self) -> contextlib.AbstractContextManager[object]:
        """Nothing to enter."""
        return contextlib.nullcontext()

    def buffer(self) -> Tensor:
        """Memory that may be paged out."""
        return torch.empty(PIECE, dtype=torch.uint8)

    def copy(self, target: Tensor, source: Tensor, ready: torch.cuda.Event | None) -> Done:
        """Copy at once."""
        assert ready is None, "of the host nothing runs later"
        target.copy_(source)
        return self

    def synchronize(self) -> None:
        """Nothing to wait for."""


class GpuLane:
    """Copies out of pinned memory on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)

    def entered(self) -> contextlib.AbstractContextManager[object]:
        """The stream and its device: buffers pinned by a thread on another one would cost a context there."""
        return torch.cuda.stream(self.stream)

    def buffer(self) -> Tensor:
        """Pinned memory."""
        return torch.empty(PIECE, dtype=torch.uint8, pin_memory=True)

    def copy(self, target: Tensor, source: Tensor, ready: torch.cuda.Event | None) -> Done:
        """Copy later, after what the stream that allocated `target` had still to do with that memory."""
        if ready is not None:
            self.stream.wait_event(ready)
        target.copy_(source, non_blocking=True)
        done = torch.cuda.Event(blocking=True)
        done.record(self.stream)
        return done


class _Piece(NamedTuple):
    target: Tensor  # [n] uint8, n <= PIECE
    sources: list[Source]
    ready: torch.cuda.Event | None


class Filler:
    """Threads that fill memory on one device; close it, or use it in a ``with`` of `contextlib.closing`.

    Parameters
    ----------
    device : torch.device
        Where targets are.
    sizes : Mapping[Path, int]
        Bytes of each file when it was opened.
    threads : int
        How many read and copy.
    """

    def __init__(self, device: torch.device, sizes: Mapping[Path, int], threads: int = THREADS) -> None:
        self._device, self._sizes, self._threads = device, sizes, threads
        self._files: dict[Path, int] = {}  # descriptors
        self._pieces: queue.SimpleQueue[_Piece | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._pool: ThreadPoolExecutor | None = None  # none before there is something to do
        self._running: list[Future[None]] = []

    def fill(self, target: Tensor, sources: Sequence[Source]) -> None:
        """Have a contiguous tensor filled with the bytes of `sources`, one behind another.

        Raises
        ------
        CheckpointError
            When a file cannot be opened, or has another size than it had.
        """
        assert target.is_contiguous(), "memory that is filled has no gaps"
        assert (wanted := sum(source.nbytes for source in sources)) == target.nbytes, f"{wanted} for {target.nbytes}"
        if target.nbytes == 0:
            return
        for source in sources:
            self._open(source.path)
        if self._pool is None:
            self._start()
        ready = None
        if self._device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(self._device))
        left = target.flatten().view(torch.uint8)
        for piece in pieces(sources):
            size = sum(source.nbytes for source in piece)
            self._pieces.put(_Piece(left[:size], piece, ready))
            left = left[size:]

    def finish(self) -> None:
        """Wait until all is filled, and raise what a thread met instead; CheckpointError naming the file."""
        self._end()
        wait(self._running, return_when=FIRST_EXCEPTION)
        self._stopped.set()  # after a failure: the others go no further
        for thread in self._running:
            thread.result()

    def close(self) -> None:
        """End the threads, whether all is filled or not."""
        self._stopped.set()
        self._end()
        if self._pool is not None:
            self._pool.shutdown()
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def _open(self, path: Path) -> None:
        if path in self._files:
            return
        if regular_file_size(path) != self._sizes[path]:
            raise _changed(path)
        try:
            self._files[path] = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise _unreadable(path, error) from None

    def _start(self) -> None:
        self._pool = ThreadPoolExecutor(self._threads, "fill")
        for _ in range(self._threads):
            lane = GpuLane(self._device) if self._device.type == "cuda" else HostLane()
            self._running.append(self._pool.submit(self._work, lane))

    def _end(self) -> None:
        for _ in self._running:
            self._pieces.put(None)

    def _work(self, lane: Lane) -> None:
        """One thread: pieces one after the other, until there are no more."""
        # tensors of a load in inference mode may be written in that mode alone, and a thread begins outside of it
        with torch.inference_mode(), lane.entered():
            buffers = [lane.buffer() for _ in range(BUFFERS)]
            copied: list[tuple[Done, Tensor] | None] = [None] * BUFFERS  # with the target: it lives until then
            turn = 0
            try:
                while (piece := self._pieces.get()) is not None and not self._stopped.is_set():
                    if (before := copied[turn]) is not None:
                        before[0].synchronize()
                    buffer = buffers[turn][: piece.target.nbytes]
                    self._read(piece.sources, buffer.numpy().data)
                    copied[turn] = lane.copy(piece.target, buffer, piece.ready), piece.target
                    turn = (turn + 1) % BUFFERS
            finally:  # whatever was met: nothing is written any more to memory that may be given to others
                for last in copied:
                    if last is not None:
                        last[0].synchronize()

    def _read(self, sources: Sequence[Source], into: memoryview) -> None:
        """Read sources one behind another; a read may bring less than was asked for."""
        for path, start, nbytes in sources:
            at, stop = start, start + nbytes
            while at < stop:
                try:
                    got = os.preadv(self._files[path], [into[: stop - at]], at)
                except OSError as error:
                    raise _unreadable(path, error) from None
                if got == 0:
                    raise _changed(path)
                at, into = at + got, into[got:]


def pieces(sources: Sequence[Source]) -> Iterator[list[Source]]:
    """Sources cut and joined, so that each piece but the last is of `PIECE` bytes."""
    piece: list[Source] = []
    room = PIECE
    for path, first, nbytes in sources:
        start, stop = first, first + nbytes
        while start < stop:
            taken = min(room, stop - start)
            piece.append(Source(path, start, taken))
            start, room = start + taken, room - taken
            if room == 0:
                yield piece
                piece, room = [], PIECE
    if piece:
        yield piece


def _changed(path: Path) -> CheckpointError:
    return CheckpointError(f"{path}: its size changed after it was opened")


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path}: cannot be read: {error.strerror}")
