"""Start the ranks of a run by hand, as a launcher would but without its watch over them, and look at how they end."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from torch.distributed import PrefixStore, TCPStore

from fathom.runtime.group.failures import Heartbeat
from fathom.runtime.group.heartbeat import NOTHING

ROOT = Path(__file__).resolve().parents[1]


class ByHand:
    """Processes of one run: what each writes to stdout, and the console that they share."""

    def __init__(self, folder, n, module, *flags, store="rank 0", **environment):
        """Start `n` ranks of ``python -m module *flags``.

        `store` says who keeps it: "rank 0", as where nothing else is said; or "test", which then can read it.
        """
        self.folder, self.store = folder, None
        if store == "test":
            kept = TCPStore("127.0.0.1", 0, n, is_master=True, wait_for_workers=False)
            self.store, port = PrefixStore("fathom/0", kept), kept.port
        else:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
        shared = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "WORLD_SIZE": str(n)}
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **environment}
        shared |= {"TORCHELASTIC_USE_AGENT_STORE": str(store == "test")}
        self.processes = []
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
        with (folder / "console").open("ab") as console:
            for rank in range(n):
                place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                with (folder / f"out {rank}").open("wb") as out:
                    command = [sys.executable, "-m", module, *flags]
                    options = {"stdout": out, "stderr": console, "cwd": ROOT, "env": shared | place}
                    self.processes.append(subprocess.Popen(command, start_new_session=True, **options))
        signal.signal(signal.SIGINT, before)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()

    def heartbeat(self, rank):
        """The last heartbeat of a rank, None before the first; for a store that the test keeps."""
        line = self.store.compare_set(f"heartbeat {rank}", NOTHING, NOTHING).decode()
        return None if line == NOTHING else Heartbeat.decode(line)

    def out(self, rank):
        return (self.folder / f"out {rank}").read_text()

    @property
    def console(self):
        """The lines that all ranks wrote to stderr."""
        return (self.folder / "console").read_text().splitlines()

    def until(self, happened, timeout=60.0):
        """Wait for a sign of life."""
        deadline = time.monotonic() + timeout
        while not happened():
            assert time.monotonic() < deadline, f"nothing happened in {timeout} s: {self.console}"
            assert all(process.poll() is None for process in self.processes), self.console
            time.sleep(0.05)

    def send(self, number, *ranks):
        for rank in ranks:
            self.processes[rank].send_signal(number)

    def statuses(self, timeout=60.0, *, stopped=()):
        """Wait for the end of all ranks but the `stopped` ones; returns their exit statuses and the seconds it took."""
        start = time.monotonic()
        for rank, process in enumerate(self.processes):
            if rank not in stopped:
                process.wait(max(0.1, start + timeout - time.monotonic()))
        taken = time.monotonic() - start
        self.send(signal.SIGKILL, *stopped)
        return [process.wait() for process in self.processes], taken
