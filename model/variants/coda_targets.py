"""What the banks of a CoDA cache compare tokens with: directions of the slots' keys or values."""

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fathom.model.cache.gqa import KvHeads


class Targets:
    """What cosines with the slots need: normalised copies of their rows, or the inverse norms of these.

    Parameters
    ----------
    rows
        [K, m, D], a view of the keys or values compared; refreshed slot by slot, when they change.
    dims
        [D] bool, on the CPU: the dims compared. All others of `rows` are 0.
    heads
        Which KV heads these rows are of: cosines are means over those of all ranks.
    inverse
        Keep inverse norms [K, m] float32, instead of copies [K, m, dims.sum()] in the dtype of `rows`.

    """

    def __init__(self, rows: Tensor, dims: Tensor, heads: KvHeads, *, inverse: bool) -> None:
        self.rows, self.heads, self.inverse, self.mask = rows, heads, inverse, dims.float().to(rows.device)
        index = dims.nonzero()[:, 0]
        first, last = (int(index[place]) for place in (0, -1))
        adjoin = last + 1 - first == len(index)  # then they are a view
        self.columns = slice(first, last + 1) if adjoin else index.to(rows.device)
        self.whole = len(index) == len(dims)
        shape = (*rows.shape[:2], len(index))
        self.data = rows.new_zeros(shape[:2], dtype=torch.float32) if inverse else rows.new_zeros(shape)
        self.refresh(torch.arange(rows.shape[1], device=rows.device))

    def refresh(self, slots: Tensor) -> None:
        """Take in new content of `slots` [n]."""
        self.data[:, slots] = self.of(self.rows[:, slots])

    def of(self, rows: Tensor) -> Tensor:
        """What is kept of rows [K, n, D]: [K, n] float32, or [K, n, dims] in the dtype of the bank."""
        rows = rows.float()
        if self.inverse:
            inverse: Tensor = 1 / rows.norm(dim=-1).clamp(min=1e-6)
            return inverse
        return normalize(rows[..., self.columns], dim=-1, eps=1e-6).to(self.data.dtype)

    def cosines(self, x: Tensor) -> Tensor:
        """Cosine of each row of x [n, K, D] with each slot, mean over KV heads: [n, m] float32."""
        compared = x.float() * self.mask if self.inverse else x.float()[..., self.columns]
        slots = self.rows if self.inverse else self.data
        by_head = torch.einsum("nhd,hmd->nhm", normalize(compared, dim=-1, eps=1e-6), slots.float())  # [n, K, m]
        return self.heads.whole(by_head * self.data if self.inverse else by_head, 1).mean(1)

    def nearest(self, used: Tensor) -> float | None:
        """How alike slots are: the mean, over those `used` [m] bool, of the cosine with the most alike of the others.

        None where fewer than two are in use. On several ranks all of them must ask.
        """
        slots = used.nonzero()[:, 0]
        if len(slots) < 2:
            return None
        cosines = self.cosines(self.rows[:, slots].transpose(0, 1))[:, slots]
        return float(cosines.fill_diagonal_(-1).amax(1).mean())

    def compare(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`cosines` of one token [K, D] float32: [m]; and what `remember` takes, should a slot hold just this token."""
        unit, norm = self._unit(x if self.whole else x * self.mask if self.inverse else x[:, self.columns])
        slots = self.rows if self.inverse else self.data
        by_head = torch.bmm(slots.float(), unit[..., None])[..., 0]  # [K, m]
        if not self.inverse:
            return self.heads.whole(by_head, 0).mean(0), unit
        return self.heads.whole(by_head.mul_(self.data), 0).mean(0), norm.reciprocal_()[:, 0]

    def remember(self, slot: int, known: Tensor) -> None:
        """Take in what `compare` found of the token that `slot` now holds."""
        self.data[:, slot] = known

    def refresh_one(self, slot: int) -> None:
        """Take in new content of one slot."""
        row = self.rows[:, slot].float()
        unit, norm = self._unit(row if self.inverse else row[:, self.columns])
        self.data[:, slot] = norm.reciprocal_()[:, 0] if self.inverse else unit

    def _unit(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [K, c] of length 1, and the length that they had, 1e-6 at least: [K, 1]."""
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_(min=1e-6)
        return x / norm, norm
