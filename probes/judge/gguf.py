"""A GGUF file as a checkpoint: the weights that a run of llama.cpp or ds4 has, dequantised when they are read.

Both write the same names, and a tensor of the official shape (`ne` is that shape backwards) in the official order. The
experts of a layer are one tensor, of which one expert is read at a time. The package `gguf` knows the file and its
types; it is imported here alone, and only when a file is opened.

Source: llama.cpp's conversion/deepseek.py; ds4's deepseek4-quantize.c.
"""

import functools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fathom.model.checkpoint.checkpoint import Checkpoint
from fathom.model.checkpoint.header import StoredTensor
from fathom.model.checkpoint.names import expert_number, layer_and_rest, parameters
from fathom.model.config import ModelConfig
from fathom.model.errors import CheckpointError, ConfigError, quoted, shown
from fathom.model.files import regular_file_size

ARCHITECTURE: Final = "deepseek4"
ARCHITECTURE_KEY: Final = "general.architecture"
SQRT_SOFTPLUS: Final = 4  # llama.cpp's number of the gate's function
FLOAT32: Final = 2.0**-22  # relative: numbers of config.json are kept in float32
TABLES: Final = ("I32", "I64")
DAMAGED: Final = (ValueError, LookupError, ArithmeticError, TypeError, RecursionError)  # what bad bytes make it raise
MOST_TAKEN: Final = 1 << 21  # numbers and words of a header: twice those of V4's tokens and merges, and more

_PART: Final = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf", re.DOTALL)

_TOP: Final = {
    "embed.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "head.weight": "output.weight",
    "hc_head_fn": "output_hc_fn.weight",
    "hc_head_base": "output_hc_base.weight",
    "hc_head_scale": "output_hc_scale.weight",
}
_IN_LAYER: Final = {
    "attn_norm.weight": "attn_norm.weight",
    "ffn_norm.weight": "ffn_norm.weight",
    **{f"hc_{part}_{leaf}": f"hc_{part}_{leaf}.weight" for part in ("attn", "ffn") for leaf in ("fn", "base", "scale")},
    "attn.attn_sink": "attn_sinks.weight",
    "attn.wq_a.weight": "attn_q_a.weight",
    "attn.q_norm.weight": "attn_q_a_norm.weight",
    "attn.wq_b.weight": "attn_q_b.weight",
    "attn.wkv.weight": "attn_kv.weight",
    "attn.kv_norm.weight": "attn_kv_a_norm.weight",
    "attn.wo_a.weight": "attn_output_a.weight",
    "attn.wo_b.weight": "attn_output_b.weight",
    "attn.indexer.wq_b.weight": "indexer.attn_q_b.weight",
    "attn.indexer.weights_proj.weight": "indexer.proj.weight",
    **{
        f"attn.{ours}.{leaf}": f"{theirs}_{name}.weight"
        for ours, theirs in (("compressor", "attn_compressor"), ("indexer.compressor", "indexer_compressor"))
        for leaf, name in (("ape", "ape"), ("wkv.weight", "kv"), ("wgate.weight", "gate"), ("norm.weight", "norm"))
    },
    "ffn.gate.weight": "ffn_gate_inp.weight",
    "ffn.gate.bias": "exp_probs_b.bias",
    "ffn.gate.tid2eid": "ffn_gate_tid2eid.weight",
    "ffn.shared_experts.w1.weight": "ffn_gate_shexp.weight",
    "ffn.shared_experts.w3.weight": "ffn_up_shexp.weight",
    "ffn.shared_experts.w2.weight": "ffn_down_shexp.weight",
}
_EXPERTS: Final = {"w1": "ffn_gate_exps.weight", "w3": "ffn_up_exps.weight", "w2": "ffn_down_exps.weight"}

# Keys, without the architecture before them, and the field of config.json that says the same.
_KEYS: Final = {
    "block_count": "num_hidden_layers",
    "vocab_size": "vocab_size",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.output_lora_rank": "o_lora_rank",
    "attention.output_group_count": "o_groups",
    "attention.sliding_window": "sliding_window",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.compress_ratios": "compress_ratios",
    "attention.compress_rope_freq_base": "compress_rope_theta",
    "attention.indexer.head_count": "index_n_heads",
    "attention.indexer.key_length": "index_head_dim",
    "attention.indexer.top_k": "index_topk",
    "rope.dimension_count": "qk_rope_head_dim",
    "rope.freq_base": "rope_theta",
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_shared_count": "n_shared_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_weights_scale": "routed_scaling_factor",
    "hash_layer_count": "num_hash_layers",
    "hyper_connection.count": "hc_mult",
    "hyper_connection.sinkhorn_iterations": "hc_sinkhorn_iters",
    "hyper_connection.epsilon": "hc_eps",
    "swiglu_clamp_exp": "swiglu_limit",
    "swiglu_clamp_shexp": "swiglu_limit",
}
_YARN: Final = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}


