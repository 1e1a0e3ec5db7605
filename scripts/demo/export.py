"""The trained network as a checkpoint in DeepSeek's own on-disk format.

Attention, indexer queries and shared experts become E4M3 with a scale per 128 x 128 block, routed experts E2M1 (two per
byte, the even column in the low nibble) with a scale per 32 input channels, both scales E8M0. Embedding, head, norms,
compressors, routers and `weights_proj` become BF16; sinks, `ape`, hyper-connections and router biases stay F32; the
hash table is I64. One shard for the embedding, one for each layer, one for the head, as DeepSeek cuts them.
"""

from pathlib import Path

import torch
from torch import Tensor

from probes.demo_language.vocabulary import build_tokenizer
from runtime.output import write_json, write_text
from runtime.tensorfile import write_safetensors
from scripts.demo.layers import Quantised
from scripts.demo.network import Network
from scripts.demo.rounding import E2M1_MAX, E4M3_MAX, power_of_two_scale, round_e2m1
from scripts.demo.shape import config_json

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
KEPT_IN_F32 = ("attn_sink", "ape", "fn", "base", "scale", "gate.bias")


def fp8_stored(W: Tensor) -> tuple[Tensor, Tensor]:
    """W [rows, columns] -> E4M3 of the same shape and E8M0 scales [rows / 128, columns / 128]."""
    rows, columns = W.shape
    assert rows % 128 == 0, f"{rows} rows"
    assert columns % 128 == 0, f"{columns} columns"
    b = W.view(rows // 128, 128, columns // 128, 128)
    s = power_of_two_scale(b.abs().amax((1, 3), keepdim=True).clamp(min=1e-4), E4M3_MAX)
    return (b / s).to(torch.float8_e4m3fn).view(rows, columns), s[:, 0, :, 0].to(torch.float8_e8m0fnu)


def fp4_stored(W: Tensor) -> tuple[Tensor, Tensor]:
    """W [rows, columns] -> packed E2M1 [rows, columns / 2] int8 and E8M0 scales [rows, columns / 32]."""
    groups = W.unflatten(1, (-1, 32))
    s = power_of_two_scale(groups.abs().amax(2, keepdim=True).clamp(min=E2M1_MAX * 2.0**-126), E2M1_MAX)
    values = round_e2m1(groups / s).flatten(1)
    code = torch.searchsorted(E2M1, values.abs()) + 8 * torch.signbit(values)
    packed = code[:, 0::2] | code[:, 1::2] << 4
    return packed.to(torch.uint8).view(torch.int8), s.squeeze(2).to(torch.float8_e8m0fnu)


def plain_stored(name: str, W: Tensor) -> Tensor:
    """The tensor in the dtype that DeepSeek stores its kind in."""
    if W.dtype == torch.int64 or name.endswith(KEPT_IN_F32):
        return W.clone()
    return W.to(torch.bfloat16)


def checkpoint_name(name: str) -> str:
    """The network's parameter name -> DeepSeek's: hyper-connections are flat, without a module of their own."""
    for site in ("hc_attn", "hc_ffn", "hc_head"):
        name = name.replace(f"{site}.", f"{site}_")
    return name


def stored_tensors(network: Network) -> dict[str, Tensor]:
    """Every tensor of the checkpoint under its official name."""
    quantised = {name for name, module in network.named_modules() if isinstance(module, Quantised)}
    tensors: dict[str, Tensor] = {}
    for name, value in network.state_dict().items():
        W, owner = value.detach().float() if value.is_floating_point() else value, name.rpartition(".")[0]
        if name.endswith(("ffn.w1", "ffn.w2", "ffn.w3")):
            for e, expert in enumerate(W):
                stem = f"{owner}.experts.{e}.{name[-2:]}"
                tensors[f"{stem}.weight"], tensors[f"{stem}.scale"] = fp4_stored(expert)
        elif owner in quantised:
            tensors[name], tensors[f"{owner}.scale"] = fp8_stored(W)
        else:
            tensors[checkpoint_name(name)] = plain_stored(name, W)
    return tensors


def shards(network: Network) -> list[dict[str, Tensor]]:
    """The tensors as DeepSeek cuts them: embedding; one shard a layer; head."""
    tensors, layers = stored_tensors(network), network.shape.layers
    parts: list[dict[str, Tensor]] = [{} for _ in range(layers + 2)]
    for name, tensor in tensors.items():
        part = int(name.split(".")[1]) + 1 if name.startswith("layers.") else 0 if name.startswith("embed") else -1
        parts[part][name] = tensor.contiguous()
    return parts


def write_checkpoint(network: Network, folder: Path) -> int:
    """Write config, tokenizer, index and shards into `folder`; the size of the shards in bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = shards(network)
    weight_map: dict[str, str] = {}
    for i, part in enumerate(parts):
        file = f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors"
        write_safetensors(folder / file, part, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.numel() * tensor.element_size() for part in parts for tensor in part.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / "model.safetensors.index.json", index, indent=2)
    write_json(folder / "config.json", config_json(network.shape), indent=2)
    write_text(folder / "tokenizer.json", build_tokenizer().to_str(pretty=True))
    return sum((folder / file).stat().st_size for file in set(weight_map.values()))


def deployed_copy(network: Network) -> None:
    """Replace every weight by the value that its stored form decodes to, in place."""
    with torch.no_grad():
        stored = stored_tensors(network)
        for name, value in network.state_dict().items():
            owner = name.rpartition(".")[0]
            if name.endswith(("ffn.w1", "ffn.w2", "ffn.w3")):
                for e, expert in enumerate(value):
                    stem = f"{owner}.experts.{e}.{name[-2:]}"
                    expert.copy_(fp4_decoded(stored[f"{stem}.weight"], stored[f"{stem}.scale"]))
            elif f"{owner}.scale" in stored and name.endswith(".weight"):
                value.copy_(fp8_decoded(stored[name], stored[f"{owner}.scale"]))
            else:
                value.copy_(stored[checkpoint_name(name)])


def fp8_decoded(W: Tensor, scale: Tensor) -> Tensor:
    """E4M3 and its block scales -> float32."""
    return W.float() * scale.float().repeat_interleave(128, 0).repeat_interleave(128, 1)


def fp4_decoded(packed: Tensor, scale: Tensor) -> Tensor:
    """Packed E2M1 and its group scales -> float32."""
    code = packed.view(torch.uint8).int()
    code = torch.stack([code & 15, code >> 4], 2).flatten(1)
    return torch.where(code > 7, -1.0, 1.0) * E2M1[code & 7] * scale.float().repeat_interleave(32, 1)
