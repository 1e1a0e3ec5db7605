"""Op sets with a memory cut out: what a model loses without it is what that memory carries.

No fault is hidden here: an ablation replaces an op by one that does less, on purpose and by name.
"""

from typing import Any

import torch
from torch import Tensor

from fathom.kernels.formats.stored import Rows
from fathom.kernels.indexer.reference import visible_entries
from fathom.kernels.ops import Ops
from fathom.probes.shared.calls import Attend


def random_selection(ops: Ops, seed: int) -> Ops:
    """`ops`, but each token of a CSA layer attends to as many visible entries as ever, drawn at random."""
    generator = torch.Generator().manual_seed(seed)

    def select(q: Tensor, head_weights: Tensor, keys: Rows, first: int, ratio: int, k: int) -> Tensor:
        del head_weights
        n = keys.shape[0]
        seen = visible_entries(first, q.shape[0], ratio, q.device)[:, None]
        noise = torch.rand(q.shape[0], n, generator=generator).to(q.device)
        noise.masked_fill_(torch.arange(n, device=q.device) >= seen, -1.0)
        picked = noise.topk(min(k, n)).indices
        picked = torch.where(picked < seen, picked, n).sort(dim=-1).values
        return torch.where(picked < n, picked, -1).to(torch.int32)

    return ops._replace(name=f"{ops.name}, random selection", select=select)


def without_entries(ops: Ops, *, csa: bool, hca: bool) -> Ops:
    """`ops`, but layers of the kinds that are true attend to their window alone, whatever was selected."""

    def attend(*given: Any) -> Tensor:
        call = Attend(*given)
        if hca if call.selected is None else csa:
            call = call._replace(entries=None, selected=None)
        return ops.attend(*call)

    cut = " and ".join(name for name, without in (("CSA", csa), ("HCA", hca)) if without)
    return ops._replace(name=f"{ops.name}, no {cut} entries", attend=attend)


def without_selection(ops: Ops) -> Ops:
    """`ops`, but each token of a CSA layer attends to all visible entries, whatever was selected."""

    def attend(*given: Any) -> Tensor:
        return ops.attend(*Attend(*given)._replace(selected=None))

    return ops._replace(name=f"{ops.name}, no selection", attend=attend)
