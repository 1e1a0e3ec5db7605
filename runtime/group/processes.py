"""The process group of a run: gloo on CPUs, NCCL with one GPU for each rank on GPUs, nothing for a process alone."""

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from fathom.kernels.ops import CPU, Ops
from fathom.model.errors import ConfigError
from fathom.model.ranks.ranks import ALONE, Group
from fathom.runtime.group.failures import LOADS
from fathom.runtime.group.store import open_store
from fathom.runtime.group.watchdog import Watch
from fathom.runtime.load import AnyLoaded, LoadedV4, check_device, load, load_any
from fathom.runtime.options import RunOptions
from fathom.runtime.plan.experts import Work

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def leads(watch: Watch | None) -> bool:
    """Whether this process is the one that writes files and talks to the user."""
    return watch is None or watch.launch.rank == 0


@contextlib.contextmanager
def connected(watch: Watch | None, device: str, timeout: float) -> Iterator[Group]:
    """Join the processes of the run, and part from them at the end; ALONE where there is no watch.

    With ``device`` "cuda" it computes on the GPU of its local rank from here on; ConfigError where this machine
    has none for it.

    Parameters
    ----------
    watch
        Of a run on several ranks.
    device
        "cpu" or "cuda".
    timeout
        Seconds that a rank may keep the others waiting. It is the watch that ends the run then; the group's own
        timeout, which says nothing of who is to blame, is the longest wait that the watch allows.

    """
    if watch is None:
        yield ALONE
        return
    watch.timeout = timeout
    launch = watch.launch
    check_device(device)
    if device == "cuda":
        if launch.local_rank >= (there := torch.cuda.device_count()):
            raise ConfigError(f"--device cuda: no GPU for local rank {launch.local_rank}, this machine has {there}")
        torch.cuda.set_device(launch.local_rank)
    dist.init_process_group(
        BACKENDS[device],
        store=open_store(launch, timeout, keep=False),
        rank=launch.rank,
        world_size=launch.size,
        timeout=timedelta(seconds=timeout * LOADS),
        device_id=torch.device(device, launch.local_rank) if device == "cuda" else None,
    )
    yield Group(launch.rank, launch.size, dist.group.WORLD)
    # Only after a run that ended well: after any other it could wait for ranks that are gone.
    dist.destroy_process_group()


def watched_load(
    watch: Watch | None,
    directory: Path,
    options: RunOptions,
    ops: Ops = CPU,
    group: Group = ALONE,
    *,
    context: int | None = None,
) -> LoadedV4:
    """Load a V4 model, see `runtime.load.load`, and let the other ranks see how far this one is in running it."""
    if watch is None:
        return load(directory, options, ops, group, context=context)
    with watch.loading() as follow:
        return load(directory, options, ops, group, context=context, follow=follow)


def watched_load_any(
    watch: Watch | None,
    directory: Path,
    options: RunOptions,
    ops: Ops,
    group: Group,
    *,
    context: int | None = None,
    work: Work | None = None,
) -> AnyLoaded:
    """Load a model of either architecture, see `runtime.load.load_any`, watched as by `watched_load`."""
    if watch is None:
        return load_any(directory, options, ops, group, context=context, work=work)
    with watch.loading() as follow:
        return load_any(directory, options, ops, group, context=context, work=work, follow=follow)
