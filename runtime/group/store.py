"""The key-value store through which the processes of a run find and watch each other: who keeps it, how to reach it."""

import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from fathom.model.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

RETRY = 0.2  # seconds between two attempts to reach it


class Launch(NamedTuple):
    """The place of this process among those that were started together."""

    rank: int
    size: int
    local_rank: int  # on this machine: which of its GPUs
    address: str  # of the store
    port: int
    kept_by_launcher: bool  # the store; else rank 0 keeps it, and it goes with rank 0
    attempt: int  # how often the launcher started all ranks again; the store outlives an attempt

    @property
    def keeps_store(self) -> bool:
        """Whether the store lives in this process."""
        return self.rank == 0 and not self.kept_by_launcher


def open_store(launch: Launch, timeout: float, *, keep: bool) -> "Store":
    """Connect to the store of this run; ConfigError when nobody answers within `timeout` seconds.

    Every caller gets a connection of its own, because a connection serves one request at a time, and a request can
    block.

    Parameters
    ----------
    launch
        Who and where.
    timeout
        Seconds, for reaching it.
    keep
        Whether the store itself is made here, and lives as long as what is returned.

    """
    from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined] # noqa: PLC0415 (`Launch` needs none)
    from torch.distributed.distributed_c10d import PrefixStore  # noqa: PLC0415

    where = f"{launch.address}:{launch.port} (MASTER_ADDR, MASTER_PORT)"
    if not keep:
        _wait_for_an_answer(launch, timeout, where)
    seconds = timedelta(seconds=timeout)
    try:
        store = TCPStore(launch.address, launch.port, launch.size, keep, seconds, wait_for_workers=False)
    except DistError as error:
        raise ConfigError(f"{where}: {str(error).splitlines()[0]}") from error
    return PrefixStore(f"fathom/{launch.attempt}", store)


def _wait_for_an_answer(launch: Launch, timeout: float, where: str) -> None:
    """Return once the port is open: torch's own attempts fill the console with C++ stack traces."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((launch.address, launch.port), timeout=max(RETRY, timeout)).close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConfigError(f"{where}: nobody answers there after {timeout:g} s ({error})") from error
            time.sleep(RETRY)
        else:
            return
