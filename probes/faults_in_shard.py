"""Faults of the variant shard: in a run whose layers remember in full they do nothing.

`SHARD` describes them for `probes.faults`, those of V4's layers alone from `probes.faults_in_entries` among them. A
faulty cache is a subclass, and the one that is made becomes one.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kernels.formats import coded_rows, qjl
from kernels.formats.rows_reference import decode
from kernels.formats.stored import CodedRows
from kernels.ops import Ops
from kernels.shard.cpu import middle_keys, middle_values
from model.cache.entries import Entries
from model.cache.layers import CsaCache, HcaCache, LayerCache
from model.transformer import Transformer
from model.variants.shard import ShardCache, causal
from probes.fault import Fault
from probes.faults_in_entries import ENTRIES
from probes.faults_in_model import become, with_caches
from probes.shared.calls import Attend
from probes.shared.parts import Parts


def _in_rows(faulty: type) -> Callable[[Transformer], None]:
    """Make coded entries, and the index keys beside them, faulty ones."""

    def change(held: LayerCache) -> None:
        parts = (held.entries,) if isinstance(held, HcaCache) else ()
        for part in (*parts, held.keys) if isinstance(held, CsaCache) else parts:
            if isinstance(part, Entries) and isinstance(part.data, CodedRows):
                become(part, faulty)

    return lambda model: with_caches(model, change)


# --- shard's scores


def _without_mean(
    q: Tensor, coefficients: Tensor, basis: Tensor, mean: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool
) -> tuple[Any, ...]:
    return q, coefficients, basis, torch.zeros_like(mean), cos, sin, interleaved


def _wrong_sign(
    q: Tensor, coefficients: Tensor, basis: Tensor, mean: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool
) -> tuple[Any, ...]:
    return q, coefficients, basis, mean, cos, -sin, interleaved


def _other_pairs(
    q: Tensor, coefficients: Tensor, basis: Tensor, mean: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool
) -> tuple[Any, ...]:
    return q, coefficients, basis, mean, cos, sin, not interleaved


class _MeanLost(ShardCache):
    def _compress(self, keys: Tensor, values: Tensor) -> None:
        super()._compress(keys, values)
        if self.middle is not None:
            self.middle.keys.mean.zero_()


class _TurnedBack(ShardCache):
    def _compress(self, keys: Tensor, values: Tensor) -> None:
        super()._compress(keys, values)
        if self.middle is not None:
            self.middle = self.middle._replace(freqs=-self.middle.freqs)


class _OtherPairs(ShardCache):
    def _compress(self, keys: Tensor, values: Tensor) -> None:
        super()._compress(keys, values)
        if self.middle is not None:
            self.middle = self.middle._replace(interleaved=not self.middle.interleaved)


def _scoring(change: Callable[..., tuple[Any, ...]], faulty: type[ShardCache]) -> Callable[[Parts], Parts]:
    """Change what the identity is given, and the cache that rebuilds keys."""

    def faulty_parts(parts: Parts) -> Parts:
        def relative_scores(*given: Tensor, interleaved: bool) -> Tensor:
            *tensors, pairs = change(*given, interleaved=interleaved)
            return parts.relative_scores(*tensors, interleaved=pairs)

        return parts._replace(relative_scores=relative_scores, shard=faulty)

    return faulty_parts


# --- codes


class _NormOfTheCall(Entries):
    def append(self, new: Tensor) -> None:
        """Give the rows of a call one length, that of the first."""
        lengths = coded_rows.row_norm(new)[:, None]
        super().append(new / lengths * lengths[:1])


class _NormOfTheToken(ShardCache):
    def _append(self, key: Tensor, value: Tensor) -> None:
        """Give the heads of a token that goes to the stream one length, that of the first."""
        if self.count >= self.exact:
            row = self._row(self.count)
            for held in (self.keys[row], self.values[row]):
                lengths = held.norm(dim=-1, keepdim=True)
                held.copy_(held / lengths * lengths[:1])
        super()._append(key, value)


class _CodedAgain(ShardCache):
    def _append(self, key: Tensor, value: Tensor) -> None:
        """Decode the stream and code it again with every eighth token."""
        super()._append(key, value)
        rows = self._streamed(self.count) * self.shape.heads.size
        for held in (self.stream_keys, self.stream_values) if self.count % 8 == 0 else ():
            assert isinstance(held, CodedRows)
            qjl.write(held, 0, coded_rows.read(held, 0, rows))


@cache
def _stopped_early(bits: int) -> Tensor:
    """Lloyd's iteration from quantiles, twenty times, as published."""
    count = 1 << bits
    centroids: Tensor = torch.special.ndtri((torch.arange(count, dtype=torch.float64) + 0.5) / count)
    for _ in range(20):
        ends = centroids.new_tensor([math.inf])
        edges = torch.cat((-ends, (centroids[1:] + centroids[:-1]) / 2, ends))
        density = torch.exp(-edges.square() / 2) / math.sqrt(2 * math.pi)
        mass = torch.special.ndtr(edges).diff()
        centroids = (density[:-1] - density[1:]) / mass
    return centroids.float()


