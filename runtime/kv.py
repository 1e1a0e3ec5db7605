"""`--kv LAYERS=VARIANT`: which layer remembers how."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from fathom.model.choices import SHARD_BITS
from fathom.model.config import LayerKind, ModelConfig
from fathom.model.errors import ConfigError
from fathom.model.llama.config import LlamaConfig
from fathom.model.variants.choice import Basis, Coda, Full, GroupedCoda, GroupedShard, Shard, Variant
from fathom.model.variants.shard import STREAM_BITS
from fathom.runtime.basis import check_weights, read_basis

Names = Mapping[str, type[Variant]]

ENTRIES: Final[Names] = {"full": Full, "shard": Shard, "coda": Coda}  # of V4's layers
GROUPED: Final[Names] = {"full": Full, "shard": GroupedShard, "coda": GroupedCoda}  # of layers with grouped heads
SLOTS: Final = 1 << 20
BANK: Final = 1 << 16  # slots of a bank, each of which every token attends to
LOGIT: Final = 30.0  # beyond it a sigmoid is 0 or 1 in fp32, or nearly


class Between(NamedTuple):
    """Numbers that need not be whole."""

    low: float
    high: float

    def __contains__(self, value: object) -> bool:
        """Whether a number is one of them."""
        return isinstance(value, float) and self.low <= value <= self.high


Allowed = Sequence[int] | Sequence[str] | Between
ALLOWED: Final[Mapping[tuple[type[Variant], str], Allowed]] = {
    (Shard, "bits"): SHARD_BITS,
    (Shard, "keys"): SHARD_BITS,
    (Coda, "window"): range(1, SLOTS + 1),
    (Coda, "exact"): range(BANK + 1),
    (Coda, "summary"): range(1, BANK + 1),
    (GroupedShard, "rank"): range(2, SLOTS + 1),
    (GroupedShard, "bits"): STREAM_BITS,
    (GroupedShard, "sinks"): range(SLOTS + 1),
    (GroupedShard, "window"): range(1, SLOTS + 1),
    (GroupedShard, "dp"): (0, 1, 2),
    (GroupedShard, "group"): range(4, SLOTS + 1),
    (GroupedShard, "qjl"): (0, 1),
    (GroupedCoda, "window"): range(1, SLOTS + 1),
    (GroupedCoda, "exact"): range(BANK + 1),
    (GroupedCoda, "summary"): range(BANK + 1),
    (GroupedCoda, "block"): range(1, SLOTS + 1),
    (GroupedCoda, "values"): (0, 1),
    (GroupedCoda, "published"): (0, 1),
    (GroupedCoda, "strict"): (0, 1),
    (GroupedCoda, "untrained"): (0, 1),
    (GroupedCoda, "gated"): (0, 1),
    (GroupedCoda, "eta_logit"): Between(-LOGIT, LOGIT),
    (GroupedCoda, "exact_at_start"): range(1, BANK + 1),
    (GroupedCoda, "summary_at_start"): range(1, BANK + 1),
    (GroupedCoda, "growth_horizon"): range(10**9 + 1),
    (GroupedCoda, "gate_exact"): Between(0.0, 1.0),
    (GroupedCoda, "gate_summary"): Between(0.0, 1.0),
    (GroupedCoda, "hit"): Between(-1.0, 1.0),
    (GroupedCoda, "novelty"): Between(-1.0, 1.0),
    (GroupedCoda, "refresh_on_hit"): (0, 1),
    (GroupedCoda, "exact_candidates"): range(SLOTS + 1),
    (GroupedCoda, "summary_candidates"): range(SLOTS + 1),
    (GroupedCoda, "overwrite_on_insert"): (0, 1),
    (GroupedCoda, "memory_init"): ("normal", "zeros"),
    (GroupedCoda, "mask_unused"): (0, 1),
}
MOST_DIGITS: Final = 10  # of a whole number that can be meant
MOST_CHARACTERS: Final = 24  # of a setting
REAL: Final = re.compile(r"-?[0-9]+(\.[0-9]+)?(e-?[0-9]{1,3})?")
SMALLEST: Final = 8  # columns, so that codes of any width fill bytes


def variants(rules: Sequence[str], config: ModelConfig | LlamaConfig) -> tuple[Variant, ...]:
    """Give each layer its variant; of two rules for one layer the later counts, as in ``all=shard hca=coda``.

    Parameters
    ----------
    rules
        ``LAYERS=VARIANT`` each. LAYERS are ``all`` (that have entries, or grouped heads), ``csa``, ``hca``, numbers and
        ranges of numbers, between commas: ``3,5-9``. VARIANT is a name and perhaps settings: ``shard:bits=8,keys=8``.
        With ``basis=FILE`` the layers for which the file has a basis get it, and the others are rotated.
    config
        Of the model.

    Returns
    -------
    tuple of Variant
        One for each layer; `Full` where no rule names it, and for SWA layers, which remember their window alone.

    Raises
    ------
    ConfigError
        Naming the rule, for anything that cannot be meant.

    """
    found: list[Variant] = [Full()] * config.num_hidden_layers
    for rule in rules:
        layers, equals, name = rule.partition("=")
        if not equals:
            raise ConfigError(f"--kv {rule}: want LAYERS=VARIANT, as in all=shard or 3,5-9=coda:window=128")
        if isinstance(config, LlamaConfig):
            variant, bases = _variant(rule, name, GROUPED), dict[int, Basis]()
        else:
            variant, bases = _with_bases(rule, name, config)
        for layer in _layers(rule, layers, config):
            _check(rule, variant, config, layer)
            found[layer] = replace(variant, basis=bases.get(layer)) if isinstance(variant, Shard) else variant
    return tuple(found)


def _with_bases(rule: str, text: str, config: ModelConfig) -> tuple[Variant, dict[int, Basis]]:
    """A variant of V4's layers, and the bases of the file that it names, by layer."""
    name, file = _without_basis(text)
    variant = _variant(rule, name, ENTRIES)
    if file is None or not isinstance(variant, Shard):
        return variant, {}
    if not file.name:
        raise ConfigError(f"--kv {rule}: basis= names no file")
    return variant, read_basis(file, config, variant.bits)


