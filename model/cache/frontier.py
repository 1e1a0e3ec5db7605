"""The frontier of a compressor: the last tokens, in fp32, that entries yet to come will pool."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fathom.kernels.formats import ring_reference as ring
from fathom.kernels.formats.stored import TokenRing


class Frontier:
    """Values and gates of the last tokens, by position: those of the open window, and with overlap of the one before.

    A token brings one or two series of `width` channels, see `kernels.compress.reference`.

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

    def take(self, first: int | Tensor, count: int) -> None:
        """Note that `Ops.compress` took so many tokens; of a captured call `advance` has to be told on the host."""
        if isinstance(first, int):
            self.position += count

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
        oldest, self.position = self._oldest(position), position
        ring.write(self.kv, oldest, saved["kv"])
        ring.write(self.gate, oldest, saved["gate"])

    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.kv.nbytes + self.gate.nbytes