class _CodedBadly(Entries):
    def append(self, new: Tensor) -> None:
        """Round to the unfinished codebook before the codes are made: they then hold its centroids."""
        assert isinstance(self.data, CodedRows)
        table, signs, width = _stopped_early(self.data.bits).to(new.device), self.data.signs, new.shape[1]
        lengths = coded_rows.row_norm(new)[:, None].clamp(min=1e-30)
        turned = coded_rows.signed_hadamard(new.float() / lengths, signs) * width**0.5
        nearest = torch.bucketize(turned, (table[1:] + table[:-1]) / 2)
        super().append(coded_rows.undo_hadamard(table[nearest] * width**-0.5, signs) * lengths)


def _codebook_unfinished(parts: Parts) -> Parts:
    def codebook(bits: int, device: torch.device) -> Tensor:
        return _stopped_early(bits).to(device)

    return parts._replace(codebook=codebook)


# --- bytes and scratch


class _BasisNotCounted(ShardCache):
    def nbytes(self) -> int:
        """Count what a token takes, not what a layer takes."""
        return super().nbytes() - (0 if self.middle is None else self.middle.keys.basis.nbytes)


class _AllRebuilt(ShardCache):
    def _attend_all(self, q: Tensor, ops: Ops) -> Tensor:
        """Decode everything, then attend to it: the same numbers."""
        held = min(self.count, self.exact)
        keys, values = [self.keys[:held]], [self.values[:held]]
        if self.middle is not None:
            n = self.middle.values.codes.shape[0]
            keys.append(middle_keys(self.middle, 0, n))
            values.append(coded_rows.undo_hadamard(middle_values(self.middle, 0, n), self.stream_values.signs))
        shape = (self._streamed(self.count), self.shape.heads.size)
        for parts, stream in ((keys, self.stream_keys), (values, self.stream_values)):
            assert isinstance(stream, CodedRows)
            parts.append(coded_rows.read(stream, 0, shape[0] * shape[1]).unflatten(0, shape))
        every = torch.cat(keys)
        return causal(ops, q, every, torch.cat(values), len(every) - 1)


def _all_decoded(ops: Ops) -> Ops:
    """Decode all codes of entries, then attend to them."""

    def attend(*given: Any) -> Tensor:
        call = Attend(*given)
        if isinstance(call.entries, CodedRows):
            call = call._replace(entries=decode(call.entries))
        return ops.attend(*call)

    return ops._replace(attend=attend)


SHARD = (
    Fault(
        "shard-mean-omitted",
        "Shard's scores leave out the mean of the keys, as the article's listing does.",
        "the Shard article",
        parts=_scoring(_without_mean, _MeanLost),
        in_variants=True,
    ),
    Fault(
        "shard-distance-negated",
        "Shard's keys are turned by minus their position, and scores by the distance the other way.",
        "the mistake's kind: a sign",
        parts=_scoring(_wrong_sign, _TurnedBack),
        in_variants=True,
    ),
    Fault(
        "shard-pairs-swapped",
        "Shard turns neighbours where the model turns halves, and the other way round.",
        "the mistake's kind: a layout",
        parts=_scoring(_other_pairs, _OtherPairs),
        in_variants=True,
    ),
    Fault(
        "shard-norm-of-the-call",
        "Rows that are coded together share the length of the first: codes depend on how a prompt was cut.",
        "the mistake's kind: a statistic over the batch",
        inject=_in_rows(_NormOfTheCall),
        parts=lambda parts: parts._replace(shard=_NormOfTheToken),
        in_variants=True,
    ),
    Fault(
        "shard-codebook-unfinished",
        "The codebook is that of twenty iterations from quantiles, as published: at 8 bits little better than 6.",
        "the Shard article",
        inject=_in_rows(_CodedBadly),
        parts=_codebook_unfinished,
        in_variants=True,
    ),
    Fault(
        "shard-stream-coded-again",
        "What was decoded is coded again, with every eighth token.",
        "the Shard article warns of it",
        parts=lambda parts: parts._replace(shard=_CodedAgain),
        in_variants=True,
    ),
    Fault(
        "shard-basis-not-counted",
        "Shard's bytes leave out the basis.",
        "the Shard article's formula for bits counts it by the token",
        parts=lambda parts: parts._replace(shard=_BasisNotCounted),
        in_variants=True,
    ),
    Fault(
        "shard-all-decoded",
        "Attention decodes all keys and values before it begins.",
        "the mistake's kind: the memory that codes save is spent on decoding them",
        ops=_all_decoded,
        parts=lambda parts: parts._replace(shard=_AllRebuilt),
        in_variants=True,
    ),
    *ENTRIES,
)
