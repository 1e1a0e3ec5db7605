"""The frequencies of a Llama-family model's rotation: one for all layers, over the whole head."""

from torch import Tensor

from fathom.kernels.rope import reference as rope
from fathom.model.llama.config import LlamaConfig
from fathom.model.llama.fields import Linear


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