class Found(NamedTuple):
    """A tensor of a GGUF file, or one expert of it."""

    file: Path
    name: str  # in the file
    type: Any  # gguf.GGMLQuantizationType
    data: NDArray[Any]  # mapped; of a quantised type the bytes of each row

    @property
    def table(self) -> bool:
        """Whether it holds integers."""
        return self.type.name in TABLES


@dataclass(frozen=True, slots=True)
class GgufCheckpoint(Checkpoint):
    """The parameters of GGUF files, by official name, every expert by itself; `open_gguf` makes it."""

    found: Mapping[str, Found] = field(default_factory=dict)

    def read(self, name: str) -> Tensor:
        """One parameter: float32, or a table of integers, on the CPU; a copy.

        Raises
        ------
        CheckpointError
            For an unknown name, or a number that is not finite.
        """
        return self._decoded(name, slice(None))

    @property
    def types(self) -> dict[str, str]:
        """Names of ggml's types by parameter."""
        return {name: one.type.name for name, one in self.found.items()}

    def rows(self, name: str, ids: Tensor) -> Tensor:
        """Rows [n, ...] of one parameter, by their numbers [n] int64; see `read`."""
        return self._decoded(name, ids.numpy())

    def _decoded(self, name: str, rows: slice | NDArray[Any]) -> Tensor:
        from gguf.quants import dequantize  # noqa: PLC0415 (not everyone has it)

        if name not in self.found:
            raise CheckpointError(f"{self.directory}: no tensor {quoted(name)}")
        one = self.found[name]
        data = one.data[rows]
        with np.errstate(all="ignore"):  # what comes of bad scales is looked at
            values = data if one.table else dequantize(data, one.type)
        if not np.isfinite(values).all():
            raise CheckpointError(f"{one.file}: tensor {quoted(one.name)}, {name}: holds numbers that are not finite")
        return torch.from_numpy(np.require(values, requirements=("C", "W")))


def open_gguf(path: Path, config: ModelConfig) -> GgufCheckpoint:
    """Open a GGUF file, or all files of a split one, of which any is named, and account for every tensor.

    Parameters
    ----------
    path
        The file; NAME-00001-of-0000N.gguf is one of N, which are beside it.
    config
        What it must be a model of.

    Raises
    ------
    ConfigError
        Where the package `gguf` is not installed, or a key contradicts config.json.
    CheckpointError
        With one line naming the file, and the tensor where one is at fault: one that cannot be read, is of another
        architecture, lacks a tensor, or has one of another shape, of a type that is not read, or of no parameter.
    """
    keys, tensors = dict[str, Any](), dict[str, tuple[Path, Any]]()
    for file in _files(path):
        theirs, inside = _read(file)
        keys |= {key: value for key, value in theirs.items() if key not in keys}
        for tensor in inside:
            if tensor.name in tensors:
                raise CheckpointError(f"{file}: tensor {quoted(tensor.name)} is in {tensors[tensor.name][0]} too")
            tensors[tensor.name] = file, tensor
    if (architecture := keys.get(ARCHITECTURE_KEY)) != ARCHITECTURE:
        raise CheckpointError(f"{path}: {ARCHITECTURE_KEY} is {shown(architecture)}, want {ARCHITECTURE!r}")
    _check_keys(path, keys, config)
    stored, found = dict[str, StoredTensor](), dict[str, Found]()
    for outline, one in _bound(path, tensors, config):
        stored[outline.name], found[outline.name] = outline, one
    bound = {one.name for one in found.values()}
    for name, (file, _) in tensors.items():
        if name not in bound:
            raise CheckpointError(f"{file}: tensor {quoted(name)} is of no parameter of this architecture")
    return GgufCheckpoint(path, (), stored, (), found=found)


def stored_as(name: str) -> tuple[str, int | None]:
    """The tensor that a parameter (official name) is in, and its place on the first axis where it is an expert's."""
    within, expert = layer_and_rest(name), expert_number(name)
    if within is None:
        return _TOP[name], None
    layer, rest = within
    leaf = _IN_LAYER[rest] if expert is None else _EXPERTS[rest.split(".")[-2]]
    return f"blk.{layer}.{leaf}", expert


def _files(path: Path) -> list[Path]:
    part = _PART.fullmatch(path.name)
    count = 0 if part is None else int(part[2])
    return [path.with_name(f"{part[1]}-{n:05d}-of-{part[2]}.gguf") for n in range(1, count + 1)] if part else [path]


