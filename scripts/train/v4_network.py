"""The V4 architecture as a batched, differentiable network: for training the demo, not for running it.

Equal to transformers' `DeepseekV4ForCausalLM` on the same weights. `Network.simulate` adds DeepSeek's rounding of
weights and activations, so that the last part of training sees the numbers that the deployed checkpoint will.
Parameters carry the checkpoint's names, except that the experts of a layer are stacked. Tokens [b * t] of all rows
stand one after the other; t is a multiple of the window.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from fathom.kernels.compress.reference import pool
from fathom.kernels.formats.groups import INDEX_GROUP, KV_GROUP
from fathom.kernels.norm.reference import rms_norm
from fathom.kernels.quantise.reference import hadamard, simulate_fp4, simulate_fp8
from fathom.kernels.rope.reference import angles, rotate
from fathom.model.config import LayerKind, ModelConfig
from fathom.model.rope import layer_frequencies, rotated_as
from fathom.scripts.train.layers import HyperConnection, HyperHead, MoE, Norm, Quantised, merge, straight_through

Angles = tuple[Tensor, Tensor]  # cos and sin, each [tokens, rope / 2]


class Seen(NamedTuple):
    """What one CSA layer saw: the material of the indexer's loss and of attention supervision."""

    probs: Tensor  # [b, t, h, n] attention on entries
    scores: Tensor  # [b, t, n] indexer scores, with a gradient
    visible: Tensor  # [b, t, n] bool: entries that could be attended to


@dataclass
class Run:
    """What a forward pass may see, and what it leaves behind for the losses.

    Attributes
    ----------
    topk
        Entries that the indexer selects for a token; None: CSA layers see all of them.
    blind
        [b] bool: rows whose CSA layers see no entry, None where every row sees them.
    positions
        [b, t] positions for RoPE alone, None for 0 to t - 1.
    seen
        Filled by CSA layers, first layer first.
    """

    topk: int | None
    blind: Tensor | None = None
    positions: Tensor | None = None
    seen: list[Seen] = field(default_factory=list)


class Compressor(nn.Module):
    """Softmax-pools every `ratio` tokens into one entry; at ratio 4 each window also takes in the one before it."""

    def __init__(self, config: ModelConfig, ratio: int, width: int) -> None:
        super().__init__()
        self.ratio, self.width, self.overlaps = ratio, width, ratio == 4
        series = 2 if self.overlaps else 1
        self.wkv = nn.Linear(config.hidden_size, series * width, bias=False)
        self.wgate = nn.Linear(config.hidden_size, series * width, bias=False)
        self.ape = nn.Parameter(torch.zeros(ratio, series * width))
        self.norm = Norm(width, config.rms_norm_eps)

    def forward(self, x: Tensor, turns: Angles) -> Tensor:
        """Map x [b, t, d] -> entries [b, t // ratio, width], rotated at the first token of their window."""
        b, t = x.shape[:2]
        n = t // self.ratio
        x = x[:, : n * self.ratio]
        kv = self.wkv(x).unflatten(1, (n, self.ratio))
        gate = self.wgate(x).unflatten(1, (n, self.ratio)) + self.ape
        if self.overlaps:
            kv, gate = self.with_previous(kv, 0.0), self.with_previous(gate, -math.inf)
        entries = self.norm(pool(kv.flatten(0, 1), gate.flatten(0, 1), None, None))
        cos, sin = (part.view(b, t, -1)[:, : n * self.ratio : self.ratio].flatten(0, 1) for part in turns)
        return rotate(entries, cos, sin).view(b, n, -1)

    def with_previous(self, x: Tensor, empty: float) -> Tensor:
        """[b, n, r, 2 w] -> [b, n, 2 r, w]: the first half of the window before, then the second half of this one."""
        before = pad(x[:, :-1, :, : self.width], (0, 0, 0, 0, 1, 0), value=empty)
        return torch.cat([before, x[..., self.width :]], 2)


