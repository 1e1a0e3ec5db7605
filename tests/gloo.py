"""Run a function on N ranks: processes of one thread each, joined by gloo through a file."""

import multiprocessing
import pickle
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
import torch.distributed as dist

from fathom.model.ranks.ranks import ALONE, Group

# Python's fork server imports these once, and a rank starts as its copy: else each would import torch, for 2 s.
# Nothing of this repository is among them, so a rank imports what is tested from where the test found it. Copies share
# what the server had when it started: its environment and the seed of its hashes. Ranks that go through a set in orders
# of their own are seen by the tests of commands, which start programs (`tests/scripts/test_ranks_commands.py`).
IMPORTED_ONCE = ["numpy", "pytest", "rich", "torch", "torch.distributed"]
GRACE = 5.0  # seconds that the other ranks have to say what became of them, after the first failed


def run(n, function, *args, timeout=120.0):
    """Call ``function(group, *args)`` on `n` ranks and return the list of results, by rank.

    `function` is at the top level of a module, `args` and results can be pickled; tensors arrive as copies. `group` is
    a `model.ranks.ranks.Group`, and ALONE where n is 1 (still in a process of its own).

    AssertionError when any rank fails: it begins "rank R raised TYPE: message" for the first one that did, and ends
    with the tracebacks of all that did. Whoever is still running `timeout` seconds after the start is killed and named.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED_ONCE)
    with tempfile.TemporaryDirectory() as folder:
        readers, processes = {}, []
        try:
            for rank in range(n):
                reader, writer = context.Pipe(duplex=False)
                readers[reader] = rank
                call = (writer, rank, n, str(Path(folder) / "store"), timeout, function, args)
                processes.append(context.Process(target=_rank, args=call, daemon=True))
                processes[-1].start()
                writer.close()  # so that the end of the process is the end of the pipe
            return _collected(readers, n, time.monotonic() + timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()
            for reader in readers:
                reader.close()


def _collected(readers, n, deadline):
    waiting, results, failures = dict(readers), {}, []
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            failures += [(f"rank {rank} was still running", "") for rank in waiting.values()]
            break
        for reader in ready:
            rank = waiting.pop(reader)
            try:
                done, answer = reader.recv()
            except EOFError:
                failures.append((f"rank {rank} died without a word", ""))
            else:
                if done:
                    results[rank] = pickle.loads(answer)
                else:
                    failures.append(answer)
            if failures:
                deadline = min(deadline, time.monotonic() + GRACE)
    if failures:
        raise AssertionError("\n".join((*(what for what, _ in failures), *(trace for _, trace in failures))))
    return [results[rank] for rank in range(n)]


def _rank(writer: Connection, rank, n, store, timeout, function, args):
    torch.set_num_threads(1)
    try:
        group = ALONE
        if n > 1:
            wait_for = timedelta(seconds=timeout)
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=n, timeout=wait_for)
            group = Group(rank, n, dist.group.WORLD)
        answer = (True, pickle.dumps(function(group, *args)))
    except BaseException as error:  # noqa: BLE001 -- whatever it is, the parent raises it
        kind = f"rank {rank} raised {type(error).__name__}: {error}"
        answer = (False, (kind, f"--- rank {rank}\n{traceback.format_exc()}"))
    writer.send(answer)
    writer.close()
    if dist.is_initialized():
        dist.destroy_process_group()
