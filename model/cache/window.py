"""The SWA ring: KV of the last tokens, overwritten in turn."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fathom.kernels.formats import ring_reference as ring


class WindowRing:
    """KV of recent positions, or numbers of their tokens; position p is row ``p % capacity``.

    The capacity is the window plus one chunk, less one: a whole chunk can be written before it attends, and its first
    token still finds the window before it. It is the window plus `rewind` at least: when so many tokens are taken back,
    the window of the next one is still there. Nothing is ever moved, copied out or concatenated.
    """

    def __init__(
        self, window: int, chunk: int, width: int, dtype: torch.dtype, device: torch.device, rewind: int = 0
    ) -> None:
        self.window = window
        self.data = torch.zeros(rows(window, chunk, rewind), width, dtype=dtype, device=device)  # [capacity, d]
        self._held = [-1] * self.data.shape[0]  # position that each row holds; on the host, for the tripwire

    def write(self, first: int, kv: Tensor) -> None:
        """Store `kv` [t, d] for positions ``first .. first + t - 1``."""
        capacity, t = self.data.shape[0], kv.shape[0]
        assert t <= capacity, f"{t} tokens do not fit a ring of {capacity}"
        ring.write(self.data, first, kv)
        start = first % capacity
        head = min(t, capacity - start)
        self._held[start : start + head] = range(first, first + head)
        self._held[: t - head] = range(first + head, first + t)

    def advance(self, position: int) -> None:
        """Note that a captured call has written the row of `position`."""
        self._held[position % len(self._held)] = position

    def rewind(self, position: int, end: int) -> None:
        """Forget the tokens at positions ``position .. end - 1``: their rows are overwritten before they are seen."""
        for lost in range(position, end):
            self._held[lost % len(self._held)] = -1

    def held_for(self, position: int) -> int:
        """Position whose KV is in the row where `position` belongs; -1 for a row never written."""
        return self._held[position % len(self._held)]

    def last(self, stop: int, count: int) -> Tensor:
        """Rows of the last `count` positions before `stop`, fewer where there are no more: a copy [n, d]."""
        return ring.read(self.data, max(0, stop - count), stop)

    def tensors(self, position: int) -> dict[str, Tensor]:
        """KV that the token at `position` may still see, oldest first: what a saved state needs, a copy."""
        oldest = max(0, position - self.window + 1)
        return {"recent": ring.read(self.data, oldest, position)}  # [min(position, window - 1), d]

    def shapes(self, position: int) -> dict[str, tuple[int, ...]]:
        """Shapes of what `tensors` gives at `position`, whatever the ring holds now."""
        return {"recent": (min(position, self.window - 1), self.data.shape[1])}

    def restore(self, position: int, saved: Mapping[str, Tensor]) -> None:
        """Put back what `tensors` gave at `position`; the ring's capacity may differ from then."""
        recent = saved["recent"]
        self.write(position - recent.shape[0], recent)

    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.data.nbytes


def rows(window: int, chunk: int, rewind: int) -> int:
    """Rows of a ring for calls of up to `chunk` tokens, of which the last `rewind` can be taken back."""
    return window + max(chunk - 1, rewind)
