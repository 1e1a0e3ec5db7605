"""The demo's dimensions, and its config.json in DeepSeek's dialect."""

from dataclasses import dataclass
from typing import Any

from probes.demo_language.vocabulary import BOS, EOS, vocabulary_size


@dataclass(frozen=True)
class Shape:
    """Every width of the demo model. Each is a multiple of the block that the stored format asks for.

    FP8 weights come in blocks of 128 x 128, FP4 weights in groups of 32 input channels, FP8 KV in groups of 64 of the
    head_dim - rope dims, the indexer's FP4 in groups of 32 after a Hadamard transform of index_head_dim.
    """

    vocab: int
    hidden: int = 128
    heads: int = 4
    head_dim: int = 128
    rope_dims: int = 64
    q_lora: int = 128
    o_groups: int = 2
    o_lora: int = 64
    experts: int = 8
    experts_per_token: int = 2
    intermediate: int = 128
    route_scale: float = 1.5
    swiglu_limit: float = 10.0
    hash_layers: int = 1
    index_heads: int = 8
    index_dim: int = 128
    index_topk: int = 16
    window: int = 16
    ratios: tuple[int, ...] = (0, 4, 128, 4)
    streams: int = 4
    sinkhorn_iterations: int = 20
    hc_eps: float = 1e-6
    norm_eps: float = 1e-6
    rope_theta: int = 10000
    compress_rope_theta: int = 160000
    yarn_factor: int = 16
    yarn_original: int = 4096
    positions: int = 1 << 20  # beyond yarn_factor x yarn_original the model extrapolates
    yarn_beta_fast: int = 32
    yarn_beta_slow: int = 1

    @property
    def layers(self) -> int:
        """Number of blocks."""
        return len(self.ratios)

    @property
    def scale(self) -> float:
        """Of the attention logits."""
        return float(self.head_dim**-0.5)


def demo_shape() -> Shape:
    """The shape that is shipped."""
    return Shape(vocab=vocabulary_size())


def config_json(shape: Shape) -> dict[str, Any]:
    """`config.json`: exactly the fields of DeepSeek-V4-Flash's, in its order, with this model's values."""
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "expert_dtype": "fp4",
        "hc_eps": shape.hc_eps,
        "hc_mult": shape.streams,
        "hc_sinkhorn_iters": shape.sinkhorn_iterations,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "index_head_dim": shape.index_dim,
        "index_n_heads": shape.index_heads,
        "index_topk": shape.index_topk,
        "initializer_range": 0.02,
        "max_position_embeddings": shape.positions,
        "model_type": "deepseek_v4",
        "moe_intermediate_size": shape.intermediate,
        "n_routed_experts": shape.experts,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": shape.heads,
        "num_experts_per_tok": shape.experts_per_token,
        "num_hidden_layers": shape.layers,
        "num_hash_layers": shape.hash_layers,
        "num_key_value_heads": 1,
        "num_nextn_predict_layers": 0,
        "o_groups": shape.o_groups,
        "o_lora_rank": shape.o_lora,
        "q_lora_rank": shape.q_lora,
        "qk_rope_head_dim": shape.rope_dims,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        },
        "rms_norm_eps": shape.norm_eps,
        "rope_scaling": {
            "beta_fast": shape.yarn_beta_fast,
            "beta_slow": shape.yarn_beta_slow,
            "factor": shape.yarn_factor,
            "original_max_position_embeddings": shape.yarn_original,
            "type": "yarn",
        },
        "rope_theta": shape.rope_theta,
        "routed_scaling_factor": shape.route_scale,
        "scoring_func": "sqrtsoftplus",
        "sliding_window": shape.window,
        "swiglu_limit": shape.swiglu_limit,
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "transformers_version": "4.57.1",
        "use_cache": True,
        "vocab_size": shape.vocab,
        "compress_rope_theta": shape.compress_rope_theta,
        "compress_ratios": list(shape.ratios),
    }
