"""Manifold-constrained hyper-connections (mHC): several residual streams, mixed by a doubly stochastic matrix."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fathom.kernels.norm.reference import rms_norm


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Push [..., s, s] logits towards a doubly stochastic matrix.

    Softmax over rows, then columns are normalised, then `iterations - 1` times rows and columns. The last step is a
    column step, so columns sum to 1 within eps while rows only converge: a test of rows alone, or of both with one
    tolerance, cannot tell the order. Source: DeepSeek kernel.py, `hc_split_sinkhorn`.
    """
    comb = logits.softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


def _mixes(streams: Tensor, fn: Tensor, norm_eps: float) -> Tensor:
    flat = streams.flatten(1).float()  # [t, s * d]
    return (flat @ fn.T) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)


def hyper_weights(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, iterations: int, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights with which one sublayer reads and writes the residual streams.

    Source: DeepSeek `Block.hc_pre` and `hc_split_sinkhorn`.

    Parameters
    ----------
    streams
        [t, s, d].
    fn
        [(2 + s) * s, s * d] float32.
    scale, base
        [3] and [(2 + s) * s] float32, for pre, post and comb.
    iterations, eps, norm_eps
        `hc_sinkhorn_iters`, `hc_eps`, `rms_norm_eps`.

    Returns
    -------
    tuple[Tensor, Tensor, Tensor]
        pre [t, s] in (eps, 1 + eps), post [t, s] in (0, 2), comb [t, s, s], all float32.

    """
    s = streams.shape[1]
    mixes = _mixes(streams, fn, norm_eps)
    pre = torch.sigmoid(mixes[:, :s] * scale[0] + base[:s]) + eps
    post = 2 * torch.sigmoid(mixes[:, s : 2 * s] * scale[1] + base[s : 2 * s])
    comb = (mixes[:, 2 * s :] * scale[2] + base[2 * s :]).unflatten(-1, (s, s))
    return pre, post, sinkhorn(comb, iterations, eps)


def head_weights(streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, eps: float, norm_eps: float) -> Tensor:
    """Weights with which the head reads the streams: [t, s] float32 (DeepSeek `ParallelHead.hc_head`)."""
    return torch.sigmoid(_mixes(streams, fn, norm_eps) * scale + base) + eps


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """Read the streams [t, s, d] into one sublayer input [t, d]: ``x = sum_s pre[s] stream[s]``."""
    return (pre[..., None] * streams.float()).sum(1).to(streams.dtype)


def expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Write a sublayer's output [t, d] back and mix the streams [t, s, d].

    Equation: ``new[k] = post[k] y + sum_j comb[j, k] stream[j]``: `comb` is used transposed, and a transposed one is
    still doubly stochastic, so only a golden value can show the difference. Source: DeepSeek `Block.hc_post`.
    """
    mixed = torch.einsum("tjk,tjd->tkd", comb, streams.float())
    return (post[..., None] * y.float()[:, None] + mixed).to(streams.dtype)


@dataclass(frozen=True, slots=True)
class ReadStreams:
    """Read the streams for a sublayer: its normed input, and the weights of reading and writing.

    Equation: `hyper_weights`, and ``x = rms_norm(collapse(streams, pre))``. The collapsed input is rounded to its dtype
    before the norm. Source: DeepSeek `Block.forward`. An op set gives its own three parts; any may be replaced.
    """

    hyper_weights: Callable[..., tuple[Tensor, Tensor, Tensor]]
    collapse: Callable[..., Tensor]
    rms_norm: Callable[..., Tensor]

    def __call__(  # noqa: PLR0913, PLR0917 (what its three ops take)
        self,
        streams: Tensor,
        fn: Tensor,
        scale: Tensor,
        base: Tensor,
        iterations: int,
        eps: float,
        norm_eps: float,
        norm: Tensor,
        norm_out_eps: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Run the parts one after the other.

        Parameters
        ----------
        streams, fn, scale, base, iterations, eps, norm_eps
            As `hyper_weights` takes them.
        norm, norm_out_eps
            [d] float32 and the eps of the norm before the sublayer.

        Returns
        -------
        tuple[Tensor, Tensor, Tensor, Tensor]
            x [t, d] in the dtype of `streams`; pre [t, s], post [t, s] and comb [t, s, s], float32.

        """
        pre, post, comb = self.hyper_weights(streams, fn, scale, base, iterations, eps, norm_eps)
        return self.rms_norm(self.collapse(streams, pre), norm, norm_out_eps), pre, post, comb


read_streams = ReadStreams(hyper_weights, collapse, rms_norm)
