"""GGUF files of a checkpoint, under the names that llama.cpp and ds4 write, by llama.cpp's own package."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray

from fathom.model.checkpoint.names import parameters
from fathom.model.config import ModelConfig
from fathom.probes.judge.oracle import Parameters

# The table of llama.cpp's conversion/deepseek.py, but for the experts, whose stacks have a name of their own each.
NAMES = {
    "embed.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "head.weight": "output.weight",
    "hc_head_fn": "output_hc_fn.weight",
    "hc_head_base": "output_hc_base.weight",
    "hc_head_scale": "output_hc_scale.weight",
    "hc_attn_fn": "hc_attn_fn.weight",
    "hc_attn_base": "hc_attn_base.weight",
    "hc_attn_scale": "hc_attn_scale.weight",
    "hc_ffn_fn": "hc_ffn_fn.weight",
    "hc_ffn_base": "hc_ffn_base.weight",
    "hc_ffn_scale": "hc_ffn_scale.weight",
    "attn.attn_sink": "attn_sinks.weight",
    "attn.wq_a.weight": "attn_q_a.weight",
    "attn.wq_b.weight": "attn_q_b.weight",
    "attn.q_norm.weight": "attn_q_a_norm.weight",
    "attn.wkv.weight": "attn_kv.weight",
    "attn.kv_norm.weight": "attn_kv_a_norm.weight",
    "attn.wo_a.weight": "attn_output_a.weight",
    "attn.wo_b.weight": "attn_output_b.weight",
    "attn.compressor.ape": "attn_compressor_ape.weight",
    "attn.compressor.wkv.weight": "attn_compressor_kv.weight",
    "attn.compressor.wgate.weight": "attn_compressor_gate.weight",
    "attn.compressor.norm.weight": "attn_compressor_norm.weight",
    "attn.indexer.wq_b.weight": "indexer.attn_q_b.weight",
    "attn.indexer.weights_proj.weight": "indexer.proj.weight",
    "attn.indexer.compressor.ape": "indexer_compressor_ape.weight",
    "attn.indexer.compressor.wkv.weight": "indexer_compressor_kv.weight",
    "attn.indexer.compressor.wgate.weight": "indexer_compressor_gate.weight",
    "attn.indexer.compressor.norm.weight": "indexer_compressor_norm.weight",
    "attn_norm.weight": "attn_norm.weight",
    "ffn_norm.weight": "ffn_norm.weight",
    "ffn.gate.weight": "ffn_gate_inp.weight",
    "ffn.gate.bias": "exp_probs_b.bias",
    "ffn.gate.tid2eid": "ffn_gate_tid2eid.weight",
    "ffn.shared_experts.w1.weight": "ffn_gate_shexp.weight",
    "ffn.shared_experts.w2.weight": "ffn_down_shexp.weight",
    "ffn.shared_experts.w3.weight": "ffn_up_shexp.weight",
    "ffn.experts.w1.weight": "ffn_gate_exps.weight",
    "ffn.experts.w2.weight": "ffn_down_exps.weight",
    "ffn.experts.w3.weight": "ffn_up_exps.weight",
}
FP8 = r"attn\.w|indexer\.wq_b|shared_experts"  # what the official files have in FP8


def llama_cpp(name: str) -> Type:
    """The type that llama.cpp's conversion gives a parameter."""
    for pattern, kind in (("tid2eid", Type.I32), (r"\.experts\.", Type.MXFP4), (FP8, Type.Q8_0)):
        if re.search(pattern, name):
            return kind
    bf16 = name in ("embed.weight", "head.weight") or re.search(r"wkv|wgate|weights_proj|gate\.weight", name)
    return Type.BF16 if bf16 else Type.F32


def ds4(name: str) -> Type:
    """The type in ds4's files, but for its experts: the package cannot write K-quants."""
    if re.search(r"tid2eid", name):
        return Type.I32
    if re.search(r"\.experts\.", name):
        return Type.Q4_0
    if re.search(rf"^head|{FP8}", name) and "indexer" not in name:
        return Type.Q8_0
    return Type.F16 if re.search(r"embed|_fn$|ape$|wkv|wgate|indexer\.w|gate\.weight", name) else Type.F32


