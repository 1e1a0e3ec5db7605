"""The fields of a Llama-family config.json, each one checked; which may be absent, and what absence means.

Every field of a file must be in one of these tables. The family's format grew over the years, and its published files
rely on what a field's absence meant when they were written; nothing else has a default:

- `num_key_value_heads` (llama): as many as attention heads. LLaMA's first files precede GQA.
- `head_dim`: `hidden_size / num_attention_heads`. Written since Llama 3.2 and Mistral-Nemo; null means the same.
- `rope_theta` (llama): 10000, the constant of the first two generations, whose files do not name it.
- `rope_scaling`: none; null means the same.
- `tie_word_embeddings`, `attention_bias`, `mlp_bias`: false.

`sliding_window` must stand in a mistral file: v0.1 writes 4096 and v0.2 null, and a file without it means 4096 to
transformers and nothing to others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from fathom.model.checkpoint.json_values import (
    MAX_INTEGER,
    Json,
    check_fixed,
    check_keys,
    check_known,
    integer,
    mapping,
    number,
    required,
)
from fathom.model.errors import ConfigError, shown

ARCHITECTURES: Final = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}  # by model_type
FIRST_ROPE_THETA: Final = 10000.0

# Positive integers that every file writes.
INTEGERS: Final = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)

# What a field must say where it is there, because nothing else is implemented; absent, it means that.
FIXED_IF_THERE: Final[dict[str, object]] = {
    "attention_bias": False,
    "mlp_bias": False,
    "is_llama_config": True,  # SmolLM2's: written by nanotron
    "rope_interleaved": False,  # the same
}

READ: Final = (
    *INTEGERS,
    "architectures",
    "bos_token_id",
    "eos_token_id",
    "head_dim",
    "hidden_act",
    "model_type",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "tie_word_embeddings",
)

IGNORABLE: Final[dict[str, str]] = {
    "_name_or_path": "where a copy was saved from",
    "attention_dropout": "training only",
    "dtype": "stored dtypes are read from each tensor",
    "initializer_range": "training only",
    "pad_token_id": "one sequence is never padded",
    "pretraining_tp": "how training cut its products; the result is the same",
    "torch_dtype": "stored dtypes are read from each tensor",
    "transformers.js_config": "options of another runtime",
    "transformers_version": "provenance",
    "use_cache": "a transformers run option",
}


@dataclass(frozen=True, slots=True)
class Linear:
    """Position interpolation: every pair turns `factor` times slower."""

    kind: ClassVar[str] = "linear"
    factor: float


@dataclass(frozen=True, slots=True)
class Llama3:
    """Llama 3.1's interpolation by wavelength, see `kernels.rope.reference.llama3_frequencies`."""

    kind: ClassVar[str] = "llama3"
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        if self.low_freq_factor >= self.high_freq_factor:
            low, high = self.low_freq_factor, self.high_freq_factor
            raise ConfigError(f"rope_scaling: low_freq_factor is {low:g}, want less than high_freq_factor {high:g}")


