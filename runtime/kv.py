"""`--kv LAYERS=VARIANT`: which layer remembers how."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Final

from model.cache.variants import Basis, Coda, Full, Shard, Variant
from model.config import LayerKind, ModelConfig
from model.errors import ConfigError
from runtime.basis import check_weights, read_basis

VARIANTS: Final[Mapping[str, type[Variant]]] = {"full": Full, "shard": Shard, "coda": Coda}
WIDTHS: Final = (2, 3, 4, 6, 8)  # bits for which there is a packing
SLOTS: Final = 1 << 20
ALLOWED: Final[Mapping[tuple[type[Variant], str], Sequence[int]]] = {
    (Shard, "bits"): WIDTHS,
    (Shard, "keys"): WIDTHS,
    (Coda, "window"): range(1, SLOTS + 1),
    (Coda, "exact"): range(SLOTS + 1),
    (Coda, "summary"): range(1, SLOTS + 1),
}
SMALLEST: Final = 8  # columns, so that codes of any width fill bytes


def variants(rules: Sequence[str], config: ModelConfig) -> tuple[Variant, ...]:
    """Give each layer its variant; of two rules for one layer the later counts, as in ``all=shard hca=coda``.

    Parameters
    ----------
    rules
        ``LAYERS=VARIANT`` each. LAYERS are ``all`` (that have entries), ``csa``, ``hca``, numbers and ranges of
        numbers, between commas: ``3,5-9``. VARIANT is a name and perhaps settings: ``shard:bits=8,keys=8``. With
        ``basis=FILE`` the layers for which the file has a basis get it, and the others are rotated.
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
        name, file = _without_basis(name)
        variant = _variant(rule, name)
        bases: dict[int, Basis] = {}
        if file is not None and isinstance(variant, Shard):
            bases = read_basis(file, config, variant.bits)
        for layer in _layers(rule, layers, config):
            if isinstance(variant, Shard):
                _check_widths(rule, config, layer)
                found[layer] = replace(variant, basis=bases.get(layer))
            else:
                found[layer] = variant
    return tuple(found)


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


def _layers(rule: str, text: str, config: ModelConfig) -> list[int]:
    kinds = config.layer_kinds
    groups = {
        "all": [layer for layer, kind in enumerate(kinds) if kind is not LayerKind.SWA],
        "csa": [layer for layer, kind in enumerate(kinds) if kind is LayerKind.CSA],
        "hca": [layer for layer, kind in enumerate(kinds) if kind is LayerKind.HCA],
    }
    found: list[int] = []
    for part in text.split(","):
        if part in groups:
            if not groups[part]:
                raise ConfigError(f"--kv {rule}: the model has no such layer ({part})")
            found += groups[part]
            continue
        first, dash, last = part.partition("-")
        if not _number(first) or (dash and not _number(last)):
            raise ConfigError(
                f"--kv {rule}: {part!r} names no layers; want all, csa, hca, a number or a range like 5-9"
            )
        low, high = int(first), int(last or first)
        if low > high or high >= len(kinds):
            raise ConfigError(f"--kv {rule}: {part}: the model has layers 0-{len(kinds) - 1}")
        for layer in range(low, high + 1):
            if kinds[layer] is LayerKind.SWA:
                raise ConfigError(f"--kv {rule}: layer {layer} is SWA: it remembers its window alone, and exactly")
            found.append(layer)
    return found


def _check_widths(rule: str, config: ModelConfig, layer: int) -> None:
    """Refuse what a Hadamard matrix cannot rotate."""
    widths = {"head_dim": config.head_dim}
    if config.layer_kind(layer) is LayerKind.CSA:
        widths["index_head_dim"] = config.index_head_dim
    for name, width in widths.items():
        if width & (width - 1) or width < SMALLEST:
            raise ConfigError(f"--kv {rule}: shard rotates rows whose width is a power of two; {name} is {width}")


def _variant(rule: str, text: str) -> Variant:
    name, colon, settings = text.partition(":")
    if name not in VARIANTS:
        raise ConfigError(f"--kv {rule}: no variant {name!r}; there are {', '.join(VARIANTS)}")
    kind = VARIANTS[name]
    given: dict[str, int] = {}
    more = ", and basis=FILE" if kind is Shard else ""
    for setting in settings.split(",") if colon else ():
        key, _, value = setting.partition("=")
        if (kind, key) not in ALLOWED or key in given or not _number(value):
            known = ", ".join(field.name for field in fields(kind) if (kind, field.name) in ALLOWED) or "none"
            raise ConfigError(
                f"--kv {rule}: {setting!r}: settings of {name} are whole numbers: {known}, each once{more}"
            )
        allowed = ALLOWED[kind, key]
        if int(value) not in allowed:
            wanted = f"{allowed[0]} to {allowed[-1]}" if isinstance(allowed, range) else " or ".join(map(str, allowed))
            raise ConfigError(f"--kv {rule}: {key} is {value}, want {wanted}")
        given[key] = int(value)
    return kind(**given)  # type: ignore[arg-type]  # what is given are numbers


def _number(text: str) -> bool:
    return text.isascii() and text.isdigit()
