"""The frontier of a compressor: tokens that no entry holds yet, carried from call to call in fp32."""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from kernels.formats.stored import Window

Pool = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]


class Frontier:
    """The open window of a compressor, and with overlap the first series of the last closed one.

    A window is `ratio` tokens. Without overlap a token brings `width` channels. With overlap it brings two series side
    by side, [next | own] (paper section 2.3.1: Ca and Cb): an entry pools its own window's second series with the first
    series of the window before. The first window has no predecessor: gates of -inf take it out of the softmax.
    """

    def __init__(self, ratio: int, width: int, *, overlap: bool, device: torch.device) -> None:
        series = 2 if overlap else 1
        self.ratio, self.width, self.overlap = ratio, width, overlap
        self.filled = 0  # tokens in the open window
        self.kv = torch.zeros(ratio, series * width, dtype=torch.float32, device=device)
        self.gate = torch.zeros(ratio, series * width, dtype=torch.float32, device=device)
        kept = ratio if overlap else 0
        self.previous_kv = torch.zeros(kept, width, dtype=torch.float32, device=device)
        self.previous_gate = torch.full((kept, width), float("-inf"), dtype=torch.float32, device=device)

    def push(self, kv: Tensor, gate: Tensor, pool: Pool) -> Iterator[Tensor]:
        """Take t more tokens and yield the pooled windows they complete, in order.

        Parameters
        ----------
        kv, gate
            [t, width] or, with overlap, [t, 2 * width], float32; `gate` holds the position bias.
        pool
            `Ops.pool`.

        Yields
        ------
        Tensor
            [n, width] float32, one row per completed window.

        """
        head = min(self.ratio - self.filled, kv.shape[0])
        self._store(kv[:head], gate[:head])
        if self.filled == self.ratio:
            yield self._close(self.kv[None], self.gate[None], pool)
            self.filled = 0
        whole = (kv.shape[0] - head) // self.ratio
        tail = head + whole * self.ratio
        if whole:
            windows = (whole, self.ratio)
            yield self._close(kv[head:tail].unflatten(0, windows), gate[head:tail].unflatten(0, windows), pool)
        self._store(kv[tail:], gate[tail:])

    def _store(self, kv: Tensor, gate: Tensor) -> None:
        rows = slice(self.filled, self.filled + kv.shape[0])
        self.kv[rows], self.gate[rows] = kv, gate
        self.filled += kv.shape[0]

    def _close(self, kv: Tensor, gate: Tensor, pool: Pool) -> Tensor:
        """Pool whole windows [n, ratio, series * width] into [n, width], and keep what the next window needs."""
        if not self.overlap:
            return pool(kv, gate, None, None)
        next_kv, own_kv = kv.split(self.width, dim=-1)
        next_gate, own_gate = gate.split(self.width, dim=-1)
        pooled = torch.empty(kv.shape[0], self.width, dtype=torch.float32, device=kv.device)
        pooled[:1] = pool(own_kv[:1], own_gate[:1], self.previous_kv[None], self.previous_gate[None])
        if kv.shape[0] > 1:
            pooled[1:] = pool(own_kv[1:], own_gate[1:], next_kv[:-1], next_gate[:-1])
        self.previous_kv.copy_(next_kv[-1])
        self.previous_gate.copy_(next_gate[-1])
        return pooled

    def window(self) -> Window:
        """Return the buffers themselves, as `kernels.compress.triton` overwrites them."""
        return Window(self.kv, self.gate, self.previous_kv, self.previous_gate)

    def advance(self) -> None:
        """Note that a captured call has pushed one token."""
        self.filled = (self.filled + 1) % self.ratio

    def tensors(self, position: int) -> dict[str, Tensor]:
        """Views of what a saved state needs: the filled rows of the open window and the previous series."""
        assert position % self.ratio == self.filled, f"{self.filled} tokens in the open window at position {position}"
        return {
            "kv": self.kv[: self.filled],
            "gate": self.gate[: self.filled],
            "previous_kv": self.previous_kv,
            "previous_gate": self.previous_gate,
        }

    def shapes(self, position: int) -> dict[str, tuple[int, ...]]:
        """Shapes of what `tensors` gives at `position`, whatever the frontier holds now."""
        open_window = (position % self.ratio, self.kv.shape[1])
        previous = tuple(self.previous_kv.shape)
        return {"kv": open_window, "gate": open_window, "previous_kv": previous, "previous_gate": previous}

    def restore(self, position: int, saved: Mapping[str, Tensor]) -> None:
        """Put back what `tensors` gave at `position`."""
        del position
        self.filled = 0
        self._store(saved["kv"], saved["gate"])
        self.previous_kv.copy_(saved["previous_kv"])
        self.previous_gate.copy_(saved["previous_gate"])

    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(part.nbytes for part in (self.kv, self.gate, self.previous_kv, self.previous_gate))
