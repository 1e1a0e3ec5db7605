"""What stands for GPUs that NVLink connects: memory that processes share, and gloo for what torch's kernels do."""

import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric

from fathom.model.ranks import ranks as between
from tests.interpreter import patched


class Handle(NamedTuple):
    """One memory of all ranks, each of which has mapped that of every rank."""

    mapped: list[torch.Tensor]

    @property
    def buffer_ptrs(self):
        return [memory.data_ptr() for memory in self.mapped]

    def barrier(self):
        dist.barrier()


class NvLink:
    """The symmetric memory of torch, in files; `gathered` counts multicasts."""

    def __init__(self, group, folder):
        self.group, self.folder, self.handles, self.gathered = group, folder, [], 0

    def empty(self, nbytes, **_):
        paths = [self.folder / f"{len(self.handles)} {rank}" for rank in range(self.group.size)]
        paths[self.group.rank].write_bytes(bytes([255]) * nbytes)
        dist.barrier()
        mapped = [torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8) for path in paths]
        self.handles.append(Handle(mapped))
        return mapped[self.group.rank]

    def rendezvous(self, memory, processes):
        assert processes is self.group.processes
        (found,) = (handle for handle in self.handles if handle.mapped[self.group.rank] is memory)
        return found

    def gather(self, own, name, every):
        """In place of the kernel by which each rank writes its part into the memory of all."""
        assert (own.dtype, every.dtype, len(every)) == (torch.uint8, torch.uint8, self.group.size * len(own))
        assert every.data_ptr() in {handle.mapped[self.group.rank].data_ptr() for handle in self.handles}
        assert name == dist.group.WORLD.group_name
        dist.all_gather_into_tensor(every, own)
        self.gathered += 1


@contextmanager
def nvlink(group):
    """Inside, torch's symmetric memory is files that the processes map, and every rank has multicast."""
    held = [tempfile.mkdtemp() if group.rank == 0 else ""]
    dist.broadcast_object_list(held)
    with pytest.MonkeyPatch.context() as monkeypatch, patched():
        found = NvLink(group, Path(held[0]))
        for name in ("empty", "rendezvous"):
            monkeypatch.setattr(symmetric, name, getattr(found, name))
        monkeypatch.setattr(torch.ops.symm_mem, "multimem_all_gather_out", found.gather)
        monkeypatch.setattr(between, "has_multicast", lambda _: True)
        yield found
    dist.barrier()
    if group.rank == 0:
        shutil.rmtree(held[0])
