"""mHC in float64 numpy from its equations, and golden values: what the mHC probe holds a run against.

Source: DeepSeek `Block.hc_pre`, `Block.hc_post`, `ParallelHead.hc_head` and `hc_split_sinkhorn`. Errors are those that
fp32 may make on the way, as absolute numbers beside each value; the rounding of a result to the activations' dtype is
added where the dtype is known.
"""

from dataclasses import dataclass

import numpy as np

from model.checkpoint.weights import Weights
from model.config import ModelConfig
from probes.shared.narrow import F64, f64

U = 2.0**-24  # half an ulp of fp32, as a share of the number
LAMBDA = 6.0  # a sum of n products rounds to within LAMBDA sqrt(n) U of the sum of their sizes (Higham and Mary 2019)

# Comb logits [j, k] whose Sinkhorn converges slowly: far from doubly stochastic, near triangular. After 20 iterations
# rows are still off 1, and every variant of the algorithm (rows first, other counts, eps elsewhere) is far away.
GOLDEN_LOGITS = ((0.5, 0.0, -0.25, 1.0), (-9.0, 0.25, 0.75, 0.0), (-11.0, -8.0, 0.0, 0.5), (-12.0, -10.0, -9.0, -0.5))
GOLDEN_EPS = 1e-6
# Iterations -> comb [j, k] row by row, with 50 digits in tests/probes/test_mhc_probe.py.
GOLDEN_COMB: dict[int, tuple[float, ...]] = {
    1: (
        *(0.999819347197, 0.357874407206, 0.128595317185, 0.193008716055),
        *(0.000108231428508, 0.641675891712, 0.488123540599, 0.0991507515478),
        *(2.72242373416e-5, 0.000280719688637, 0.383072695536, 0.271590201016),
        *(4.14702058755e-5, 0.000166781981631, 0.000207431895467, 0.436249895006),
    ),
    2: (
        *(0.999621232255, 0.289547736143, 0.0723054305919, 0.0714181539683),
        *(0.000147850372363, 0.709349637627, 0.374999433707, 0.0501282802302),
        *(6.97870762611e-5, 0.000582328105548, 0.552245653401, 0.257662455336),
        *(0.000159451330592, 0.000518939444139, 0.000448538079536, 0.620790489082),
    ),
    20: (
        *(0.971601657065, 0.067640511097, 0.00343615943097, 0.000646548610714),
        *(0.000787373487202, 0.907930587874, 0.0976424326279, 0.00248645702541),
        *(0.0023143563132, 0.00464148447792, 0.89544133816, 0.0795877354623),
        *(0.0252955672541, 0.0197864047885, 0.00347908635843, 0.917278296101),
    ),
}


@dataclass(frozen=True, slots=True)
class Mixing:
    """The parameters of one mHC as the file holds them; float64."""

    fn: F64  # [(2 + s) * s, s * hidden]; of the head [s, s * hidden]
    scale: F64  # [3]; of the head [1]
    base: F64  # [(2 + s) * s]; of the head [s]

    @classmethod
    def of(cls, weights: Weights, prefix: str) -> "Mixing":
        """Read the three tensors of `prefix`, for example "layers.0.hc_attn"."""
        return cls(*(f64(weights.vector(f"{prefix}_{part}")) for part in ("fn", "scale", "base")))

    def logits(self, streams: F64, norm_eps: float) -> tuple[F64, F64]:
        """``rms_norm(streams) @ fn^T`` of streams [t, s, hidden]: [t, rows of fn], and what fp32 may be off."""
        flat = streams.reshape(len(streams), -1)  # [t, s * hidden]
        rms = np.sqrt((flat**2).mean(1, keepdims=True) + norm_eps)
        sizes = np.abs(flat) @ np.abs(self.fn).T / rms
        return flat @ self.fn.T / rms, (LAMBDA * flat.shape[1] ** 0.5 + 4) * U * sizes


@dataclass(frozen=True, slots=True)
class Connection:
    """Weights of one sublayer for t tokens, and how far off fp32 may put each."""

    pre: F64  # [t, s]
    post: F64  # [t, s]
    comb: F64  # [t, s, s]
    pre_error: F64
    post_error: F64
    comb_error: F64


