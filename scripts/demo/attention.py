"""Attention of the training network: sliding window, CSA and HCA over one shared key-value head."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, rms_norm

from scripts.demo.layers import Quantised, RMSNorm
from scripts.demo.rounding import bf16, fp4_groups, fp8_groups, hadamard, straight_through
from scripts.demo.shape import Shape

if TYPE_CHECKING:
    from scripts.demo.network import Run

CHUNK = 2048  # queries at a time: bounds the memory of long evaluation passes; training never splits


@dataclass
class Seen:
    """What one CSA layer saw: the material of the indexer's loss and of attention supervision.

    Attributes
    ----------
    probs
        [b, t, h, n] attention on entries.
    scores
        [b, t, n] indexer scores, with a gradient.
    visible
        [b, t, n] bool: entries that could be attended to.
    """

    probs: Tensor
    scores: Tensor
    visible: Tensor


def rope_frequencies(shape: Shape, positions: Tensor, *, compressed: bool) -> Tensor:
    """Positions [b, t] -> unit complex numbers [b, t, rope / 2]: plain RoPE, or base 160000 with YaRN."""
    pairs = torch.arange(0, shape.rope_dims, 2, dtype=torch.float32) / shape.rope_dims
    if not compressed:
        angles = positions.unsqueeze(-1) * shape.rope_theta**-pairs
        return torch.polar(torch.ones_like(angles), angles)
    frequency = shape.compress_rope_theta**-pairs

    def pair_that_turns(turns: float) -> float:
        wavelength = shape.yarn_original / (turns * 2 * math.pi)
        return shape.rope_dims * math.log(wavelength) / (2 * math.log(shape.compress_rope_theta))

    low = max(math.floor(pair_that_turns(shape.yarn_beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(shape.yarn_beta_slow)), shape.rope_dims - 1)
    ramp = ((torch.arange(shape.rope_dims // 2) - low) / max(high - low, 0.001)).clamp(0, 1)
    frequency = frequency * (1 - ramp) + frequency / shape.yarn_factor * ramp
    angles = positions.unsqueeze(-1) * frequency
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x: Tensor, freqs: Tensor) -> Tensor:
    """Rotate the last 2 * freqs.shape[-1] channels of x in neighbouring pairs; freqs broadcasts against x's others."""
    width = 2 * freqs.shape[-1]
    pairs = torch.view_as_complex(x[..., -width:].unflatten(-1, (-1, 2)).contiguous())
    return torch.cat([x[..., :-width], torch.view_as_real(pairs * freqs).flatten(-2)], -1)


class Compressor(nn.Module):
    """Softmax-pools every `ratio` tokens into one entry; at ratio 4 each window also takes in the one before it."""

    def __init__(self, shape: Shape, ratio: int, width: int) -> None:
        super().__init__()
        self.ratio, self.width, self.overlaps = ratio, width, ratio == 4
        series = 2 if self.overlaps else 1
        self.wkv = nn.Linear(shape.hidden, series * width, bias=False)
        self.wgate = nn.Linear(shape.hidden, series * width, bias=False)
        self.ape = nn.Parameter(torch.zeros(ratio, series * width))
        self.norm = RMSNorm(width, shape)

    def forward(self, x: Tensor, freqs: Tensor) -> Tensor:
        """Map x [b, t, d] -> entries [b, t // ratio, width], rotated at the first token of their window."""
        n = x.shape[1] // self.ratio
        x = x[:, : n * self.ratio]
        kv = self.wkv(x).unflatten(1, (n, self.ratio))
        gate = self.wgate(x).unflatten(1, (n, self.ratio)) + self.ape
        if self.overlaps:
            kv, gate = self.with_previous(kv, 0.0), self.with_previous(gate, -math.inf)
        entries = self.norm((kv * gate.softmax(2)).sum(2))
        return rotate(entries, freqs[:, : n * self.ratio : self.ratio])

    def with_previous(self, x: Tensor, empty: float) -> Tensor:
        """[b, n, r, 2 w] -> [b, n, 2 r, w]: the first half of the window before, then the second half of this one."""
        before = pad(x[:, :-1, :, : self.width], (0, 0, 0, 0, 1, 0), value=empty)
        return torch.cat([before, x[..., self.width :]], 2)


