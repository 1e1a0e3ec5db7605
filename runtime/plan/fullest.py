"""How many of their experts tokens have on the fullest rank, by expectation.

A token's k experts are drawn evenly, none twice. Real ones are not: their gate's bias balances them on the whole, and
those of one prompt less.
"""

from functools import cache
from itertools import accumulate
from math import comb, erf, sqrt
from typing import Final

from fathom.model.config import ModelConfig
from fathom.model.ranks.ranks import AxisShard

STEP: Final = 1e-3  # of an integral, in standard deviations
TAIL: Final = 8.0  # standard deviations beyond which nothing lies


def pairs(c: ModelConfig, experts: AxisShard, tokens: int) -> float:
    """Pairs of a token and one of its experts that the fullest rank computes; undivided `experts`: all of them.

    Exact for a token. For many, their mean and the largest of as many normal deviations, adding up to nothing, as there
    are ranks.
    """
    k, total = c.num_experts_per_tok, c.n_routed_experts
    if not experts.split:
        return float(tokens * k)
    ranks = total // experts.size
    if tokens == 1:
        return _of_a_token(k, total, ranks)
    mean = tokens * k / ranks
    deviation = sqrt(mean * (total - k) / (total - 1))
    return min(mean + deviation * _largest(ranks), float(tokens * min(k, experts.size)))


def _of_a_token(k: int, total: int, ranks: int) -> float:
    """Mean of the largest of the ranks' counts of k experts: a sum, over each number, of the chance to be beyond it."""
    each, all_ = total // ranks, comb(total, k)
    found = 0.0
    for most in range(k):  # choices of which no rank has more: coefficients of a power of a polynomial
        ways = [1] + [0] * k
        for _ in range(ranks):
            ways = [sum(ways[at - n] * comb(each, n) for n in range(min(at, most) + 1)) for at in range(k + 1)]
        found += 1 - ways[k] / all_
    return found


@cache
def _largest(n: int) -> float:
    """Mean of the largest of n normal numbers; the same when their mean is subtracted."""
    at = accumulate([STEP] * int(2 * TAIL / STEP), initial=-TAIL)
    below = [((1 + erf(x / sqrt(2))) / 2) ** n for x in at]
    return TAIL - STEP * (sum(below) - (below[0] + below[-1]) / 2)
