"""Random transformers models as an oracle, and the same weights loaded by this runtime through `save_pretrained`."""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from fathom.kernels.ops import CPU, Ops
from fathom.model.transformer import Transformer
from fathom.runtime.load import load
from fathom.runtime.options import RunOptions

LAYER_TYPES = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
YARN = {
    "rope_type": "yarn",
    "factor": 16,
    "original_max_position_embeddings": 64,  # so short that every test prompt beyond it feels YaRN
    "beta_fast": 32,
    "beta_slow": 1,
}


def oracle(
    ratios: Sequence[int], *, hc_mult: int = 4, index_topk: int = 8, hash_layers: int = 1, seed: int = 0
) -> DeepseekV4ForCausalLM:
    """A tiny model with every parameter random and logits of unit scale, in fp32.

    32 indexer heads: with few, whole rows of scores are zero after the ReLU, and transformers' top-k of ties is
    arbitrary while ours takes the lower index.
    """
    config = DeepseekV4Config(
        vocab_size=320,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=len(ratios),
        num_attention_heads=4,
        head_dim=32,
        qk_rope_head_dim=16,
        q_lora_rank=32,
        num_experts_per_tok=2,
        n_routed_experts=6,
        layer_types=[LAYER_TYPES[r] for r in ratios],
        num_hash_layers=hash_layers,
        hc_mult=hc_mult,
        sliding_window=128,
        o_groups=2,
        o_lora_rank=16,
        index_n_heads=32,
        index_head_dim=16,
        index_topk=index_topk,
        max_position_embeddings=4096,
        swiglu_limit=1.0,  # low enough to clamp: unit-scale activations pass 10 without touching it
        routed_scaling_factor=2.5,
        rope_parameters=dict(YARN),
        attn_implementation="eager",
        num_nextn_predict_layers=0,
    )
    model = DeepseekV4ForCausalLM(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            _randomise(name, parameter, generator, config)
    return model


def _randomise(name: str, parameter: Tensor, generator: torch.Generator, config: DeepseekV4Config) -> None:
    leaf = name.rsplit(".", 1)[-1]
    if "inv_freq" in leaf:
        return
    if leaf == "tid2eid":
        rows = torch.rand(parameter.shape[0], config.n_routed_experts, generator=generator)
        parameter.copy_(rows.argsort(-1)[:, : parameter.shape[1]])
        return
    noise = torch.randn(parameter.shape, generator=generator)
    if "norm" in name:
        parameter.copy_(1 + 0.1 * noise)
    elif parameter.ndim == 1:  # sinks, biases, mHC base and scale
        parameter.copy_(0.5 * noise)
    elif "embed" in name or leaf == "position_bias":
        parameter.copy_(noise)
    else:
        parameter.copy_(noise / math.sqrt(parameter.shape[-1]))


def load_ours(directory: Path, ops: Ops = CPU, chunk: int = 512) -> Transformer:
    """The saved model in this runtime: plain fp32."""
    return load(directory, RunOptions("plain", "fp32", "cpu", chunk), ops).model


def our_logits(model: Transformer, tokens: Tensor, lengths: Sequence[int] | None = None) -> Tensor:
    """Logits [t, vocab] of all positions, the calls being of the given lengths (one call when None).

    The state takes chunks of the longest call and no more, so that the SWA ring wraps as early as it can.
    """
    lengths = [len(tokens)] if lengths is None else list(lengths)
    state = model.new_state(len(tokens), max(lengths))
    parts = tokens.split(lengths)
    return torch.cat([model.logits(model(part, state)) for part in parts])


@torch.no_grad()
def their_logits(model: DeepseekV4ForCausalLM, tokens: Tensor) -> Tensor:
    """Logits [t, vocab] of one uncached forward pass."""
    return model(tokens[None], use_cache=False).logits[0]
