"""Norms, linears and experts of the training network, with the deployed rounding where it is switched on."""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu, softplus

from scripts.demo.rounding import fp4_groups, fp8_blocks, fp8_groups, straight_through
from scripts.demo.shape import Shape


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis."""

    def __init__(self, width: int, shape: Shape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = shape.norm_eps

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as x."""
        return nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Quantised(nn.Linear):
    """A linear whose weight ships as FP8 blocks; `rounds_input` as its input does in DeepSeek's kernels."""

    def __init__(self, inputs: int, outputs: int, *, rounds_input: bool = True) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.simulated, self.rounds_input = False, rounds_input

    def deployed_weight(self) -> Tensor:
        """The weight, rounded if `simulated`."""
        return straight_through(self.weight, fp8_blocks(self.weight.detach())) if self.simulated else self.weight

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., inputs] -> [..., outputs]."""
        if self.simulated and self.rounds_input:
            x = rounded_input(x)
        return linear(x, self.deployed_weight())


def rounded_input(x: Tensor) -> Tensor:
    """E4M3 per 128 channels: what enters every FP8 and FP4 linear."""
    return straight_through(x, fp8_groups(x.detach(), 128))


class Gate(nn.Module):
    """Which experts a token goes to, and with which weights."""

    tid2eid: Tensor
    bias: Tensor

    def __init__(self, shape: Shape, *, hashed: bool) -> None:
        super().__init__()
        self.shape, self.hashed = shape, hashed
        self.weight = nn.Parameter(torch.empty(shape.experts, shape.hidden))
        if hashed:
            self.register_buffer("tid2eid", torch.zeros(shape.vocab, shape.experts_per_token, dtype=torch.int64))
        else:
            self.register_buffer("bias", torch.zeros(shape.experts))
            self.load = torch.zeros(shape.experts)  # tokens per expert in the last forward pass

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Map x [t, d], ids [t] -> weights and expert ids, both [t, k]."""
        scores = softplus(linear(x, self.weight)).sqrt()
        if self.hashed:
            chosen = self.tid2eid[ids]
        else:
            chosen = (scores + self.bias).topk(self.shape.experts_per_token, dim=-1).indices
            self.load = torch.bincount(chosen.flatten(), minlength=self.shape.experts).float()
        weights = scores.gather(1, chosen)
        return weights / (weights.sum(1, keepdim=True) + 1e-20) * self.shape.route_scale, chosen


class SharedExpert(nn.Module):
    """The expert every token goes to: SwiGLU with clamped branches."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.limit = shape.swiglu_limit
        self.w1 = Quantised(shape.hidden, shape.intermediate)
        self.w3 = Quantised(shape.hidden, shape.intermediate)
        self.w2 = Quantised(shape.intermediate, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [t, d] -> [t, d]."""
        gate, up = self.w1(x).clamp(max=self.limit), self.w3(x).clamp(-self.limit, self.limit)
        out: Tensor = self.w2(silu(gate) * up)
        return out


class MoE(nn.Module):
    """Routed experts, stacked, and the shared one."""

    def __init__(self, shape: Shape, *, hashed: bool) -> None:
        super().__init__()
        self.shape, self.simulated = shape, False
        self.gate = Gate(shape, hashed=hashed)
        self.shared_experts = SharedExpert(shape)
        self.w1 = nn.Parameter(torch.empty(shape.experts, shape.intermediate, shape.hidden))
        self.w3 = nn.Parameter(torch.empty(shape.experts, shape.intermediate, shape.hidden))
        self.w2 = nn.Parameter(torch.empty(shape.experts, shape.hidden, shape.intermediate))

    def deployed(self, W: Tensor) -> Tensor:
        """A stack of expert weights, rounded to FP4 if `simulated`."""
        return straight_through(W, fp4_groups(W.detach())) if self.simulated else W

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """Map x [t, d], ids [t] -> [t, d]. Tokens are sorted by expert: each expert is three matrix products."""
        weights, chosen = self.gate(x, ids)
        order = chosen.flatten().argsort(stable=True)
        token = order // self.shape.experts_per_token
        counts = torch.bincount(chosen.flatten(), minlength=self.shape.experts).tolist()
        inputs = (rounded_input(x) if self.simulated else x)[token].split(counts)
        scale = weights.flatten()[order].unsqueeze(1).split(counts)
        stacks = zip(self.deployed(self.w1), self.deployed(self.w3), self.deployed(self.w2), strict=True)
        limit = self.shape.swiglu_limit
        outputs = []
        for rows, weight, (w1, w3, w2) in zip(inputs, scale, stacks, strict=True):
            h = silu(linear(rows, w1).clamp(max=limit)) * linear(rows, w3).clamp(-limit, limit) * weight
            outputs.append(linear(rounded_input(h) if self.simulated else h, w2))
        out: Tensor = self.shared_experts(x).index_add(0, token, torch.cat(outputs))
        return out
