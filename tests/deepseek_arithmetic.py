"""DeepSeek's functions without weights of their own, written from kernel.py and model.py, each naming its source.

Nothing here comes from kernels/, model/ or runtime/. Every result has the dtype that it has in DeepSeek's code. What
happens between two roundings is computed in `Choices.wide`: float32 as there, or float64, which makes every tensor the
correctly rounded one, so that the order of a sum can no longer be seen.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

BF16, F32 = torch.bfloat16, torch.float32
MINUS_INF = float("-inf")


@dataclass(frozen=True)
class Rounding:
    """Where DeepSeek's code rounds to BF16 and this runtime does not."""

    q_norm: bool  # square, mean, rsqrt and product of the weightless norm of q (`Attention.forward`)
    index_weights: bool  # the scaled output of weights_proj (`Indexer.forward`)
    index_scores: bool  # per-head scores, weighted scores and their sum (`Indexer.forward`)
    probabilities: bool  # exp(score - running maximum), before P.V (kernel.py `sparse_attn_kernel`)


@dataclass(frozen=True)
class Simulation:
    """What DeepSeek's serving arithmetic does to activations; all of it, unless a test takes one part out."""

    linear_inputs: bool = True
    kv: bool = True
    index_queries: bool = True
    index_keys: bool = True
    hadamard: bool = True


DEEPSEEK = Rounding(q_norm=True, index_weights=True, index_scores=True, probabilities=True)
FP32 = Rounding(q_norm=False, index_weights=False, index_scores=False, probabilities=False)  # this runtime's choice


@dataclass(frozen=True)
class Choices:
    """One variant of the arithmetic."""

    rounding: Rounding
    simulation: Simulation = field(default_factory=Simulation)
    wide: torch.dtype = torch.float64


# --- kernel.py ---


def fast_round_scale(amax: Tensor, largest: float) -> Tensor:
    """`fast_round_scale`: 2^ceil(log2(amax * fl32(1 / largest)))."""
    fraction, exponent = torch.frexp(amax * torch.tensor(1 / largest, dtype=F32))  # amax = fraction * 2^exponent, < 1
    return torch.ldexp(torch.ones_like(amax), exponent - (fraction == 0.5).int())


