"""From logits to a token, on the device of the logits: greedy, temperature, top-p; and how likely tokens were."""

from dataclasses import dataclass
from itertools import accumulate
from typing import Final, NamedTuple

import torch
from torch import Tensor

SIGNIFICAND: Final = 53  # bits of a float64's: integers below 2^53 are exact in it
EXPONENT_BIAS: Final = 1023  # of a float64
LN2: Final = 0.6931471805599453
# Of 2^x, off by 2^-51 where |x| <= 1/2; by products alone, not by a power that a C library computes in its own way.
TAYLOR: Final = list(accumulate(range(1, 13), lambda term, n: term * LN2 / n, initial=1.0))


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0  # in (0, 1]
    seed: int = 0  # of the generator; greedy does not use it

    def generator(self) -> torch.Generator:
        """Return a generator on the CPU, so that a seed means the same on every device."""
        return torch.Generator().manual_seed(self.seed)


def sample(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Choose one token, on the device of the logits: the host waits once, for its id.

    Greedy takes the lowest id among equal maxima. Otherwise probabilities are ``softmax(logits / temperature)``; with
    top-p below 1 they are cut to the smallest set of most likely tokens whose mass reaches top_p (of equal ones the
    lower id first; the most likely one always stays). In order of ids, the token is the first at which the sum of
    probabilities exceeds a uniform draw.

    From the same logits a seed draws the same token on every device: masses are integers, made by operations each of
    which IEEE 754 rounds in one way, and sums of integers do not depend on their order. The likeliest token has a mass
    of 2^W, where W is 53 less the bits of the vocabulary's size: 2^36 of 129,280 tokens. A token that is less than
    2^-(W + 1) times as likely has none and is never drawn. The distribution is off by at most ``vocab / 2^(W + 1)`` in
    total variation, 1e-6 of 129,280 tokens, and by 2^-45 for the exponential.

    Parameters
    ----------
    logits
        [vocab] float32, finite, on any device.
    sampling
        Temperature and top-p.
    generator
        On the CPU. Advanced by one draw of a float64 unless greedy.

    Returns
    -------
    int
        The token id.

    """
    token = int(_chosen(logits, sampling, generator))
    assert token >= 0, "the caller checks for logits that are not finite"
    return token


def _chosen(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """`sample` without the wait: the id, [] int64 on the device of the logits; -1 where they are not finite.

    The draw goes to CUDA as an argument of a kernel, with no copy. A `where` with a number would copy that, and wait:
    so `masked_fill`.
    """
    assert logits.dtype == torch.float32, f"logits: {logits.dtype}, want float32"
    least, most = (end.double() for end in logits.aminmax())
    if sampling.temperature == 0:
        token = logits.argmax()  # torch promises the first of the largest
    else:
        draw = torch.rand((), dtype=torch.float64, generator=generator)
        masses = _masses(logits, most, sampling.temperature)
        if sampling.top_p < 1:
            masses = _nucleus(masses, logits, sampling.top_p)
        reached = masses.cumsum(0)
        # the draw is at most 1 - 2^-53, and its product with an integer below 2^53 rounds to less than that
        token = torch.searchsorted(reached, (reached[-1].double() * draw).long(), right=True)
    return token.masked_fill(~torch.isfinite(most - least), -1)


def _masses(logits: Tensor, most: Tensor, temperature: float) -> Tensor:
    """``exp((logits - most) / temperature)`` in units of 2^-W, see `sample`: [vocab] int64; `most` is [] float64."""
    unit = SIGNIFICAND - len(logits).bit_length()  # W: the sum is below 2^53
    # by a tensor: where the divisor is a number, CUDA multiplies by its reciprocal
    x = logits.double().sub_(most).div_(most.new_full((), temperature * LN2))
    return _exp2(x.clamp_(min=-unit - 2), unit).round_().long()  # below -W - 1 it rounds to 0


def _exp2(x: Tensor, scale: int) -> Tensor:
    """``2^(x + scale)`` within 2^-50 of itself; x [n] float64, -500 to 0, is overwritten.

    No device's exponential, and each operation a kernel of its own, so that no compiler makes one rounding of two.
    """
    whole = x.round()
    rest = x.sub_(whole)  # exact, in [-1/2, 1/2]
    power = rest * TAYLOR[-1]
    for term in TAYLOR[-2:0:-1]:
        power.add_(term).mul_(rest)
    power.add_(TAYLOR[0])
    exponent = whole.long().add_(EXPONENT_BIAS + scale)
    return power.mul_(exponent.bitwise_left_shift_(SIGNIFICAND - 1).view(torch.float64))


def _nucleus(masses: Tensor, logits: Tensor, top_p: float) -> Tensor:
    """The masses [vocab] int64, with 0 for tokens outside of the nucleus of `top_p`."""
    order = _descending(logits).sort(stable=True).indices
    ordered = masses.gather(0, order)
    reached = ordered.cumsum(0)
    needed = (reached[-1].double() * top_p).ceil().long()
    return masses.scatter(0, order, ordered.masked_fill(reached - ordered >= needed, 0))


def _descending(logits: Tensor) -> Tensor:
    """Integers that ascend as float32 numbers descend, [vocab] int32: a CPU sorts integers ten times faster.

    The bits of numbers >= 0 ascend as the numbers do; so do those of negative ones with all but the sign flipped.
    """
    bits = (logits + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    return ~(bits ^ (bits >> 31 & 0x7FFFFFFF))


class Likelihood(NamedTuple):
    """How likely a chosen token was, and what else could have come."""

    token: int
    logprob: float  # natural logarithm of its probability
    top: list[tuple[int, float]]  # the likeliest tokens and theirs, best first, of equal ones the lower id


def likelihood(logits: Tensor, token: int, count: int) -> Likelihood:
    """Return ``log_softmax(logits)``, in float64, of a token and of the `count` likeliest.

    It is the model's own distribution, before temperature and top-p: what they leave a token is not in it.

    Parameters
    ----------
    logits
        [vocab] float32.
    token
        The one that was chosen.
    count
        How many others to tell, 0 or more; at most the vocabulary.

    """
    logprobs = logits.cpu().double().log_softmax(0)
    if not count:
        return Likelihood(token, float(logprobs[token]), [])
    least = logprobs.topk(count).values[-1]
    (ids,) = (logprobs >= least).nonzero(as_tuple=True)  # ascending, and more than `count` where several are the last
    order = logprobs[ids].sort(descending=True, stable=True).indices[:count]
    best = [(int(ids[at]), float(logprobs[ids[at]])) for at in order]
    return Likelihood(token, float(logprobs[token]), best)
