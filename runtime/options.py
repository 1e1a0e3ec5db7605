"""The choices of one run, as opposed to facts of the model. Nothing here needs torch."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from fathom.model.architectures import Config, config_from_file
from fathom.model.choices import AUTO, DEPLOYED, EXACT, NUMERICS, OF_CODES, OFF, OWN, PLAIN
from fathom.model.config import check_widths
from fathom.model.errors import ConfigError
from fathom.model.llama.config import LlamaConfig
from fathom.model.rounding import FP4, FP8, NONE, Rounding

DEMO = Path(__file__).resolve().parents[1] / "model" / "demo"  # the checkpoint that ships with the project
# What a cache in this form holds: FP8 keys have a scale by row, under which E2M1 keys fit, see `model.cache.formats`.
HELD = {FP8: (FP8, FP4), FP4: (FP4,)}
NEW_TOKENS = 128  # of an answer, unless told
TIMEOUT = 60.0  # seconds that a rank may keep the others waiting, unless told


def usual(device: str) -> str:
    """The op set of a run that names none: Triton's kernels on a GPU, PyTorch in tiles elsewhere."""
    return "triton" if device == "cuda" else "cpu"


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How to run: numerics, dtype, device, chunk. Every field is in the run's report."""

    numerics: str = DEPLOYED  # deployed | plain, or a rounding as `Rounding.of` reads it
    dtype: str = "bf16"  # of activations and caches: bf16 | fp32
    device: str = "cpu"  # cpu | cuda
    prefill_chunk: int = 512  # tokens per call during prefill
    entry_format: str = "dtype"  # of compressed entries: dtype | fp8
    key_format: str = "dtype"  # of index keys: dtype | fp8 | fp4
    index_scores: str = EXACT  # exact | fp8, which rounds index queries to E4M3
    rank_tokens: str = AUTO  # of a call that a rank of several has between attentions: all | own | auto
    kv: tuple[str, ...] = ()  # how layers remember: rules of `runtime.kv`; none: every layer in full
    coda_adapters: str | None = None  # file of adapters over a Llama-family checkpoint; None: ordinary attention
    draft: str = OFF  # what drafts tokens: off | lookup | mtp | dspark | auto
    draft_tokens: int = 0  # drafted for one call at most, and so taken back where they are rejected
    draft_confidence: float = 0.0  # least chance of being accepted, as DSpark tells it, of a draft that is run
    fp8_products: str = AUTO  # of many tokens: exact | fp8, as a GPU's FP8 products sum | auto
    experts: str = AUTO  # how routed experts lie on several ranks: whole | rows | auto

    def __post_init__(self) -> None:
        """Refuse cache formats that do not hold the values of this numerics and dtype, and FP8 products of others.

        Raises
        ------
        ConfigError
            Naming the flag.

        """
        assert (self.draft == OFF) == (self.draft_tokens == 0), f"draft {self.draft} of {self.draft_tokens} tokens"
        rounding = self.rounding
        narrow = {"--entry-format": (self.entry_format, rounding.kv), "--key-format": (self.key_format, rounding.index)}
        for flag, (form, rounded) in narrow.items():
            if form != "dtype" and rounded not in HELD[form]:
                how = f"{self.told} leaves unrounded" if rounded == NONE else f"{self.told} rounds to {rounded}"
                raise ConfigError(f"{flag} {form}: cannot hold what {how}; dtype can")
        if self.entry_format != "dtype" and self.dtype != "bf16":
            raise ConfigError(
                f"--entry-format {self.entry_format}: keeps rope dims in bf16, which cannot hold those of"
                f" --dtype {self.dtype}"
            )

        if self.index_scores != EXACT and (self.key_format != "fp8" or self.kv):
            raise ConfigError(
                f"--index-scores {self.index_scores}: multiplies FP8 keys; want --key-format fp8 and no --kv"
            )

        if self.fp8_products == OF_CODES and (rounding.linears != FP8 or self.dtype != "bf16"):
            raise ConfigError(
                f"--fp8-products {self.fp8_products}: multiplies inputs rounded to FP8; want those of --numerics"
                f" {DEPLOYED} and --dtype bf16"
            )

    @property
    def rounding(self) -> Rounding:
        """What of activations is rounded."""
        return Rounding.of(self.numerics)

    @property
    def told(self) -> str:
        """The flag that says so."""
        return f"--numerics {self.numerics}" if self.numerics in NUMERICS else f"--rounding {self.numerics}"

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """Undo `to_json`, for another process of the same run."""
        return cls(**fields | {"kv": tuple(fields["kv"])})

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self) | {"kv": list(self.kv)}


def checked_config(directory: Path, options: RunOptions) -> Config:
    """Read the config of a checkpoint of either architecture that has these options; ConfigError otherwise."""
    config = config_from_file(directory / "config.json")
    check_options(config, options, directory)
    return config


def check_options(config: Config, options: RunOptions, where: Path) -> None:
    """Refuse options that a model's architecture does not have: ConfigError naming `where` or the flag.

    `deployed` rounds as DeepSeek serves V4, and nobody serves Llamas so. It is not replaced by `plain` in silence,
    though it is the default of the flag: who compares two runs must see that they were made alike.

    What takes torch to check, `device` and `kv`, is not looked at: see `runtime.load`.
    """
    if isinstance(config, LlamaConfig):
        if options.numerics != PLAIN:
            raise ConfigError(
                f"{where}: {options.told} is DeepSeek-V4's; run a {config.model_type} model with --numerics {PLAIN}"
            )
        if options.rank_tokens == OWN:
            raise ConfigError(f"{where}: --rank-tokens {OWN}: each rank of a {config.model_type} model has all tokens")
        if options.experts != AUTO:
            raise ConfigError(f"{where}: --experts {options.experts}: a {config.model_type} model has none")
        return
    if config.v41 is not None:
        _check_v41(options, where)
    check_widths(config, options.rounding)
    if options.coda_adapters is not None:
        raise ConfigError("--coda-adapters: of Llama-family checkpoints; DeepSeek-V4's attention has none")


def check_ranks(config: Config, ranks: int, where: Path) -> None:
    """Refuse several ranks of a model that runs on one: ConfigError naming `where`."""
    if ranks > 1 and not isinstance(config, LlamaConfig) and config.v41 is not None:
        raise ConfigError(f"{where}: a run on {ranks} ranks is not built for DeepSeek-V4.1")


def _check_v41(options: RunOptions, where: Path) -> None:
    """Refuse what is not built of V4.1: ConfigError naming the flag."""
    if options.device != "cpu":
        raise ConfigError(f"{where}: --device {options.device} is not built for DeepSeek-V4.1; --device cpu is")
    told = {
        f"--entry-format {options.entry_format}": options.entry_format != "dtype",
        f"--key-format {options.key_format}": options.key_format not in {"dtype", "fp4"},
        f"--kv {' --kv '.join(options.kv)}": bool(options.kv),
        f"--rank-tokens {options.rank_tokens}": options.rank_tokens != AUTO,
        f"--experts {options.experts}": options.experts != AUTO,
    }
    if wrong := [flag for flag, given in told.items() if given]:
        raise ConfigError(f"{where}: {wrong[0]} is not built for DeepSeek-V4.1")
