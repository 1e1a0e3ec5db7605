"""Rows written into the memory of other ranks over NVLink: tables on each rank, into which all others write.

Where a row goes, and whether it does, stands in tensors on the device: no host waits to know how many come, and what
nobody wants takes no time on a link. This runs beside the computation, on a stream of its own. Memory and barriers are
torch's, the kernel is `kernels.exchange.triton`. Not run yet: it takes GPUs that NVLink connects. Tests put memory that
processes share in its place.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

ALIGNED: Final = 256  # bytes at a multiple of which a table begins
WORD: Final = 4  # bytes of which a row is a multiple
NUMBER: Final = 8  # bytes of a row's number
LATER: Final = 1 << 32  # by which numbers of the next table differ: what was not overwritten tells


class Table(NamedTuple):
    """How many rows a rank is sent at most, and bytes of each."""

    rows: int
    width: int

    @property
    def nbytes(self) -> int:
        """Bytes of its rows and of their numbers."""
        return self.rows * (self.width + NUMBER) + 2 * ALIGNED


class Mailbox:
    """Tables of rows on each rank of one process group, and beside each the numbers of its rows, by their senders.

    The next layer's rows overwrite a table. They are written behind a barrier that a rank enters when it has computed
    what it was given before, and read behind a second one.
    """

    def __init__(self, processes: dist.ProcessGroup, device: torch.device, tables: Sequence[Table]) -> None:
        from torch.distributed import _symmetric_memory as symmetric  # noqa: PLC0415 (not on every platform)

        sizes = [size for table in tables for size in (table.rows * table.width, table.rows * NUMBER)]
        *starts, nbytes = accumulate((-(-size // ALIGNED) * ALIGNED for size in sizes), initial=0)
        memory = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
        self.handle = symmetric.rendezvous(memory, processes)
        begins = torch.tensor(self.handle.buffer_ptrs, dtype=torch.int64)
        begins += memory.data_ptr() - begins[processes.rank()]  # of a block that torch may have cut
        self.tables = [memory[start : start + size] for start, size in zip(starts, sizes, strict=True)]
        self.addresses = [(begins + start).to(device) for start in starts]  # of a table on each rank
        self.device = torch.get_device_module(device)
        self.stream, self.later = self.device.Stream(), 0

    def __call__(
        self, table: int, rows: Tensor, places: Tensor, first: int, into: int
    ) -> Callable[[], tuple[Tensor, Tensor]]:
        """Write rows [n, w], numbered from `first` on, to `places` [n, ranks] of others' tables, -1 for none.

        Waits for this rank's [into, w], and the number of each row [into] int64.
        """
        from fathom.kernels.exchange.triton import push  # noqa: PLC0415 (Triton is not on every platform)

        self.later += LATER
        first += self.later
        number = torch.arange(first, first + len(rows), device=rows.device)[:, None]
        given = rows.contiguous(), number, places.contiguous()
        self.stream.wait_stream(self.device.current_stream())
        with self.device.stream(self.stream):
            self.handle.barrier()
            for plane, addresses in zip(given, self.addresses[2 * table :][:2], strict=False):
                push(plane, given[-1], addresses)
            self.handle.barrier()
            written = self.stream.record_event()

        def arrived(given: tuple[Tensor, ...] = given, later: int = self.later) -> tuple[Tensor, Tensor]:
            self.device.current_stream().wait_event(written)  # until when what is given lives
            return self._table(2 * table, given[0], into), self._table(2 * table + 1, number, into)[:, 0] - later

        return arrived

    def _table(self, index: int, like: Tensor, into: int) -> Tensor:
        """`into` rows of a table, as wide as those of `like` and of its dtype."""
        nbytes = into * like.shape[1] * like.element_size()
        assert nbytes <= len(self.tables[index]), f"{nbytes} bytes in a table of {len(self.tables[index])}"
        return self.tables[index][:nbytes].view(like.dtype).view(into, -1)
