"""Layers of the V4 training network, with the deployed model's rounding of weights and inputs where it is switched on.

Rounding is straight-through: the forward pass sees what the deployed model sees, the gradient does not notice.

Hyper-connections are laid out for speed: twenty Sinkhorn iterations over 4 x 4 matrices are 39 normalisations. With the
token axis last each of them is a few vector instructions in place, and the backward pass walks back from the result
with their sums alone.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from fathom.kernels.formats.groups import FP8_BLOCK, LINEAR_GROUP
from fathom.kernels.formats.reference import decode
from fathom.kernels.formats.stored import Fp8
from fathom.kernels.gate.reference import route, route_weights
from fathom.kernels.norm.reference import rms_norm
from fathom.kernels.quantise.reference import E4M3_MAX, power_of_two_scale, simulate_fp4, simulate_fp8
from fathom.kernels.swiglu.reference import swiglu
from fathom.model.config import ModelConfig


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, _x: Tensor, rounded: Tensor) -> Tensor:
        return rounded

    @staticmethod
    def backward(_ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    """`rounded` forwards, the gradient of `x` backwards."""
    out: Tensor = _StraightThrough.apply(x, rounded.detach())  # type: ignore[no-untyped-call]
    return out


def rounded_input(x: Tensor) -> Tensor:
    """E4M3 per 128 channels: what enters every FP8 and FP4 linear."""
    return straight_through(x, simulate_fp8(x.detach(), LINEAR_GROUP))


def fp8_blocks(W: Tensor) -> Fp8:
    """W [rows, columns] as E4M3 with an E8M0 scale for each block of 128 x 128; whole blocks only."""
    rows, columns = W.shape
    assert rows % FP8_BLOCK == 0, f"{rows} rows"
    assert columns % FP8_BLOCK == 0, f"{columns} columns"
    blocks = W.view(rows // FP8_BLOCK, FP8_BLOCK, columns // FP8_BLOCK, FP8_BLOCK)
    scale = power_of_two_scale(blocks.abs().amax((1, 3), keepdim=True).clamp(min=1e-4), E4M3_MAX)
    values = (blocks / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return Fp8(values.view(rows, columns), scale[:, 0, :, 0].to(torch.float8_e8m0fnu))


class Norm(nn.Module):
    """RMSNorm over the last axis, in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as x."""
        return rms_norm(x, self.weight, self.eps)


class Quantised(nn.Linear):
    """A linear whose weight ships as FP8 blocks; `rounds_input` as its input does in DeepSeek's kernels."""

    def __init__(self, inputs: int, outputs: int, *, rounds_input: bool = True) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.simulated, self.rounds_input = False, rounds_input

    def deployed_weight(self) -> Tensor:
        """The weight, rounded if `simulated`."""
        return (
            straight_through(self.weight, decode(fp8_blocks(self.weight.detach()))) if self.simulated else self.weight
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., inputs] -> [..., outputs]."""
        return linear(rounded_input(x) if self.simulated and self.rounds_input else x, self.deployed_weight())


class Gate(nn.Module):
    """Which experts a token goes to, and with which weights."""

    tid2eid: Tensor
    bias: Tensor

    def __init__(self, config: ModelConfig, *, hashed: bool) -> None:
        super().__init__()
        self.config, self.hashed = config, hashed
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        if hashed:
            table = torch.zeros(config.vocab_size, config.num_experts_per_tok, dtype=torch.int64)
            self.register_buffer("tid2eid", table)
        else:
            self.register_buffer("bias", torch.zeros(config.n_routed_experts))
            self.load = torch.zeros(config.n_routed_experts)  # tokens per expert in the last forward pass

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Map x [t, d], ids [t] -> expert ids and weights, both [t, k]."""
        logits, config = linear(x, self.weight), self.config
        if self.hashed:
            chosen = self.tid2eid[ids]
            return chosen, route_weights(logits, chosen, config.routed_scaling_factor)
        chosen, weights = route(logits, self.bias, config.num_experts_per_tok, config.routed_scaling_factor)
        self.load = torch.bincount(chosen.flatten(), minlength=config.n_routed_experts).float()
        return chosen, weights


class SharedExpert(nn.Module):
    """The expert every token goes to: SwiGLU with clamped branches."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.limit = config.swiglu_limit
        self.w1 = Quantised(config.hidden_size, config.moe_intermediate_size)
        self.w3 = Quantised(config.hidden_size, config.moe_intermediate_size)
        self.w2 = Quantised(config.moe_intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [t, d] -> [t, d]."""
        out: Tensor = self.w2(swiglu(self.w1(x), self.w3(x), self.limit, None))
        return out


