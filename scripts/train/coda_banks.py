"""The bounded cache of CoDA-GQA-L with gradients through it: what `model.variants.coda.CodaCache` computes in blocks.

Which token goes to which slot is decided as there, without a gradient: the order of candidates, thresholds, the slot
that resembles it, the slot that is replaced. What a slot then holds stays in the graph: keys and values of evicted
tokens, and in the summary bank also their gates and the rate eta. So a loss at a later token reaches what was written
long before ("gradient flow through evictions"), and the gate learns, by the summary bank, what is worth keeping.

Corrected rules (`CodaSettings`'s defaults) only, and what holds nothing is not attended to. A cache belongs to one
forward pass: it goes on from block to block, so no block can be computed again, as gradient checkpointing would.
"""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize, scaled_dot_product_attention

from fathom.kernels.differential.reference import combine, noise_query
from fathom.model.cache.gqa import all_heads
from fathom.model.variants.coda import CodaCache
from fathom.model.variants.coda_attention import Differential, Tokens
from fathom.model.variants.coda_settings import CodaSettings

NOWHERE, NEVER = -1e9, -(2**62)


class Slots(NamedTuple):
    """A bank, or the ring with its oldest token first."""

    keys: Tensor  # [K, m, D]
    values: Tensor  # [K, m, D]
    used: Tensor  # [m] bool


class Evicted(NamedTuple):
    """Tokens offered to the banks, the most important first."""

    keys: Tensor  # [K, n, D]
    values: Tensor  # [K, n, D]
    gates: Tensor  # [n]
    positions: Tensor  # [n] int64

    def first(self, n: int) -> "Evicted":
        """The n most important."""
        return Evicted(self.keys[:, :n], self.values[:, :n], self.gates[:n], self.positions[:n])


