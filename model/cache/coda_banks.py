"""The two banks of a CoDA cache: slots that evicted tokens replace (exact) or are averaged into (summary).

A bank routes a token by its mean cosine over KV heads with each slot in use. The n tokens of a call are compared with
the bank as it was before the call: two equal tokens of one block do not find each other. A step is a call with one.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import normalize

from model.cache.coda_settings import CodaSettings

NOWHERE = -1e9  # cosine with a slot that cannot be chosen
NEVER = -(2**62)  # time of a slot that has not been used


class Targets:
    """What cosines with the slots need: normalised copies of their rows, or the inverse norms of these.

    Parameters
    ----------
    rows
        [K, m, D], a view of the keys or values compared; refreshed slot by slot, when they change.
    dims
        [D] bool, on the CPU: the dims compared. All others of `rows` are 0.
    inverse
        Keep inverse norms [K, m] float32, instead of copies [K, m, dims.sum()] in the dtype of `rows`.

    """

    def __init__(self, rows: Tensor, dims: Tensor, *, inverse: bool) -> None:
        self.rows, self.inverse = rows, inverse
        self.mask, self.columns = dims.float().to(rows.device), dims.nonzero()[:, 0].to(rows.device)
        shape = (*rows.shape[:2], len(self.columns))
        self.data = rows.new_zeros(shape[:2], dtype=torch.float32) if inverse else rows.new_zeros(shape)
        self.refresh(torch.arange(rows.shape[1], device=rows.device))

    def refresh(self, slots: Tensor) -> None:
        """Take in new content of `slots` [n]."""
        rows = self.rows[:, slots].float()
        if self.inverse:
            self.data[:, slots] = 1 / rows.norm(dim=-1).clamp(min=1e-6)
        else:
            self.data[:, slots] = normalize(rows[..., self.columns], dim=-1, eps=1e-6).to(self.data.dtype)

    def cosines(self, x: Tensor) -> Tensor:
        """Cosine of each row of x [n, K, D] with each slot, mean over KV heads: [n, m] float32."""
        compared = x.float() * self.mask if self.inverse else x.float()[..., self.columns]
        slots = self.rows if self.inverse else self.data
        by_head = torch.einsum("nhd,hmd->nhm", normalize(compared, dim=-1, eps=1e-6), slots.float())  # [n, K, m]
        return (by_head * self.data if self.inverse else by_head).mean(1)


class Bank:
    """What both banks have: slots, which of them hold something, how many may, and counts of what happened."""

    def __init__(self, settings: CodaSettings, parts: tuple[Tensor, Tensor, Tensor], start: int | None) -> None:
        self.settings = settings
        self.keys, self.values, self.used = parts  # views of the cache's buffers: [K, m, D], [K, m, D], [m] bool
        self.size = self.used.shape[0]
        self.start = self.size if start is None else start
        self.active = self.start  # slots in use, the first ones
        self.counts: dict[str, int] = {}

    def _grow(self, pressure: int, position: int) -> None:
        """Take more slots into use, at most `pressure`, up to what the logarithm of the tokens seen allows."""
        horizon = self.settings.growth_horizon
        ratio = min(1.0, math.log(1 + position) / math.log(1 + horizon)) if horizon > 0 else 1.0
        grown = max(0, min(pressure, self.start + int((self.size - self.start) * ratio) - self.active))
        self.active += grown
        self.counts["expansions"] += grown


class ExactBank(Bank):
    """Tokens as they were, least recently used out first: an evicted token enters when no slot holds its like.

    Routed by values, which carry no RoPE. "Used" is the position of the token that entered or was a hit, never that of
    a query.
    """

    def __init__(self, settings: CodaSettings, parts: tuple[Tensor, Tensor, Tensor]) -> None:
        super().__init__(settings, parts, settings.exact_at_start)
        values = self.values
        every = torch.ones(values.shape[-1], dtype=torch.bool)
        self.targets = Targets(values, every, inverse=settings.inverse_norms)
        self.last_used = torch.zeros(self.size, dtype=torch.int64, device=values.device)  # position, by slot
        names = ("hits", "inserts", "overwrites", "gated_out", "frustrated", "expansions")
        self.counts = dict.fromkeys(names, 0)

    def insert(self, tokens: tuple[Tensor, Tensor], positions: Tensor, gates: Tensor, now: int, *, step: bool) -> None:
        """Offer evicted tokens to the bank, the most important first.

        Parameters
        ----------
        tokens
            Keys and values, [n, K, D] each.
        positions
            [n] int64, of these tokens.
        gates
            [n] float32.
        now
            Tokens seen before the call.
        step
            Whether this is the eviction of a step: the published rules differ.

        """
        keys, values = tokens
        keep = gates >= self.settings.gate_exact
        self.counts["gated_out"] += int((~keep).sum())
        count_all_hits = step and self.settings.published_counts
        if not keep.any() and not count_all_hits:
            return
        cosines = self.targets.cosines(values).masked_fill(~self._searched(), NOWHERE)
        best, slot = cosines.max(-1)
        hit = best >= self.settings.hit
        new = keep & (best < self.settings.novelty)
        order = self._by_age(published=self.settings.published_growth and not step)[: min(len(gates), self.active)]
        rank = new.cumsum(0) - 1
        placed = new & (rank < self.active)
        slot = torch.where(placed, order[rank.clamp(0, len(order) - 1)], slot)
        pressure = self._pressure(int(new.sum()), step=step)
        overwrite = placed | (keep & hit) if self.settings.refresh_on_hit else placed
        similar = keep & (best >= self.settings.novelty) if self.settings.lru_touch_between else keep & hit
        self._touch(slot, positions, placed | similar)
        self._overwrite(slot, (keys, values), positions, overwrite)
        self.counts["hits"] += int((hit if count_all_hits else hit & keep).sum())
        self.counts["inserts"] += int(placed.sum())
        self.counts["overwrites"] += int(overwrite.sum())
        self.counts["frustrated"] += 0 if count_all_hits else pressure
        self._grow(pressure, now)

    def _searched(self) -> Tensor:
        """Slots that a token may resemble: [m] bool."""
        searched = self.used.clone()
        searched[self.active :] = False
        return searched

    def _by_age(self, *, published: bool) -> Tensor:
        """Slots in the order in which new tokens take them: free ones, then the least recently used; lower index first.

        The published order of a block has the slots beyond the active ones among the free, whatever they hold.
        """
        age = torch.where(self.used, self.last_used, NEVER)
        if published:
            age[self.active :] = NEVER
        else:
            age = age[: self.active]
        return age.sort(stable=True).indices

    def _pressure(self, new: int, *, step: bool) -> int:
        """How many of the `new` tokens there was no room for."""
        if self.settings.published_growth and not step:
            return max(0, new - self.active)
        return max(0, new - int((~self.used[: self.active]).sum()))

    def _touch(self, slot: Tensor, positions: Tensor, touched: Tensor) -> None:
        self.last_used.scatter_reduce_(0, slot[touched], positions[touched], "amax")

    def _overwrite(self, slot: Tensor, tokens: tuple[Tensor, Tensor], positions: Tensor, chosen: Tensor) -> None:
        """Put the chosen tokens into their slots; where several share one, the last of them (or the published sum)."""
        rows = chosen.nonzero()[:, 0]
        if not len(rows):
            return
        if self.settings.refresh_sums:
            for stored, given in zip((self.keys, self.values), tokens, strict=True):
                new = given[rows].transpose(0, 1)  # [K, rows, D]
                stored.index_add_(1, slot[rows], new - stored[:, slot[rows]])
        else:
            rows = rows[positions[rows].argsort()]
            last = dict(zip(slot[rows].tolist(), rows.tolist(), strict=True))  # a later position replaces an earlier
            rows = torch.tensor(list(last.values()), device=slot.device)
            for stored, given in zip((self.keys, self.values), tokens, strict=True):
                stored[:, slot[rows]] = given[rows].transpose(0, 1)
        self.used[slot[rows]] = True
        self.targets.refresh(slot[rows].unique())


class SummaryBank(Bank):
    """Moving averages of what was evicted: an evicted token moves the slot it resembles most towards itself.

    Keys are averaged in their low-frequency dims only, scaled by sqrt(D / (D/2)) to keep their energy, and are 0 in the
    others, whose phases at different positions would cancel; values are averaged whole. Free slots take part in the
    comparison with what they were initialised to.
    """

    def __init__(self, settings: CodaSettings, parts: tuple[Tensor, Tensor, Tensor], eta_logit: Tensor) -> None:
        super().__init__(settings, parts, settings.summary_at_start)
        keys, values = self.keys, self.values
        low = settings.low_frequencies(keys.shape[-1], torch.device("cpu"))
        self.by_value = settings.route == "value"
        self.eta = torch.sigmoid(eta_logit.detach().float()).to(keys.device)  # [K]
        self.blend = (low.float() * math.sqrt(low.numel() / int(low.sum()))).to(keys.device)  # [D]
        compared = torch.ones_like(low) if self.by_value else low
        self.targets = Targets(values if self.by_value else keys, compared, inverse=settings.inverse_norms)
        self.counts = dict.fromkeys(("updates", "inserts", "frustrated", "expansions"), 0)

    def absorb(self, tokens: tuple[Tensor, Tensor], gates: Tensor, now: int, *, step: bool) -> None:
        """Average evicted tokens into the slots they resemble; those that share a slot by their gate-weighted mean.

        Parameters
        ----------
        tokens
            Keys and values, [n, K, D] each.
        gates
            [n] float32.
        now
            Tokens seen before the call.
        step
            Whether this is the eviction of a step: the published rate differs.

        """
        kept = ((gates >= self.settings.gate_summary) & (gates > 0)).nonzero()[:, 0]
        if not len(kept):
            return
        keys, values, gates = tokens[0][kept].float(), tokens[1][kept].float(), gates[kept]
        cosines = self.targets.cosines(values if self.by_value else keys)
        cosines[:, self.active :] = NOWHERE
        slots, group = cosines.argmax(-1).unique(return_inverse=True)
        fresh = ~self.used[slots]
        rate = self._rate(gates, group, len(slots), gated=step or self.settings.gate_eta_in_blocks)  # [s, K]
        if self.settings.overwrite_on_insert:
            rate = rate.masked_fill(fresh[:, None], 1)
            self.counts["inserts"] += int(fresh.sum())
        mass = gates.new_zeros(len(slots)).index_add_(0, group, gates).clamp(min=1e-6)[:, None, None]
        for stored, given in ((self.keys, keys * self.blend), (self.values, values)):
            mean = (
                given.new_zeros(len(slots), *given.shape[1:]).index_add_(0, group, given * gates[:, None, None]) / mass
            )
            old = stored[:, slots].float()
            stored[:, slots] = (old + rate.T[..., None] * (mean.transpose(0, 1) - old)).to(stored.dtype)
        self.used[slots] = True
        self.targets.refresh(slots)
        self.counts["updates"] += len(slots)
        if self.used[: self.active].all():
            self.counts["frustrated"] += 1
            self._grow(1, now)

    def _rate(self, gates: Tensor, group: Tensor, n: int, *, gated: bool) -> Tensor:
        """How far towards the mean of its tokens each of n slots moves, by KV head: [n, K]."""
        if not gated:
            return self.eta.expand(n, -1)
        stays = torch.log1p(-self.eta * gates[:, None])  # [tokens, K]: log of what one token leaves of the old content
        return -torch.expm1(stays.new_zeros(n, self.eta.shape[0]).index_add_(0, group, stays))