def fields(obj: Json) -> dict[str, Any]:
    """The constructor arguments of `LlamaConfig` for a parsed config.json.

    Raises
    ------
    ConfigError
        With one line naming the field at fault; the caller puts the file before it.
    """
    kind = required(obj, "model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise ConfigError(f"model_type is {shown(kind)}; supported: {', '.join(map(repr, ARCHITECTURES))}")
    _check_known(obj, kind)
    check_fixed(obj, {"architectures": [ARCHITECTURES[kind]], "hidden_act": "silu"})
    check_fixed(obj, {name: want for name, want in FIXED_IF_THERE.items() if name in obj})
    facts: dict[str, Any] = {name: integer(obj, name) for name in INTEGERS}
    theta, scaling = _rotation(obj, kind)
    return facts | {
        "model_type": kind,
        "num_key_value_heads": _kv_heads(obj, kind),
        "head_dim": _head_dim(obj, facts),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rms_norm_eps": number(obj, "rms_norm_eps"),
        "sliding_window": _window(obj, kind),
        "tie_word_embeddings": _tied(obj),
        "bos_token_id": None if required(obj, "bos_token_id") is None else integer(obj, "bos_token_id", least=0),
        "eos_token_ids": _eos(obj),
    }


def _check_known(obj: Json, kind: str) -> None:
    if obj.get("quantization_config") is not None:
        raise ConfigError("quantization_config: quantised checkpoints of this family are not read")
    own = {"quantization_config"} | ({"sliding_window"} if kind == "mistral" else set())
    check_known(obj, {*READ, *own, *FIXED_IF_THERE, *IGNORABLE})


def _kv_heads(obj: Json, kind: str) -> int:
    if kind == "llama" and "num_key_value_heads" not in obj:
        return integer(obj, "num_attention_heads")
    return integer(obj, "num_key_value_heads")


def _head_dim(obj: Json, facts: Json) -> int:
    if obj.get("head_dim") is not None:
        return integer(obj, "head_dim")
    hidden, heads = facts["hidden_size"], facts["num_attention_heads"]
    if hidden % heads:
        raise ConfigError(
            f"hidden_size is {hidden}, no multiple of num_attention_heads {heads}, and there is no head_dim"
        )
    return int(hidden // heads)


def _window(obj: Json, kind: str) -> int | None:
    if kind == "llama" or required(obj, "sliding_window") is None:
        return None
    return integer(obj, "sliding_window")


def _tied(obj: Json) -> bool:
    tied = obj.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise ConfigError(f"tie_word_embeddings is {shown(tied)}; want true or false")
    return tied


def _eos(obj: Json) -> tuple[int, ...]:
    """One id, or a list of them as Llama 3's instruct models have."""
    value = required(obj, "eos_token_id")
    ids = value if isinstance(value, list) else [value]
    if not ids or any(type(eos) is not int or not 0 <= eos <= MAX_INTEGER for eos in ids):
        raise ConfigError(f"eos_token_id is {shown(value)}; want a token id or a list of them")
    return tuple(ids)


def _rotation(obj: Json, kind: str) -> tuple[float, Linear | Llama3 | None]:
    """Base and scaling, of either spelling."""
    if "rope_parameters" not in obj:
        absent = kind == "llama" and "rope_theta" not in obj
        theta = FIRST_ROPE_THETA if absent else number(obj, "rope_theta")
        scaling = obj.get("rope_scaling")
        return theta, None if scaling is None else _scaling(mapping(scaling, "rope_scaling"), "rope_scaling", ())
    if obj.get("rope_scaling") is not None:
        raise ConfigError("rope_scaling and rope_parameters both describe the rotation; want one of them")
    both = mapping(obj["rope_parameters"], "rope_parameters")
    theta = number(both, "rope_theta", "rope_parameters.")
    if "rope_theta" in obj and number(obj, "rope_theta") != theta:
        raise ConfigError(f"rope_theta is {shown(obj['rope_theta'])}, but rope_parameters.rope_theta is {theta:g}")
    if both.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(
            f"rope_parameters.partial_rotary_factor is {shown(both['partial_rotary_factor'])}; supported: 1"
        )
    return theta, _scaling(both, "rope_parameters", ("rope_theta", "partial_rotary_factor"))


def _scaling(obj: Json, where: str, may: Sequence[str]) -> Linear | Llama3 | None:
    """What one kind of scaling says; `type` is the older spelling of `rope_type`."""
    spellings = [obj[key] for key in ("rope_type", "type") if key in obj]
    if not spellings or any(kind != spellings[0] for kind in spellings):
        raise ConfigError(f"{where}.rope_type: {'missing' if not spellings else 'type says something else'}")
    may = (*may, "rope_type", "type")
    match spellings[0]:
        case "default":
            check_keys(obj, (), where, may)
            return None
        case "linear":
            check_keys(obj, ("factor",), where, may)
            return Linear(number(obj, "factor", f"{where}."))
        case "llama3":
            numbers = ("factor", "low_freq_factor", "high_freq_factor")
            check_keys(obj, (*numbers, "original_max_position_embeddings"), where, may)
            factor, low, high = (number(obj, name, f"{where}.") for name in numbers)
            return Llama3(factor, low, high, integer(obj, "original_max_position_embeddings", f"{where}."))
        case kind:
            raise ConfigError(f"{where}.rope_type is {shown(kind)}; supported: 'default', 'linear', 'llama3'")