def sigmoid(x: F64) -> F64:
    """``1 / (1 + exp(-x))``."""
    out: F64 = 1 / (1 + np.exp(-x))
    return out


def sinkhorn(logits: F64, iterations: int, eps: float) -> F64:
    """Rows by softmax, plus eps, then columns; `iterations` - 1 times more rows, then columns. [..., j, k]."""
    mass = np.exp(logits - logits.max(-1, keepdims=True))
    comb: F64 = mass / mass.sum(-1, keepdims=True) + eps
    comb = comb / (comb.sum(-2, keepdims=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdims=True) + eps)
        comb = comb / (comb.sum(-2, keepdims=True) + eps)
    return comb


def sinkhorn_error(iterations: int) -> float:
    """What fp32 may be off in an entry of `sinkhorn`, as a share of it, given the logits: a few roundings per step."""
    return 8 * 2 * iterations * U


def connection(streams: F64, mixing: Mixing, config: ModelConfig) -> Connection:
    """Weights with which a sublayer reads and writes streams [t, s, hidden]."""
    s = streams.shape[1]
    mixed, error = mixing.logits(streams, config.rms_norm_eps)
    scale, base = np.repeat(mixing.scale, (s, s, s * s)), mixing.base
    logits = mixed * scale + base
    error = error * np.abs(scale) + 2 * U * (np.abs(mixed * scale) + np.abs(base))
    pre, post, comb = np.split(logits, (s, 2 * s), axis=1)
    pre_off, post_off, comb_off = np.split(error, (s, 2 * s), axis=1)
    pre, post = sigmoid(pre) + config.hc_eps, 2 * sigmoid(post)
    comb = sinkhorn(comb.reshape(-1, s, s), config.hc_sinkhorn_iters, config.hc_eps)
    # A logit that is off by e moves log softmax by up to 2e, and the scalings of its row and column by as much each
    share = 8 * comb_off.max(1)[:, None, None] + sinkhorn_error(config.hc_sinkhorn_iters)
    # The slope of a sigmoid is at most 1/4; its own arithmetic is a few roundings of a number below 1 (or 2)
    return Connection(pre, post, comb, pre_off / 4 + 4 * U, post_off / 2 + 8 * U, comb * share)


def head_read(streams: F64, mixing: Mixing, config: ModelConfig) -> tuple[F64, F64]:
    """Weights [t, s] with which the head reads streams [t, s, hidden], and what fp32 may be off."""
    mixed, error = mixing.logits(streams, config.rms_norm_eps)
    logits = mixed * mixing.scale + mixing.base
    error = error * np.abs(mixing.scale) + 2 * U * (np.abs(mixed * mixing.scale) + np.abs(mixing.base))
    return sigmoid(logits) + config.hc_eps, error / 4 + 4 * U


def read(streams: F64, pre: F64, norm: F64, norm_eps: float) -> tuple[F64, F64]:
    """A sublayer's normed input [t, hidden] and the sizes that went into each number, for its rounding.

    ``x = sum_s pre[s] stream[s]``, then RMS norm with weights `norm` [hidden].
    """
    x = np.einsum("ts,tsd->td", pre, streams)
    gain = norm / np.sqrt((x**2).mean(1, keepdims=True) + norm_eps)
    return x * gain, np.einsum("ts,tsd->td", pre, np.abs(streams)) * np.abs(gain)


def written(y: F64, streams: F64, post: F64, comb: F64) -> tuple[F64, F64]:
    """The streams [t, s, hidden] after a sublayer's output y [t, hidden], and the sizes that went into each number.

    ``new[k] = post[k] y + sum_j comb[j, k] stream[j]``.
    """
    new = post[:, :, None] * y[:, None] + np.einsum("tjk,tjd->tkd", comb, streams)
    sizes = post[:, :, None] * np.abs(y)[:, None] + np.einsum("tjk,tjd->tkd", comb, np.abs(streams))
    return new, sizes
