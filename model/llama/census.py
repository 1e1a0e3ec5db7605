"""Names and shapes of a Llama-family checkpoint, and its census: every tensor demanded by name, no other one there.

The family has one dialect, that of its published files, and a parameter is called by its name there.
"""

import re
from collections.abc import Mapping
from typing import Final

import torch

from fathom.model.checkpoint.census import Census, Faults, count
from fathom.model.checkpoint.checkpoint import Checkpoint
from fathom.model.checkpoint.header import ITEM_BYTES
from fathom.model.checkpoint.mtp import FoundHead
from fathom.model.checkpoint.names import Parameter
from fathom.model.checkpoint.tensor_mapping import Form, Stored, TensorMapping
from fathom.model.errors import CheckpointError, did_you_mean, quoted
from fathom.model.llama.config import LlamaConfig

EMBEDDING: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head.weight"
NORM: Final = "model.norm.weight"

ROTARY_REASON: Final = "rotary buffer: recomputed from the config"
COMPARED: Final = 1024  # rows of embedding and head at a time

TIED_REASON: Final = "tied head: the embedding again, which loading checks bit by bit"

_FORMS: Final = {"BF16": Form.BF16, "F16": Form.F16, "F32": Form.F32}
# A buffer that transformers wrote until 4.32, in Llama 2's files for one.
_ROTARY_BUFFER: Final = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,5})\.self_attn\.rotary_emb\.inv_freq")


def parameters(config: LlamaConfig) -> dict[str, Parameter]:
    """Every parameter that the architecture demands, by stored name: embedding, layers, norm, and an untied head."""
    V, D, I, d = config.vocab_size, config.hidden_size, config.intermediate_size, config.head_dim
    q_rows, kv_rows = config.num_attention_heads * d, config.num_key_value_heads * d
    layer = {
        "input_layernorm.weight": Parameter((D,), "bf16"),
        "self_attn.q_proj.weight": Parameter((q_rows, D), "matrix"),
        "self_attn.k_proj.weight": Parameter((kv_rows, D), "matrix"),
        "self_attn.v_proj.weight": Parameter((kv_rows, D), "matrix"),
        "self_attn.o_proj.weight": Parameter((D, q_rows), "matrix"),
        "post_attention_layernorm.weight": Parameter((D,), "bf16"),
        "mlp.gate_proj.weight": Parameter((I, D), "matrix"),
        "mlp.up_proj.weight": Parameter((I, D), "matrix"),
        "mlp.down_proj.weight": Parameter((D, I), "matrix"),
    }
    demanded = {EMBEDDING: Parameter((V, D), "bf16")}
    for number in range(config.num_hidden_layers):
        demanded |= {f"model.layers.{number}.{name}": parameter for name, parameter in layer.items()}
    demanded[NORM] = Parameter((D,), "bf16")
    return demanded if config.tie_word_embeddings else demanded | {HEAD: Parameter((V, D), "matrix")}


def ignored(stored: str, config: LlamaConfig) -> str | None:
    """The reason why a stored tensor is not read, or None."""
    if stored == HEAD and config.tie_word_embeddings:
        return TIED_REASON
    buffer = _ROTARY_BUFFER.fullmatch(stored)
    return ROTARY_REASON if buffer is not None and int(buffer[1]) < config.num_hidden_layers else None


def census(tensors: Mapping[str, Stored], config: LlamaConfig, where: str = "") -> Census:
    """Account for every tensor of a checkpoint: `model.checkpoint.census.census` for this family.

    CheckpointError with one line for each kind of fault: unknown name or dtype, missing, misshapen, wrong type.
    """
    demanded, faults = parameters(config), Faults()
    skipped: dict[str, str] = {}
    mappings: dict[str, TensorMapping] = {}
    for stored, (dtype, shape) in tensors.items():
        if dtype not in ITEM_BYTES:
            faults.add("unknown dtype", f"{quoted(stored)} is {quoted(dtype)}")
        elif stored in demanded:
            if dtype not in _FORMS:
                faults.add("wrong type", f"{quoted(stored)} is {dtype}, want {' or '.join(_FORMS)}")
                continue
            if tuple(shape) != demanded[stored].shape:
                faults.add("misshapen", f"{quoted(stored)} is {list(shape)}, want {list(demanded[stored].shape)}")
            mappings[stored] = TensorMapping(_FORMS[dtype], stored)
        elif reason := ignored(stored, config):
            skipped[stored] = reason
        else:
            faults.add_unknown(stored)
    for name in demanded:
        if name not in tensors:
            faults.add("missing", name)
    faults.check(where, lambda stored: did_you_mean(stored, (name for name in demanded if name not in tensors)))
    in_order = {name: mappings[name] for name in demanded}
    return count(tensors, demanded, in_order, skipped, FoundHead(), {})


def check_tied_head(checkpoint: Checkpoint, counted: Census) -> None:
    """Where a head is stored beside the embedding that it is tied to, check that both are the same, bit by bit.

    Raises
    ------
    CheckpointError
        Naming the head and the first row that differs: a file that says both is right about neither.
    """
    if HEAD not in counted.ignored:
        return
    tied, other = checkpoint.tensors[EMBEDDING], checkpoint.tensors[HEAD]
    where = f"{other.shard}: tensor {quoted(HEAD)}"
    if (tied.dtype, tied.shape) != (other.dtype, other.shape):
        told = f"{other.dtype} {list(other.shape)}, the embedding {tied.dtype} {list(tied.shape)}"
        raise CheckpointError(f"{where}: tie_word_embeddings is true, but it is {told}")
    # by bytes: equality of numbers would let two NaN differ, and 0 be -0
    rows, others = (checkpoint.read(name).view(torch.uint8) for name in (EMBEDDING, HEAD))  # [vocab, bytes]
    for start in range(0, len(rows), COMPARED):
        part = slice(start, start + COMPARED)
        if not torch.equal(rows[part], others[part]):
            row = start + int((rows[part] != others[part]).any(1).nonzero()[0])
            raise CheckpointError(f"{where}: tie_word_embeddings is true, but row {row} is not the embedding's")
