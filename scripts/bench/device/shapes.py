"""The dimensions of V4-Flash, V4-Pro and Llama-3.1-8B as published, and the V4 ones as a config.json of two layers."""

from typing import Any, NamedTuple


class V4(NamedTuple):
    """One published model; the fields are named as in `ModelConfig`."""

    name: str
    hidden: int
    heads: int
    q_lora: int
    o_groups: int
    o_lora: int
    index_topk: int
    experts: int  # of the whole model
    held: int  # of them on one GPU: all of Flash's, an EP-8 rank's of Pro
    intermediate: int
    routed_scaling: float


FLASH = V4("V4-Flash", 4096, 64, 1024, 8, 1024, 512, 256, 256, 2048, 1.5)
PRO = V4("V4-Pro", 7168, 128, 1536, 16, 1024, 1024, 384, 48, 3072, 2.5)
MODELS = (FLASH, PRO)

# What the two models agree in
HEAD_DIM, ROPE, WINDOW, STREAMS, CHOSEN = 512, 64, 128, 4, 6
INDEX_HEADS, INDEX_DIM = 64, 128
RATIOS = {"CSA": 4, "HCA": 128}
SINKHORN, EPS, LIMIT = 20, 1e-6, 10.0
MILLION = 1 << 20


class Llama(NamedTuple):
    """Llama-3.1-8B's attention, with the sizes of Shard and CoDA that the project runs it with."""

    heads: int
    kv_heads: int
    head_dim: int
    rank: int  # of Shard's basis
    slots: tuple[int, int, int]  # of CoDA: ring, exact, summary


LLAMA = Llama(32, 8, 128, 192, (256, 64, 64))


def config_json(shape: V4) -> dict[str, Any]:
    """A config.json in DeepSeek's dialect: one CSA layer, then one HCA layer, and the experts that a GPU holds."""
    return {
        "model_type": "deepseek_v4",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "compress_ratios": [RATIOS["CSA"], RATIOS["HCA"]],
        "compress_rope_theta": 160000,
        "expert_dtype": "fp4",
        "hc_eps": EPS,
        "hc_mult": STREAMS,
        "hc_sinkhorn_iters": SINKHORN,
        "head_dim": HEAD_DIM,
        "hidden_size": shape.hidden,
        "index_head_dim": INDEX_DIM,
        "index_n_heads": INDEX_HEADS,
        "index_topk": shape.index_topk,
        "max_position_embeddings": MILLION,
        "moe_intermediate_size": shape.intermediate,
        "n_routed_experts": shape.held,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": shape.heads,
        "num_experts_per_tok": CHOSEN,
        "num_hash_layers": 0,
        "num_hidden_layers": 2,
        "num_key_value_heads": 1,
        "num_nextn_predict_layers": 0,
        "o_groups": shape.o_groups,
        "o_lora_rank": shape.o_lora,
        "q_lora_rank": shape.q_lora,
        "qk_rope_head_dim": ROPE,
        "rms_norm_eps": EPS,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 16,
            "original_max_position_embeddings": 65536,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": shape.routed_scaling,
        "scoring_func": "sqrtsoftplus",
        "sliding_window": WINDOW,
        "swiglu_limit": LIMIT,
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
        "vocab_size": 129280,
    }
