"""The frontier of a compressor: the last tokens, in fp32, that entries yet to come will pool."""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from fathom.kernels.formats.stored import TokenRing
from fathom.model.cache import ring

Pool = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]


class Frontier:
    """Values and gates of the last tokens, by position: those of the open window, and with overlap of the one before.

    A window is `ratio` tokens. Without overlap a token brings `width` channels. With overlap it brings two series side
    by side, [next | own] (paper section 2.3.1: Ca and Cb): an entry pools its own window's second series with the first
    series of the window before. The first window has no predecessor.

    The token at position p is row ``p % rows`` of a ring, which no other token writes while an entry yet needs it: to
    take the last `rewind` tokens back is to set the position back. The ring is whole windows: each lies in one piece.
    """

    def __init__(self, ratio: int, width: int, *, overlap: bool, device: torch.device, rewind: int = 0) -> None:
        self.ratio, self.width, self.overlap = ratio, width, overlap
        self.position = 0  # tokens taken: the position of the next one
        self.series = 2 if overlap else 1
        rows = (self.series + -(-rewind // ratio)) * ratio
        self.kv = torch.zeros(rows, self.series * width, dtype=torch.float32, device=device)
        self.gate = torch.zeros(rows, self.series * width, dtype=torch.float32, device=device)

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
        t, entry = kv.shape[0], self.position // self.ratio
        head = min(-self.position % self.ratio, t)  # tokens of the window that is open
        if head:
            self._store(kv[:head], gate[:head])
            if self.position % self.ratio == 0:
                yield self._pooled(entry, *self._window(entry), pool)
                entry += 1
        whole = (t - head) // self.ratio
        if whole:
            tokens, windows = slice(head, head + whole * self.ratio), (whole, self.ratio)
            yield self._pooled(entry, kv[tokens].unflatten(0, windows), gate[tokens].unflatten(0, windows), pool)
        if head < t:
            self._store(kv[head:], gate[head:])

    def _store(self, kv: Tensor, gate: Tensor) -> None:
        ring.write(self.kv, self.position, kv)
        ring.write(self.gate, self.position, gate)
        self.position += kv.shape[0]

    def _window(self, entry: int) -> tuple[Tensor, Tensor]:
        """Values and gates of the tokens of one window, views [1, ratio, series * width]."""
        start = entry * self.ratio % self.kv.shape[0]
        rows = slice(start, start + self.ratio)
        return self.kv[None, rows], self.gate[None, rows]

    def before(self, entry: int) -> tuple[Tensor | None, Tensor | None]:
        """First series of the window before an entry's own, from the ring; None where there is no such window."""
        if not self.overlap or entry == 0:
            return None, None
        kv, gate = self._window(entry - 1)
        return kv[..., : self.width], gate[..., : self.width]

    def _pooled(self, entry: int, kv: Tensor, gate: Tensor, pool: Pool) -> Tensor:
        """Pool whole windows [n, ratio, series * width], the first of which is of `entry`, into [n, width]."""
        own_kv, own_gate = kv[..., -self.width :], gate[..., -self.width :]
        if not self.overlap:
            return pool(own_kv, own_gate, None, None)
        pooled = torch.empty(kv.shape[0], self.width, dtype=torch.float32, device=kv.device)
        pooled[:1] = pool(own_kv[:1], own_gate[:1], *self.before(entry))
        if kv.shape[0] > 1:
            pooled[1:] = pool(own_kv[1:], own_gate[1:], kv[:-1, :, : self.width], gate[:-1, :, : self.width])
        return pooled

    def ring(self) -> TokenRing:
        """Return the buffers themselves, as `Ops.compress` overwrites them."""
        return TokenRing(self.kv, self.gate)

    def advance(self) -> None:
        """Note that a captured call has pushed one token."""
        self.position += 1

    def rewind(self, position: int, end: int) -> None:
        """Forget the tokens at positions ``position .. end - 1``, the last ones."""
        assert end == self.position, f"{self.position} tokens taken, not {end}"
        self.position = position

    def _oldest(self, position: int) -> int:
        """Position of the oldest token that an entry will pool when `position` tokens were taken."""
        return max(0, (position // self.ratio - self.series + 1) * self.ratio)

    def tensors(self, position: int) -> dict[str, Tensor]:
        """What a saved state needs: tokens that entries will pool, oldest first, copies."""
        assert position == self.position, f"{self.position} tokens taken at position {position}"
        oldest = self._oldest(position)
        return {"kv": ring.read(self.kv, oldest, position), "gate": ring.read(self.gate, oldest, position)}

    def shapes(self, position: int) -> dict[str, tuple[int, ...]]:
        """Shapes of what `tensors` gives at `position`, whatever the frontier holds now."""
        return dict.fromkeys(("kv", "gate"), (position - self._oldest(position), self.kv.shape[1]))

    def restore(self, position: int, saved: Mapping[str, Tensor]) -> None:
        """Put back what `tensors` gave at `position`; the ring may hold more tokens than then."""
        self.position = self._oldest(position)
        self._store(saved["kv"], saved["gate"])

    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.kv.nbytes + self.gate.nbytes
