"""CoDA-GQA-L adapters over a Llama-family checkpoint: another query mechanism, and projections trained with it.

Two files hold the same: `coda_adapters.pt` as published for Mistral, a dict of state dicts by ``layer_<i>``, and
safetensors with the names joined, ``layer_<i>.coda.<parameter>``. The names are those of the package `coda-gqa-l`.
A file of the unbounded phase of training has no write gate and no rates of the summary bank: every token is then kept
alike and the bank moves at its initial rate, as in the package.

Files of `scripts.train_coda` say over which weights and for which cache they were trained, and are refused over
others: `model.llama.trained`. Published files say nothing of the kind.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fathom.model.checkpoint.archive import line_of, read_archive
from fathom.model.checkpoint.header import zipped
from fathom.model.errors import CheckpointError, quoted
from fathom.model.llama.config import LlamaConfig
from fathom.model.llama.trained import check_trained
from fathom.model.ranks.ranks import Shards
from fathom.model.variants.choice import Variant

EPS: Final = 1e-6  # of the head norm
GATE_LOGIT: Final = -2.0  # of a write gate that nothing was learnt for: the package's write_gate_init_bias
BOUNDED: Final = ("write_proj.weight", "write_proj.bias", "summary_eta_logit")  # all or none of them
STORED: Final = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # by its name in safetensors
HEAD_NORM: Final = "head_norm.weight"  # only with the head norm "full"; without it there is none, "identity"


class Adapter(NamedTuple):
    """What replaces or joins the parameters of one layer's attention; H query heads, K KV heads of d, hidden E.

    On several ranks those rows of it that are this rank's, as of the checkpoint's own parameters.
    """

    q_proj: Tensor  # [H * d, E]
    k_proj: Tensor  # [K * d, E]
    v_proj: Tensor  # [K * d, E]
    o_proj: Tensor  # [E, H * d]
    lambda_weight: Tensor  # [H, E]
    lambda_bias: Tensor  # [H] float32
    cos: Tensor  # [H, d / 2] float32, of theta
    sin: Tensor  # the same
    norm: Tensor | None  # [d] float32, of the head norm; None: no norm
    gate: tuple[Tensor, Tensor] | None  # weight [1, E] and bias [1] of the write gate; None: sigmoid(GATE_LOGIT) always
    eta_logit: Tensor | None  # [K], rates of the summary bank; None: as initialised


def read_adapters(path: Path, config: LlamaConfig, device: torch.device, shards: Shards) -> list[Adapter]:
    """Read the adapters of every layer, strictly, to a device; of several ranks, this rank's rows.

    Raises
    ------
    CheckpointError
        With one line naming the file and the layer or tensor at fault: missing, unknown, misshapen, not a float, not
        finite.
    """
    layers = _own_layers(path, config, shards)
    for layer, found in enumerate(layers):
        for name, tensor in found.items():
            found[name] = tensor.to(device)
            if not bool(torch.isfinite(found[name]).all()):
                raise CheckpointError(f"{path}: tensor 'layer_{layer}.coda.{name}' has a value that is not finite")
    return [_adapter(path, f"layer_{layer}", found, config) for layer, found in enumerate(layers)]


def check_adapters(path: Path, config: LlamaConfig, variants: Sequence[Variant]) -> None:
    """Refuse a file that is not of this model's adapters, by its header alone: `read_adapters`, `check_trained`."""
    check_trained(path, variants, config, None)
    for layer, found in enumerate(_layers(path, _tensors(path, values=False), config)):
        _check_whole(path, f"layer_{layer}", found, config)


def adapters_nbytes(path: Path, config: LlamaConfig, shards: Shards) -> int:
    """Bytes of what `read_adapters` reads, as stored; CheckpointError for a tensor that is not one of an adapter."""
    return sum(own.nbytes for found in _own_layers(path, config, shards, values=False) for own in found.values())


