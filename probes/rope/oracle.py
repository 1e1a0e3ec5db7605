"""Rotary angles in float64 numpy from their formulas, and golden values: what the rope probe holds a run against.

Source: DeepSeek `precompute_freqs_cis` and `Attention.__init__`; YaRN, arXiv 2309.00071, section 3.2.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model.config import LayerKind, ModelConfig, Yarn
from probes.shared.narrow import F64

I64 = NDArray[np.int64]
U = 2.0**-24  # half an ulp of fp32, as a share of the number
EDGE = 8 * U  # cosine and sine of an angle in fp32, one ulp each, as an angle
TINY = 1e-30  # length of a pair below which it has no direction

POSITIONS = (0, 127, 4096, 65535, 1_000_000)
GOLDEN_DIM = 64
GOLDEN_PAIRS = (1, 16, 31)
V4_YARN = Yarn(16, 65536, 32, 1)
DEMO_YARN = Yarn(16, 4096, 32, 1)
# (theta, YaRN) -> position -> (cos, sin) of each of GOLDEN_PAIRS, with 50 digits in tests/probes/test_rope_probe.py.
# At position 0 all are (1, 0).
GOLDEN: dict[tuple[float, Yarn | None], dict[int, tuple[tuple[float, float], ...]]] = {
    (10000, None): {
        127: ((0.5497052457, 0.8353586911), (0.2962808729, 0.9551008556), (0.9998565941, 0.01693491262)),
        4096: ((0.6130082552, -0.790076502), (-0.9928927263, -0.1190127473), (0.8544991824, 0.5194527383)),
        65535: ((-0.9274996691, -0.3738239743), (-0.3220856624, 0.9467105292), (-0.7740739638, 0.6330951734)),
        1000000: ((-0.6855140741, 0.7280593754), (-0.9521553683, -0.3056143889), (0.1647894718, 0.9863287636)),
    },
    (160000, V4_YARN): {
        127: ((0.8066824459, -0.5909851365), (0.9588892761, 0.2837804718), (0.9999999974, 7.214271871e-5)),
        4096: ((-0.1998961171, 0.9798170964), (-0.9895379645, 0.144272717), (0.9999972931, 0.002326742594)),
        65535: ((-0.8200955636, 0.5722265868), (-0.6801129329, -0.7331073581), (0.9993071423, 0.0372187489)),
        1000000: ((0.613093939, -0.7900100139), (-0.8594023126, -0.5112999757), (0.8429500942, 0.5379917646)),
    },
    (160000, DEMO_YARN): {
        127: ((0.8066824459, -0.5909851365), (0.9968514583, 0.07929167733), (0.9999999974, 7.214271871e-5)),
        4096: ((-0.1998961171, 0.9798170964), (-0.8355887771, 0.5493554364), (0.9999972931, 0.002326742594)),
        65535: ((-0.8200955636, 0.5722265868), (-0.9929669154, -0.1183921661), (0.9993071423, 0.0372187489)),
        1000000: ((0.613093939, -0.7900100139), (-0.984387257, 0.1760162728), (0.8429500942, 0.5379917646)),
    },
}


@dataclass(frozen=True, slots=True)
class Table:
    """The frequencies of one layer kind, in radians per position, and how far off fp32 may put them."""

    theta: float
    yarn: Yarn | None
    freqs: F64  # [r / 2]
    slowed: F64  # [r / 2], 0: as without YaRN, 1: divided by its factor
    units: F64  # [r / 2], error of an angle in fp32, in half ulps of it

    @classmethod
    def of(cls, dim: int, theta: float, yarn: Yarn | None) -> "Table":
        """``theta^(-2i / dim)``, slowed by YaRN's ramp over the pair index."""
        exponent = np.arange(0, dim, 2) / dim
        freqs: F64 = theta**-exponent
        # In fp32: a power within one ulp (2), its reciprocal (1), the product with the position (1); the exponent is
        # exact where dim is a power of two, and its rounding moves the power by its logarithm
        units: F64 = 4 + math.log(theta) * exponent * (dim & (dim - 1) != 0)
        slowed = np.zeros(dim // 2)
        if yarn is not None:
            slowed = cls._ramp(dim, theta, yarn)
            freqs = freqs / yarn.factor * slowed + freqs * (1 - slowed)
            units = units + np.where(slowed == 0, 0, 6)  # ramp, quotient, two products, a difference and a sum
        return cls(theta, yarn, freqs, slowed, units)

    @staticmethod
    def _ramp(dim: int, theta: float, yarn: Yarn) -> F64:
        def pair_that_turns(times: float) -> float:  # so often within the original context
            return dim * math.log(yarn.original_max_position_embeddings / (times * 2 * math.pi)) / (2 * math.log(theta))

        low = max(math.floor(pair_that_turns(yarn.beta_fast)), 0)
        high = min(math.ceil(pair_that_turns(yarn.beta_slow)), dim - 1)
        ramp: F64 = np.clip((np.arange(dim // 2) - low) / (high - low or 0.001), 0, 1)
        return ramp

    @classmethod
    def of_kind(cls, config: ModelConfig, kind: LayerKind) -> "Table":
        """SWA layers: `rope_theta`, never YaRN. CSA and HCA layers: `compress_rope_theta` and the config's YaRN."""
        if kind is LayerKind.SWA:
            return cls.of(config.qk_rope_head_dim, config.rope_theta, None)
        return cls.of(config.qk_rope_head_dim, config.compress_rope_theta, config.rope_scaling)

    def angles(self, positions: I64) -> F64:
        """Radians [t, r / 2] at `positions` [t]."""
        out: F64 = positions[:, None] * self.freqs
        return out

    def allowed(self, positions: I64) -> F64:
        """How far off an angle may be in fp32, in radians, seen through its cosine and sine: [t, r / 2]."""
        out: F64 = self.units * U * self.angles(positions) + EDGE
        return out


def apart(cos: F64, sin: F64, angle: F64) -> F64:
    """Radians, at most pi, between the direction (cos, sin) and `angle`."""
    off: F64 = np.abs(np.angle((cos + 1j * sin) * np.exp(-1j * angle)))
    return off


def pairs(x: F64, dim: int) -> NDArray[np.complex128]:
    """The trailing `dim` columns of x [..., d] as neighbours (x[2i], x[2i + 1]): complex [..., dim / 2]."""
    tail = x[..., -dim:]
    return tail[..., 0::2] + 1j * tail[..., 1::2]
