"""One layer's bounded caches of two documents made into one, as if the second document had followed the first.

The second one's keys move by a rotation: they are stored rotated by their absolute positions, and a constant number of
positions is a constant angle for each pair of dims. It is linear, so it is as right for averages of keys as for keys.

- The ring holds the last W tokens: those of the second document, and of the first what the second leaves room for.
- The first document's other ring tokens are evicted into its own banks, by the rule of a block.
- Exact bank: all tokens of both while they fit. Beyond that the most recently used stay, counted in each document by
  itself and taken in turn, the first document's first. (Counted over both, the second document would take all.)
- Summary bank: all averages of both while they fit. Beyond that as many pairs as there are too many, one of each
  document, most alike first (cosine of what the bank routes by), become their mean. A bank of moving averages does not
  know how many tokens an average holds, so both weigh the same.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fathom.kernels.rope.reference import rotate_halves
from fathom.model.variants.coda import CodaCache
from fathom.model.variants.coda_banks import ExactBank, SummaryBank


class Kept(NamedTuple):
    """What of two caches is in the merged one, in slots."""

    ring_first: int  # tokens
    ring_second: int
    evicted: int  # ring tokens of the first document that were offered to its banks
    exact_first: int
    exact_second: int
    exact_lost: int  # of both
    summary_alone: int  # averages that are as they were
    summary_pairs: int  # averages that are the mean of two


def merge_caches(a: CodaCache, b: CodaCache, shift: int, turn: tuple[Tensor, Tensor], block: int) -> Kept:
    """Put what `b` holds behind what `a` holds; `b` is left as it is.

    Parameters
    ----------
    a, b
        Of one layer, with equal settings: the corrected rules, RoPE in halves.
    shift
        Positions that b's tokens move by: those of `a`, or 0, see `runtime.merge.merge`.
    turn
        Cos and sin [1, D / 2] float32 of that many positions.
    block
        Tokens that are evicted at once.

    Returns
    -------
    Kept
        Counts of slots.

    """
    assert a.settings == b.settings, "caches of one layer"
    assert a.settings.lf_layout == "pairs", "half a rotated pair cannot be rotated"
    window, total = a.settings.window, shift + b.position
    oldest = a.position - min(a.position, window)
    stays = min(max(oldest, total - window), a.position) if shift else a.position  # what is before goes to the banks
    for first in range(oldest, stays, block):
        a.evict(first, min(block, stays - first))
    keys = rotate_halves(b.keys, *turn)  # [K, slots, D], ring and banks
    banks = slice(window, window + a.exact.size), slice(window + a.exact.size, None)
    exact = _merge_exact(a.exact, b.exact, keys[:, banks[0]], shift)
    summary = _merge_summary(a.summary, b.summary, keys[:, banks[1]])
    held = torch.arange(b.position - min(b.position, window), b.position, device=keys.device)
    source, slots = held % window, (shift + held) % window
    a.keys[:, slots], a.values[:, slots], a.gates[slots] = keys[:, source], b.values[:, source], b.gates[source]
    a.used[:window] = torch.arange(window, device=keys.device) < total
    a.count(b)
    a.renew()
    ring, a.position = (a.position - stays, len(held)), total
    return Kept(*ring, stays - oldest, *exact, *summary)


def _merge_exact(a: ExactBank, b: ExactBank, keys: Tensor, shift: int) -> tuple[int, int, int]:
    """Put b's tokens, whose keys are `keys` [K, m, D], into `a`: slots kept of a, of b, and lost."""
    ours, theirs = _by_recency(a), _by_recency(b)
    n = min(len(ours), max((a.size + 1) // 2, a.size - len(theirs)))
    m = min(len(theirs), a.size - n)
    taken = torch.zeros_like(a.used)
    taken[ours[:n]] = True
    free, given = (~taken).nonzero()[:m, 0], theirs[:m].sort().values
    a.keys[:, free], a.values[:, free] = keys[:, given], b.values[:, given]
    a.last_used[free], a.used[free] = b.last_used[given] + shift, True
    a.active = max(a.active, b.active)
    return n, m, len(ours) - n + len(theirs) - m


def _by_recency(bank: ExactBank) -> Tensor:
    """Slots in use, the most recently used first, lower index first among equals."""
    used = bank.used.nonzero()[:, 0]
    return used[bank.last_used[used].sort(descending=True, stable=True).indices]


def _merge_summary(a: SummaryBank, b: SummaryBank, keys: Tensor) -> tuple[int, int]:
    """Put b's averages, whose keys are `keys` [K, m, D], into `a`: averages left alone, and pairs."""
    ours, theirs = a.used.nonzero()[:, 0], b.used.nonzero()[:, 0]
    pairs = _most_alike(a, ours, (b.values if a.by_value else keys)[:, theirs], len(ours) + len(theirs) - a.size)
    for i, j in pairs:
        slot, other = ours[i], theirs[j]
        for stored, given in ((a.keys, keys), (a.values, b.values)):
            stored[:, slot] = ((stored[:, slot].float() + given[:, other].float()) / 2).to(stored.dtype)
    paired = {j for _, j in pairs}
    rest = theirs[[j for j in range(len(theirs)) if j not in paired]]
    free = (~a.used).nonzero()[: len(rest), 0]
    a.keys[:, free], a.values[:, free], a.used[free] = keys[:, rest], b.values[:, rest], True
    a.active = max(a.active, b.active)
    return len(ours) + len(theirs) - 2 * len(pairs), len(pairs)


def _most_alike(a: SummaryBank, ours: Tensor, compared: Tensor, n: int) -> list[tuple[int, int]]:
    """Disjoint pairs (index into `ours`, index into `compared` [K, m, D]), at most `n`, most alike first."""
    if n <= 0:
        return []
    cosines = a.targets.cosines(compared.transpose(0, 1))[:, ours].T  # [ours, m]
    pairs: list[tuple[int, int]] = []
    left, right = set(range(cosines.shape[0])), set(range(cosines.shape[1]))
    for at in cosines.flatten().sort(descending=True, stable=True).indices.tolist():
        i, j = divmod(at, cosines.shape[1])
        if i in left and j in right and len(pairs) < n:
            pairs.append((i, j))
            left.remove(i)
            right.remove(j)
    return pairs
