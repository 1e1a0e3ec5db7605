"""Causal attention with grouped heads (GQA): several query heads read one head of keys and values."""

import torch
from torch import Tensor


def attend(q: Tensor, keys: Tensor, values: Tensor, first: int, window: int | None) -> Tensor:
    """Attend from each token to itself and to what came before it.

    Equation: ``o[t, h] = sum_p softmax_p(q[t, h] . k[g, p] d^-0.5) v[g, p]`` over positions ``p <= first + t``, of
    which a window leaves the last `window`; query heads ``g H / K .. (g + 1) H / K - 1`` read head g of the keys.
    Source: Ainslie et al., arXiv 2305.13245; the window, Mistral 7B, arXiv 2310.06825, section 2.

    Parameters
    ----------
    q
        [t, H, d]; token i stands at position ``first + i``.
    keys, values
        [K, n, d], H a multiple of K: row p is of position p, n >= first + t. Later rows are not read.
    first
        Position of the first token.
    window
        Positions seen, the token's own included; None: all.

    Returns
    -------
    Tensor
        [t, H, d] in the dtype of `q`. NaN where a position that the token sees holds NaN.

    """
    t, heads, d = q.shape
    kv_heads = keys.shape[0]
    assert heads % kv_heads == 0, f"{heads} query heads for {kv_heads} heads of keys"
    assert keys.shape[1] >= first + t, f"{keys.shape[1]} rows do not hold positions up to {first + t - 1}"
    out = torch.empty_like(q)
    for i in range(t):
        stop = first + i + 1
        seen = slice(0 if window is None else max(0, stop - window), stop)
        grouped = q[i].float().view(kv_heads, -1, d)  # [K, H / K, d]
        logits = grouped @ keys[:, seen].float().mT * d**-0.5  # [K, H / K, m]
        out[i] = (logits.softmax(-1) @ values[:, seen].float()).view(heads, d)
    return out
