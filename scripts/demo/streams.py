"""Manifold-constrained hyper-connections, differentiable and laid out for speed.

Twenty Sinkhorn iterations over 4 x 4 matrices are 39 normalisations. With the token axis last each of them is a few
vector instructions in place, and the backward pass walks back from the result with their sums alone.
"""

from typing import Any

import torch
from torch import Tensor, nn

from scripts.demo.shape import Shape


class _Sinkhorn(torch.autograd.Function):
    """M [4, 4, tokens] -> columns and rows normalised in turn, columns first and last."""

    @staticmethod
    def forward(ctx: Any, M: Tensor, iterations: int, eps: float) -> Tensor:
        M, totals = M.clone(), []
        for k in range(2 * iterations - 1):
            totals.append(M.sum(k % 2, keepdim=True).add_(eps))
            M.div_(totals[-1])
        ctx.save_for_backward(M, *totals)
        return M

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        M, totals, g = ctx.saved_tensors[0].clone(), ctx.saved_tensors[1:], grads[0].clone()
        for k in reversed(range(len(totals))):
            # y = x / sum(x):  dx = (dy - sum(dy * y)) / sum(x), and x = y * sum(x) needs no memory of its own
            g.sub_((g * M).sum(k % 2, keepdim=True)).div_(totals[k])
            M.mul_(totals[k])
        return g, None, None


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Map logits [tokens, 4, 4] -> doubly stochastic [tokens, 4, 4]; rows are softmaxed first."""
    M = logits.permute(1, 2, 0).contiguous().softmax(1) + eps
    out: Tensor = _Sinkhorn.apply(M, iterations, eps)  # type: ignore[no-untyped-call]
    return out.permute(2, 0, 1).contiguous()  # batched products want it so


def unit_mixes(X: Tensor, fn: Tensor, eps: float) -> Tensor:
    """Projection of the RMS-normalised flat streams: X [tokens, streams, d] -> [tokens, rows of fn]."""
    flat = X.flatten(1)
    return (flat @ fn.T) * torch.rsqrt(flat.square().mean(1, keepdim=True) + eps)


class HyperConnection(nn.Module):
    """One site: what enters the sublayer, and how its output and the streams become the new streams."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        n = shape.streams
        self.shape = shape
        self.fn = nn.Parameter(torch.empty((2 + n) * n, n * shape.hidden))
        self.base = nn.Parameter(torch.empty((2 + n) * n))
        self.scale = nn.Parameter(torch.empty(3))

    def forward(self, X: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """X [tokens, streams, d] -> input of the sublayer [tokens, d], post [tokens, streams], comb [tokens, s, s]."""
        n, s = self.shape.streams, self.scale
        mixes = unit_mixes(X, self.fn, self.shape.norm_eps)
        pre_b, post_b, comb_b = self.base.split([n, n, n * n])
        pre = torch.sigmoid(mixes[:, :n] * s[0] + pre_b) + self.shape.hc_eps
        post = 2 * torch.sigmoid(mixes[:, n : 2 * n] * s[1] + post_b)
        logits = (mixes[:, 2 * n :] * s[2] + comb_b).unflatten(1, (n, n))
        comb = sinkhorn(logits, self.shape.sinkhorn_iterations, self.shape.hc_eps)
        return torch.bmm(pre.unsqueeze(1), X).squeeze(1), post, comb


def merge(X: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """New streams: comb transposed times the old ones, plus `post` of the sublayer's output y [tokens, d]."""
    return torch.bmm(comb.transpose(1, 2), X) + post.unsqueeze(2) * y.unsqueeze(1)


class HyperHead(nn.Module):
    """The streams collapsed into one before the last norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.fn = nn.Parameter(torch.empty(shape.streams, shape.streams * shape.hidden))
        self.base = nn.Parameter(torch.empty(shape.streams))
        self.scale = nn.Parameter(torch.empty(1))

    def forward(self, X: Tensor) -> Tensor:
        """X [tokens, streams, d] -> [tokens, d]."""
        mixes = unit_mixes(X, self.fn, self.shape.norm_eps)
        pre = torch.sigmoid(mixes * self.scale + self.base) + self.shape.hc_eps
        return torch.bmm(pre.unsqueeze(1), X).squeeze(1)