class TrainingCache:
    """Ring, exact bank and summary bank of one layer for one forward pass over one sequence.

    Parameters
    ----------
    settings
        As of a CodaCache, of which `trainable` has been asked.
    kv_heads, head_dim
        Of the layer.
    eta_logit
        [kv_heads]: the summary bank moves by sigmoid of it; in the graph.
    seed
        Of the slots' initial content: that of a CodaCache of the same seed.
    detach
        Keys, values and gates of what leaves the ring are constants: no loss reaches them from there.

    """

    def __init__(
        self,
        settings: CodaSettings,
        kv_heads: int,
        head_dim: int,
        eta_logit: Tensor,
        *,
        seed: int = 0,
        detach: bool = False,
    ) -> None:
        s, self.detach = settings, detach
        assert trainable(s) is None, trainable(s)
        start = CodaCache(
            s, all_heads(kv_heads), head_dim, eta_logit.detach(), torch.float32, eta_logit.device, seed=seed
        )
        self.settings, self.position, self.eta = s, 0, torch.sigmoid(eta_logit)
        keys, values = start.keys.to(eta_logit.dtype), start.values.to(eta_logit.dtype)
        ring, exact, summary = slice(0), slice(s.window, s.window + s.exact), slice(s.window + s.exact, None)
        self.ring, self.exact, self.summary = (
            Slots(keys[:, part], values[:, part], start.used[part]) for part in (ring, exact, summary)
        )
        self.start = {"exact": start.exact.start, "summary": start.summary.start}  # slots that may be used at first
        self.active = dict(self.start)  # and so far
        self.ring_gates = eta_logit.new_zeros(0)
        self.last_used = torch.zeros(s.exact, dtype=torch.int64, device=eta_logit.device)
        low = s.low_frequencies(head_dim, eta_logit.device)
        self.compared = torch.ones_like(low) if s.route == "value" else low  # dims that route to a summary slot
        self.blend = low.to(eta_logit.dtype) * math.sqrt(low.numel() / int(low.sum()))  # [D]

    def attend(self, streams: Tensor, k: Tensor, v: Tensor, *, strict: bool = False) -> Tensor:
        """Attend from streams [n, t, H, D] to what is held and, causally, to the block's own k and v [t, K, D].

        The order of a published block (`model.variants.coda_attention`): the whole ring as it was before the block; or
        of a strict one, in which each token sees its last W tokens alone.
        """
        parts = zip(*self._banks(), self.ring[:2], _rows(k, v), strict=True)
        keys, values = (torch.cat(part, 1) for part in parts)  # [K, s, D]
        t = streams.shape[1]
        past, held = keys.shape[1] - t, self.ring.keys.shape[1]
        seen = torch.ones(t, past + t, dtype=torch.bool, device=k.device).tril(past)
        if strict:  # of ring and block, in which positions follow each other
            seen[:, past - held :] &= seen[:, past - held :].triu(held - self.settings.window + 1)
        queries = streams.unflatten(2, (keys.shape[0], -1)).permute(2, 3, 0, 1, 4)  # [K, H / K, n, t, D]
        flat = queries.flatten(0, 2)  # the heads that read one KV head stand together
        out = scaled_dot_product_attention(flat[None], keys[None], values[None], seen, enable_gqa=True)[0]
        return out.view(queries.shape).permute(2, 3, 0, 1, 4).flatten(2, 3)

    def _banks(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [K, m, D] of what there is to attend to in both banks."""
        return [(bank.keys[:, bank.used], bank.values[:, bank.used]) for bank in (self.exact, self.summary)]

    def write_block(self, k: Tensor, v: Tensor, gates: Tensor) -> None:
        """Write a block of tokens, [t, K, D], gates [t]; what does not stay in the ring is offered to the banks."""
        s, oldest = self.settings, self.position - self.ring.keys.shape[1]
        keys, values = (torch.cat(parts, 1) for parts in zip(self.ring[:2], _rows(k, v), strict=True))
        gates = torch.cat((self.ring_gates, gates))
        leaving = max(0, len(gates) - s.window)
        if leaving:
            order = gates[:leaving].detach().sort(descending=True, stable=True).indices
            offered = Evicted(keys[:, order], values[:, order], gates[order], oldest + order)
            if self.detach:
                offered = Evicted(*(part.detach() for part in offered))
            if s.exact:
                self._insert(offered.first(s.exact_candidates))
            if s.summary:
                self._absorb(offered.first(s.summary_candidates))
        used = torch.ones(len(gates) - leaving, dtype=torch.bool, device=k.device)
        self.ring, self.ring_gates = Slots(keys[:, leaving:], values[:, leaving:], used), gates[leaving:]
        self.position += k.shape[0]

    def _insert(self, tokens: Evicted) -> None:
        """Exact bank: tokens that are like none it holds replace free slots, then the least recently used."""
        s, bank = self.settings, self.exact
        keep = tokens.gates >= s.gate_exact
        if not keep.any():
            return
        every = torch.ones_like(self.compared)
        cosines = _cosines(tokens.values, bank.values, every).masked_fill(~bank.used, NOWHERE)
        best, slot = cosines.max(-1)
        order = torch.where(bank.used, self.last_used, NEVER)[: self.active["exact"]].sort(stable=True).indices
        new = keep & (best < s.novelty)
        self._grow("exact", int(new.sum()) - int((~bank.used[: len(order)]).sum()))
        rank = new.cumsum(0) - 1
        placed = new & (rank < len(order))
        slot = torch.where(placed, order[rank.clamp(0, len(order) - 1)], slot)
        hit = keep & (best >= s.hit)
        touched = placed | (keep & (best >= s.novelty) if s.lru_touch_between else hit)
        self.last_used = self.last_used.scatter_reduce(0, slot[touched], tokens.positions[touched], "amax")
        source = torch.full_like(self.last_used, -1)  # which token each slot takes; the last of several
        written = (placed | hit if s.refresh_on_hit else placed).nonzero()[:, 0]
        for row in written[tokens.positions[written].argsort()].tolist():
            source[slot[row]] = row
        taken = (source >= 0)[:, None]
        keys, values = (
            torch.where(taken, given[:, source.clamp(min=0)], held)
            for given, held in ((tokens.keys, bank.keys), (tokens.values, bank.values))
        )
        self.exact = Slots(keys, values, bank.used | (source >= 0))

    def _absorb(self, tokens: Evicted) -> None:
        """Summary bank: each slot moves towards the gate-weighted mean of the tokens that resemble it most."""
        s, bank = self.settings, self.summary
        kept = ((tokens.gates >= s.gate_summary) & (tokens.gates > 0)).nonzero()[:, 0]
        if not len(kept):
            return
        keys, values, gates = tokens.keys[:, kept], tokens.values[:, kept], tokens.gates[kept]
        by_value = s.route == "value"
        given, held = (values, bank.values) if by_value else (keys, bank.keys)
        group = _cosines(given, held, self.compared)[:, : self.active["summary"]].argmax(-1)  # [n]: each token's slot
        slots = bank.used.shape[0]
        touched = torch.zeros_like(bank.used).index_fill(0, group, value=True)
        if s.gate_eta_in_blocks:
            stays = torch.log1p(-self.eta[:, None] * gates)  # [K, n]
            rate = -torch.expm1(stays.new_zeros(len(self.eta), slots).index_add(1, group, stays))  # [K, slots]
        else:
            rate = self.eta[:, None].expand(-1, slots)
        if s.overwrite_on_insert:
            rate = rate.masked_fill(~bank.used, 1)
        mass = gates.new_zeros(slots).index_add(0, group, gates).clamp(min=1e-6)[:, None]
        moved = []
        for new, old in ((keys * self.blend, bank.keys), (values, bank.values)):
            mean = torch.zeros_like(old).index_add(1, group, new * gates[:, None]) / mass
            moved.append(torch.where(touched[:, None], old + rate[..., None] * (mean - old), old))
        self.summary = Slots(moved[0], moved[1], bank.used | touched)
        if self.summary.used[: self.active["summary"]].all():
            self._grow("summary", 1)

    def _grow(self, bank: Literal["exact", "summary"], pressure: int) -> None:
        """Take more slots into use, at most `pressure`, as `model.variants.coda_banks.Bank`."""
        size = getattr(self, bank).used.shape[0]
        most = self.settings.ceiling(self.start[bank], size, self.position)
        self.active[bank] += max(0, min(pressure, most - self.active[bank]))


def trainable(settings: CodaSettings) -> str | None:
    """What there are no gradients of in these settings; None where they can be trained with."""
    if (settings.candidate_order, settings.refresh_sums, settings.published_growth) != ("gate", False, False):
        return "published rules"
    return None if settings.mask_unused else "attention to slots that hold nothing"


def prefill(
    cache: TrainingCache, tokens: Tokens, differential: Differential, block: int, *, strict: bool = False
) -> Tensor:
    """Attend and write in blocks, as `model.variants.coda_attention.prefill`: [t, H, D]."""
    assert tokens.gates is not None
    assert tokens.lam is not None
    out, noise = [], noise_query(tokens.q, differential.cos, differential.sin)
    for first in range(0, tokens.q.shape[0], block):
        rows = slice(first, first + block)
        k, v = tokens.k[rows], tokens.v[rows]
        signal, subtracted = cache.attend(torch.stack((tokens.q[rows], noise[rows])), k, v, strict=strict)
        out.append(combine(signal, subtracted, tokens.lam[rows], differential.norm, differential.eps))
        cache.write_block(k, v, tokens.gates[rows])
    return torch.cat(out)


def _rows(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return k.transpose(0, 1), v.transpose(0, 1)


@torch.no_grad()
def _cosines(given: Tensor, held: Tensor, dims: Tensor) -> Tensor:
    """Cosine in `dims` [D] of each given row [K, n, D] with each held one [K, m, D], mean over KV heads: [n, m]."""
    a, b = (normalize(part * dims, dim=-1, eps=1e-6) for part in (given, held))
    return (a @ b.mT).mean(0)
