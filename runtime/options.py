"""The choices of one run, as opposed to facts of the model."""

from dataclasses import asdict, dataclass
from typing import Any, Self

import torch

from kernels.ops import Ops, noted
from model.architectures import Config
from model.arithmetic import KV_GROUP, LINEAR_GROUP, Arithmetic
from model.cache.formats import CacheFormats
from model.config import LayerKind, ModelConfig
from model.errors import ConfigError
from model.ranks import Ranks
from model.sites import Taps
from runtime.kv import variants

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
NUMERICS = ("deployed", "plain")


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How to run: numerics, dtype, device, chunk. Every field is in the run's report."""

    numerics: str = "deployed"  # deployed | plain
    dtype: str = "bf16"  # of activations and caches: bf16 | fp32
    device: str = "cpu"  # cpu | cuda
    prefill_chunk: int = 512  # tokens per call during prefill
    entry_format: str = "dtype"  # of compressed entries: dtype | fp8
    key_format: str = "dtype"  # of index keys: dtype | fp8 | fp4
    dispatch: str = "auto"  # with several ranks: all-reduce | all-to-all | auto
    kv: tuple[str, ...] = ()  # how layers remember: rules of `runtime.kv`; none: every layer in full
    coda_adapters: str | None = None  # file of adapters over a Llama-family checkpoint; None: ordinary attention

    def __post_init__(self) -> None:
        """Refuse cache formats that do not hold the values of this numerics and dtype: ConfigError naming the flag."""
        narrow = {"--entry-format": self.entry_format, "--key-format": self.key_format}
        for flag, form in narrow.items():
            if form != "dtype" and self.numerics != "deployed":
                raise ConfigError(
                    f"{flag} {form}: cannot hold what --numerics {self.numerics} leaves unrounded; dtype can"
                )
        if self.entry_format != "dtype" and self.dtype != "bf16":
            raise ConfigError(
                f"--entry-format {self.entry_format}: keeps rope dims in bf16, which cannot hold those of"
                f" --dtype {self.dtype}"
            )

    def formats(self, config: Config) -> CacheFormats:
        """How caches are stored; ConfigError for a rule of `kv` that does not fit the model."""
        return CacheFormats(DTYPES[self.dtype], self.entry_format, self.key_format, variants(self.kv, config))

    def arithmetic(self, ops: Ops, ranks: Ranks, config: Config) -> Arithmetic:
        """Return what the model computes with."""
        formats = self.formats(config)
        ran: dict[str, str] = {}
        return Arithmetic(noted(ops, ran), self.numerics == "deployed", formats.dtype, formats, ranks, Taps(ranks), ran)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """Undo `to_json`, for another process of the same run."""
        return cls(**fields | {"kv": tuple(fields["kv"])})

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self) | {"kv": list(self.kv)}


def check_deployed(config: ModelConfig) -> None:
    """Refuse `deployed` numerics for widths that its groups do not divide: ConfigError naming the field.

    A partial group has no defined scale in the reference, so there is nothing to be faithful to.
    """
    nope = config.head_dim - config.qk_rope_head_dim
    per_linear = {
        "hidden_size": config.hidden_size,
        "q_lora_rank": config.q_lora_rank,
        "o_groups * o_lora_rank": config.o_groups * config.o_lora_rank,
        "moe_intermediate_size": config.moe_intermediate_size,
    }
    wrong = [
        f"{name} is {width}, no multiple of {LINEAR_GROUP}"
        for name, width in per_linear.items()
        if width % LINEAR_GROUP
    ]
    if nope % KV_GROUP:
        wrong.append(f"head_dim - qk_rope_head_dim is {nope}, no multiple of {KV_GROUP}")
    width = config.index_head_dim
    if LayerKind.CSA in config.layer_kinds and (width % 32 or width & (width - 1)):
        wrong.append(f"index_head_dim is {width}, no power of two that 32 divides")
    if wrong:
        raise ConfigError(f"--numerics deployed: {'; '.join(wrong)}; run this model with --numerics plain")
