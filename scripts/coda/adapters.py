"""The adapters' file, in the published layout: one tensor for each layer and parameter, `layer_{i}.coda.{name}`."""

from pathlib import Path

import torch

from runtime.tensorfile import write_safetensors
from scripts.coda.network import attentions
from scripts.llama.network import Network

FILE = "coda_adapters.safetensors"


def write_adapters(network: Network, folder: Path) -> int:
    """Write the CoDA attention of every layer in float32; the size of the file in bytes.

    There is no `head_norm.weight`: the head norm is the identity, as in the published adapters for Mistral.
    """
    tensors = {
        f"layer_{i}.coda.{name}": value.detach().to(torch.float32).contiguous()
        for i, layer in enumerate(attentions(network))
        for name, value in layer.state_dict().items()
    }
    write_safetensors(folder / FILE, tensors, {"format": "pt"})
    return (folder / FILE).stat().st_size
