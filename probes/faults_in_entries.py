"""Faults of the variant shard on V4's layers alone: how wide their codes are, and the basis that entries may have.

`ENTRIES` describes them for `probes.faults`. In a run whose layers remember in full they do nothing.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels.formats import coded_rows
from kernels.formats.stored import BasisRows, CodedRows
from kernels.ops import Ops
from model.cache.layers import SIGNS, AnyEntries, AnyKeys, CsaCache, HcaCache, LayerCache
from model.config import LayerKind
from model.transformer import Transformer
from probes.fault import Fault, needs
from probes.faults_in_model import with_caches
from probes.shared.calls import Attend


def _narrowed(part: Callable[[LayerCache], AnyEntries | AnyKeys | None], bits: int) -> Callable[[Transformer], None]:
    """Allocate the codes of a part of each cache at other bits than the run asks for."""

    def change(held: LayerCache) -> None:
        of = part(held)
        if of is not None and isinstance(of.data, CodedRows):
            n, width = of.data.shape
            of.data = coded_rows.allocate(n, width, bits, held.ring.data.device, SIGNS)

    return lambda model: with_caches(model, change)


def _entries(held: LayerCache) -> AnyEntries | None:
    return held.entries if isinstance(held, HcaCache) else None


def _keys(held: LayerCache) -> AnyKeys | None:
    return held.keys if isinstance(held, CsaCache) else None


def _mean_omitted(ops: Ops) -> Ops:
    """Leave the mean of entries in a basis out of scores and sums: of both, what is fitted is what is centred."""

    def attend(*given: Any) -> Tensor:
        call = Attend(*given)
        if isinstance(call.entries, BasisRows):
            nope = call.entries.nope
            centred = nope._replace(mean=torch.zeros_like(nope.mean))
            call = call._replace(entries=call.entries._replace(nope=centred))
        return ops.attend(*call)

    return ops._replace(attend=attend)


ENTRIES = (
    Fault(
        "shard-index-keys-in-4-bits",
        "Index keys are stored in 4 bits.",
        "the mistake's kind: a width that does for entries",
        inject=_narrowed(_keys, 4),
        inapplicable=needs(LayerKind.CSA),
        in_variants=True,
    ),
    Fault(
        "shard-entries-in-2-bits",
        "Entries are stored in 2 bits, whatever was asked for.",
        "the mistake's kind: a width that is told by what it is checked against",
        inject=_narrowed(_entries, 2),
        inapplicable=needs(LayerKind.CSA, LayerKind.HCA),
        in_variants=True,
    ),
    Fault(
        "shard-basis-mean-omitted",
        "Attention to entries in a basis leaves out their mean.",
        "the Shard article, for keys",
        ops=_mean_omitted,
        inapplicable=needs(LayerKind.CSA, LayerKind.HCA),
        in_variants=True,
    ),
)