class Indexer(nn.Module):
    """Scores every compressed entry for every query."""

    H: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, self.simulated = shape, False
        self.compressor = Compressor(shape, 4, shape.index_dim)
        self.wq_b = Quantised(shape.q_lora, shape.index_heads * shape.index_dim)
        self.weights_proj = nn.Linear(shape.hidden, shape.index_heads, bias=False)
        self.register_buffer("H", hadamard(shape.index_dim), persistent=False)

    def rounded(self, x: Tensor) -> Tensor:
        """Hadamard transform and FP4, if `simulated`; without rounding the transform changes no dot product."""
        if not self.simulated:
            return x
        x = x @ self.H
        return straight_through(x, bf16(fp4_groups(bf16(x.detach()))))

    def forward(self, x: Tensor, qr: Tensor, freqs: Tensor) -> Tensor:
        """Map x [b, t, d], qr [b, t, q_lora] -> scores [b, t, n]."""
        keys = self.rounded(self.compressor(x, freqs))
        q = self.wq_b(qr).unflatten(-1, (self.shape.index_heads, -1))
        q = self.rounded(rotate(q, freqs.unsqueeze(2)))
        weights = self.weights_proj(x) * (self.shape.index_heads * self.shape.index_dim) ** -0.5
        scores = []
        for part, weight in zip(q.split(CHUNK, 1), weights.split(CHUNK, 1), strict=True):
            hits = (part.flatten(1, 2) @ keys.transpose(1, 2)).relu().unflatten(1, part.shape[1:3])  # [b, t, h, n]
            scores.append(torch.einsum("bth,bthn->btn", weight, hits))
        return torch.cat(scores, 1)


