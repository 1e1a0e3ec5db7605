"""Bases of a model's entries in a file: what `scripts.calibrate_kv` writes and ``--kv ..=shard:basis=FILE`` reads.

A safetensors file with the basis of every layer that has one, and what was predicted and measured of all CSA and HCA
layers. It belongs to one checkpoint: fingerprints of config and weights are in it, and a checksum of all of it. A file
that does not match in every point is refused, and so are settings for which it was not made.
"""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fathom.kernels.formats.basis_fit import ROPE_BITS, Fitted, Loss, group_of
from fathom.kernels.formats.eigenbasis import DP_BITS
from fathom.kernels.formats.stored import EigenKeys
from fathom.model.checkpoint import strict_json
from fathom.model.config import LayerKind, ModelConfig
from fathom.model.errors import ConfigError, shown
from fathom.model.files import regular_file_size
from fathom.model.variants.choice import Basis
from fathom.runtime.digest import digest
from fathom.runtime.tensorfile import write_safetensors

FORMAT: Final = "fathom-basis-1"
PARTS: Final = {  # of a layer's basis, by name
    "basis": torch.int8,
    "basis_scale": torch.float16,
    "scale": torch.float16,
    "mean": torch.float16,
    "bits": torch.int8,
}
LAYER: Final = re.compile("0|[1-9][0-9]{0,5}")
LARGEST_SCALE: Final = 4096.0  # of a coefficient: 4 deviations of 512 dims that RMSNorm made 45 long each
ROUNDED_SCALE: Final = 0.001  # of a column's scale to float16


def write_basis(
    path: Path, found: Mapping[int, Fitted], config: ModelConfig, weights: str, bits: int, made: Mapping[str, int]
) -> None:
    """Write the bases of the layers that got one, and why the others did not.

    Parameters
    ----------
    path
        An existing file is replaced only once the new one is complete. OSError naming it when it cannot be written.
    found
        By layer, of all that have entries.
    config, weights
        Of the model, and the fingerprint of its weights.
    bits
        Of a value of a rotated row, for whose bytes the bases were made.
    made
        Of what: tokens and context.

    """
    tensors = {
        f"layers.{layer}.{name}": getattr(of_layer.fit, name).clone()
        for layer, of_layer in found.items()
        if of_layer.pays
        for name in PARTS
    }
    metadata = {
        "format": FORMAT,
        "config": config.fingerprint,
        "weights": weights,
        "bits": str(bits),
        "made": json.dumps(dict(made)),
        "layers": json.dumps({layer: told(of_layer) for layer, of_layer in found.items()}),
    }
    metadata["sha256"] = digest(tensors, metadata)
    write_safetensors(path, tensors, metadata)


def told(found: Fitted) -> dict[str, Any]:
    """What was found of one layer, as JSON values: which form won, and losses as shares of the squared length."""
    return {
        "codec": "basis" if found.pays else "rotated",
        "rotated": _loss(found.rotated),
        "based": None if found.based is None else _loss(found.based),
        "rope_bits": found.rope_bits,
        "group_bits": list(found.bits),
        "row_bytes": found.row_bytes,
    }


def _loss(loss: Loss) -> dict[str, float | None]:
    """As JSON values, which have none for what could not be measured."""
    return {name: value if math.isfinite(value) else None for name, value in loss._asdict().items()}


def read_basis(path: Path, config: ModelConfig, bits: int) -> dict[int, Basis]:
    """Read the bases of the layers that have one.

    ConfigError, with one line naming the file, when it is none, is damaged, or was made for another model, other widths
    or other bits. Its weights are compared by `check_weights`, once they are known.
    """
    metadata, tensors = _content(path)
    for key, expected in (("config", config.fingerprint), ("bits", str(bits))):
        if metadata[key] != expected:
            raise ConfigError(f"{path}: made for {key} {shown(metadata[key])}, this run has {expected!r}")
    layers = _layers(path, metadata["layers"])
    wanted = [layer for layer, kind in enumerate(config.layer_kinds) if kind is not LayerKind.SWA]
    if sorted(layers) != wanted:
        raise ConfigError(f"{path}: is about layers {shown(sorted(layers))}, want {wanted}")
    found = {layer: rope_bits for layer, rope_bits in layers.items() if rope_bits is not None}
    names = {f"layers.{layer}.{name}" for layer in found for name in PARTS}
    if tensors.keys() != names:
        raise ConfigError(f"{path}: holds other tensors than those of its layers, {min(tensors.keys() ^ names)}")
    width = config.head_dim - config.qk_rope_head_dim
    return {
        layer: _basis(path, layer, {name: tensors[f"layers.{layer}.{name}"] for name in PARTS}, width, rope_bits)
        for layer, rope_bits in found.items()
    }