def check_bases(rules: Sequence[str], weights: str) -> None:
    """Refuse a file of bases that was made from other weights than those of this fingerprint: ConfigError."""
    for rule in rules:
        _, file = _without_basis(rule.partition("=")[2])
        if file is not None:
            check_weights(file, weights)


def _without_basis(text: str) -> tuple[str, Path | None]:
    """A variant without its setting ``basis=FILE``, and the file."""
    name, _, settings = text.partition(":")
    parts = settings.split(",")
    files = [part for part in parts if part.startswith("basis=")] if name == "shard" else []
    if not files:
        return text, None
    parts.remove(files[0])
    return f"{name}:{','.join(parts)}" if parts else name, Path(files[0].removeprefix("basis="))


def _layers(rule: str, text: str, config: ModelConfig | LlamaConfig) -> list[int]:
    """Layers that a rule names, in its order."""
    n, groups = config.num_hidden_layers, _groups(config)
    found: list[int] = []
    for part in text.split(","):
        if part in groups:
            if not groups[part]:
                raise ConfigError(f"--kv {rule}: the model has no such layer ({part})")
            found += groups[part]
            continue
        first, dash, last = part.partition("-")
        if not _number(first) or (dash and not _number(last)):
            named = ", ".join(groups)
            raise ConfigError(f"--kv {rule}: {part!r} names no layers; want {named}, a number or a range like 5-9")
        low, high = int(first), int(last or first)
        if low > high or high >= n:
            raise ConfigError(f"--kv {rule}: {part}: the model has layers 0-{n - 1}")
        found += range(low, high + 1)
    return found


def _groups(config: ModelConfig | LlamaConfig) -> dict[str, list[int]]:
    """Layers that have a name of their own."""
    if isinstance(config, LlamaConfig):
        return {"all": list(range(config.num_hidden_layers))}
    kinds = config.layer_kinds
    return {
        "all": [layer for layer, kind in enumerate(kinds) if kind is not LayerKind.SWA],
        "csa": [layer for layer, kind in enumerate(kinds) if kind is LayerKind.CSA],
        "hca": [layer for layer, kind in enumerate(kinds) if kind is LayerKind.HCA],
    }


def _check(rule: str, variant: Variant, config: ModelConfig | LlamaConfig, layer: int) -> None:
    """Refuse a variant that this layer cannot have: ConfigError naming the rule."""
    if isinstance(config, LlamaConfig):
        if config.sliding_window is not None and not isinstance(variant, Full):
            raise ConfigError(f"--kv {rule}: the model has a sliding_window of {config.sliding_window}: full only")
        if isinstance(variant, GroupedCoda) and variant.window > (most := config.max_position_embeddings):
            raise ConfigError(f"--kv {rule}: window is {variant.window}, the model has {most} positions")
        try:
            variant.check(config.num_key_value_heads, config.head_dim)
        except ConfigError as error:
            raise ConfigError(f"--kv {rule}: {error}") from None
        return
    if config.layer_kind(layer) is LayerKind.SWA:
        raise ConfigError(f"--kv {rule}: layer {layer} is SWA: it remembers its window alone, and exactly")
    if isinstance(variant, Shard):
        _check_width(rule, "head_dim", config.head_dim)
        if config.layer_kind(layer) is LayerKind.CSA:
            _check_width(rule, "index_head_dim", config.index_head_dim)


def _check_width(rule: str, name: str, width: int) -> None:
    """Refuse what a Hadamard matrix cannot rotate."""
    if width & (width - 1) or width < SMALLEST:
        raise ConfigError(f"--kv {rule}: shard rotates rows whose width is a power of two; {name} is {width}")


def _variant(rule: str, text: str, names: Names) -> Variant:
    name, colon, settings = text.partition(":")
    if name not in names:
        raise ConfigError(f"--kv {rule}: no variant {name!r}; there are {', '.join(names)}")
    kind = names[name]
    given: dict[str, Any] = {}
    for setting in settings.split(",") if colon else ():
        key, _, value = setting.partition("=")
        if (kind, key) not in ALLOWED or key in given or not value or len(value) > MOST_CHARACTERS:
            known = ", ".join(field.name for field in fields(kind) if (kind, field.name) in ALLOWED) or "none"
            more = ", and basis=FILE" if kind is Shard else ""
            raise ConfigError(f"--kv {rule}: {setting!r}: settings of {name} are {known}, each once{more}")
        given[key] = _value(rule, key, value, ALLOWED[kind, key])
    return kind(**given)


def _value(rule: str, key: str, text: str, allowed: Allowed) -> int | float | str:
    """Return the value of a setting; ConfigError naming what is allowed instead."""
    value: int | float | str | None = None
    if isinstance(allowed, Between):
        value = float(text) if REAL.fullmatch(text) else None
        wanted = f"{allowed.low:g} to {allowed.high:g}"
    elif isinstance(allowed[0], str):
        value, wanted = text, " or ".join(map(str, allowed))
    else:
        value = int(text) if _number(text) else None
        wanted = f"{allowed[0]} to {allowed[-1]}" if isinstance(allowed, range) else " or ".join(map(str, allowed))
    if value is None or value not in allowed:
        raise ConfigError(f"--kv {rule}: {key} is {text}, want {wanted}")
    return value


def _number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS
