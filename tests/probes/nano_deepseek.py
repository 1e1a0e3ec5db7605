"""The package nano-deepseek-v4 as a runtime to judge: its sites, and its equations that are not V4's, to be mended.

Its own modules run the demo checkpoint, loaded by its own loader.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from nano_deepseek_v4 import DeepSeekV4Config, DeepSeekV4ForCausalLM, load_deepseek_official_checkpoint
from nano_deepseek_v4 import modeling as theirs
from torch import Tensor

from fathom.kernels.hyper.reference import sinkhorn
from fathom.kernels.rope import reference as rope
from fathom.runtime.options import DEMO
from tests.exporter import exporter

YARN = {"factor": 16, "original_context": 4096, "beta_fast": 32, "beta_slow": 1}  # the demo's rope_scaling


def load() -> Any:
    """The demo checkpoint in its model, fp32: every tensor is taken, and everything that the model reads is filled."""
    model = DeepSeekV4ForCausalLM(DeepSeekV4Config.from_official_json(DEMO / "config.json")).eval()
    report = load_deepseek_official_checkpoint(model, DEMO)
    unused = {
        "e_score_correction_bias": "hash_moe",
        "tid2eid": "moe",
    }  # buffers that a layer of this kind does not read
    for name in report.missing_keys:
        path, _, leaf = name.rpartition(".")
        assert model.get_submodule(path).layer_type == unused[leaf]
    assert not [*report.unexpected_keys, *report.conversion.unconverted_keys, *report.conversion.ignored_keys]
    return model


# --- its sites


class Recorder(exporter.Recorder):
    """Forward hooks on its modules; three methods whose results no module returns are wrapped."""

    def around(self, module: Any, method: str, note: Callable[[Sequence[Any], Any], None]) -> None:
        """Give `note` what a method is given and returns."""
        whole = getattr(module, method)

        def noted(*given: Any) -> Any:
            out = whole(*given)
            note(given, out)
            return out

        setattr(module, method, noted)

    def watch(self, block: Any, layer: str) -> None:
        self.after(block, f"{layer}streams", lambda out: out[0][0])
        for hyper, part in ((block.attn_hc, "attention"), (block.ffn_hc, "experts")):
            self.after(hyper, f"{layer}{part}.post", lambda out: out[0][0])
            self.after(hyper, f"{layer}{part}.comb", lambda out: out[1][0])
        self.before(block.ffn_hc, f"{layer}attention.streams", lambda given: given[0][0])
        self.after(block.attn_norm, f"{layer}attention.input", lambda out: out[0])
        self.after(block.ffn_norm, f"{layer}experts.input", lambda out: out[0])
        (shared,) = block.moe.shared_experts
        self.after(shared.gate_up_proj, f"{layer}experts.shared_gate", lambda out: out.chunk(2, -1)[0])
        self.after(shared.gate_up_proj, f"{layer}experts.shared_up", lambda out: out.chunk(2, -1)[1])
        self.after(block.moe, f"{layer}experts.output", lambda out: out[0][0])

        def routed(_given: Sequence[Any], out: Any) -> None:
            self.note(f"{layer}experts.ids", out[0][0])
            self.note(f"{layer}experts.weights", out[1][0])

        self.around(block.moe, "route", routed)
        self.watch_attention(block.self_attn, layer)

    def watch_attention(self, attention: Any, layer: str) -> None:
        heads = (attention.num_heads, attention.head_dim)
        self.after(attention.q_a_norm, f"{layer}attention.latent", lambda out: out[0])

        def attended(given: Sequence[Any], out: Any) -> None:
            q, keys, *_ = given  # rotated [1, heads, t, d]; the window's keys, then entries, each head's are the same
            self.note(f"{layer}attention.query", q[0].transpose(0, 1))
            self.note(f"{layer}attention.kv", keys[0, 0, : q.shape[2]])
            self.note(f"{layer}attention.mixed", out[0].transpose(0, 1))

        self.around(attention, "_core_attention", attended)
        self.before(attention.o_a_proj, f"{layer}attention.unrotated", lambda given: given[0][0].unflatten(-1, heads))
        self.after(attention, f"{layer}attention.output", lambda out: out[0])
        for compressor in (attention.hca, attention.csa):
            if compressor is not None:
                self.after(compressor, f"{layer}attention.entry", lambda out: out[0][0, 0])
        if attention.csa is not None:
            self.watch_indexer(attention.csa.indexer, layer)

    def watch_indexer(self, indexer: Any, layer: str) -> None:
        def rotated(out: Tensor) -> Tensor:
            """As the lines after the projection do."""
            positions = torch.arange(out.shape[1])[None]
            angles = theirs.rope_cos_sin(positions, indexer.rope_dim, indexer.compress_rope_theta)
            q = out.unflatten(-1, (indexer.num_heads, indexer.head_dim)).transpose(1, 2)
            return theirs.apply_partial_rope(q, *angles)[0].transpose(0, 1)

        def chosen(out: Any) -> Tensor:
            """Numbers of the entries in its mask [1, t, n], ascending, then -1."""
            mask = out[0][0]
            n = mask.shape[1]
            numbers = torch.where(mask, torch.arange(n), n).sort(-1).values[:, : indexer.index_topk]
            return torch.where(numbers < n, numbers, -1).int()

        self.around(indexer, "_compress", lambda _given, out: self.note(f"{layer}indexer.key", out[0][0]))
        self.after(indexer.q_b_proj, f"{layer}indexer.query", rotated)
        scale = indexer.head_dim**-0.5 * indexer.num_heads**-0.5  # it scales scores by one root, weights by the other
        self.after(indexer.weights_proj, f"{layer}indexer.weights", lambda out: out[0].float() * scale)
        self.after(indexer, f"{layer}indexer.selected", chosen)


def record(model: Any, tokens: Tensor) -> dict[str, Tensor]:
    """A recording of tokens [t] in one call, which uses no cache. Mends come before: hooks see what they return."""
    recorder = Recorder(model)
    with torch.inference_mode():
        model(tokens[None])
    return {"tokens": tokens, **recorder.tensors()}


# --- its equations that are not V4's


class Mend(NamedTuple):
    """A published equation in place of one of its own, in all layers."""

    fault: str  # of `probes.faults`: what its own equation is
    theirs: str  # where it stands
    what: str  # their equation
    put: Callable[[Any], None]

    @property
    def told(self) -> dict[str, str]:
        """Which it is, in words."""
        return {"fault": self.fault, "theirs": self.theirs, "what": self.what}


def hypers(model: Any) -> list[Any]:
    """Its mHC, two of each layer."""
    return [hyper for block in model.model.layers for hyper in (block.attn_hc, block.ffn_hc)]


def logits(hyper: Any, streams: Tensor) -> Tensor:
    """What pre, post and comb are made of, [1, t, (2 + s) s], before their scales and bases."""
    flat = streams.flatten(2).float()
    return (flat @ hyper.fn.T) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + hyper.input_norm.eps)


def doubled(model: Any) -> None:
    """Take post = 2 sigmoid."""

    def changed(hyper: Any, given: Any, out: Any) -> Any:
        part = slice(hyper.hc_mult, 2 * hyper.hc_mult)
        x = logits(hyper, given[0])[..., part] * hyper.scale[1] + hyper.base[part]
        return 2 * x.sigmoid(), *out[1:]

    for hyper in hypers(model):
        hyper.register_forward_hook(changed)


def exponentials(model: Any) -> None:
    """Start Sinkhorn from the exponentials."""

    def changed(hyper: Any, given: Any, out: Any) -> Any:
        s = hyper.hc_mult
        x = logits(hyper, given[0])[..., 2 * s :] * hyper.scale[2] + hyper.base[2 * s :]
        return out[0], sinkhorn(x.unflatten(-1, (s, s)), hyper.sinkhorn_iters, hyper.eps), out[2]

    for hyper in hypers(model):
        hyper.register_forward_hook(changed)


def mixed(model: Any) -> None:
    """Let comb [j, k] send stream j to k."""

    def forward(block: Any, streams: Tensor, ids: Tensor, positions: Tensor, mask: Any, cache: Any = None) -> Any:
        post, comb, x = block.attn_hc(streams)
        y = block.self_attn(block.attn_norm(x), positions, mask, cache)
        streams = post[..., None] * y[..., None, :] + comb.mT @ streams
        post, comb, x = block.ffn_hc(streams)
        y, router = block.moe(block.ffn_norm(x), ids)
        return post[..., None] * y[..., None, :] + comb.mT @ streams, router

    for block in model.model.layers:
        block.forward = forward.__get__(block)


def compressed(model: Any) -> list[Any]:
    """Attentions of its CSA and HCA layers."""
    return [block.self_attn for block in model.model.layers if block.self_attn.layer_type != "sliding_attention"]


def yarn(model: Any) -> None:
    """Rotate by compress_rope_theta with YaRN."""
    plainly = theirs.rope_cos_sin

    def slowed(positions: Tensor, dim: int, theta: float) -> tuple[Tensor, Tensor]:
        if theta != model.config.compress_rope_theta:
            return plainly(positions, dim, theta)
        angles = positions.float()[..., None] * rope.yarn_frequencies(dim, theta, **YARN)
        return angles.cos(), angles.sin()

    def within(forward: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*given: Any) -> Any:
            with patch.object(theirs, "rope_cos_sin", slowed):
                return forward(*given)

        return changed

    for attention in compressed(model):
        attention.forward = within(attention.forward)


def one_base(model: Any) -> None:
    """Rotate all of a compressed layer by one base."""
    for attention in compressed(model):
        attention.config = dataclasses.replace(attention.config, rope_theta=attention.config.compress_rope_theta)


MENDS = (
    Mend("post-not-doubled", "HyperConnection.forward", "post = sigmoid + eps, not 2 sigmoid", doubled),
    Mend(
        "sinkhorn-of-sigmoids",
        "HyperConnection.forward",
        "Sinkhorn started from sigmoids, not exponentials",
        exponentials,
    ),
    Mend("comb-transposed", "DeepSeekV4DecoderLayer.forward", "streams mixed by comb, not by its transpose", mixed),
    Mend("yarn-dropped", "rope_cos_sin", "no YaRN, as rope_scaling is not read from config.json", yarn),
    Mend(
        "query-theta",
        "DeepSeekV4Attention.forward",
        "queries, window KV and output of CSA and HCA layers rotated with rope_theta, not compress_rope_theta",
        one_base,
    ),
)  # in the order in which they are mended