def check_weights(path: Path, weights: str) -> None:
    """Refuse a file that was made from other weights than those of this fingerprint: ConfigError."""
    metadata, _ = _content(path)
    if metadata["weights"] != weights:
        raise ConfigError(f"{path}: made for weights {shown(metadata['weights'])}, this run has {weights!r}")


def _content(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Metadata and tensors of a whole file, its checksum left out."""
    regular_file_size(path, ConfigError)
    try:
        with safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 -- no mapping
    except SafetensorError as error:
        raise ConfigError(f"{path}: no readable file of bases ({str(error).splitlines()[0]})") from error
    if metadata.get("format") != FORMAT:
        raise ConfigError(f"{path}: format is {shown(metadata.get('format'))}, want {FORMAT!r}")
    said = metadata.pop("sha256", "")
    if said != digest(tensors, metadata):
        raise ConfigError(f"{path}: the content does not match its checksum")
    if missing := {"config", "weights", "bits", "layers"} - metadata.keys():
        raise ConfigError(f"{path}: does not say its {min(missing)}")
    return metadata, tensors


def _layers(path: Path, text: str) -> dict[int, int | None]:
    """Bits of the rope dims of each layer that has a basis, None for one that has not."""
    try:
        said = strict_json.parse(text.encode())
    except ValueError as error:
        raise ConfigError(f"{path}: layers: {error}") from None
    found: dict[int, int | None] = {}
    for layer, each in said.items() if isinstance(said, dict) else ():
        codec, rope_bits = (each.get("codec"), each.get("rope_bits")) if isinstance(each, dict) else (None, None)
        if not LAYER.fullmatch(layer) or codec not in ("rotated", "basis"):
            raise ConfigError(f"{path}: layer {shown(layer)} is {shown(codec)}, want rotated or basis")
        if codec == "basis" and (type(rope_bits) is not int or rope_bits not in ROPE_BITS):
            raise ConfigError(f"{path}: layer {layer}: rope_bits {shown(rope_bits)}, want one of {ROPE_BITS}")
        found[int(layer)] = rope_bits if codec == "basis" else None
    return found


def _basis(path: Path, layer: int, parts: Mapping[str, Tensor], width: int, rope_bits: int) -> Basis:
    """One layer's basis; a checksum can be made up, so shapes and values are looked at."""
    group = group_of(width)
    shapes = dict.fromkeys(PARTS, (width,)) | {"basis": (width, width), "bits": (width // group if group else 0,)}
    for name, part in parts.items():
        if (tuple(part.shape), part.dtype) != (shapes[name], PARTS[name]):
            said = f"{list(part.shape)} {part.dtype}, want {list(shapes[name])} {PARTS[name]}"
            raise ConfigError(f"{path}: layers.{layer}.{name} is {said}")
        if not bool(part.isfinite().all()) or (name.endswith("scale") and bool((part < 0).any())):
            raise ConfigError(f"{path}: layers.{layer}.{name} holds what cannot be meant")
    _check_scales(path, layer, parts)
    bits = parts["bits"].tolist()
    if not set(bits) <= set(DP_BITS) or not any(bits):
        raise ConfigError(f"{path}: layers.{layer}.bits is {bits}, want some of {DP_BITS}")
    codes = torch.zeros(0, sum(bits) * group // 8, dtype=torch.uint8)
    return Basis(digest(parts, {"rope_bits": rope_bits})[:16], EigenKeys(codes, **parts), rope_bits)


def _check_scales(path: Path, layer: int, parts: Mapping[str, Tensor]) -> None:
    """Refuse columns that are not orthonormal but for their rounding to int8, and scales of no entry."""
    if parts["scale"].max() > LARGEST_SCALE:
        raise ConfigError(f"{path}: layers.{layer}.scale is up to {parts['scale'].max():g}, want {LARGEST_SCALE:g}")
    columns = parts["basis"].double() * parts["basis_scale"].double()
    rounded = len(columns) ** 0.5 / 254 + ROUNDED_SCALE  # the most that a column of length 1 is off its own
    off = (columns.mT @ columns - torch.eye(len(columns), dtype=torch.float64)).abs().max().item()
    if not off <= 2 * rounded + rounded**2:
        raise ConfigError(f"{path}: layers.{layer}.basis has columns that are {off:.3g} off orthonormal ones")