def adapters_fingerprint(path: Path) -> str:
    """SHA-256 of the file, 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter that a layer may have, by name."""
    H, K, d, E = config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.hidden_size
    return {
        "q_proj.weight": (H * d, E),
        "k_proj.weight": (K * d, E),
        "v_proj.weight": (K * d, E),
        "o_proj.weight": (E, H * d),
        "lambda_proj.weight": (H, E),
        "lambda_proj.bias": (H,),
        "theta": (H, d // 2),
        "write_proj.weight": (1, E),
        "write_proj.bias": (1,),
        "summary_eta_logit": (K,),
        HEAD_NORM: (d,),
    }


def _sharded(config: LlamaConfig) -> dict[str, tuple[str, int]]:
    """The axis of `Shards` by which the rows of a parameter are cut, and rows for each place of it."""
    d = config.head_dim
    return {
        "q_proj.weight": ("heads", d),
        "k_proj.weight": ("kv_heads", d),
        "v_proj.weight": ("kv_heads", d),
        "o_proj.weight": ("output", 1),
        "lambda_proj.weight": ("heads", 1),
        "lambda_proj.bias": ("heads", 1),
        "theta": ("heads", 1),
        "summary_eta_logit": ("kv_heads", 1),
    }


def _own_layers(path: Path, config: LlamaConfig, shards: Shards, *, values: bool = True) -> list[dict[str, Tensor]]:
    """`_layers`, of each tensor this rank's rows."""
    sharded, layers = _sharded(config), _layers(path, _tensors(path, values=values), config)
    return [
        {name: shards.along(*sharded.get(name, (None,))).of(tensor) for name, tensor in found.items()}
        for found in layers
    ]


def _tensors(path: Path, *, values: bool = True) -> dict[str, Tensor]:
    """Every tensor of the file by its joined name; without `values` those of safetensors are on the meta device."""
    if not zipped(path):
        try:
            with safe_open(path, framework="pt") as opened:
                return {name: _stored(path, opened, name, values=values) for name in opened.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise CheckpointError(f"{path}: neither safetensors nor a .pt archive ({line_of(error)})") from error
    held = read_archive(path)
    found: dict[str, Tensor] = {}
    for layer, state in held.items() if isinstance(held, Mapping) else ():
        for name, tensor in state.items() if isinstance(state, Mapping) else ((None, state),):
            if not (isinstance(layer, str) and isinstance(name, str) and isinstance(tensor, Tensor)):
                said = layer if isinstance(layer, str) else type(layer).__name__
                raise CheckpointError(f"{path}: want layer_<i>, each a dict of tensors; {quoted(said)} is none")
            found[f"{layer}.{name}"] = _plain(path, f"{layer}.{name}", tensor)
    return found


def _stored(path: Path, opened: Any, name: str, *, values: bool) -> Tensor:
    """A tensor of an open safetensors file, or its shape and dtype."""
    if values:
        read: Tensor = opened.get_tensor(name)
        return read
    part = opened.get_slice(name)
    if part.get_dtype() not in STORED:
        raise CheckpointError(f"{path}: tensor {quoted(name)} is {part.get_dtype()}, want {' or '.join(STORED)}")
    return torch.empty(part.get_shape(), dtype=STORED[part.get_dtype()], device="meta")


def _plain(path: Path, name: str, tensor: Tensor) -> Tensor:
    """Return it without what a parameter has besides; CheckpointError where it is not numbers one beside the other."""
    ordinary = tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized
    if not ordinary or tensor.device.type != "cpu":
        said = f"{tensor.layout} {tensor.dtype} on {tensor.device.type}"
        raise CheckpointError(f"{path}: tensor {quoted(name)} is {said}, want dense numbers")
    return tensor.detach()


def _layers(path: Path, tensors: Mapping[str, Tensor], config: LlamaConfig) -> list[dict[str, Tensor]]:
    """Tensors of each layer by parameter, each known and of its shape."""
    known, layers = shapes(config), config.num_hidden_layers
    found: list[dict[str, Tensor]] = [{} for _ in range(layers)]
    names = {f"layer_{layer}.coda.{name}": (layer, name) for layer in range(layers) for name in known}
    for stored, tensor in tensors.items():
        if stored not in names:
            raise CheckpointError(f"{path}: tensor {quoted(stored)} is no adapter's of a model with {layers} layers")
        layer, name = names[stored]
        if tuple(tensor.shape) != known[name] or tensor.dtype not in STORED.values():
            raise CheckpointError(
                f"{path}: tensor {quoted(stored)} is {list(tensor.shape)} {tensor.dtype}, want {list(known[name])}"
            )
        found[layer][name] = tensor
    return found


def _check_whole(path: Path, where: str, found: Mapping[str, Tensor], config: LlamaConfig) -> None:
    """Refuse a layer that lacks a parameter: CheckpointError naming it."""
    optional = (HEAD_NORM,) if any(name in found for name in BOUNDED) else (HEAD_NORM, *BOUNDED)
    missing = [name for name in shapes(config) if name not in found and name not in optional]
    if missing:
        raise CheckpointError(f"{path}: {where} lacks {', '.join(f'coda.{name}' for name in missing)}")


def _adapter(path: Path, where: str, found: Mapping[str, Tensor], config: LlamaConfig) -> Adapter:
    """Put one layer together; CheckpointError naming what is missing."""
    _check_whole(path, where, found, config)
    theta = found["theta"].float()
    norm = found.get(HEAD_NORM)
    gate = (found["write_proj.weight"], found["write_proj.bias"].float()) if "write_proj.bias" in found else None
    return Adapter(
        q_proj=found["q_proj.weight"],
        k_proj=found["k_proj.weight"],
        v_proj=found["v_proj.weight"],
        o_proj=found["o_proj.weight"],
        lambda_weight=found["lambda_proj.weight"],
        lambda_bias=found["lambda_proj.bias"].float(),
        cos=theta.cos(),
        sin=theta.sin(),
        norm=None if norm is None else norm.float(),
        gate=gate,
        eta_logit=found.get("summary_eta_logit"),
    )
