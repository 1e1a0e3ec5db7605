"""Entries in bounded memory: CoDA's banks, thought through for layers whose entry is key and value at once.

CoDA-GQA-L (the article's sections on banks) keeps a window of tokens, an exact bank of those that were like no other,
and a summary bank of moving averages. Here what leaves the window is a compressed entry, and five things differ:

- A mean stands for many entries, so its logit gets the logarithm of their number: exactly what the softmax would have
  given them had they all been equal to it. Without it a slot of a thousand entries weighs as much as one.
- A slot is the plain mean of what went into it, and no moving average: weights that decay would not add up to a number
  of entries.
- All columns are averaged, the rotated ones too: key and value are one, so the mean of the rows is what attention to
  all of them would have summed.
- Entries are told apart by their columns without rotation alone; those with it say where an entry was made.
- Nothing is counted twice: an evicted entry goes into the exact bank or into the summary, and what the exact bank gives
  up goes into the summary. The number of entries behind all slots is the number of entries seen (`mass`).

Evictions happen one by one and in order, after the call that made them possible has attended. So the banks depend on
the entries that left the window and on nothing else, bit by bit; how a prompt is cut into calls decides only how many
entries a token sees beyond the newest `window`: those of its own call.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log

import torch
from torch import Tensor

from fathom.kernels.formats.stored import Rows, Slots
from fathom.model.cache.entries import RowCache
from fathom.model.cache.formats import CacheFormats
from fathom.model.cache.variant import Room, Variant
from fathom.model.errors import StateError

NOVEL = 0.70  # cosine below which an entry is like no other; article, as published
HIT = 0.90  # cosine from which it is the same again; article, as published


@dataclass(frozen=True, slots=True)
class Coda(Variant):
    """So many entries and no more: the newest, some that are like no other, and means of the rest."""

    name = "coda"
    window: int = 256  # newest entries, exact
    exact: int = 64  # entries that were like no other when they left the window
    summary: int = 64  # means of all the others

    def entry_cache(self, room: Room, formats: CacheFormats, device: torch.device) -> RowCache[Rows | Slots]:
        """The newest, and both banks."""
        newest = newest_rows(room.ratio, self, room.chunk, room.rows)
        return BankedEntries(room.ratio, self, room.width, room.rope, newest, formats.dtype, device)

    def key_cache(self, room: Room, formats: CacheFormats, device: torch.device) -> RowCache[Rows]:
        """Those of the newest."""
        newest = newest_rows(room.ratio, self, room.chunk, room.rows)
        return NewestKeys(room.ratio, self, room.width, newest, formats.dtype, device)


class BankedEntries(RowCache[Rows | Slots]):
    """Slots of an exact bank, of a summary bank, and the newest entries after them.

    Parameters
    ----------
    ratio
        Tokens per entry.
    variant
        How many entries of each kind.
    width, rope
        Columns of an entry, and how many of them, the last, are rotated.
    newest
        Rows for entries that are not in the banks: `newest_rows`.
    dtype, device
        Of entries and keys. Means are kept in float32 and attended to in `dtype`.

    """

    def __init__(
        self, ratio: int, variant: Coda, width: int, rope: int, newest: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.variant, self.plain, self.banked = variant, width - rope, variant.exact + variant.summary
        super().__init__(ratio, data := torch.zeros(self.banked + newest, width, dtype=dtype, device=device))
        self.data: Tensor = data
        self.means = torch.zeros(variant.summary, width, device=device)
        self.bias = torch.zeros(self.data.shape[0], device=device)  # log of the entries behind a row
        self.bias[: self.banked] = float("-inf")
        self.counts = [0] * variant.summary  # entries behind each mean; on the host, where evictions are decided
        self.times = [-1] * variant.exact  # the last entry that was, or was like, each exact one; -1: empty

    @property
    def hidden(self) -> int:
        """Entries by which rows lag behind: a token that has seen n entries sees the first ``n - hidden`` rows."""
        return self.evicted - self.banked

    def mass(self) -> int:
        """Entries behind all rows."""
        return sum(self.counts) + sum(time >= 0 for time in self.times) + self.count - self.evicted

    def stats(self) -> dict[str, float | None]:
        """Slots in use, how alike they are, and where entries went; see `model.cache.components.Banked`."""
        exact = [slot for slot, time in enumerate(self.times) if time >= 0]
        means = [slot for slot, count in enumerate(self.counts) if count]
        return {
            "ring_used": self.count - self.evicted,
            "exact_used": len(exact),
            "summary_used": len(means),
            "exact_nearest": self._alike(self.data[exact]),
            "summary_nearest": self._alike(self.means[means]),
            "total_evictions": self.evicted,
            "summarised": sum(self.counts),  # entries behind all means
            "largest_mean": max(self.counts),
        }

    def _alike(self, rows: Tensor) -> float | None:
        """Mean over rows [n, d] of the cosine with the most alike of the others; None of fewer than two."""
        if len(rows) < 2:
            return None
        unit = torch.nn.functional.normalize(rows[:, : self.plain].float(), dim=1)
        return float((unit @ unit.T).fill_diagonal_(-1).amax(1).mean())

    @property
    def used(self) -> int:
        """Rows in use, those of empty slots among them."""
        return self.count - self.hidden

    def view(self) -> Slots:
        """Return all slots and the newest entries, as views; no slots while they are empty."""
        if not self.evicted:
            rows = slice(self.banked, self.used)
            return Slots(self.data[rows], self.bias[rows], 0)
        return Slots(self.data[: self.used], self.bias[: self.used], self.hidden)

    def chosen(self, selected: Tensor) -> Tensor:
        """Rows of `view` for a selection [t, k] int32 among the newest entries: all slots, and these; -1 stays none."""
        if not self.evicted:
            return selected
        slots = torch.arange(self.banked, dtype=torch.int32, device=selected.device).expand(selected.shape[0], -1)
        return torch.cat((slots, torch.where(selected >= 0, selected + self.banked, -1)), dim=1)

    def evict(self) -> None:
        """Evict what is older than the window; to be called when all tokens of a call have attended."""
        many = self.count - self.evicted - self.variant.window
        if many <= 0:
            return
        window = self.variant.window
        for row in self.data[self.banked : self.banked + many].clone():
            self._evict(row, self.evicted)
            self.evicted += 1
        self.data[self.banked :][:window] = self.data[self.banked + many :][:window].clone()

    def nbytes(self) -> int:
        """Bytes allocated; what the host keeps is counted as the tensors that a saved state makes of it."""
        held = (self.data, self.means, self.bias)
        return sum(part.nbytes for part in held) + 8 * (len(self.counts) + len(self.times))

    def tensors(self, position: int) -> dict[str, Tensor]:
        """What a saved state needs."""
        assert self.count == position // self.ratio, f"{self.count} entries at position {position}"
        return {
            "exact": self.data[: self.variant.exact],
            "means": self.means,
            "newest": self.data[self.banked : self.used],
            "counts": torch.tensor(self.counts, dtype=torch.int64),
            "times": torch.tensor(self.times, dtype=torch.int64),
        }

    def shapes(self, position: int) -> dict[str, tuple[int, ...]]:
        """Shapes of what `tensors` gives at `position`, whatever the banks hold now."""
        newest, width = min(position // self.ratio, self.variant.window), self.data.shape[1]
        return {
            "exact": (self.variant.exact, width),
            "means": (self.variant.summary, width),
            "newest": (newest, width),
            "counts": (self.variant.summary,),
            "times": (self.variant.exact,),
        }

    def restore(self, position: int, saved: Mapping[str, Tensor]) -> None:
        """Put back what `tensors` gave at `position`; StateError, and nothing changed, for what cannot have been given.

        Every entry that has left the window is behind one slot.
        """
        count = position // self.ratio
        evicted = max(0, count - self.variant.window)
        counts, times = saved["counts"].tolist(), saved["times"].tolist()
        if any(n < 0 for n in counts) or sum(counts) + sum(time >= 0 for time in times) != evicted:
            raise StateError(f"coda: counts of the state are not those of {evicted} evicted entries")
        if any(not -1 <= time < evicted for time in times):
            raise StateError(f"coda: times of the state are not all those of {evicted} evicted entries")
        for name in ("exact", "means", "newest"):
            if not bool(saved[name].isfinite().all()):
                raise StateError(f"coda: {name} of the state are not all finite")
        self.count, self.evicted, self.counts, self.times = count, evicted, counts, times
        self.means.copy_(saved["means"])
        exact, newest = self.variant.exact, saved["newest"]
        self.data[:exact] = saved["exact"]
        self.data[exact : self.banked] = self.means
        self.data[self.banked : self.banked + len(newest)] = newest
        behind = [int(time >= 0) for time in self.times] + self.counts
        self.bias[: self.banked] = torch.tensor([log(n) if n else float("-inf") for n in behind])

    def _evict(self, row: Tensor, index: int) -> None:
        """Send entry `index` [d] to the bank where it belongs."""
        used = [slot for slot, time in enumerate(self.times) if time >= 0]
        best, nearest = self._nearest(self.data[: self.variant.exact], used, row)
        if self.variant.exact and nearest < NOVEL:
            free = self.times.index(-1) if len(used) < len(self.times) else None
            slot = self.times.index(min(self.times)) if free is None else free
            if free is None:
                self._summarise(self.data[slot].clone())
            self.data[slot], self.bias[slot], self.times[slot] = row, 0.0, index
            return
        if nearest >= HIT:
            self.times[best] = index
        self._summarise(row)

    def _summarise(self, row: Tensor) -> None:
        """Add an entry [d] to an empty mean, or to the one it is most like."""
        slot = self.counts.index(0) if 0 in self.counts else self._nearest(self.means, range(len(self.counts)), row)[0]
        self.counts[slot] += 1
        self.means[slot] += (row.float() - self.means[slot]) / self.counts[slot]
        at = self.variant.exact + slot
        self.data[at] = self.means[slot]
        self.bias[at] = log(self.counts[slot])

    def _nearest(self, rows: Tensor, slots: Sequence[int], row: Tensor) -> tuple[int, float]:
        """Which of the `slots` of `rows` has the largest cosine with a row, the lowest of equals, and that cosine."""
        if not slots:
            return -1, float("-inf")
        plain = rows[list(slots), : self.plain].float()
        cosines = torch.cosine_similarity(plain, row[None, : self.plain].float(), dim=1)
        largest, places = cosines.max(), torch.arange(len(cosines), device=cosines.device)
        first = torch.where(cosines == largest, places, len(places)).min()
        best, cosine = torch.stack((first.double(), largest.double())).tolist()  # one read of a device
        return list(slots)[int(best)], cosine


class NewestKeys(RowCache[Rows]):
    """Index keys of the newest entries [n, d]: banks have none, since they are always attended to."""

    def __init__(
        self, ratio: int, variant: Coda, width: int, newest: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(ratio, data := torch.zeros(newest, width, dtype=dtype, device=device))
        self.data: Tensor = data
        self.window = variant.window

    def view(self) -> Tensor:
        """Return the keys as a view, [n, d]; the first is of entry `evicted`."""
        return self.data[: self.used]

    def evict(self) -> None:
        """Forget what is older than the window."""
        if (many := self.used - self.window) > 0:
            self.data[: self.window] = self.data[many : many + self.window].clone()
            self.evicted += many

    def tensors(self, position: int) -> dict[str, Tensor]:
        """What a saved state needs."""
        del position
        return {"newest": self.view()}

    def shapes(self, position: int) -> dict[str, tuple[int, ...]]:
        """Shapes of what `tensors` gives at `position`, whatever is held now."""
        return {"newest": (min(position // self.ratio, self.window), self.data.shape[1])}

    def restore(self, position: int, saved: Mapping[str, Tensor]) -> None:
        """Put back what `tensors` gave at `position`; StateError, and nothing changed, for keys that are not finite."""
        newest = saved["newest"]
        if not bool(newest.isfinite().all()):
            raise StateError("coda: index keys of the state are not all finite")
        self.count = position // self.ratio
        self.evicted = max(0, self.count - self.window)
        self.data[: self.used] = newest


def newest_rows(ratio: int, variant: Coda, chunk: int, entries: int) -> int:
    """Rows for the newest entries: a window, and those of a call, the first of which may have begun before it.

    A context of so many `entries` needs no more than these, however wide the window.
    """
    return min(variant.window + chunk // ratio + 1, entries)
