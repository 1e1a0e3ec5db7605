"""What each field of a config.json is to this project: architecture, fixed, or ignorable and why.

Every field of a file must be in one of these tables; an unknown field is an error, because a field nobody
has read may change what the model computes.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from fathom.model.errors import ConfigError


class LayerKind(StrEnum):
    """What the attention of a layer reads besides its sliding window."""

    SWA = "swa"  # nothing
    CSA = "csa"  # the indexer's top-k of overlapping compressed entries
    HCA = "hca"  # every compressed entry, no indexer


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN's frequency interpolation, used by CSA and HCA layers; its mscale is never applied (V4's model.py)."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float

    def __post_init__(self) -> None:
        if self.beta_slow >= self.beta_fast:
            raise ConfigError(f"rope_scaling: beta_slow is {self.beta_slow}, want less than beta_fast {self.beta_fast}")


@dataclass(frozen=True, slots=True)
class Dspark:
    """What DSpark's stages are: all that config.json says of a draft head."""

    block_size: int  # tokens that one pass drafts
    noise_token_id: int  # stands where nothing is known yet
    target_layer_ids: tuple[int, ...]  # main layers whose streams the head reads, each after its last mHC
    markov_rank: int  # columns of the embedding by which a drafted token moves the next one's logits


@dataclass(frozen=True, slots=True)
class Engram:
    """Tables of n-grams, which V4.1 adds to the streams before some layers."""

    layer_ids: tuple[int, ...]
    rows: tuple[int, ...]  # of each layer's table
    max_ngram: int  # orders 2 to this one are looked up
    heads: int  # rows of each order
    head_dim: int  # numbers of a row
    first_prime: int  # where the search for the tables' primes starts
    pad_token_id: int  # stands before the first token
    compressed_vocab: int  # ids that spell alike are one

    @property
    def columns(self) -> int:
        """Rows of a table that a token looks up."""
        return (self.max_ngram - 1) * self.heads


@dataclass(frozen=True, slots=True)
class Vision:
    """Sizes of V4.1's image tower, of which nothing is run: its tensors are accounted for."""

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    patch_size: int
    downsample_ratio: int


@dataclass(frozen=True, slots=True)
class V41:
    """What DeepSeek-V4.1 has and V4 has not: caches that layers share, candidates, Engram."""

    kv_sources: tuple[int, ...]  # layers with a compressor, whose entries those after them read too
    index_sources: tuple[int, ...]  # layers with an indexer, whose selection those after them read too
    candidate_source: int  # the layer whose scores say which blocks later indexers may select from
    candidate_blocks: int  # open to a token
    candidate_block_size: int  # entries
    engram: Engram
    draft_experts: int  # of a drafting stage
    draft_experts_per_tok: int
    vision: Vision
    image_token_id: int  # stands for a row of an image


# Positive integers, named as in DeepSeek's config.json. Both dialects write them.
INTEGERS: Final = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "qk_rope_head_dim",
    "q_lora_rank",
    "o_lora_rank",
    "o_groups",
    "sliding_window",
    "hc_mult",
    "hc_sinkhorn_iters",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "max_position_embeddings",
)

# Positive finite numbers.
NUMBERS: Final = (
    "rope_theta",
    "compress_rope_theta",
    "rms_norm_eps",
    "hc_eps",
    "routed_scaling_factor",
    "swiglu_limit",
)

# Token ids, 0 included.
TOKENS: Final = ("bos_token_id", "eos_token_id")

# Fields that V4 files write with one value, and for which no other value is implemented.
FIXED: Final[dict[str, object]] = {
    "attention_bias": False,
    "hidden_act": "silu",
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_key_value_heads": 1,
    "scoring_func": "sqrtsoftplus",
    "tie_word_embeddings": False,
}

# The same, but only one of the two dialects writes them.
FIXED_DEEPSEEK: Final[dict[str, object]] = {"topk_method": "noaux_tc"}
FIXED_TRANSFORMERS: Final[dict[str, object]] = {"mlp_bias": False}

