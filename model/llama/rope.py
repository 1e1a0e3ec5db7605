"""The rotation of a Llama-family model: one for all layers, over the whole head."""

import torch
from torch import Tensor

from kernels.reference import rope
from model.llama.config import LlamaConfig
from model.llama.fields import Linear


def frequencies(config: LlamaConfig) -> Tensor:
    """Radians per position of each pair (dim i and dim i + head_dim / 2): [head_dim / 2] float32."""
    scaling = config.rope_scaling
    if scaling is None:
        return rope.frequencies(config.head_dim, config.rope_theta)
    if isinstance(scaling, Linear):
        return rope.frequencies(config.head_dim, config.rope_theta) / scaling.factor
    return rope.llama3_frequencies(
        config.head_dim,
        config.rope_theta,
        factor=scaling.factor,
        low_freq_factor=scaling.low_freq_factor,
        high_freq_factor=scaling.high_freq_factor,
        original_context=scaling.original_max_position_embeddings,
    )


class Rotation:
    """Cosines and sines, fp32 whatever the run's dtype."""

    def __init__(self, config: LlamaConfig, device: torch.device) -> None:
        self.freqs = frequencies(config).to(device)  # [head_dim / 2]

    def at(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Cos and sin, each [count, head_dim / 2] float32, at positions ``first ..``."""
        return rope.angles(torch.arange(first, first + count, device=self.freqs.device), self.freqs)