def _reader() -> type[Any]:
    """The package's reader, but for two things: what lies beyond the file is an error, and a header has an end."""
    from gguf.gguf_reader import GGUFReader  # noqa: PLC0415 (not everyone has it)

    class Reader(GGUFReader):
        taken = 0

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> NDArray[Any]:
            del override_order  # of other machines: none of its numbers makes sense then
            self.taken += 1
            if self.taken > MOST_TAKEN:
                raise ValueError(f"more than {MOST_TAKEN} numbers and words before the tensors")
            return np.frombuffer(self.data, dtype, int(count), int(offset))

    return Reader


def _read(path: Path) -> tuple[dict[str, Any], list[Any]]:
    """The keys that say what a model is, and all tensors, of one file."""
    try:
        reads = _reader()
    except ModuleNotFoundError as error:
        raise ConfigError(f"{path}: it takes a package that is not installed ({error}): pip install gguf") from None
    regular_file_size(path)
    try:
        with np.errstate(over="raise"):  # of offsets
            reader = reads(path)
            keys = {
                key: value.contents()
                for key, value in reader.fields.items()
                if key == ARCHITECTURE_KEY or key.startswith(f"{ARCHITECTURE}.")
            }
    except DAMAGED as error:
        raise CheckpointError(f"{path}: no GGUF file, or damaged, or cut short ({shown(str(error))})") from None
    return keys, reader.tensors


def _bound(
    path: Path, tensors: Mapping[str, tuple[Path, Any]], config: ModelConfig
) -> Iterator[tuple[StoredTensor, Found]]:
    """Each parameter as it is once it is read, and where it is."""
    for name, parameter in parameters(config).items():
        stored, expert = stored_as(name)
        if stored not in tensors:
            raise CheckpointError(f"{path}: tensor {quoted(stored)} is missing, which has {name}")
        file, tensor = tensors[stored]
        where, shape = f"{file}: tensor {quoted(stored)}", tuple(reversed(tensor.shape.tolist()))
        want = parameter.shape if expert is None else (config.n_routed_experts, *parameter.shape)
        if shape != want:
            raise CheckpointError(f"{where} is {list(shape)}, want {list(want)}")
        data = np.asarray(tensor.data)
        one = Found(file, stored, tensor.tensor_type, data if expert is None else data[expert])
        if one.table != (parameter.kind == "i64") or not (one.table or _readable(one.type)):
            want_type = " or ".join(TABLES) if parameter.kind == "i64" else "a type of numbers that gguf dequantises"
            raise CheckpointError(f"{where} is {one.type.name}, want {want_type}")
        if one.table and not 0 <= data.min() <= data.max() < config.n_routed_experts:
            raise CheckpointError(f"{where} names an expert outside the {config.n_routed_experts}")
        start = tensor.data_offset + (expert or 0) * one.data.nbytes
        dtype = one.type.name if one.table else "F32"
        yield StoredTensor(name, dtype, parameter.shape, file, start, start + one.data.nbytes), one


@functools.cache
def _readable(kind: Any) -> bool:
    """Whether the package dequantises a type: asked of a block of zeros."""
    from gguf.constants import GGML_QUANT_SIZES  # noqa: PLC0415 (not everyone has it)
    from gguf.quants import dequantize  # noqa: PLC0415

    try:
        dequantize(np.zeros(GGML_QUANT_SIZES[kind][1], np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _check_keys(path: Path, keys: Mapping[str, Any], config: ModelConfig) -> None:
    """Refuse a file whose keys say another model than config.json: ConfigError naming the first of them."""
    facts: dict[str, tuple[str, Any]] = {key: (name, getattr(config, name)) for key, name in _KEYS.items()}
    facts["attention.head_count_kv"] = "num_key_value_heads", 1
    facts["expert_weights_norm"] = "norm_topk_prob", True
    facts["expert_gating_func"] = "scoring_func", SQRT_SOFTPLUS
    yarn = config.rope_scaling
    facts["rope.scaling.type"] = "rope_scaling", "none" if yarn is None else "yarn"
    if yarn is not None:
        facts |= {f"rope.scaling.{key}": (f"rope_scaling.{name}", getattr(yarn, name)) for key, name in _YARN.items()}
    for key, (name, ours) in facts.items():
        theirs = keys.get(f"{ARCHITECTURE}.{key}")
        if theirs is not None and not _same(theirs, ours):
            raise ConfigError(f"{path}: {ARCHITECTURE}.{key} is {shown(theirs)}, and {name} of config.json is {ours}")


def _same(theirs: Any, ours: Any) -> bool:
    """Whether a key's value is a field's: of a list that has one for each layer, all of them."""
    if isinstance(ours, tuple):
        return isinstance(theirs, list) and tuple(theirs[: len(ours)]) == ours  # llama.cpp lists draft layers too
    if isinstance(theirs, list):
        return bool(theirs) and all(_same(one, ours) for one in theirs)
    if isinstance(ours, str) or not isinstance(theirs, int | float):
        return bool(theirs == ours)
    return math.isclose(theirs, ours, rel_tol=FLOAT32)
