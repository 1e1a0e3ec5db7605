"""mHC in tiles of tokens: the streams pass through a core's cache once per op, not once per temporary.

A single token's weights are two dozen numbers: what an op takes to be called is then all it takes, and Python, in fp64,
is 1.4 to 1.9 times as fast (audits/cpu-gains.md, audits/cpu-gains-deployed.md).
"""

import math
from operator import mul

import torch
from torch import Tensor

from kernels.hyper import reference

TILE = 1 << 18  # numbers of the streams per tile: 1 MiB of fp32
SETTLED = 2.0**-32  # relative change of a Sinkhorn step after which no later one changes fp32's 24 bits, see below


def hyper_weights(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, iterations: int, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights of one sublayer: `kernels.hyper.reference.hyper_weights`."""
    s = streams.shape[1]
    if streams.shape[0] == 1 and streams.device.type == "cpu":
        return _of_one(streams, fn, scale, base, iterations, eps, norm_eps)
    mixes = _mixes(streams, fn, norm_eps)
    pre = torch.sigmoid(mixes[:, :s] * scale[0] + base[:s]) + eps
    post = 2 * torch.sigmoid(mixes[:, s : 2 * s] * scale[1] + base[s : 2 * s])
    comb = (mixes[:, 2 * s :] * scale[2] + base[2 * s :]).view(-1, s, s)
    return pre, post, sinkhorn(comb, iterations, eps)


def hyper_weights_scratch(tokens: int, streams: int, hidden: int, item: int) -> int:
    """Bytes alive at most in `hyper_weights`, the result included: `fn` transposed, two tiles, the mixes and steps."""
    mixes = (2 + streams) * streams
    transposed = mixes * streams * hidden * 4 if tokens > 1 else 0
    return transposed + 2 * _tile_bytes(tokens, streams, hidden, item) + tokens * (2 * mixes + 6 * streams**2) * 4


def head_weights(streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, eps: float, norm_eps: float) -> Tensor:
    """Weights of the head: `kernels.hyper.reference.head_weights`."""
    return torch.sigmoid(_mixes(streams, fn, norm_eps) * scale + base) + eps


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Push [t, s, s] logits towards a doubly stochastic matrix: `kernels.hyper.reference.sinkhorn`.

    Every step scales rows or columns, so the matrix stays ``M_ij / (u_i v_j)`` for the M after the softmax, and only u
    and v change: ``u = M (1 / v) + eps u`` for rows, ``v = M^T (1 / u) + eps v`` for columns. That is two small calls
    a step instead of three large ones.
    """
    matrix = logits.softmax(-1) + eps
    transposed = matrix.mT.contiguous()
    u = torch.ones_like(matrix[..., :1])  # [t, s, 1]
    v = matrix.sum(-2)[..., None] + eps
    for _ in range(iterations - 1):
        u = torch.baddbmm(u, matrix, v.reciprocal(), beta=eps)
        v = torch.baddbmm(v, transposed, u.reciprocal(), beta=eps)
    return matrix / (u * v.mT)


def _of_one(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, iterations: int, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`hyper_weights` of one token, [1, s, d], behind the product with `fn`."""
    _, s, d = streams.shape
    flat = streams.flatten().float()
    factor = 1 / math.sqrt(torch.linalg.vector_norm(flat).item() ** 2 / (s * d) + norm_eps)
    pre_scale, post_scale, comb_scale = scale.tolist()
    mixes, bias = [factor * mix for mix in torch.mv(fn, flat).tolist()], base.tolist()
    pre = [_sigmoid(mix * pre_scale + b) + eps for mix, b in zip(mixes[:s], bias[:s], strict=True)]
    post = [2 * _sigmoid(mix * post_scale + b) for mix, b in zip(mixes[s : 2 * s], bias[s : 2 * s], strict=True)]
    logits = [mix * comb_scale + b for mix, b in zip(mixes[2 * s :], bias[2 * s :], strict=True)]
    comb = _sinkhorn_of_one([logits[i * s : (i + 1) * s] for i in range(s)], iterations, eps)
    return torch.tensor([pre]), torch.tensor([post]), torch.tensor([comb])


def _sigmoid(x: float) -> float:
    """NaN stays NaN; no exponential overflows."""
    return 1 / (1 + math.exp(-x)) if x > 0 else math.exp(x) / (1 + math.exp(x))


def _sinkhorn_of_one(logits: list[list[float]], iterations: int, eps: float) -> list[list[float]]:
    """`sinkhorn` in the same two vectors; ends sooner when a step changes nothing any more.

    Changes shrink by a factor r from step to step, so that all later ones together are a change of SETTLED times
    r / (1 - r): less than 2^-24 for r < 0.996, and where r is larger than that, 20 steps do not come near SETTLED.
    """
    matrix = []
    for row in logits:
        mass = [math.exp(x - max(row)) for x in row]
        total = sum(mass)
        matrix.append([x / total + eps for x in mass])
    columns = list(zip(*matrix, strict=True))
    u, v = [1.0] * len(matrix), [sum(column) + eps for column in columns]
    for _ in range(iterations - 1):
        w = [1 / x for x in v]
        before, u = u, [sum(map(mul, row, w)) + eps * x for row, x in zip(matrix, u, strict=True)]
        w = [1 / x for x in u]
        v = [sum(map(mul, column, w)) + eps * x for column, x in zip(columns, v, strict=True)]
        if all(abs(x - y) <= SETTLED * x for x, y in zip(u, before, strict=True)):
            break
    return [[x / (a * b) for x, b in zip(row, v, strict=True)] for row, a in zip(matrix, u, strict=True)]


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """Read the streams: `kernels.hyper.reference.collapse`."""
    if streams.shape[0] == 1:
        return reference.collapse(streams, pre)  # half the calls
    step = _tokens(streams)
    parts = zip(streams.split(step), pre[:, None].split(step), strict=True)
    return torch.cat([(weights @ part.float())[:, 0].to(streams.dtype) for part, weights in parts])


def collapse_scratch(tokens: int, streams: int, hidden: int, item: int) -> int:
    """Bytes alive at most in `collapse`, the result included: in parts and joined, a tile, and its product."""
    results = (1 + (tokens > 1)) * tokens * hidden * item
    return results + _tile_bytes(tokens, streams, hidden, item) + min(TILE // streams, tokens * hidden) * 4


def expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Write the streams: `kernels.hyper.reference.expand`."""
    out = torch.empty_like(streams)
    step = _tokens(streams)
    for start in range(0, y.shape[0], step):
        part = slice(start, start + step)
        new = post[part, :, None] * y[part, None].float()  # [t, s, d]
        out[part] = new.baddbmm_(comb[part].mT, streams[part].float())
    return out


def expand_scratch(tokens: int, streams: int, hidden: int, item: int) -> int:
    """Bytes alive at most in `expand`, the result included: it, two tiles in fp32, and of one token an input."""
    tile = _tile_bytes(tokens, streams, hidden, 0)
    return tokens * streams * hidden * item + 2 * tile + tile // streams


def _mixes(streams: Tensor, fn: Tensor, norm_eps: float) -> Tensor:
    # Products with so few columns run three times as fast from a weight that lies as [s * d, columns]
    turned = fn.T.contiguous() if len(streams) > 1 else fn.T
    parts = []
    for part in streams.split(_tokens(streams)):
        flat = part.flatten(1).float()
        mean_square = torch.linalg.vector_norm(flat, dim=-1, keepdim=True).square() / flat.shape[1]
        parts.append((flat @ turned) * torch.rsqrt(mean_square + norm_eps))
    return torch.cat(parts)


def _tokens(streams: Tensor) -> int:
    return max(1, TILE // (streams.shape[1] * streams.shape[2]))


def _tile_bytes(tokens: int, streams: int, hidden: int, item: int) -> int:
    """Bytes of a tile of the streams made fp32; of streams that are fp32 it is a view."""
    return 0 if item == 4 else min(max(1, TILE // (streams * hidden)), tokens) * streams * hidden * 4
