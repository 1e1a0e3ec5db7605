"""Routing: which experts a token goes to, and with what weight."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from fathom.kernels.formats.stored import Weight
from fathom.kernels.linear.reference import linear


def route(logits: Tensor, bias: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
    """Pick k experts by biased score, weigh them by the unbiased one.

    Equation: ``score = sqrt(softplus(logit))``; the experts are the top k of ``score + bias`` (of equal ones the lower
    index); ``weight = scale * score / sum of the k scores``. Source: DeepSeek `Gate.forward`.

    Parameters
    ----------
    logits
        [t, experts] float32.
    bias
        [experts] float32, for selection only.
    k, scale
        `num_experts_per_tok`, `routed_scaling_factor`.

    Returns
    -------
    tuple[Tensor, Tensor]
        [t, k] int64 expert ids and [t, k] float32 weights, which sum to `scale`.

    """
    biased = functional.softplus(logits).sqrt() + bias
    ids = biased.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return ids, route_weights(logits, ids, scale)


def route_weights(logits: Tensor, ids: Tensor, scale: float) -> Tensor:
    """Weights of given experts `ids` [t, k], as in `route`: [t, k] float32. Hash layers bring their own ids."""
    chosen = functional.softplus(logits).sqrt().gather(1, ids)
    return scale * chosen / chosen.sum(-1, keepdim=True)


@dataclass(frozen=True, slots=True)
class Gate:
    """Logits of all experts, and which of them a token goes to. Of an op set's own parts."""

    linear: Callable[..., Tensor]
    route: Callable[..., tuple[Tensor, Tensor]]
    route_weights: Callable[..., Tensor]

    def __call__(
        self, x: Tensor, weight: Weight, bias: Tensor | None, ids: Tensor | None, k: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Run one after the other; logits are not rounded, as DeepSeek computes them in fp32.

        Parameters
        ----------
        x
            [t, hidden] bfloat16 or float32.
        weight
            [experts, hidden].
        bias
            [experts] float32, by which `route` selects; None where experts are given.
        ids
            [t, k] int64, experts that are given, which `route_weights` weighs; else None.
        k, scale
            As `route` takes them.

        Returns
        -------
        tuple[Tensor, Tensor]
            Ids [t, k] int64 and weights [t, k] float32.

        """
        assert (bias is None) != (ids is None), "experts are selected or given"
        logits = self.linear(x, weight, wide=True)
        return self.route(logits, bias, k, scale) if ids is None else (ids, self.route_weights(logits, ids, scale))


gate = Gate(linear, route, route_weights)
