"""Shared-KV attention over the SWA ring and compressed entries, with a sink per head."""

import torch
from torch import Tensor

from fathom.kernels.formats.rows_reference import decode
from fathom.kernels.formats.stored import Rows, Slots


def attend(
    q: Tensor,
    ring: Tensor,
    first: int,
    window: int,
    entries: Rows | Slots | None,
    ratio: int,
    selected: Tensor | None,
    sink: Tensor,
) -> Tensor:
    """Attend from each token to its window and to compressed entries; keys are values, one KV head for all.

    Equation: ``o[t, h] = sum_j exp(l_j) kv_j / (exp(sink_h) + sum_j exp(l_j))`` with ``l_j = q[t, h] . kv_j d^-0.5``
    over the keys that token t sees. The sink is in the denominator only: it has no value. The logit of a row of
    `entries` has the row's bias added.

    Parameters
    ----------
    q
        [t, h, d]; token i stands at position ``first + i``.
    ring
        [capacity, d]: the KV of position p is row ``p % capacity``; holds positions up to ``first + t - 1``, and
        capacity >= window + t - 1 so that writing this chunk has not overwritten what its first token sees.
    first
        Position of the first token.
    window
        Tokens seen, the token itself included: positions ``p - window + 1 .. p``.
    entries
        [n, d] compressed entries in their stored form, or None for a layer without. `Slots` say what is added to the
        logits of each row, and by how many entries rows lag behind.
    ratio
        Tokens per entry: entry e is seen from position p when ``e < (p + 1) // ratio``. Read only with `entries`.
    selected
        [t, k] int32 indices into `entries`, anything outside [0, n) or not yet visible is no entry; those that are one
        must be distinct in each row. None attends to all visible entries.
    sink
        [h] float32, may be infinite: +inf takes all mass, and the output is 0.

    Returns
    -------
    Tensor
        [t, h, d] in the dtype of `q`. NaN where a key that the token sees holds NaN, whatever mass that key has.

    """
    t, _, d = q.shape
    capacity = ring.shape[0]
    assert capacity >= window + t - 1, f"a ring of {capacity} cannot hold window {window} and {t} new tokens"
    out = torch.empty_like(q)
    slots = Slots(entries, None, 0) if entries is not None and not isinstance(entries, Slots) else entries
    wide = None if slots is None else decode(slots.rows)  # [n, d]
    for i in range(t):
        position = first + i
        oldest = max(0, position - window + 1)
        recent = torch.arange(oldest, position + 1, device=q.device) % capacity
        keys = ring[recent].float()  # [<= window, d]
        if slots is not None and wide is not None:
            seen = _seen(i, (position + 1) // ratio - slots.hidden, wide.shape[0], selected, q.device)
            keys = torch.cat((keys, wide[seen]))
        logits = q[i].float() @ keys.T * d**-0.5  # [h, keys]
        if slots is not None and slots.bias is not None:
            logits[:, len(recent) :] += slots.bias[seen]
        peak = torch.maximum(logits.amax(-1), sink.clamp(max=torch.finfo(torch.float32).max))  # [h], never inf - inf
        mass = torch.exp(logits - peak[:, None])
        total = mass.sum(-1) + torch.exp(sink - peak)
        out[i] = (mass @ keys) / total[:, None]
    return out


def _seen(i: int, visible: int, n: int, selected: Tensor | None, device: torch.device) -> Tensor:
    visible = max(0, min(visible, n))
    if selected is None:
        return torch.arange(visible, device=device)
    row = selected[i].long()
    seen = row[(row >= 0) & (row < visible)]
    assert len(seen.unique()) == len(seen), f"token {i} selects an entry twice: {seen.tolist()}"
    return seen
