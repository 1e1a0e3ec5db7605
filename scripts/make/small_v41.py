"""A small DeepSeek-V4.1 over the demo's tokenizer: the files of a model that has a layer of every role."""

import json
from itertools import islice
from pathlib import Path
from typing import Any, Final

from fathom.model.checkpoint.folder import TOKENIZER
from fathom.runtime.text.alike import token_map
from fathom.runtime.text.segments import SYSTEM
from fathom.runtime.text.tokenizer import Tokenizer

IDS: Final = 1056  # some beyond the tokenizer's
IMAGE: Final = "<｜deepseek_image｜>"
FIRST_PRIME: Final = 10_007  # where the search for primes of the n-gram tables starts
ORDERS, HEADS = (2, 3, 4), 2  # of n-grams, and rows of each order


def tokenizer_of_v41(of_v4: Path, out: Path) -> None:
    """Write a tokenizer.json to a folder: that of another, and the tokens that V4.1 has beside V4's."""
    obj = json.loads((of_v4 / TOKENIZER).read_text())
    known, first = obj["added_tokens"], len(obj["model"]["vocab"])
    known.extend(known[0] | {"id": first + n, "content": name} for n, name in enumerate((SYSTEM.name, IMAGE)))
    (out / TOKENIZER).write_text(json.dumps(obj, ensure_ascii=False))


def small_v41(tokenizer: Path) -> dict[str, Any]:
    """The config.json of a model of nine layers.

    Layers 0 and 1 see a window alone, 1 with n-grams before it; 2, 4 and 5 make entries, 4 with n-grams; 5 says among
    which entries 7 selects; 3, 6 and 8 read what others made. With more than 64 tokens not all entries are open to 7.
    Three stages of DSpark draft behind it.

    Parameters
    ----------
    tokenizer
        Folder of a tokenizer.json, whose ids that spell alike are counted.

    """
    read = Tokenizer(tokenizer, IDS)
    primes = (n for n in range(FIRST_PRIME, 1 << 20) if all(n % d for d in range(2, int(n**0.5) + 1)))
    rows = [sum(islice(primes, len(ORDERS) * HEADS)) for _ in range(2)]
    text = {
        "model_type": "deepseek_v41_text",
        "vocab_size": IDS,
        "hidden_size": 256,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 9,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 96,
        "qk_rope_head_dim": 32,
        "q_lora_rank": 64,
        "o_lora_rank": 64,
        "o_groups": 2,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-20,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
        "rope_theta": 10000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 256,
        },
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "sliding_window": 32,
        "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0],  # the last three are stages of its draft head
        "compress_rope_theta": 160000,
        "kv_source_layer_ids": [2, 4, 5],
        "index_source_layer_ids": [2, 4, 5, 7],
        "index_n_heads": 8,
        "index_head_dim": 64,
        "index_topk": 24,
        "candidate_source_layer_id": 5,
        "candidate_topk_blocks": 8,
        "candidate_block_size": 8,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-06,
        "engram_layer_ids": [1, 4],
        "engram_num_embeddings": rows,
        "engram_max_ngram_size": ORDERS[-1],
        "engram_vocab_size": FIRST_PRIME,
        "engram_n_heads": HEADS,
        "engram_head_dim": 64,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": max(token_map(read)) + 1,
        "num_nextn_predict_layers": 3,
        "dspark_block_size": 5,
        "dspark_noise_token_id": IDS - 1,
        "dspark_target_layer_ids": [6, 7, 8],
        "dspark_markov_rank": 32,
        "dspark_n_routed_experts": 8,
        "dspark_num_experts_per_tok": 2,
    }
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": read.control_id(IMAGE),
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
        "text_config": text,
        "vision_config": {
            "num_hidden_layers": 1,
            "hidden_size": 32,
            "intermediate_size": 48,
            "patch_size": 2,
            "downsample_ratio": 3,
        },
    }
