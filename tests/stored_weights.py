"""What is in a checkpoint that was trained here, under the names of the network that it was trained as."""

import re

import torch

from fathom.kernels.formats.reference import decode
from fathom.kernels.formats.stored import Fp4, Fp8


def decoded(stored, name: str, experts: int) -> torch.Tensor:
    """What a file holds for a parameter or buffer of the network, experts stacked."""
    if name.endswith(("ffn.w1", "ffn.w2", "ffn.w3")):
        stems = [f"{name[:-2]}experts.{e}.{name[-2:]}" for e in range(experts)]
        return torch.stack([decode(Fp4(stored[f"{stem}.weight"], stored[f"{stem}.scale"])) for stem in stems])
    name = re.sub(r"(hc_\w+)\.", r"\1_", name)
    scale = stored.get(f"{name.removesuffix('.weight')}.scale")
    return stored[name] if scale is None else decode(Fp8(stored[name], scale))
