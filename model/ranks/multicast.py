"""Gathers by NVLink's multicast: each rank writes its part into the memory of all of them at once, in one kernel.

The kernel is torch's; it is meant for the few bytes of a decoded token. Not run yet: it takes GPUs that a switch
connects. Tests put a gather of gloo in its place.
"""

from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

LARGEST: Final = 4 << 20  # bytes of all ranks' parts: those of a prompt's calls are NCCL's
WORD: Final = 4  # bytes of which a part must be a multiple


class Multicast:
    """The gather of one process group on one device.

    A second gather overwrites what the first one wrote. It is safe all the same: torch's kernel begins with a barrier
    of all ranks, and each has copied the last result by then, for its launches follow each other.
    """

    def __init__(self, processes: dist.ProcessGroup, device: torch.device) -> None:
        from torch.distributed import _symmetric_memory as symmetric  # noqa: PLC0415 (not on every platform)

        self.memory = symmetric.empty(LARGEST, dtype=torch.uint8, device=device)
        symmetric.rendezvous(self.memory, processes)
        self.size, self.name = processes.size(), processes.group_name

    def takes(self, own: Tensor) -> bool:
        """Whether a part is gathered here: its bytes are whole words, and few."""
        return own.nbytes % WORD == 0 and own.nbytes * self.size <= LARGEST

    def __call__(self, every: Tensor, own: Tensor) -> None:
        """Every rank's `own` [n], one behind another, into `every` [ranks * n]."""
        part = own.view(torch.uint8)
        found = self.memory[: len(part) * self.size]
        torch.ops.symm_mem.multimem_all_gather_out(part, self.name, found)
        every.view(torch.uint8).copy_(found)


def has_multicast(device: torch.device) -> bool:
    """Whether a device is one that others' multicasts reach."""
    if device.type != "cuda":
        return False
    from torch._C._autograd import DeviceType  # noqa: PLC0415 (not on every platform)
    from torch._C._distributed_c10d import _SymmetricMemory  # noqa: PLC0415

    index = torch.cuda.current_device() if device.index is None else device.index
    return bool(_SymmetricMemory.has_multicast_support(DeviceType.CUDA, index))
