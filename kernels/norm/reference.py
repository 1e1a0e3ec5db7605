"""RMSNorm in fp32."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Scale each row to unit root mean square, then by `weight`.

    Equation: ``y = w * x / sqrt(mean(x^2) + eps)``, all in fp32, one rounding at the end.

    Parameters
    ----------
    x
        [..., d], bfloat16 or float32.
    weight
        [d] float32, or None for the weightless norm that follows the low-rank query (DeepSeek `Attention.forward`).
    eps
        `rms_norm_eps` of the config.

    Returns
    -------
    Tensor
        [..., d] in the dtype of `x`.

    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        wide = wide * weight
    return wide.to(x.dtype)
