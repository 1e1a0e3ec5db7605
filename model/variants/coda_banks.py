"""The two banks of a CoDA cache: slots that evicted tokens replace (exact) or are averaged into (summary).

A bank routes a token by its mean cosine over KV heads with each slot in use. The n tokens of a block are compared with
the bank as it was before the block: two equal tokens of one block do not find each other. The one token of a step
has calls of its own, `insert_one` and `absorb_one`: the same rules, where the published ones do not differ, decided on
the host.
"""

import math

import torch
from torch import Tensor

from fathom.model.cache.gqa import KvHeads
from fathom.model.variants.coda_settings import CodaSettings
from fathom.model.variants.coda_targets import Targets

NOWHERE = -1e9  # cosine with a slot that cannot be chosen
LEAST_MASS = 1e-6  # of the gates of tokens that are averaged
NEVER = -(2**62)  # time of a slot that has not been used


class Bank:
    """What both banks have: slots, which of them hold something, how many may, and counts of what happened."""

    targets: Targets  # what a token is compared with

    def __init__(self, settings: CodaSettings, rows: Tensor, used: Tensor, start: int | None) -> None:
        self.settings = settings
        self.rows, self.used = rows, used  # views of the cache's buffers: [2, K, m, D] keys and values, [m] bool
        self.keys, self.values = rows
        self.size = used.shape[0]
        self.start = self.size if start is None else start
        self.active = self.start  # slots in use, the first ones
        self.counts: dict[str, int] = {}
        self.filled = 0  # so many active slots are known to hold something each

    def free(self) -> int:
        """How many active slots hold nothing; no slot is ever emptied again but by a restored state."""
        if self.filled == self.active:
            return 0
        free = int((~self.used[: self.active]).sum())
        if free == 0:
            self.filled = self.active
        return free

    def _grow(self, pressure: int, position: int) -> None:
        """Take more slots into use, at most `pressure`, up to what the logarithm of the tokens seen allows."""
        grown = max(0, min(pressure, self.settings.ceiling(self.start, self.size, position) - self.active))
        self.active += grown
        self.counts["expansions"] += grown


