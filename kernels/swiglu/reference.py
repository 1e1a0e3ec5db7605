"""The experts' activation."""

from torch import Tensor
from torch.nn import functional


def swiglu(gate: Tensor, up: Tensor, limit: float, weight: Tensor | None) -> Tensor:
    """Clamped SwiGLU in fp32.

    Equation: ``silu(min(gate, limit)) * clamp(up, -limit, limit) * weight``: gate has no lower clamp. The routing
    weight multiplies before the down projection, as in DeepSeek `Expert.forward`.

    Parameters
    ----------
    gate, up
        [t, i].
    limit
        `swiglu_limit`; routed and shared experts both clamp. Infinity clamps nothing: the Llama family's SwiGLU.
    weight
        [t] float32 routing weights, or None for the shared expert.

    Returns
    -------
    Tensor
        [t, i] in the dtype of `gate`.

    """
    out = functional.silu(gate.float().clamp(max=limit)) * up.float().clamp(-limit, limit)
    if weight is not None:
        out = out * weight[:, None]
    return out.to(gate.dtype)
