"""Faults of the variant coda: in a run whose layers remember in full they do nothing.

`CODA` describes them for `probes.faults`. A faulty cache is a subclass, and the one that is made becomes one.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from kernels.formats.stored import Slots
from kernels.ops import Ops
from model.cache.layers import HcaCache, LayerCache
from model.config import LayerKind
from model.transformer import Transformer
from model.variants.banked_entries import BankedEntries
from model.variants.coda import CodaCache, View
from probes.fault import Fault, needs
from probes.faults_in_model import become, with_caches
from probes.shared.calls import Attend


def _in_banks(faulty: type) -> Callable[[Transformer], None]:
    """Make banks faulty ones."""

    def change(held: LayerCache) -> None:
        if isinstance(held, HcaCache) and isinstance(held.entries, BankedEntries):
            become(held.entries, faulty)

    return lambda model: with_caches(model, change)


# --- what is seen


class _RingOneShort(CodaCache):
    def view(self) -> View:
        """Leave out the oldest token of a full ring."""
        seen, window = self.used.clone(), self.settings.window
        if self.position >= window:
            seen[self.position % window] = False
        return View(self.keys, self.values, seen)


class _WindowOneShort(BankedEntries):
    def evict(self) -> None:
        """Evict one entry too early."""
        if self.count - self.evicted == self.variant.window:
            self._evict(self.data[self.banked].clone(), self.evicted)
            self.evicted += 1
            self.data[self.banked :][: self.variant.window - 1] = self.data[self.banked + 1 : self.used + 1].clone()
        super().evict()


class _UnfinishedVisible(BankedEntries):
    def view(self) -> Slots:
        """Let a token see the entry that it is a part of, where the call has it already."""
        slots = super().view()
        return slots._replace(hidden=slots.hidden - 1)


# --- bytes


class _TargetsNotCounted(CodaCache):
    def nbytes(self) -> int:
        """Count slots, not what is kept to compare with them."""
        return super().nbytes() - self.exact.targets.data.nbytes - self.summary.targets.data.nbytes


class _MeansNotCounted(BankedEntries):
    def nbytes(self) -> int:
        """Count rows, not the means in fp32 behind some of them."""
        return super().nbytes() - self.means.nbytes


# --- mass


class _Forgetful(BankedEntries):
    def _evict(self, row: Tensor, index: int) -> None:
        """Forget the exact entry that a new one replaces."""
        full, counts, means, bias = -1 not in self.times, list(self.counts), self.means.clone(), self.bias.clone()
        super()._evict(row, index)
        if full and index in self.times and torch.equal(self.data[self.times.index(index)], row):
            self.counts, self.means, self.bias = counts, means, bias
            self.data[self.variant.exact : self.banked] = means


class _CountedTwice(BankedEntries):
    def _evict(self, row: Tensor, index: int) -> None:
        """Offer an entry to both banks, each of which decides on its own: as published for tokens."""
        before = sum(self.counts)
        super()._evict(row, index)
        if sum(self.counts) == before:
            self._summarise(row)


class _Unweighed(BankedEntries):
    def _summarise(self, row: Tensor) -> None:
        """Let a mean weigh as much as one entry."""
        super()._summarise(row)
        summary = self.bias[self.variant.exact : self.banked]
        summary.clamp_(max=0.0)


def _sink_weighed(ops: Ops) -> Ops:
    """Give the sink the mass of the entries that it stands beside."""

    def attend(*given: Any) -> Tensor:
        call, slots = Attend(*given), given[4]
        if isinstance(slots, Slots) and slots.bias is not None and slots.bias.isfinite().any():
            call = call._replace(sink=call.sink + slots.bias.amax())
        return ops.attend(*call)

    return ops._replace(attend=attend)


# --- saved states


class _RingFromTheStart(CodaCache):
    def restore(self, position: int, saved: Mapping[str, Tensor]) -> None:
        """Go on writing at the ring's first slot."""
        super().restore(position, saved)
        self.position -= self.position % self.settings.window


class _CountsLost(BankedEntries):
    def restore(self, position: int, saved: Mapping[str, Tensor]) -> None:
        """Put back means, but not of how many."""
        super().restore(position, saved)
        self.counts = [min(n, 1) for n in self.counts]
        self.bias[self.variant.exact : self.banked].clamp_(max=0)


_COMPRESSED = needs(LayerKind.CSA, LayerKind.HCA)
BANKS = "the mistake's kind: what becomes of an evicted entry"
STATES = "the mistake's kind: a part of the state that is not saved"

CODA = (
    Fault(
        "coda-ring-one-short",
        "On grouped-query layers a token does not see the oldest token of its window.",
        "an off-by-one",
        parts=lambda parts: parts._replace(coda=_RingOneShort),
        in_variants=True,
    ),
    Fault(
        "coda-window-one-short",
        "On V4's layers an entry is evicted when the window is full, before another needs its place.",
        "an off-by-one",
        inject=_in_banks(_WindowOneShort),
        inapplicable=_COMPRESSED,
        in_variants=True,
    ),
    Fault(
        "coda-unfinished-entry-visible",
        "A token sees the entry that it is itself a part of.",
        "an off-by-one",
        inject=_in_banks(_UnfinishedVisible),
        inapplicable=_COMPRESSED,
        in_variants=True,
    ),
    Fault(
        "coda-replaced-entry-forgotten",
        "What the exact bank gives up goes nowhere.",
        BANKS,
        inject=_in_banks(_Forgetful),
        inapplicable=_COMPRESSED,
        in_variants=True,
    ),
    Fault(
        "coda-entry-in-both-banks",
        "An entry that the exact bank takes goes into the summary too, as published for tokens.",
        "CoDA-GQA-L, which offers each token to both",
        inject=_in_banks(_CountedTwice),
        inapplicable=_COMPRESSED,
        in_variants=True,
    ),
    Fault(
        "coda-mean-weighs-as-one",
        "A mean of many entries weighs as much as one entry.",
        "CoDA-GQA-L, whose averages do",
        inject=_in_banks(_Unweighed),
        inapplicable=_COMPRESSED,
        in_variants=True,
    ),
    Fault(
        "coda-sink-weighed",
        "The sink gets the logarithm of the largest count, as if it were a mean too.",
        BANKS,
        ops=_sink_weighed,
        inapplicable=_COMPRESSED,
        in_variants=True,
    ),
    Fault(
        "coda-targets-not-counted",
        "On grouped-query layers coda's bytes leave out what new tokens are compared with.",
        "the mistake's kind: a buffer beside the cache",
        parts=lambda parts: parts._replace(coda=_TargetsNotCounted),
        in_variants=True,
    ),
    Fault(
        "coda-means-not-counted",
        "On V4's layers coda's bytes leave out the means in fp32.",
        "the mistake's kind: a buffer beside the cache",
        inject=_in_banks(_MeansNotCounted),
        inapplicable=_COMPRESSED,
        in_variants=True,
    ),
    Fault(
        "coda-ring-restored-from-its-start",
        "A ring that is put back goes on at its first slot.",
        STATES,
        parts=lambda parts: parts._replace(coda=_RingFromTheStart),
        in_variants=True,
    ),
    Fault(
        "coda-counts-not-restored",
        "Means that are put back have forgotten of how many entries they are.",
        STATES,
        inject=_in_banks(_CountsLost),
        inapplicable=_COMPRESSED,
        in_variants=True,
    ),
)
