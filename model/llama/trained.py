"""What CoDA adapters say of their training: over which weights, and for which cache. Nothing else is run in silence.

Files that `scripts.train_coda` writes say it in the metadata of their safetensors header; published ones say nothing.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from safetensors import SafetensorError, safe_open

from fathom.model.checkpoint.header import zipped
from fathom.model.errors import CheckpointError, ConfigError, shown
from fathom.model.llama.config import LlamaConfig
from fathom.model.variants.choice import GroupedCoda, Variant

FORMAT: Final = "fathom-coda-adapters-1"
SPELT: Final = re.compile(r"[a-z0-9_:=,.-]{1,500}")  # what `--kv` spells


class Trained(NamedTuple):
    """What adapters say they were trained over, and for which cache."""

    config: str  # fingerprint of the model's config
    weights: str  # fingerprint of its checkpoint
    kv: str  # the variant of every layer, as `--kv` spells it; "full": everything was remembered

    def metadata(self) -> dict[str, str]:
        """Return what the header of the file holds."""
        return {"format": "pt", "fathom": FORMAT, **self._asdict()}


def trained(path: Path) -> Trained | None:
    """What a file of adapters says of its training; None where it says nothing, as published ones do.

    CheckpointError for one that says it in another form than this.
    """
    if zipped(path):
        return None
    try:
        with safe_open(path, framework="pt") as opened:
            said = opened.metadata() or {}
    except SafetensorError as error:
        raise CheckpointError(
            f"{path}: neither safetensors nor a .pt archive ({str(error).splitlines()[0]})"
        ) from error
    if "fathom" not in said:
        return None
    if said["fathom"] != FORMAT or not SPELT.fullmatch(said.get("kv", "")) or not set(Trained._fields) <= said.keys():
        raise CheckpointError(f"{path}: metadata is of {shown(said['fathom'])}, want {FORMAT!r} with all of its fields")
    return Trained(*(said[name] for name in Trained._fields))


def check_trained(path: Path, variants: Sequence[Variant], config: LlamaConfig, weights: str | None) -> None:
    """Refuse adapters over weights, or with a cache, that they were not trained for: CheckpointError.

    Parameters
    ----------
    path
        Of the adapters; nothing is refused of a file that says nothing, nor of a layer that remembers everything.
    variants
        Of each layer; with ``untrained=1`` any cache will do.
    config, weights
        Of the model, and the fingerprint of its checkpoint; None where that is not known yet.

    """
    told = trained(path)
    if told is None:
        return
    for name, found in (("config", config.fingerprint), ("weights", weights)):
        if found is not None and getattr(told, name) != found:
            raise CheckpointError(f"{path}: trained over {name} {shown(getattr(told, name))}, the model has {found!r}")
    for layer, variant in enumerate(variants):
        if isinstance(variant, GroupedCoda) and not variant.untrained and str(variant) != told.kv:
            raise CheckpointError(
                f"{path}: trained for {told.kv}, layer {layer} has {variant}; untrained=1 runs it all the same"
            )


def check_learnt(variants: Sequence[Variant], learnt: Sequence[bool] | None) -> None:
    """Refuse settings of a layer's cache that would be without effect: ConfigError.

    `learnt` says of each layer whether its adapter has rates of the summary bank; None: there are no adapters.
    """
    for layer, variant in enumerate(variants):
        if not isinstance(variant, GroupedCoda):
            continue
        if learnt is None and not variant.gated:
            raise ConfigError(f"--kv: layer {layer} has gated=0, and without --coda-adapters no token has a gate")
        if learnt is not None and learnt[layer] and variant.eta_logit != GroupedCoda().eta_logit:
            raise ConfigError(f"--kv: layer {layer} has eta_logit={variant.eta_logit}, the adapters have learnt theirs")
