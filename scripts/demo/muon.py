"""Muon for matrices, AdamW for the rest, one schedule for both."""

import torch
from torch import Tensor, nn

from scripts.demo.network import Network

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
MOMENTUM, STEPS = 0.95, 5


def orthogonalised(G: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrix to G [rows, columns], nearly: five Newton-Schulz steps."""
    a, b, c = NEWTON_SCHULZ
    tall = G.shape[0] > G.shape[1]
    X = G.T if tall else G
    X = X / (X.norm() + 1e-7)
    for _ in range(STEPS):
        A = X @ X.T
        X = torch.addmm(X, torch.addmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return X.T if tall else X


class Muon(torch.optim.Optimizer):
    """Momentum, then the orthogonal factor of it, scaled so that its entries move as far as Adam's would."""

    def __init__(self, matrices: list[nn.Parameter], lr: float) -> None:
        super().__init__(matrices, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every matrix."""
        assert closure is None
        for group in self.param_groups:
            for W in group["params"]:
                if W.grad is None:
                    continue
                momentum = self.state[W].setdefault("momentum", torch.zeros_like(W))
                momentum.lerp_(W.grad, 1 - MOMENTUM)
                update = orthogonalised(W.grad.lerp(momentum, MOMENTUM))
                W.add_(update, alpha=-group["lr"] * 0.2 * max(W.shape) ** 0.5)


def is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether Muon owns the parameter: projections, but neither embeddings, routers nor hyper-connections."""
    return (
        parameter.ndim == 2
        and not name.startswith(("embed", "head", "hc_head"))
        and not any(part in name for part in ("hc_", "gate.weight", "ape"))
    )


def optimisers(network: Network, lr: float) -> tuple[Muon, torch.optim.AdamW]:
    """Muon on projections; AdamW on embeddings, head, stacked experts, vectors and hyper-connections."""
    named = list(network.named_parameters())
    matrices = [p for name, p in named if is_matrix(name, p)]
    others = [p for name, p in named if not is_matrix(name, p)]
    return Muon(matrices, lr), torch.optim.AdamW(others, lr, betas=(0.9, 0.95), weight_decay=0.0)
