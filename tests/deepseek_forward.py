"""DeepSeek's inference code as one straight line: a whole prompt from position 0, without caches, without this runtime.

Written from DeepSeek's model.py, method by method; it reads the checkpoint with `safetensors.safe_open` and imports
nothing from kernels/, model/ or runtime/.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from tests import deepseek_arithmetic as ds
from tests.deepseek_arithmetic import BF16, F32, Choices


def read(directory: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and every tensor of a checkpoint in official format."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as shard:
            tensors |= {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118, it is no dict
    return json.loads((directory / "config.json").read_text()), tensors


class Forward:
    """One prompt; `trace` holds tensors by name, in the order of computation."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor], choices: Choices) -> None:
        self.config, self.tensors, self.choices = config, tensors, choices
        self.eps, self.wide = config["rms_norm_eps"], choices.wide
        self.trace: dict[str, Tensor] = {}

    def linear(self, x: Tensor, name: str) -> Tensor:
        """A quantised `Linear`: BF16 to BF16."""
        return ds.quantised_gemm(x, self.tensors[f"{name}.weight"], self.tensors[f"{name}.scale"], self.choices)

    def dense(self, x: Tensor, name: str) -> Tensor:
        """A `Linear` stored in BF16: `x` in its own dtype, FP32 where the reference makes the parameter FP32."""
        return (x.to(self.wide) @ self.tensors[f"{name}.weight"].to(self.wide).T).to(x.dtype)

    def norm(self, x: Tensor, name: str) -> Tensor:
        """A learned `RMSNorm`."""
        return ds.rms_norm(x, self.tensors[f"{name}.weight"], self.eps, self.wide)

    def compress(self, x: Tensor, name: str, ratio: int) -> Tensor:
        """`Compressor.forward` of a whole prompt, up to and with rope: [t // ratio, d]."""
        n = len(x) // ratio
        ape = self.tensors[f"{name}.ape"]
        kv = self.dense(x.float(), f"{name}.wkv")[: n * ratio].unflatten(0, (n, ratio))
        score = self.dense(x.float(), f"{name}.wgate")[: n * ratio].unflatten(0, (n, ratio)) + ape
        if ratio == 4:
            kv, score = ds.overlap_transform(kv, 0), ds.overlap_transform(score, ds.MINUS_INF)
        entries = self.norm(ds.pool(kv, score, self.wide).to(BF16), f"{name}.norm")
        return ds.rotate(entries, *ds.rope_table(self.config, ratio, torch.arange(n) * ratio), self.wide)

    def cached(self, kv: Tensor) -> Tensor:
        """Round the dims without rope as the cache does (`act_quant(kv[..., :-rd], 64, ..., True)`)."""
        if not self.choices.simulation.kv:
            return kv
        nope = kv[:, : -self.config["qk_rope_head_dim"]]
        return torch.cat((ds.in_place(ds.act_quant(nope, 64), nope), kv[:, nope.shape[1] :]), 1)

    def index_round(self, x: Tensor, *, simulate: bool) -> Tensor:
        """Rotation and FP4 of the indexer's queries and keys."""
        if self.choices.simulation.hadamard:
            x = ds.rotate_activation(x, self.wide)
        return ds.in_place(ds.fp4_act_quant(x), x) if simulate else x

    def indexer(self, x: Tensor, latent: Tensor, name: str, ratio: int, rope: tuple[Tensor, Tensor]) -> Tensor:
        """`Indexer.forward`: [t, min(k, n)] entries, best first."""
        heads, width, on = self.config["index_n_heads"], self.config["index_head_dim"], self.choices.simulation
        q = ds.rotate(self.linear(latent, f"{name}.wq_b").unflatten(1, (heads, width)), *rope, self.wide)
        q = self.index_round(q, simulate=on.index_queries)
        keys = self.index_round(self.compress(x, f"{name}.compressor", ratio), simulate=on.index_keys)
        self.trace[f"{name}.keys"] = keys
        weights = self.dense(x, f"{name}.weights_proj")
        weights = weights if self.choices.rounding.index_weights else weights.float()
        scores = ds.index_scores(q, weights * (width**-0.5 * heads**-0.5), keys, self.choices)
        return ds.top_k(scores, self.config["index_topk"], ratio)

    def attention(self, x: Tensor, name: str, ratio: int) -> Tensor:
        """`Attention.forward` from position 0."""
        t, positions = len(x), torch.arange(len(x))
        rope = ds.rope_table(self.config, ratio, positions)
        latent = self.norm(self.linear(x, f"{name}.wq_a"), f"{name}.q_norm")
        q = self.linear(latent, f"{name}.wq_b").unflatten(1, (self.config["num_attention_heads"], -1))
        q = ds.rms_norm_bf16(q, self.eps) if self.choices.rounding.q_norm else ds.rms_norm(q, None, self.eps, self.wide)
        q = ds.rotate(q, *rope, self.wide)
        kv = self.cached(ds.rotate(self.norm(self.linear(x, f"{name}.wkv"), f"{name}.kv_norm"), *rope, self.wide))
        window = self.config["sliding_window"]
        index = (positions[:, None] - window + 1).clamp_min(0) + torch.arange(min(t, window))
        index = torch.where(index > positions[:, None], -1, index)  # `get_window_topk_idxs`
        self.trace |= {f"{name}.q": q, f"{name}.kv": kv}
        if ratio:
            selected = torch.arange(t // ratio).expand(t, -1)  # `get_compress_topk_idxs`
            selected = torch.where(selected >= (positions[:, None] + 1) // ratio, -1, selected)
            if ratio == 4:
                selected = self.indexer(x, latent, f"{name}.indexer", ratio, rope)
                self.trace[f"{name}.selected"] = ds.ascending(selected)
            entries = self.cached(self.compress(x, f"{name}.compressor", ratio))
            self.trace[f"{name}.entries"] = entries
            index = torch.cat((index, torch.where(selected < 0, -1, selected + t)), 1)
            kv = torch.cat((kv, entries))
        out = ds.sparse_attn(q, kv, self.tensors[f"{name}.attn_sink"], index, self.choices)
        self.trace[f"{name}.out"] = out
        out = ds.rotate(out, rope[0], -rope[1], self.wide)
        return self.linear(self.low_rank_output(out, f"{name}.wo_a"), f"{name}.wo_b")

    def low_rank_output(self, out: Tensor, name: str) -> Tensor:
        """The grouped projection of `Attention.forward`: wo_a is FP8 on disk, but decoded; its input is not rounded."""
        values, scale = ds.stored_blocks(self.tensors[f"{name}.weight"], self.tensors[f"{name}.scale"])
        weight = (values * scale.repeat_interleave(128, 1)[:, : values.shape[1]]).to(BF16)  # exact (convert.py)
        groups = self.config["o_groups"]
        x, weight = out.flatten(1).unflatten(1, (groups, -1)), weight.unflatten(0, (groups, -1))
        return torch.einsum("tgd,grd->tgr", x.to(self.wide), weight.to(self.wide)).to(BF16).flatten(1)

    def expert(self, x: Tensor, name: str, weight: Tensor | None) -> Tensor:
        """`Expert.forward`."""
        gate, up = self.linear(x, f"{name}.w1"), self.linear(x, f"{name}.w3")
        return self.linear(ds.swiglu(gate, up, self.config["swiglu_limit"], weight, self.wide), f"{name}.w2")

    def experts(self, x: Tensor, tokens: Tensor, layer: int) -> Tensor:
        """`MoE.forward` and `Gate.forward`; the sum over experts is FP32."""
        name, config = f"layers.{layer}.ffn", self.config
        logits = self.dense(x.float(), f"{name}.gate")
        if layer < config["num_hash_layers"]:
            ids = self.tensors[f"{name}.gate.tid2eid"][tokens]
        else:
            ids = ds.best_experts(logits, self.tensors[f"{name}.gate.bias"], config["num_experts_per_tok"], self.wide)
        weights = ds.gate_weights(logits, ids, config["routed_scaling_factor"], self.wide)
        y = torch.zeros_like(x, dtype=F32)
        for e in range(config["n_routed_experts"]):
            rows, slots = torch.where(ids == e)
            if len(rows):
                y[rows] += self.expert(x[rows], f"{name}.experts.{e}", weights[rows, slots])
        return (y + self.expert(x, f"{name}.shared_experts", None)).to(BF16)

    def mixes(self, x: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """Scale and base of one mHC, and what its `fn` makes of the streams."""
        parts = (self.tensors[f"{name}_{part}"] for part in ("fn", "scale", "base"))
        fn, scale, base = (part.to(self.wide) for part in parts)
        return ds.hc_read(x, fn, self.eps, self.wide), scale, base

    def hc_pre(self, x: Tensor, hc: str, norm: str) -> tuple[Tensor, Tensor, Tensor]:
        """`Block.hc_pre` and the norm after it: the sublayer's input [t, d], post and comb."""
        pre, post, comb = ds.hc_split_sinkhorn(*self.mixes(x, hc), self.config)
        return self.norm(ds.hc_sum(x, pre, self.wide), norm), post, comb

    def hc_post(self, y: Tensor, x: Tensor, post: Tensor, comb: Tensor, hc: str) -> Tensor:
        """`Block.hc_post`."""
        x = ds.hc_post(y, x, post, comb, self.wide)
        self.trace[hc] = x
        return x

    def logits(self, tokens: Tensor) -> Tensor:
        """`Transformer.forward` and `ParallelHead.forward`, but for every position: [t, vocab] float32."""
        x = self.tensors["embed.weight"][tokens][:, None].repeat(1, self.config["hc_mult"], 1)  # [t, s, d]
        for layer, ratio in enumerate(self.config["compress_ratios"][: self.config["num_hidden_layers"]]):
            name = f"layers.{layer}"
            y, post, comb = self.hc_pre(x, f"{name}.hc_attn", f"{name}.attn_norm")
            x = self.hc_post(self.attention(y, f"{name}.attn", ratio), x, post, comb, f"{name}.hc_attn")
            y, post, comb = self.hc_pre(x, f"{name}.hc_ffn", f"{name}.ffn_norm")
            x = self.hc_post(self.experts(y, tokens, layer), x, post, comb, f"{name}.hc_ffn")
        mixes, scale, base = self.mixes(x, "hc_head")
        pre = (torch.sigmoid(mixes * scale + base) + self.config["hc_eps"]).float()
        return self.dense(self.norm(ds.hc_sum(x, pre, self.wide), "norm").float(), "head")