def act_quant(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """`act_quant`: values [..., d / block, block] on the E4M3 grid and scales [..., d / block, 1], both float32."""
    blocks = x.float().unflatten(-1, (-1, block))
    scale = fast_round_scale(blocks.abs().amax(-1, keepdim=True).clamp_min(1e-4), 448)
    return (blocks / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float(), scale


def fp4_act_quant(x: Tensor) -> tuple[Tensor, Tensor]:
    """`fp4_act_quant`: as `act_quant`, on the E2M1 grid with blocks of 32. A tie goes to the even code."""
    blocks = x.float().unflatten(-1, (-1, 32))
    scale = fast_round_scale(blocks.abs().amax(-1, keepdim=True).clamp_min(6 * 2.0**-126), 6)
    size = (blocks / scale).abs()[..., None]
    ties_down, ties_up = torch.tensor([0.25, 1.25, 2.5, 5]), torch.tensor([0.75, 1.75, 3.5])
    code = (size > ties_down).sum(-1) + (size >= ties_up).sum(-1)
    return torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[code] * blocks.sign(), scale


def in_place(quantised: tuple[Tensor, Tensor], x: Tensor) -> Tensor:
    """The `inplace=True` of both: what the narrow numbers stand for, in the dtype of `x`."""
    values, scale = quantised
    return (values * scale).flatten(-2).to(x.dtype)


def stored_blocks(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Values [out, in] and scales [out, ceil(in / block)] of an FP8 (128x128) or FP4 (1x32) matrix, float32."""
    if weight.dtype == torch.float8_e4m3fn:
        return weight.float(), scale.float().repeat_interleave(128, 0)[: weight.shape[0]]
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    byte = weight.view(torch.uint8).int()
    return table[torch.stack((byte % 16, byte // 16), -1).flatten(1)], scale.float()


def quantised_gemm(x: Tensor, weight: Tensor, scale: Tensor, choices: Choices) -> Tensor:
    """`linear` with `fp8_gemm` or `fp4_gemm`: E4M3 input, a sum per K block times both scales, BF16 output."""
    values, weight_scale = stored_blocks(weight, scale)
    if choices.simulation.linear_inputs:
        x_values, x_scale = act_quant(x, 128)
    else:
        x_values, x_scale = x.float().unflatten(-1, (-1, 128)), torch.ones(x.shape[0], x.shape[1] // 128, 1)
    step = values.shape[1] // weight_scale.shape[1]  # 128 or 32
    x_values, total = x_values.flatten(1), torch.zeros(x.shape[0], values.shape[0], dtype=choices.wide)
    for k in range(weight_scale.shape[1]):
        columns = slice(k * step, (k + 1) * step)
        block = x_values[:, columns].to(choices.wide) @ values[:, columns].to(choices.wide).T
        total += block * (x_scale[:, k * step // 128] * weight_scale[:, k])
    return total.to(BF16)


def sparse_attn(q: Tensor, kv: Tensor, sink: Tensor, index: Tensor, choices: Choices) -> Tensor:
    """`sparse_attn_kernel`: q [t, h, d], kv [n, d], index [t, k], -1 for none; online softmax, 64 keys a step."""
    q, wide = q.to(choices.wide), choices.wide
    peak = torch.full(q.shape[:2], MINUS_INF, dtype=wide)
    total, out = torch.zeros_like(peak), torch.zeros_like(q)
    for columns in index.split(64, dim=1):
        keys = kv[columns.clamp_min(0)].to(wide)  # [t, 64, d]
        scores = torch.einsum("thd,tkd->thk", q, keys) * q.shape[-1] ** -0.5
        scores = scores.masked_fill((columns < 0)[:, None], MINUS_INF)
        before, peak = peak, torch.maximum(peak, scores.amax(-1))
        mass, shrink = (scores - peak[..., None]).exp(), (before - peak).exp()
        total = total * shrink + mass.sum(-1)
        mass = mass.to(BF16).to(wide) if choices.rounding.probabilities else mass
        out = out * shrink[..., None] + torch.einsum("thk,tkd->thd", mass, keys)
    return (out / (total + (sink - peak).exp())[..., None]).to(BF16)


def hc_split_sinkhorn(
    mixes: Tensor, scale: Tensor, base: Tensor, config: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """`hc_split_sinkhorn`: pre and post [t, s], comb [t, s, s]."""
    s, eps = config["hc_mult"], config["hc_eps"]
    pre = torch.sigmoid(mixes[:, :s] * scale[0] + base[:s]) + eps
    post = 2 * torch.sigmoid(mixes[:, s : 2 * s] * scale[1] + base[s : 2 * s])
    comb = (mixes[:, 2 * s :] * scale[2] + base[2 * s :]).unflatten(1, (s, s)).softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(config["hc_sinkhorn_iters"] - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return pre.float(), post.float(), comb.float()


# --- model.py ---


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, wide: torch.dtype) -> Tensor:
    """`RMSNorm.forward`: wide, rounded once."""
    y = x.to(wide) * torch.rsqrt(x.to(wide).square().mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight.to(wide)).to(x.dtype)


def rms_norm_bf16(q: Tensor, eps: float) -> Tensor:
    """The weightless norm of q in `Attention.forward`: every step a BF16 tensor."""
    return q * torch.rsqrt(q.square().mean(-1, keepdim=True) + eps)


def rope_table(config: dict[str, Any], ratio: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    """`precompute_freqs_cis` as `Attention.__init__` calls it: cos and sin [t, r / 2] float32."""
    dim, yarn = config["qk_rope_head_dim"], config["rope_scaling"]
    base = config["compress_rope_theta"] if ratio else config["rope_theta"]
    freqs = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=F32) / dim))
    if ratio:

        def dim_of(rotations: float) -> float:
            context = yarn["original_max_position_embeddings"]
            return float(dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(base)))

        low, high = max(math.floor(dim_of(yarn["beta_fast"])), 0), min(math.ceil(dim_of(yarn["beta_slow"])), dim - 1)
        smooth = 1 - ((torch.arange(dim // 2, dtype=F32) - low) / (high - low)).clamp(0, 1)
        freqs = freqs / yarn["factor"] * (1 - smooth) + freqs * smooth
    angle = torch.outer(positions.float(), freqs)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor, wide: torch.dtype) -> Tensor:
    """`apply_rotary_emb` on the trailing dims of [t, d] or [t, h, d]; -sin is its `inverse`."""
    rope = 2 * cos.shape[1]
    shape = (x.shape[0], *[1] * (x.ndim - 2), cos.shape[1])
    turn = torch.complex(cos.to(wide), sin.to(wide)).view(shape)
    pairs = torch.view_as_complex(x[..., -rope:].to(wide).unflatten(-1, (-1, 2)).contiguous())
    return torch.cat((x[..., :-rope], torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)), -1)


def rotate_activation(x: Tensor, wide: torch.dtype) -> Tensor:
    """`rotate_activation`: butterflies of the fast Walsh-Hadamard transform, scaled, rounded once."""
    y, d, half = x.to(wide), x.shape[-1], 1
    while half < d:
        a, b = y.unflatten(-1, (-1, 2, half)).unbind(-2)
        y, half = torch.stack((a + b, a - b), -2).flatten(-3), 2 * half
    return (y * d**-0.5).to(x.dtype)


def index_scores(q: Tensor, weights: Tensor, keys: Tensor, choices: Choices) -> Tensor:
    """The scores of `Indexer.forward`, [t, n]: BF16 tensors there."""
    wide = choices.wide
    if not choices.rounding.index_scores:
        per_head = torch.einsum("thd,nd->thn", q.to(wide), keys.to(wide)).relu()
        return torch.einsum("thn,th->tn", per_head, weights.to(wide)).float()
    per_head = torch.einsum("thd,nd->thn", q.to(wide), keys.to(wide)).to(BF16).relu()
    weighted = (per_head * weights[..., None]).to(BF16)
    return weighted.to(wide).sum(1).to(BF16).float()


def top_k(scores: Tensor, k: int, ratio: int, first: int = 0) -> Tensor:
    """The top k of `Indexer.forward`, best first, -1 where fewer are visible. Of equal scores, the lower entry."""
    visible = torch.arange(first + 1, first + 1 + len(scores))[:, None] // ratio
    scores = scores.masked_fill(torch.arange(scores.shape[1]) >= visible, MINUS_INF)
    best = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
    return torch.where(best < visible, best, -1)


def ascending(selected: Tensor) -> Tensor:
    """Rows of selected entries in ascending order, -1 last, int32: an order that does not depend on scores."""
    last = torch.iinfo(selected.dtype).max
    rows = torch.where(selected < 0, last, selected).sort(dim=1).values
    return torch.where(rows == last, -1, rows).int()


def pool(kv: Tensor, score: Tensor, wide: torch.dtype) -> Tensor:
    """The gated pooling of `Compressor.forward`: [n, r, d] to [n, d], float32."""
    return (kv.to(wide) * score.to(wide).softmax(1)).sum(1).float()


def overlap_transform(windows: Tensor, fill: float) -> Tensor:
    """`Compressor.overlap_transform`: [n, r, 2d] to [n, 2r, d], the last window's first half before the own second."""
    d = windows.shape[2] // 2
    previous = torch.cat((torch.full_like(windows[:1, :, :d], fill), windows[:-1, :, :d]))
    return torch.cat((previous, windows[:, :, d:]), 1)


def swiglu(gate: Tensor, up: Tensor, limit: float, weight: Tensor | None, wide: torch.dtype) -> Tensor:
    """The activation of `Expert.forward`; the routing weight [t] multiplies before w2."""
    y = functional.silu(gate.to(wide).clamp(max=limit)) * up.to(wide).clamp(-limit, limit)
    return (y if weight is None else y * weight[:, None]).to(gate.dtype)


def gate_weights(logits: Tensor, ids: Tensor, scale: float, wide: torch.dtype) -> Tensor:
    """The routing weights of `Gate.forward` for experts `ids` [t, k], float32."""
    scores = functional.softplus(logits.to(wide)).sqrt().gather(1, ids)
    return (scores / scores.sum(1, keepdim=True) * scale).float()


def best_experts(logits: Tensor, bias: Tensor, k: int, wide: torch.dtype) -> Tensor:
    """The choice of `Gate.forward`, [t, k]."""
    return (functional.softplus(logits.to(wide)).sqrt() + bias).topk(k).indices


def hc_read(x: Tensor, fn: Tensor, eps: float, wide: torch.dtype) -> Tensor:
    """The normed projection of `Block.hc_pre` and `ParallelHead.hc_head`: [t, s, d] to [t, mixes]."""
    flat = x.flatten(1).to(wide)
    return (flat @ fn.to(wide).T) * torch.rsqrt(flat.square().mean(1, keepdim=True) + eps)


def hc_sum(x: Tensor, pre: Tensor, wide: torch.dtype) -> Tensor:
    """The reading of `Block.hc_pre`: streams [t, s, d] and weights [t, s] to [t, d]."""
    return (pre[..., None].to(wide) * x.to(wide)).sum(1).to(x.dtype)


def hc_post(y: Tensor, residual: Tensor, post: Tensor, comb: Tensor, wide: torch.dtype) -> Tensor:
    """`Block.hc_post`: comb[j, k] carries stream j into stream k."""
    mixed = (comb[..., None].to(wide) * residual[:, :, None].to(wide)).sum(1)
    return (post[..., None].to(wide) * y[:, None].to(wide) + mixed).to(y.dtype)