class Indexer(nn.Module):
    """Scores every compressed entry for every query."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.simulated, self.heads, self.width = False, config.index_n_heads, config.index_head_dim
        self.compressor = Compressor(config, 4, self.width)
        self.wq_b = Quantised(config.q_lora_rank, self.heads * self.width)
        self.weights_proj = nn.Linear(config.hidden_size, self.heads, bias=False)

    def rounded(self, x: Tensor) -> Tensor:
        """Hadamard transform and FP4, if `simulated`; without rounding the transform changes no dot product."""
        if not self.simulated:
            return x
        x = hadamard(x)
        return straight_through(x, simulate_fp4(x.detach().bfloat16(), INDEX_GROUP).float())

    def forward(self, x: Tensor, qr: Tensor, turns: Angles) -> Tensor:
        """Map x [b, t, d], qr [b, t, q_lora] -> scores [b, t, n]."""
        keys = self.rounded(self.compressor(x, turns))
        q = self.wq_b(qr).view(-1, self.heads, self.width)
        q = self.rounded(rotate(q, *turns)).view(len(x), -1, self.width)  # [b, t * h, w]
        weights = self.weights_proj(x) * (self.heads * self.width) ** -0.5
        hits = (q @ keys.transpose(1, 2)).relu().unflatten(1, (x.shape[1], self.heads))  # [b, t, h, n]
        return torch.einsum("bth,bthn->btn", weights, hits)


class Attention(nn.Module):
    """One layer's attention: window alone at ratio 0, window and entries at ratios 4 (CSA) and 128 (HCA)."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.config, self.ratio, self.simulated = config, config.ratio(layer), False
        hidden, width = config.hidden_size, config.num_attention_heads * config.head_dim
        self.wq_a = Quantised(hidden, config.q_lora_rank)
        self.q_norm = Norm(config.q_lora_rank, config.rms_norm_eps)
        self.wq_b = Quantised(config.q_lora_rank, width)
        self.wkv = Quantised(hidden, config.head_dim)
        self.kv_norm = Norm(config.head_dim, config.rms_norm_eps)
        self.wo_a = Quantised(width // config.o_groups, config.o_groups * config.o_lora_rank, rounds_input=False)
        self.wo_b = Quantised(config.o_groups * config.o_lora_rank, hidden)
        self.attn_sink = nn.Parameter(torch.zeros(config.num_attention_heads))
        if self.ratio:
            self.compressor = Compressor(config, self.ratio, config.head_dim)
        if self.ratio == 4:
            self.indexer = Indexer(config)

    def rounded_kv(self, kv: Tensor) -> Tensor:
        """FP8 groups of 64 on the channels without RoPE, BF16 on the others, if `simulated`."""
        if not self.simulated:
            return kv
        stored, nope = kv.detach().bfloat16(), self.config.head_dim - self.config.qk_rope_head_dim
        rounded = torch.cat([simulate_fp8(kv.detach()[..., :nope], KV_GROUP).bfloat16(), stored[..., nope:]], -1)
        return straight_through(kv, rounded.float())

    def latent(self, x: Tensor) -> Tensor:
        """Map x [..., d] -> [..., q_lora], what queries and the indexer's are made from."""
        out: Tensor = self.q_norm(self.wq_a(x))
        return out

    def query(self, latent: Tensor, turns: Angles) -> Tensor:
        """Map [tokens, q_lora] -> rotated queries [tokens, h, head_dim]."""
        q: Tensor = self.wq_b(latent).unflatten(1, (self.config.num_attention_heads, -1))
        return rotate(rms_norm(q, None, self.config.rms_norm_eps), *turns)

    def kv(self, x: Tensor, turns: Angles) -> Tensor:
        """Map x [tokens, d] -> rows of the window [tokens, head_dim], rotated and rounded."""
        return self.rounded_kv(rotate(self.kv_norm(self.wkv(x)), *turns))

    def output(self, out: Tensor, turns: Angles) -> Tensor:
        """Map what was attended to [tokens, h, head_dim] -> [tokens, d]."""
        config, (cos, sin) = self.config, turns
        out = rotate(out, cos, -sin).view(len(out), config.o_groups, -1)  # [tokens, g, heads * head_dim / g]
        W = self.wo_a.deployed_weight().view(config.o_groups, config.o_lora_rank, -1)
        y: Tensor = self.wo_b(torch.einsum("tgi,goi->tgo", out, W).flatten(1))
        return y

    def forward(self, x: Tensor, turns: Angles, run: Run) -> Tensor:
        """Map x [b, t, d] -> [b, t, d]."""
        b, t = x.shape[:2]
        qr = self.latent(x)
        q = self.query(qr.flatten(0, 1), turns).unflatten(0, (b, t))
        kv = self.kv(x.flatten(0, 1), turns).unflatten(0, (b, t))
        entries, visible, scores = kv[:, :0], torch.zeros(b, t, 0, dtype=torch.bool), kv[:, :, :0]
        if self.ratio and t >= self.ratio:
            entries = self.rounded_kv(self.compressor(x, turns))
            # entry c is complete once token (c + 1) * ratio - 1 is there
            visible = torch.arange(entries.shape[1]) < ((torch.arange(t) + 1) // self.ratio).unsqueeze(1)
            visible = visible.expand(b, -1, -1)
        if self.ratio == 4:
            scores = self.indexer(x.detach(), qr.detach(), turns)  # hard top-k: the indexer has a loss of its own
            visible = select(visible, scores.detach(), run)
        out, probs = self.attend(q, kv, entries, visible)
        if self.ratio == 4:
            run.seen.append(Seen(probs, scores, visible))
        return self.output(out.flatten(0, 1), turns).view(b, t, -1)

    def attend(self, q: Tensor, kv: Tensor, entries: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        """Map q [b, t, h, d], kv [b, t, d], entries [b, n, d] to output [b, t, h, d] and p on entries [b, t, h, n]."""
        (b, t, h, d), w = q.shape, self.config.sliding_window
        blocks = kv.unflatten(1, (t // w, w))
        near = torch.cat([pad(blocks[:, :-1], (0, 0, 0, 0, 1, 0)), blocks], 2).flatten(0, 1)  # [b * t / w, 2 w, d]
        local = (q.reshape(-1, w * h, d) @ near.transpose(1, 2)).view(b, t, h, 2 * w)
        local = local.masked_fill(~band(t, w).unsqueeze(1), -math.inf)
        far = (q.flatten(1, 2) @ entries.transpose(1, 2)).view(b, t, h, -1)
        far = far.masked_fill(~visible.unsqueeze(2), -math.inf)
        sink = self.attn_sink.view(1, 1, h, 1).expand(b, t, h, 1)
        p = torch.cat([torch.cat([local, far], -1) * d**-0.5, sink], -1).softmax(-1)
        p_near, p_far = p[..., : 2 * w], p[..., 2 * w : -1]
        out = (p_near.reshape(-1, w * h, 2 * w) @ near).view(b, t, h, d)
        return out + (p_far.flatten(1, 2) @ entries).view(b, t, h, d), p_far


def band(t: int, w: int) -> Tensor:
    """[t, 2 w] bool: which keys of its own window block and the one before a query sees, at most w with itself."""
    i, j = torch.arange(t).unsqueeze(1), torch.arange(2 * w)
    key = (i // w - 1) * w + j
    return (key >= 0) & (key <= i) & (key > i - w)


def select(visible: Tensor, scores: Tensor, run: Run) -> Tensor:
    """Narrow the entries that a CSA layer may see, [b, t, n] bool, to what `run` asks for."""
    if run.blind is not None:
        visible = visible & ~run.blind.view(-1, 1, 1)
    if run.topk is None or run.topk >= visible.shape[2]:
        return visible
    best = scores.masked_fill(~visible, -math.inf).topk(run.topk, -1).indices
    return visible & torch.zeros_like(visible).scatter_(2, best, value=True)


class Block(nn.Module):
    """Attention and experts, each inside its hyper-connection."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.kind = rotated_as(config.layer_kind(layer))
        self.attn_norm, self.ffn_norm = (Norm(config.hidden_size, config.rms_norm_eps) for _ in range(2))
        self.hc_attn, self.hc_ffn = HyperConnection(config), HyperConnection(config)
        self.attn = Attention(config, layer)
        self.ffn = MoE(config, hashed=config.is_hash(layer))

    def forward(self, X: Tensor, ids: Tensor, turns: Angles, run: Run) -> Tensor:
        """X [b * t, streams, d], ids [b, t] -> X."""
        return self.around(X, ids, lambda x: self.attn(x.view(*ids.shape, -1), turns, run).flatten(0, 1))

    def around(self, X: Tensor, ids: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        """X [tokens, streams, d], ids of as many tokens -> X; `attend` maps [tokens, d] to as much."""
        x, post, comb = self.hc_attn(X)
        X = merge(X, attend(self.attn_norm(x)), post, comb)
        x, post, comb = self.hc_ffn(X)
        return merge(X, self.ffn(self.ffn_norm(x), ids.flatten()), post, comb)


class Rounding(nn.Module):
    """A network whose layers can round as the deployed model does."""

    def simulate(self, *, on: bool) -> None:
        """Switch the rounding of the deployed model on or off."""
        for module in self.modules():
            if isinstance(module, Attention | Indexer | MoE | Quantised):
                module.simulated = on


class Network(Rounding):
    """ids [b, t] -> logits [b, t, vocab]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.hc_head = HyperHead(config)
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def blocks(self) -> list[Block]:
        """The layers, in order."""
        return [block for block in self.layers if isinstance(block, Block)]

    def forward(self, ids: Tensor, run: Run) -> Tensor:
        """Logits at every position."""
        b, t = ids.shape
        assert t % self.config.sliding_window == 0, f"{t} tokens: want whole windows"
        positions = run.positions if run.positions is not None else torch.arange(t).expand(b, t)
        turns = {
            kind: angles(positions.flatten(), layer_frequencies(self.config, kind))
            for kind in (LayerKind.SWA, LayerKind.HCA)
        }
        X = self.embed(ids).flatten(0, 1).unsqueeze(1).expand(-1, self.config.hc_mult, -1).contiguous()
        for block in self.blocks():
            X = block(X, ids, turns[block.kind], run)
        logits: Tensor = self.head(self.norm(self.hc_head(X)).view(b, t, -1))
        return logits
