"""The bounded cache of CoDA-GQA-L: one layer, one sequence, a size that no context changes.

A ring of the last W tokens, a bank of tokens kept as they were, a bank of averages. A token that leaves the ring is
offered to both banks, each of which has its own threshold for the token's write gate. Keys come with RoPE applied at
their absolute position, values as projected.

Published (`CodaSettings.published`): the rules of the package `coda-gqa-l` 1.3.1 on CPU. The article and the package's
page differ from it and from each other: the page routes the summary bank by values (``route="value"``), the article
leaves a token between the two thresholds of the exact bank alone.

Corrected (the default), and why:

- candidates of a block are its highest gates, older first among equals (the package's 8 for the exact bank are any 8 of
  64, because it slices an unsorted top-k; equal gates and equal ages have no defined order there);
- the low-frequency half of a key is the slower half of the RoPE pairs (the package takes dims [D/2, D), which under the
  Llama family's pairing are the second components of all pairs, the fastest included);
- a block moves a summary slot by what steps would move it (the package multiplies by the gate in steps alone);
- a token between "new" and "hit" does not count as a use (the package's GPU kernel and the article agree on that);
- several tokens of a block that refresh one slot: the last stays (the package stores the sum less the old content);
- a bank that grows uses its active slots only, and grows in blocks under the same pressure as in steps (the package's
  blocks write to slots that are not active, where no search finds them, before they reuse an active one);
- hits and refusals are counted by one rule in steps and blocks;
- inverse norms instead of normalised copies: 1.506 instead of 1.689 MiB at 256 + 64 + 64 slots, 8 heads of 128, BF16.

Not corrected, because it is what the design is: a step and a block of one are different functions once something has
been evicted (`model.variants.coda_attention` says how), a block forgets what is not among its candidates, tokens of one
block are not compared with each other, and an average weighs as much as one token in the softmax.

Arithmetic on the banks is fp32 whatever the cache's dtype, rounded when stored. A BF16 average that moves by a small
rate stands still before it arrives: half a step of BF16 is 2^-9 to 2^-8 of a value, so that the published rate of one
step, eta * g = 0.0474 * 0.119, moves nothing that is nearer to its target than 0.35 to 0.69 of its own size.

For inference: what is written carries no gradient, and replaces in place what an earlier call attended to. A gate
decides on the host what happens to its token, so on a GPU each eviction waits for it.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fathom.model.cache.gqa import KvHeads
from fathom.model.variants.coda_banks import ExactBank, SummaryBank
from fathom.model.variants.coda_saved import check_saved
from fathom.model.variants.coda_settings import CodaSettings


class View(NamedTuple):
    """What there is to attend to, as views."""

    keys: Tensor  # [K, W + exact + summary, D]
    values: Tensor  # the same
    seen: Tensor | None  # [slots] bool, those to attend to; None: all


class CodaCache:
    """Ring, exact bank and summary bank in one buffer of keys and one of values, allocated once.

    Parameters
    ----------
    settings
        Sizes and rules.
    heads, head_dim
        KV heads that are here, and their width. On several ranks each has the slots of its own heads; all decide alike,
        by cosines that are means over all heads.
    eta_logit
        [heads]: the summary bank moves by sigmoid of it (summary_eta_logit).
    dtype, device
        Of keys and values.
    seed
        Of the slots' initial content, where that is random.

    """

    def __init__(
        self,
        settings: CodaSettings,
        heads: KvHeads,
        head_dim: int,
        eta_logit: Tensor,
        dtype: torch.dtype,
        device: torch.device,
        *,
        seed: int = 0,
    ) -> None:
        assert eta_logit.shape == (heads.size,), f"eta_logit: {list(eta_logit.shape)}, want [{heads.size}]"
        self.settings, self.heads, self.position = settings, heads, 0  # position: tokens written
        window, slots = settings.window, settings.window + settings.exact + settings.summary
        self._slots = torch.zeros(2, heads.size, slots, head_dim, dtype=dtype, device=device)  # position p: p % window
        self.keys, self.values = self._slots
        self.used = torch.zeros(slots, dtype=torch.bool, device=device)
        self.gates = torch.zeros(window, dtype=torch.float32, device=device)  # of the tokens in the ring
        if settings.memory_init == "normal":
            self._fill(seed)
        self.exact = ExactBank(settings, *self._part(window, settings.exact), heads)
        summary = self._part(window + settings.exact, settings.summary)
        self.summary = SummaryBank(settings, *summary, heads, eta_logit)
        self._evictions, self._complete = 0, False  # the latter: all slots are known to be in use

    def _fill(self, seed: int) -> None:
        """Give the banks random content, drawn on the CPU for all heads so that every device and rank has the same."""
        generator, window = torch.Generator().manual_seed(seed), self.settings.window
        for buffer in (self.keys, self.values):
            shape = (self.heads.total, *buffer[:, window:].shape[1:])
            drawn = self.heads.part(torch.randn(*shape, generator=generator), 0) * 0.02
            buffer[:, window:] = drawn.to(buffer.device, buffer.dtype)
        low = self.settings.low_frequencies(self.keys.shape[-1], self.keys.device)
        self.keys[:, window + self.settings.exact :] *= low

    def _part(self, first: int, size: int) -> tuple[Tensor, Tensor]:
        slots = slice(first, first + size)
        return self._slots[:, :, slots], self.used[slots]

    @torch.no_grad()
    def write(self, k: Tensor, v: Tensor, gates: Tensor | None = None) -> None:
        """Write one token, [1, K, D]: the rule of a step. The token that it drives out of the ring goes to the banks.

        `gates` [1] float32 says how much the token is worth keeping, None that every token is (write_policy "none").
        """
        assert k.shape[0] == 1, f"a step writes one token, not {k.shape[0]}"
        slot = self.position % self.settings.window
        if self.position >= self.settings.window:
            self._evict_one(self.position - self.settings.window)
        else:
            self.used[slot] = True
        self.keys[:, slot], self.values[:, slot] = k[0], v[0]
        self.gates[slot] = 1 if gates is None else gates[0]
        self.position += 1

    def _evict_one(self, at: int) -> None:
        """Offer the token at position `at`, which is in the ring, to both banks."""
        slot = at % self.settings.window
        token, gate = self._slots[:, :, slot], float(self.gates[slot])
        self._evictions += 1
        if self.exact.size:
            self.exact.insert_one(token, at, gate, self.position)
        if self.summary.size:
            self.summary.absorb_one(token, gate, self.position)

    @torch.no_grad()
    def write_block(self, k: Tensor, v: Tensor, gates: Tensor | None = None) -> None:
        """Write a block of tokens, [t, K, D]: the rule of prefill. What does not stay in the ring is evicted at once.

        Of the evicted, only the first `exact_candidates` and `summary_candidates` by gate are offered to the banks; the
        rest is forgotten. `gates` [t] float32 as for `write`.
        """
        t, window = k.shape[0], self.settings.window
        gates = k.new_ones(t, dtype=torch.float32) if gates is None else gates.float()
        held = min(self.position, window)
        oldest = self.position - held
        leaving = max(0, held + t - window)
        if leaving == 1 and held and self.settings.one_rule:
            self._evict_one(oldest)
        elif leaving:
            in_ring = torch.arange(oldest, self.position, device=k.device) % window
            of_all = torch.cat((self.gates[in_ring], gates))[:leaving]
            chosen = self._candidates(of_all)
            evicted = (self._rows(self.keys, k, oldest + chosen), self._rows(self.values, v, oldest + chosen))
            self._evictions += leaving
            self._offer(evicted, oldest + chosen, of_all[chosen])
        stay = min(t, window)
        slots = torch.arange(self.position + t - stay, self.position + t, device=k.device) % window
        for buffer, given in ((self.keys, k), (self.values, v)):
            buffer[:, slots] = given[t - stay :].transpose(0, 1).to(buffer.dtype)
        self.gates[slots] = gates[t - stay :]
        self.used[slots] = True
        self.position += t

    @torch.no_grad()
    def evict(self, first: int, n: int) -> None:
        """Offer the ring's tokens at positions ``first .. first + n - 1`` to the banks, by the rule of a block.

        The ring is left as it is: whoever lets tokens go before newer ones come has to put something in their place.
        """
        if n == 1 and self.settings.one_rule:
            self._evict_one(first)
            return
        slots = torch.arange(first, first + n, device=self.keys.device) % self.settings.window
        gates = self.gates[slots]
        chosen = self._candidates(gates)
        evicted = (self.keys[:, slots[chosen]].transpose(0, 1), self.values[:, slots[chosen]].transpose(0, 1))
        self._evictions += n
        self._offer(evicted, first + chosen, gates[chosen])

    def renew(self) -> None:
        """After keys or values were replaced from outside: let what the banks compare follow."""
        for bank in (self.exact, self.summary):
            bank.targets.refresh(torch.arange(bank.size, device=self.keys.device))

    def count(self, other: "CodaCache") -> None:
        """Add what has happened in another cache to what has happened here; see `metrics`."""
        self._evictions += other._evictions  # noqa: SLF001 -- its own class
        for own, theirs in ((self.exact, other.exact), (self.summary, other.summary)):
            own.counts = {name: count + theirs.counts[name] for name, count in own.counts.items()}

    def _candidates(self, gates: Tensor) -> Tensor:
        """Choose what to offer to the banks, in order; each bank takes the first of these."""
        limits = (
            self.settings.exact_candidates if self.exact.size else 0,
            self.settings.summary_candidates if self.summary.size else 0,
        )
        most = min(max(limits), len(gates))
        if self.settings.candidate_order == "unsorted":
            return gates[None].topk(most, dim=1, sorted=False).indices[0]
        return gates.sort(descending=True, stable=True).indices[:most]

    def _rows(self, buffer: Tensor, block: Tensor, positions: Tensor) -> Tensor:
        """Rows of `positions` [n], which stand in the ring or in the block [t, K, D] that follows it: [n, K, D]."""
        from_ring = buffer[:, positions % self.settings.window].transpose(0, 1)
        from_block = block[(positions - self.position).clamp(min=0)].to(buffer.dtype)
        return torch.where((positions < self.position)[:, None, None], from_ring, from_block)

    def _offer(self, tokens: tuple[Tensor, Tensor], positions: Tensor, gates: Tensor) -> None:
        """Offer tokens of a block, the most important first, to both banks: each decides on its own."""
        keys, values = tokens
        if self.exact.size:
            n = self.settings.exact_candidates
            self.exact.insert((keys[:n], values[:n]), positions[:n], gates[:n], self.position)
        if self.summary.size:
            n = self.settings.summary_candidates
            self.summary.absorb((keys[:n], values[:n]), gates[:n], self.position)

    def view(self) -> View:
        """Return all slots, and which of them to attend to: one at least; of an empty cache no slots."""
        if self.position == 0 and self.settings.mask_unused:
            return View(self.keys[:, :0], self.values[:, :0], None)
        self._complete = self._complete or not self.settings.mask_unused or bool(self.used.all())
        return View(self.keys, self.values, None if self._complete else self.used)

    def strict_view(self, t: int) -> View:
        """Return all slots as the next t tokens, whose keys are not written yet, see them: their last W tokens only.

        `View.seen` is [t, slots]: of the ring, what stands less than W before the token; of the banks, what `view` has.
        """
        window, device = self.settings.window, self.keys.device
        last = self.position - 1
        held = last - (last - torch.arange(window, device=device)) % window  # position that each slot of the ring holds
        tokens = torch.arange(self.position, self.position + t, device=device)
        seen = self.used.expand(t, -1).clone() if self.settings.mask_unused else self.used.new_ones(t, len(self.used))
        seen[:, :window] &= held > tokens[:, None] - window
        return View(self.keys, self.values, seen)

    def metrics(self) -> dict[str, float]:
        """Return what has happened, by the package's names; counts, and the filled share of each bank."""
        counts = {f"exact_{name}": count for name, count in self.exact.counts.items()}
        counts |= {f"summary_{name}": count for name, count in self.summary.counts.items()}
        for name, bank in (("exact", self.exact), ("summary", self.summary)):
            counts[f"expansions_{name}"] = counts.pop(f"{name}_expansions")
            counts[f"active_{name}"] = bank.active
        counts["tokens_gated_out"] = counts.pop("exact_gated_out")
        counts["total_evictions"] = self._evictions
        fill = {
            f"{name}_fill_ratio": int(bank.used.sum()) / bank.size if bank.size else 0.0
            for name, bank in (("exact", self.exact), ("summary", self.summary))
        }
        return counts | fill

    def stats(self) -> dict[str, float | None]:
        """`metrics`, and what is held: slots in use, and how alike they are; see `model.cache.components.Banked`."""
        used = {
            f"{name}_used": int(bank.used.sum()) for name, bank in (("exact", self.exact), ("summary", self.summary))
        }
        alike = {
            f"{name}_nearest": bank.targets.nearest(bank.used) if bank.size else None
            for name, bank in (("exact", self.exact), ("summary", self.summary))
        }
        return {"ring_used": min(self.position, self.settings.window), **used, **alike, **self.metrics()}

    def _held(self) -> dict[str, Tensor]:
        """Every tensor that belongs to the state."""
        return {
            "keys": self.keys,
            "values": self.values,
            "used": self.used,
            "gates": self.gates,
            "last_used": self.exact.last_used,
            "exact_targets": self.exact.targets.data,
            "summary_targets": self.summary.targets.data,
        }

    def nbytes(self) -> int:
        """Bytes allocated for the state; the formula of the package's `cache_bytes` where copies are kept."""
        return sum(part.nbytes for part in self._held().values())

    def tensors(self, position: int) -> dict[str, Tensor]:
        """Views of what a saved state needs, and the integers beside them."""
        assert position == self.position, f"{self.position} tokens written, not {position}"
        counts = [self._evictions, *self.exact.counts.values(), *self.summary.counts.values()]
        return self._held() | {
            "active": torch.tensor([self.exact.active, self.summary.active]),
            "counts": torch.tensor(counts),
        }

    def by_head(self) -> Mapping[str, tuple[int, int]]:
        """Slots stand head by head."""
        return dict.fromkeys(("keys", "values", "exact_targets", "summary_targets"), (0, 1))

    def shapes(self, position: int) -> dict[str, tuple[int, ...]]:
        """Shapes of what `tensors` gives, at any position."""
        del position
        counts = 1 + len(self.exact.counts) + len(self.summary.counts)
        return {name: tuple(part.shape) for name, part in self._held().items()} | {"active": (2,), "counts": (counts,)}

    def restore(self, position: int, saved: Mapping[str, Tensor]) -> None:
        """Put back what `tensors` gave at `position`; StateError, and nothing changed, for what cannot have been given.

        Without the targets of the banks, what the banks compare follows from keys and values.
        """
        check_saved(self.settings, (self.exact, self.summary), position, saved)
        held = self._held()
        for name in held.keys() & saved.keys():
            held[name].copy_(saved[name])
        if not held.keys() <= saved.keys():
            self.renew()
        self.exact.active, self.summary.active = (int(n) for n in saved["active"])
        self.exact.filled = self.summary.filled = 0
        self._complete = False
        counts = [int(n) for n in saved["counts"]]
        self._evictions, counts = counts[0], counts[1:]
        for bank in (self.exact, self.summary):
            own, counts = counts[: len(bank.counts)], counts[len(bank.counts) :]
            bank.counts = dict(zip(bank.counts, own, strict=True))
        self.position = position