class Attention(nn.Module):
    """One layer's attention: window alone at ratio 0, window and entries at ratios 4 (CSA) and 128 (HCA)."""

    def __init__(self, shape: Shape, ratio: int) -> None:
        super().__init__()
        self.shape, self.ratio, self.simulated = shape, ratio, False
        width = shape.heads * shape.head_dim
        self.wq_a = Quantised(shape.hidden, shape.q_lora)
        self.q_norm = RMSNorm(shape.q_lora, shape)
        self.wq_b = Quantised(shape.q_lora, width)
        self.wkv = Quantised(shape.hidden, shape.head_dim)
        self.kv_norm = RMSNorm(shape.head_dim, shape)
        self.wo_a = Quantised(width // shape.o_groups, shape.o_groups * shape.o_lora, rounds_input=False)
        self.wo_b = Quantised(shape.o_groups * shape.o_lora, shape.hidden)
        self.attn_sink = nn.Parameter(torch.zeros(shape.heads))
        if ratio:
            self.compressor = Compressor(shape, ratio, shape.head_dim)
        if ratio == 4:
            self.indexer = Indexer(shape)

    def rounded_kv(self, kv: Tensor) -> Tensor:
        """FP8 groups of 64 on the channels without RoPE, if `simulated`."""
        if not self.simulated:
            return kv
        d = self.shape.head_dim - self.shape.rope_dims
        rounded = torch.cat([bf16(fp8_groups(kv.detach()[..., :d], 64)), bf16(kv.detach()[..., d:])], -1)
        return straight_through(kv, rounded)

    def forward(self, x: Tensor, freqs: Tensor, run: "Run", seen: list[Seen]) -> Tensor:
        """Map x [b, t, d] -> [b, t, d]."""
        shape, b, t = self.shape, x.shape[0], x.shape[1]
        qr = self.q_norm(self.wq_a(x))
        q = self.wq_b(qr).unflatten(-1, (shape.heads, -1))
        q = rotate(rms_norm(q, (shape.head_dim,), eps=shape.norm_eps), freqs.unsqueeze(2))
        kv = self.rounded_kv(rotate(self.kv_norm(self.wkv(x)), freqs))
        entries, visible, scores = kv[:, :0], torch.zeros(b, t, 0, dtype=torch.bool), kv[:, :, :0]
        if self.ratio and t >= self.ratio:
            entries = self.rounded_kv(self.compressor(x, freqs))
            visible = self.causal(t, entries.shape[1]).expand(b, -1, -1)
        if self.ratio == 4:
            scores = self.indexer(x.detach(), qr.detach(), freqs)  # hard top-k: the indexer has a loss of its own
            visible = select(visible, scores.detach(), run)
        elif not run.hca:
            visible = torch.zeros_like(visible)
        out, probs = self.attend(q, kv, entries, visible)
        if run.record and self.ratio == 4:
            seen.append(Seen(probs, scores, visible))
        out = rotate(out, freqs.conj().unsqueeze(2))
        grouped = out.flatten(2).unflatten(2, (shape.o_groups, -1))  # [b, t, g, heads * head_dim / g]
        W = self.wo_a.deployed_weight().view(shape.o_groups, shape.o_lora, -1)
        y: Tensor = self.wo_b(torch.einsum("btgi,goi->btgo", grouped, W).flatten(2))
        return y

    def causal(self, t: int, n: int) -> Tensor:
        """[1, t, n] bool: entry c is complete once token (c + 1) * ratio - 1 is there."""
        return (torch.arange(n) < ((torch.arange(t) + 1) // self.ratio).unsqueeze(1)).unsqueeze(0)

    def attend(self, q: Tensor, kv: Tensor, entries: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        """Map q [b, t, h, d], kv [b, t, d], entries [b, n, d] to output [b, t, h, d] and p on entries [b, t, h, n]."""
        (b, t, h, d), w = q.shape, self.shape.window
        blocks = kv.unflatten(1, (t // w, w))
        keys = torch.cat([pad(blocks[:, :-1], (0, 0, 0, 0, 1, 0)), blocks], 2)  # [b, t / w, 2 w, d]
        inside = band(t, w)
        outputs, probs = [], []
        for i in range(0, t, CHUNK):
            part = q[:, i : i + CHUNK]
            c = part.shape[1]
            near = keys[:, i // w : (i + c) // w].flatten(0, 1)  # [b * c / w, 2 w, d]
            local = (part.reshape(-1, w * h, d) @ near.transpose(1, 2)).view(b, c, h, 2 * w)
            local = local.masked_fill(~inside[i : i + c].unsqueeze(1), -math.inf)
            far = (part.flatten(1, 2) @ entries.transpose(1, 2)).view(b, c, h, -1)
            far = far.masked_fill(~visible[:, i : i + c].unsqueeze(2), -math.inf)
            logits = torch.cat([local * self.shape.scale, far * self.shape.scale], -1)
            sink = self.attn_sink.view(1, 1, h, 1).expand(b, c, h, 1)
            p = torch.cat([logits, sink], -1).softmax(-1)
            p_near, p_far = p[..., : 2 * w], p[..., 2 * w : -1]
            out = (p_near.reshape(-1, w * h, 2 * w) @ near).view(b, c, h, d)
            outputs.append(out + (p_far.flatten(1, 2) @ entries).view(b, c, h, d))
            probs.append(p_far)
        return torch.cat(outputs, 1), torch.cat(probs, 1) if len(probs) == 1 else entries[:, :0]


def band(t: int, w: int) -> Tensor:
    """[t, 2 w] bool: which keys of its own window block and the one before a query sees, at most w with itself."""
    i, j = torch.arange(t).unsqueeze(1), torch.arange(2 * w)
    key = (i // w - 1) * w + j
    return (key >= 0) & (key <= i) & (key > i - w)


def select(visible: Tensor, scores: Tensor, run: "Run") -> Tensor:
    """Narrow the entries that a CSA layer may see, [b, t, n] bool, to what `run` asks for."""
    if run.blind is not None:
        visible = visible & ~run.blind.view(-1, 1, 1)
    if run.csa == "none":
        return torch.zeros_like(visible)
    if run.csa == "all" or run.topk >= visible.shape[2]:
        return visible
    key = torch.rand_like(scores) if run.csa == "random" else scores
    best = key.masked_fill(~visible, -math.inf).topk(run.topk, -1).indices
    return visible & torch.zeros_like(visible).scatter_(2, best, value=True)