class MoE(nn.Module):
    """Routed experts, stacked, and the shared one."""

    def __init__(self, config: ModelConfig, *, hashed: bool) -> None:
        super().__init__()
        self.config, self.simulated = config, False
        self.gate, self.shared_experts = Gate(config, hashed=hashed), SharedExpert(config)
        experts, inner, hidden = config.n_routed_experts, config.moe_intermediate_size, config.hidden_size
        self.w1 = nn.Parameter(torch.empty(experts, inner, hidden))
        self.w3 = nn.Parameter(torch.empty(experts, inner, hidden))
        self.w2 = nn.Parameter(torch.empty(experts, hidden, inner))

    def deployed(self, W: Tensor) -> Tensor:
        """A stack of expert weights, rounded to FP4 if `simulated`."""
        return straight_through(W, simulate_fp4(W.detach())) if self.simulated else W

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """Map x [t, d], ids [t] -> [t, d]. Tokens are sorted by expert: each expert is three matrix products."""
        chosen, weights = self.gate(x, ids)
        order = chosen.flatten().argsort(stable=True)
        token = order // self.config.num_experts_per_tok
        counts = torch.bincount(chosen.flatten(), minlength=self.config.n_routed_experts).tolist()
        inputs = (rounded_input(x) if self.simulated else x)[token].split(counts)
        by_expert = weights.flatten()[order].split(counts)
        stacks = zip(self.deployed(self.w1), self.deployed(self.w3), self.deployed(self.w2), strict=True)
        outputs = []
        for rows, weight, (w1, w3, w2) in zip(inputs, by_expert, stacks, strict=True):
            h = swiglu(linear(rows, w1), linear(rows, w3), self.config.swiglu_limit, weight)
            outputs.append(linear(rounded_input(h) if self.simulated else h, w2))
        out: Tensor = self.shared_experts(x).index_add(0, token, torch.cat(outputs))
        return out


class _Sinkhorn(torch.autograd.Function):
    """M [4, 4, tokens] -> columns and rows normalised in turn, columns first and last."""

    @staticmethod
    def forward(ctx: Any, M: Tensor, iterations: int, eps: float) -> Tensor:
        M, totals = M.clone(), []
        for k in range(2 * iterations - 1):
            totals.append(M.sum(k % 2, keepdim=True).add_(eps))
            M.div_(totals[-1])
        ctx.save_for_backward(M, *totals)
        return M

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        M, totals, g = ctx.saved_tensors[0].clone(), ctx.saved_tensors[1:], grads[0].clone()
        for k in reversed(range(len(totals))):
            # y = x / sum(x):  dx = (dy - sum(dy * y)) / sum(x), and x = y * sum(x) needs no memory of its own
            g.sub_((g * M).sum(k % 2, keepdim=True)).div_(totals[k])
            M.mul_(totals[k])
        return g, None, None


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Map logits [tokens, 4, 4] -> doubly stochastic [tokens, 4, 4]; rows are softmaxed first."""
    M = logits.permute(1, 2, 0).contiguous().softmax(1) + eps
    out: Tensor = _Sinkhorn.apply(M, iterations, eps)  # type: ignore[no-untyped-call]
    return out.permute(2, 0, 1).contiguous()  # batched products want it so


class Mixes(nn.Module):
    """The projection of the RMS-normalised flat streams [tokens, streams, d] that both sites below weigh by."""

    def __init__(self, config: ModelConfig, outputs: int, scales: int) -> None:
        super().__init__()
        self.config = config
        self.fn = nn.Parameter(torch.empty(outputs, config.hc_mult * config.hidden_size))
        self.base = nn.Parameter(torch.empty(outputs))
        self.scale = nn.Parameter(torch.empty(scales))

    def mixes(self, X: Tensor) -> Tensor:
        """[tokens, outputs]."""
        flat = X.flatten(1)
        return (flat @ self.fn.T) * torch.rsqrt(flat.square().mean(1, keepdim=True) + self.config.rms_norm_eps)


class HyperConnection(Mixes):
    """One site: what enters the sublayer, and how its output and the streams become the new streams."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, (2 + config.hc_mult) * config.hc_mult, 3)

    def forward(self, X: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """X [tokens, streams, d] -> input of the sublayer [tokens, d], post [tokens, streams], comb [tokens, s, s]."""
        n, s, mixes = self.config.hc_mult, self.scale, self.mixes(X)
        pre_b, post_b, comb_b = self.base.split([n, n, n * n])
        pre = torch.sigmoid(mixes[:, :n] * s[0] + pre_b) + self.config.hc_eps
        post = 2 * torch.sigmoid(mixes[:, n : 2 * n] * s[1] + post_b)
        logits = (mixes[:, 2 * n :] * s[2] + comb_b).unflatten(1, (n, n))
        comb = sinkhorn(logits, self.config.hc_sinkhorn_iters, self.config.hc_eps)
        return torch.bmm(pre.unsqueeze(1), X).squeeze(1), post, comb


def merge(X: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """New streams: comb transposed times the old ones, plus `post` of the sublayer's output y [tokens, d]."""
    return torch.bmm(comb.transpose(1, 2), X) + post.unsqueeze(2) * y.unsqueeze(1)


class HyperHead(Mixes):
    """The streams collapsed into one before the last norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, config.hc_mult, 1)

    def forward(self, X: Tensor) -> Tensor:
        """X [tokens, streams, d] -> [tokens, d]."""
        pre = torch.sigmoid(self.mixes(X) * self.scale + self.base) + self.config.hc_eps
        return torch.bmm(pre.unsqueeze(1), X).squeeze(1)