class ExactBank(Bank):
    """Tokens as they were, least recently used out first: an evicted token enters when no slot holds its like.

    Routed by values, which carry no RoPE. "Used" is the position of the token that entered or was a hit, never that of
    a query.
    """

    def __init__(self, settings: CodaSettings, rows: Tensor, used: Tensor, heads: KvHeads) -> None:
        super().__init__(settings, rows, used, settings.exact_at_start)
        # thresholds as fp32 has them: what one token is compared with is what a block's tensors are compared with
        self.least_gate, self.least_hit, self.most_novel = torch.tensor(
            [settings.gate_exact, settings.hit, settings.novelty]
        ).tolist()
        values = self.values
        every = torch.ones(values.shape[-1], dtype=torch.bool)
        self.targets = Targets(values, every, heads, inverse=settings.inverse_norms)
        self.last_used = torch.zeros(self.size, dtype=torch.int64, device=values.device)  # position, by slot
        names = ("hits", "inserts", "overwrites", "gated_out", "frustrated", "expansions")
        self.counts = dict.fromkeys(names, 0)

    def insert(self, tokens: tuple[Tensor, Tensor], positions: Tensor, gates: Tensor, now: int) -> None:
        """Offer the tokens that a block evicts to the bank, the most important first.

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

        """
        keys, values = tokens
        keep = gates >= self.settings.gate_exact
        self.counts["gated_out"] += int((~keep).sum())
        if not keep.any():
            return
        cosines = self.targets.cosines(values).masked_fill(~self._searched(), NOWHERE)
        best, slot = cosines.max(-1)
        hit = best >= self.settings.hit
        new = keep & (best < self.settings.novelty)
        order = self._by_age(published=self.settings.published_growth)[: min(len(gates), self.active)]
        rank = new.cumsum(0) - 1
        placed = new & (rank < self.active)
        slot = torch.where(placed, order[rank.clamp(0, len(order) - 1)], slot)
        pressure = self._pressure(int(new.sum()))
        overwrite = placed | (keep & hit) if self.settings.refresh_on_hit else placed
        similar = keep & (best >= self.settings.novelty) if self.settings.lru_touch_between else keep & hit
        self._touch(slot, positions, placed | similar)
        self._overwrite(slot, (keys, values), positions, overwrite)
        self.counts["hits"] += int((hit & keep).sum())
        self.counts["inserts"] += int(placed.sum())
        self.counts["overwrites"] += int(overwrite.sum())
        self.counts["frustrated"] += pressure
        self._grow(pressure, now)

    def insert_one(self, token: Tensor, position: int, gate: float, now: int) -> None:
        """Offer the token that a step evicts, [2, K, D] keys and values: `insert` by the rules of a step.

        Everything that is decided, is decided on the host.
        """
        keep, counts = gate >= self.least_gate, self.counts
        if not keep:
            counts["gated_out"] += 1
            if not self.settings.published_counts:
                return
        cosines, known = self.targets.compare(token[1].float())
        free = self.free()
        if free:
            cosines.masked_fill_(~self.used, NOWHERE)
        most, place = (cosines if self.active == self.size else cosines[: self.active]).max(0)
        best, slot = float(most), int(place)
        hit, new = best >= self.least_hit, keep and best < self.most_novel
        if new and free:
            slot = int((~self.used[: self.active]).byte().argmax())
        elif new:
            slot = int(self.last_used[: self.active].argmin())
        if new or (keep and (best >= self.most_novel if self.settings.lru_touch_between else hit)):
            self.last_used[slot] = position  # which is later than that of any token evicted before
        overwrite = new or (keep and hit and self.settings.refresh_on_hit)
        if overwrite:
            self.rows[:, :, slot] = token
            if free:
                self.used[slot] = True
            self.targets.remember(slot, known)
        pressure = max(0, int(new) - free)
        counts["hits"] += int(hit and (keep or self.settings.published_counts))
        counts["inserts"] += int(new)
        counts["overwrites"] += int(overwrite)
        counts["frustrated"] += 0 if self.settings.published_counts else pressure
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

    def _pressure(self, new: int) -> int:
        """How many of the `new` tokens of a block there was no room for."""
        return max(0, new - (self.active if self.settings.published_growth else self.free()))

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

    def __init__(self, settings: CodaSettings, rows: Tensor, used: Tensor, heads: KvHeads, eta_logit: Tensor) -> None:
        super().__init__(settings, rows, used, settings.summary_at_start)
        keys, values = self.keys, self.values
        low = settings.low_frequencies(keys.shape[-1], torch.device("cpu"))
        self.by_value = settings.route == "value"
        self.eta = torch.sigmoid(eta_logit.detach().float()).to(keys.device)  # [K]
        self.blend = (low.float() * math.sqrt(low.numel() / int(low.sum()))).to(keys.device)  # [D]
        compared = torch.ones_like(low) if self.by_value else low
        self.targets = Targets(values if self.by_value else keys, compared, heads, inverse=settings.inverse_norms)
        self.counts = dict.fromkeys(("updates", "inserts", "frustrated", "expansions"), 0)
        self.both = torch.stack((self.blend, torch.ones_like(self.blend)))[:, None]  # [2, 1, D], of keys and values
        (self.least_gate,) = torch.tensor([settings.gate_summary]).tolist()  # as fp32 has it

    def absorb(self, tokens: tuple[Tensor, Tensor], gates: Tensor, now: int) -> None:
        """Average what a block evicts into the slots it resembles, tokens that share one by their gate-weighted mean.

        Parameters
        ----------
        tokens
            Keys and values, [n, K, D] each.
        gates
            [n] float32.
        now
            Tokens seen before the call.

        """
        kept = ((gates >= self.settings.gate_summary) & (gates > 0)).nonzero()[:, 0]
        if not len(kept):
            return
        keys, values, gates = tokens[0][kept].float(), tokens[1][kept].float(), gates[kept]
        cosines = self.targets.cosines(values if self.by_value else keys)
        cosines[:, self.active :] = NOWHERE
        slots, group = cosines.argmax(-1).unique(return_inverse=True)
        fresh = ~self.used[slots]
        rate = self._rate(gates, group, len(slots), gated=self.settings.gate_eta_in_blocks)  # [s, K]
        if self.settings.overwrite_on_insert:
            rate = rate.masked_fill(fresh[:, None], 1)
            self.counts["inserts"] += int(fresh.sum())
        mass = gates.new_zeros(len(slots)).index_add_(0, group, gates).clamp(min=LEAST_MASS)[:, None, None]
        for stored, given in ((self.keys, keys * self.blend), (self.values, values)):
            mean = (
                given.new_zeros(len(slots), *given.shape[1:]).index_add_(0, group, given * gates[:, None, None]) / mass
            )
            old = stored[:, slots].float()
            stored[:, slots] = (old + rate.T[..., None] * (mean.transpose(0, 1) - old)).to(stored.dtype)
        self.used[slots] = True
        self.targets.refresh(slots)
        self.counts["updates"] += len(slots)
        if not self.free():
            self.counts["frustrated"] += 1
            self._grow(1, now)

    def absorb_one(self, token: Tensor, gate: float, now: int) -> None:
        """Average the token that a step evicts, [2, K, D] keys and values: `absorb` by the rules of a step."""
        if not (gate >= self.least_gate and gate > 0):
            return
        wide = token.float()
        cosines, _ = self.targets.compare(wide[int(self.by_value)])
        slot = int(cosines[: self.active].argmax())
        fresh = self.free() > 0 and not self.used[slot]
        mean = wide * self.both
        if gate < LEAST_MASS:
            mean *= gate / LEAST_MASS
        stored = self.rows[:, :, slot]
        if fresh:
            self.used[slot] = True
        if fresh and self.settings.overwrite_on_insert:
            self.counts["inserts"] += 1
            stored.copy_(mean)
        elif stored.dtype == torch.float32:
            stored.lerp_(mean, (self.eta * gate)[:, None])
        else:
            stored.copy_(torch.lerp(stored.float(), mean, (self.eta * gate)[:, None]))
        self.targets.refresh_one(slot)
        self.counts["updates"] += 1
        if not self.free():
            self.counts["frustrated"] += 1
            self._grow(1, now)

    def _rate(self, gates: Tensor, group: Tensor, n: int, *, gated: bool) -> Tensor:
        """How far towards the mean of its tokens each of n slots moves, by KV head: [n, K]."""
        if not gated:
            return self.eta.expand(n, -1)
        stays = torch.log1p(-self.eta * gates[:, None])  # [tokens, K]: log of what one token leaves of the old content
        return -torch.expm1(stays.new_zeros(n, self.eta.shape[0]).index_add_(0, group, stays))