# Fields of DSpark's stages: without any of them these cannot be run, and the model is complete without them.
DSPARK: Final = ("dspark_block_size", "dspark_markov_rank", "dspark_noise_token_id", "dspark_target_layer_ids")

# Of V4.1's file, whose architecture is in `text_config`.
V41_INTEGERS: Final = (
    "candidate_topk_blocks",
    "candidate_block_size",
    "engram_max_ngram_size",
    "engram_n_heads",
    "engram_head_dim",
    "engram_vocab_size",
    "engram_compressed_vocab_size",
    "dspark_n_routed_experts",
    "dspark_num_experts_per_tok",
)
V41_LISTS: Final = ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids", "engram_num_embeddings")
V41_TOP: Final = (
    "image_token_id",
    "model_type",
    "bos_token_id",
    "eos_token_id",
    "quantization_config",
    "text_config",
    "vision_config",
)
V41_VISION_IGNORABLE: Final[dict[str, str]] = dict.fromkeys(
    ("model_type", "num_attention_heads", "rope_theta", "max_image_tokens", "min_pixels", "max_wh_ratio"),
    "no image is read",
)

# Fields that say which layer is what, in each dialect.
DEEPSEEK: Final = ("compress_ratios", "num_hash_layers", "rope_scaling")
TRANSFORMERS: Final = ("layer_types", "mlp_layer_types", "compress_rates", "rope_parameters", "partial_rotary_factor")

IGNORABLE: Final[dict[str, str]] = {
    "_name_or_path": "where a copy was saved from",
    "architectures": "names a Python class; model_type decides",
    "attention_dropout": "training only",
    "chunk_size_feed_forward": "a transformers run option; the result is the same",
    "dtype": "stored dtypes are read from each tensor",
    "expert_dtype": "absent or wrong in published files; stored dtypes are read from each tensor",
    "id2label": "classification heads only",
    "initializer_range": "training only",
    "is_encoder_decoder": "transformers' generation; the architecture is a decoder",
    "label2id": "classification heads only",
    "num_nextn_predict_layers": "counts mtp stages, and is 1 beside three of them",
    "output_attentions": "a transformers run option",
    "output_hidden_states": "a transformers run option",
    "output_router_logits": "a transformers run option",
    "pad_token_id": "one sequence is never padded",
    "problem_type": "classification heads only",
    "quantization_config": "checked; forms are read from each tensor, never from a global key",
    "return_dict": "a transformers run option",
    "router_aux_loss_coef": "training only",
    "router_jitter_noise": "training only",
    "torch_dtype": "stored dtypes are read from each tensor",
    "transformers_version": "provenance",
    "use_cache": "a transformers run option",
}

# quantization_config: what every V4 file says. A key that is present must say this.
QUANTIZATION_FIXED: Final[dict[str, object]] = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}

QUANTIZATION_IGNORABLE: Final[dict[str, str]] = {
    "config_groups": "ModelOpt's NVFP4 export: repeats what each tensor's scales show",
    "dequantize": "a transformers loading option",
    "exclude_modules": "repeats what each tensor's scales show",
    "expert_dtype": "transformers moves it here; stored dtypes are read from each tensor",
    "group_size": "repeats what each tensor's scales show",
    "ignore": "repeats what each tensor's scales show",
    "kv_cache_quant_algo": "the cache's form is a run option",
    "kv_cache_scheme": "the cache's form is a run option",
    "modules_to_convert": "repeats what each tensor's scales show",
    "modules_to_not_convert": "repeats what each tensor's scales show",
    "moe_quant_algo": "ModelOpt's NVFP4 export: repeats what each tensor's scales show",
    "producer": "provenance",
    "quant_algo": "ModelOpt's NVFP4 export: repeats what each tensor's scales show",
    "quantized_layers": "repeats what each tensor's scales show",
}
