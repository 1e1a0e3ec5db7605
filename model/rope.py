"""Which rotation a layer uses: SWA layers the base theta, CSA and HCA layers theirs with YaRN."""

import torch
from torch import Tensor

from fathom.kernels.rope import reference as rope
from fathom.model.config import LayerKind, ModelConfig


def rotated_as(kind: LayerKind) -> LayerKind:
    """The kind whose rotation the layers of a kind use: CSA layers share that of HCA."""
    return LayerKind.HCA if kind is LayerKind.CSA else kind


def layer_frequencies(config: ModelConfig, kind: LayerKind) -> Tensor:
    """Radians per position of each rope pair in a layer of this kind: [qk_rope_head_dim / 2] float32.

    SWA layers use `rope_theta` and no YaRN. CSA and HCA layers use `compress_rope_theta` with the YaRN of
    `rope_scaling` for everything in them: queries, window KV, entries, indexer. Source: DeepSeek `Attention.__init__`.
    """
    dim = config.qk_rope_head_dim
    if kind is LayerKind.SWA:
        return rope.frequencies(dim, config.rope_theta)
    yarn = config.rope_scaling
    if yarn is None:
        return rope.frequencies(dim, config.compress_rope_theta)
    return rope.yarn_frequencies(
        dim,
        config.compress_rope_theta,
        factor=yarn.factor,
        original_context=yarn.original_max_position_embeddings,
        beta_fast=yarn.beta_fast,
        beta_slow=yarn.beta_slow,
    )


class Rotation:
    """Cosines and sines of one kind of layer, of any architecture.

    Parameters
    ----------
    freqs
        [r / 2] float32, radians per position of each pair.

    """

    def __init__(self, freqs: Tensor) -> None:
        self.freqs = freqs

    def at(self, first: int | Tensor, count: int, step: int = 1) -> tuple[Tensor, Tensor]:
        """Cos and sin, each [count, r / 2] float32, at positions ``first, first + step, ...``.

        `first` may be [] int64 on the device.
        """
        start, stop = (0, count * step) if isinstance(first, Tensor) else (first, first + count * step)
        positions = torch.arange(start, stop, step, device=self.freqs.device)
        return rope.angles(first + positions if isinstance(first, Tensor) else positions, self.freqs)