def keys(config: ModelConfig) -> dict[str, Any]:
    """What a file says of its model."""
    c, yarn = config, config.rope_scaling
    assert yarn is not None
    return {
        "block_count": c.num_hidden_layers,
        "context_length": c.max_position_embeddings,
        "vocab_size": c.vocab_size,
        "embedding_length": c.hidden_size,
        "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": 1,
        "attention.key_length": c.head_dim,
        "attention.value_length": c.head_dim,
        "attention.q_lora_rank": c.q_lora_rank,
        "attention.output_lora_rank": c.o_lora_rank,
        "attention.output_group_count": c.o_groups,
        "attention.sliding_window": c.sliding_window,
        "attention.layer_norm_rms_epsilon": c.rms_norm_eps,
        "attention.compress_ratios": [*c.compress_ratios, 0],
        "attention.compress_rope_freq_base": float(c.compress_rope_theta),
        "attention.indexer.head_count": c.index_n_heads,
        "attention.indexer.key_length": c.index_head_dim,
        "attention.indexer.top_k": c.index_topk,
        "rope.dimension_count": c.qk_rope_head_dim,
        "rope.freq_base": float(c.rope_theta),
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(yarn.factor),
        "rope.scaling.original_context_length": yarn.original_max_position_embeddings,
        "rope.scaling.yarn_beta_fast": float(yarn.beta_fast),
        "rope.scaling.yarn_beta_slow": float(yarn.beta_slow),
        "expert_count": c.n_routed_experts,
        "expert_used_count": c.num_experts_per_tok,
        "expert_shared_count": c.n_shared_experts,
        "expert_feed_forward_length": c.moe_intermediate_size,
        "expert_weights_scale": float(c.routed_scaling_factor),
        "expert_weights_norm": True,
        "expert_gating_func": 4,
        "hash_layer_count": c.num_hash_layers,
        "hyper_connection.count": c.hc_mult,
        "hyper_connection.sinkhorn_iterations": c.hc_sinkhorn_iters,
        "hyper_connection.epsilon": c.hc_eps,
        "swiglu_clamp_exp": [float(c.swiglu_limit)] * c.num_hidden_layers,
    }


def stacks(directory: Path, config: ModelConfig) -> dict[str, NDArray[Any]]:
    """All parameters of a checkpoint by official name, float32 or int32, and the experts of a layer as one."""
    theirs = Parameters.of(directory, config)
    found: dict[str, list[NDArray[Any]]] = {}
    for name in theirs.mappings:
        found.setdefault(re.sub(r"experts\.\d+", "experts", name), []).append(theirs[name].float().numpy())
    return {
        name: np.stack(parts) if ".experts." in name else parts[0].astype(np.int32 if "tid2eid" in name else np.float32)
        for name, parts in found.items()
    }


def zeros(config: ModelConfig) -> dict[str, NDArray[Any]]:
    """The same of a model of zeros."""
    found: dict[str, NDArray[Any]] = {}
    for name, parameter in parameters(config).items():
        shape = (config.n_routed_experts, *parameter.shape) if ".experts." in name else parameter.shape
        dtype = np.int32 if parameter.kind == "i64" else np.float32
        found.setdefault(re.sub(r"experts\.\d+", "experts", name), np.zeros(shape, dtype))
    return found


def named(official: str) -> str:
    """What a file calls a parameter, or a stack of experts."""
    if official in NAMES:
        return NAMES[official]
    _, layer, rest = official.split(".", 2)
    return f"blk.{layer}.{NAMES[rest]}"


def write(
    path: Path,
    weights: Mapping[str, NDArray[Any]],
    said: Mapping[str, Any],
    kinds: Callable[[str], Type] = llama_cpp,
    architecture: str = "deepseek4",
    tensors: int = 0,
) -> dict[str, NDArray[Any]]:
    """Write a file, or several of `tensors` each.

    Returns what is in it, dequantised by the package, by official name and each expert by itself.
    """
    writer = GGUFWriter(path, architecture, split_max_tensors=tensors)
    writer.add_tokenizer_model("none")  # without a word of it llama.cpp loads no file
    for key, value in said.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add.get(type(value), writer.add_array)(f"deepseek4.{key}", value)
    held: dict[str, NDArray[Any]] = {}
    for name, value in weights.items():
        kind = kinds(name)
        data = value if kind is Type.I32 or value.dtype == np.uint8 else quantize(value, kind)  # or it is bytes already
        writer.add_tensor(named(name), data, raw_dtype=None if kind in (Type.I32, Type.F32, Type.F16) else kind)
        back = value if kind is Type.I32 else dequantize(data, kind)
        if ".experts." in name:
            held |= {name.replace("experts.", f"experts.{e}.", 1): back[e] for e in range(len(back))}
        else:
            held[name] = back
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held
