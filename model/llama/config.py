"""A Llama-family config.json as frozen facts: `LlamaForCausalLM` and `MistralForCausalLM`.

Two spellings of the rotation are read: `rope_theta` with `rope_scaling`, as published, and `rope_parameters`, as
transformers 5 saves. Refused, by name: a field that this project does not know, a missing one that the format does not
define (`model.llama.fields` says which it does), and values that are not implemented.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from fathom.model.checkpoint.config_json import read_json
from fathom.model.errors import ConfigError
from fathom.model.llama.fields import Linear, Llama3, fields

# Bounds that keep a hostile file of a few KiB from turning into gigabytes of names.
MAX_LAYERS = 4096

# What the weights and the arithmetic do not depend on.
NOT_ARCHITECTURE = ("max_position_embeddings", "bos_token_id", "eos_token_ids")


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """One architecture of the family, with the field names of its config.json.

    Raises
    ------
    ConfigError
        From the constructor too, when two fields contradict each other.
    """

    model_type: str  # "llama" | "mistral"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    rope_scaling: Linear | Llama3 | None
    rms_norm_eps: float
    sliding_window: int | None  # positions that a token sees, its own included; None: all before it
    tie_word_embeddings: bool
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # any of them ends an answer

    def __post_init__(self) -> None:
        for wrong, message in self._contradictions():
            if wrong:
                raise ConfigError(message)

    def _contradictions(self) -> tuple[tuple[bool, str], ...]:
        layers, heads, kv_heads = self.num_hidden_layers, self.num_attention_heads, self.num_key_value_heads
        bos, outside = self.bos_token_id, [eos for eos in self.eos_token_ids if eos >= self.vocab_size]
        return (
            (layers > MAX_LAYERS, f"num_hidden_layers is {layers}, more than {MAX_LAYERS}"),
            (
                heads % kv_heads != 0,
                f"num_attention_heads is {heads}, not a multiple of num_key_value_heads {kv_heads}",
            ),
            (self.head_dim % 2 != 0, f"head_dim is {self.head_dim}, want an even number: RoPE rotates pairs"),
            # RoPE's frequencies are powers of 1/theta
            (self.rope_theta <= 1, f"rope_theta is {self.rope_theta:g}, want more than 1"),
            (bos is not None and bos >= self.vocab_size, f"bos_token_id is {bos}, outside the vocabulary"),
            (bool(outside), f"eos_token_id holds {outside[:1]}, outside the vocabulary"),
        )

    def to_json(self) -> dict[str, Any]:
        """Every field as JSON values, in the order of the class; both spellings give the same."""
        scaling = (
            None if self.rope_scaling is None else {"rope_type": self.rope_scaling.kind, **asdict(self.rope_scaling)}
        )
        return asdict(self) | {"rope_scaling": scaling, "eos_token_ids": list(self.eos_token_ids)}

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the fields that weights and arithmetic depend on, as hex digits."""
        facts = {name: value for name, value in self.to_json().items() if name not in NOT_ARCHITECTURE}
        return hashlib.sha256(json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Read a config.json (the file itself); ConfigError with one line naming the file and the field at fault."""
        return cls.from_json(read_json(path), str(path))

    @classmethod
    def from_json(cls, obj: Mapping[str, Any], where: str) -> Self:
        """Check the parsed config.json; ConfigError with one line naming `where` and the field at fault."""
        try:
            return cls(**fields(obj))
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
