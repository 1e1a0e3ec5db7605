"""`deployed` numerics are DeepSeek's: each op within one rounding, free runs within their roundings.

Two correct BF16 runs of one model drift apart. They add in different orders, so a sum differs by some 2^-24, sometimes
falls on the other side of a BF16 boundary (2^-7), then of an E4M3 one (2^-3), then another entry or expert is chosen.
No useful bound on logits can be derived from the formats. Therefore the evidence comes in two halves that can be sharp:

1. Wiring, in `test_deployed_wiring`. On `EXACT`, ops in float64 that round once, the model must equal the independent
   forward of `tests.deepseek_forward` in every bit of every tensor: which op gets what, in which dtype, rounded where.
2. Ops, here. On the very arguments of such a run, REFERENCE and CPU must agree with `EXACT` within one BF16 ulp.

Free runs are then measured against a yardstick that the checkpoint itself gives, see `check_close`.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fathom.kernels.ops import COMPOSED, CPU, REFERENCE, Ops
from tests.deepseek_arithmetic import DEEPSEEK, FP32, Choices, Simulation, rms_norm_bf16
from tests.deployed_cases import LENGTH, Case
from tests.exact_ops import Difference, attend, first_difference, shadowed

pytestmark = pytest.mark.usefixtures("one_thread")

OTHERS = {"rotate_halves", "attend_grouped", "attend_codes", "attend_banks"}  # no V4 run has them
OTHERS |= {"name", *COMPOSED, "compress_at_once", "experts"}  # made of others, or of captured calls
OTHERS |= {"sum_slots", "pack_fp8", "unpack_fp8"}  # what ranks exchange; the first adds up in the given order
OTHERS |= {"open_blocks", "select_open", "simulate_entries"}  # of V4.1
OTHERS |= {"store"}  # it writes, and returns nothing: `test_compress` compares what


# --- ops ---


NOISE = 2**-16


def allowed(exact: Tensor) -> Tensor:
    """How far fp32 sums may lead from a correctly rounded result.

    An op that computes in fp32 is off by at most some hundred roundings of 2^-24 relative to the largest number of its
    row: `NOISE`, 2^-16 of it. Rounded to BF16, it then ends at the same number or at a neighbour, one ulp away.
    Integers have no excuse.
    """
    if not exact.is_floating_point():
        return torch.zeros_like(exact)
    size = exact.abs().double()
    noise = NOISE * size.amax(-1, keepdim=True)
    ulp = torch.ldexp(torch.ones_like(size), size.frexp().exponent - 8)  # of 8 significant bits
    return torch.where(size > 0, ulp, 0) + noise if exact.dtype == torch.bfloat16 else noise


# A number changes when a BF16 boundary, of which there is one in every 2^-8 of its size or less, lies within the noise.
SHARE = 2 * NOISE / 2**-8
BIT_EQUAL = ("simulate_fp8", "simulate_fp4", "select")  # grids and indices


@pytest.fixture(scope="module")
def shadow(case, exact) -> Callable[[Ops], dict[str, Difference]]:
    """Differences of an op set from `EXACT`, by op, on the arguments of the exact run."""

    @functools.cache
    def run(ops: Ops) -> dict[str, Difference]:
        differences: dict[str, Difference] = {}
        logits = case("flash").run(case("flash").model(shadowed(ops, allowed, differences)))
        assert torch.equal(logits, exact("flash")[0]), "the shadowed run must have been the exact one"
        return differences

    return run


@pytest.mark.parametrize("ops", [REFERENCE, CPU], ids=lambda ops: ops.name)
def test_every_op_is_within_one_rounding_on_the_arguments_of_a_run(shadow, ops):
    differences = shadow(ops)
    assert differences.keys() == set(ops._asdict()) - OTHERS, "an op was not used"
    for name, difference in differences.items():
        assert difference.largest <= 1, f"{name}: {difference}"
        assert difference.changed <= SHARE * difference.numbers, f"{name}: {difference}"
        assert difference.changed == 0 or name not in BIT_EQUAL, f"{name}: {difference}"


def test_one_rounding_too_many_would_be_seen(case):
    """Probabilities in BF16, or a norm of BF16 steps: within one ulp mostly, but in far too many places."""
    rounded = Choices(replace(FP32, probabilities=True))
    ops = REFERENCE._replace(
        attend=functools.partial(attend, choices=rounded),
        rms_norm=lambda x, w, eps: rms_norm_bf16(x, eps) if w is None else REFERENCE.rms_norm(x, w, eps),
    )
    differences: dict[str, Difference] = {}
    model = case("uneven")
    model.run(model.model(shadowed(ops, allowed, differences)))
    for name in ("attend", "rms_norm"):
        assert differences[name].changed > 4 * SHARE * differences[name].numbers, f"{name}: {differences[name]}"


# --- free runs ---


class Distance(NamedTuple):
    """Of two sets of logits [t, vocab]."""

    relative: float  # Frobenius norm of the difference over that of the second
    median: float  # over positions, of the same ratio: without the few where another expert or entry is chosen
    argmax: float  # share of positions with the same one

    def __str__(self) -> str:
        return f"{self.relative:.4f} | {self.median:.4f} | {self.argmax:.3f}"


def distance(found: Tensor, exact: Tensor) -> Distance:
    same = (found.argmax(1) == exact.argmax(1)).float().mean()
    each = (found - exact).norm(dim=1) / exact.norm(dim=1)
    return Distance(relative(found, exact), float(each.median()), float(same))


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def free_runs(model: Case, exact: Tensor) -> dict[str, Tensor]:
    """Logits of one model from every implementation and arithmetic; "exact" is what they are measured against."""
    own, theirs = Choices(FP32, wide=torch.float32), Choices(DEEPSEEK, wide=torch.float32)
    return {
        "exact": exact,
        "reference": model.run(model.model(REFERENCE)),
        "cpu": model.run(model.model(CPU)),
        "oracle in fp32": model.oracle(own)[0],
        "DeepSeek in fp32": model.oracle(theirs)[0],
        "plain bf16": model.run(model.model(CPU, "plain")),
        "plain fp32": model.run(model.model(CPU, "plain", "fp32")),
    }


@pytest.fixture(scope="module")
def free(case, exact) -> dict[str, Tensor]:
    return free_runs(case("csa first"), exact("csa first")[0])


def check_close(found: Tensor, exact: Tensor, unrounded: Tensor) -> None:
    """The bound of free runs, from a yardstick that the checkpoint gives: what all its roundings together do.

    `unrounded` is a run without simulations in fp32. Roundings that have nothing to do with each other are sqrt(2)
    times as far from each other as each is from no rounding. 512 random logits: their two largest are on average
    1 / 3.5 of a standard deviation apart, so noise of a share r of it exchanges them at some 2r of all positions, and
    more distant rivals at most double that.
    """
    found_distance, yardstick = distance(found, exact), distance(unrounded, exact)
    assert found_distance.relative < 2**0.5 * yardstick.relative, (found_distance, yardstick)
    assert found_distance.argmax > 1 - 4 * found_distance.relative, found_distance


@pytest.mark.parametrize(
    ("one", "other"),
    [("reference", "exact"), ("cpu", "exact"), ("cpu", "reference"), ("oracle in fp32", "exact")],
)
def test_free_runs_differ_by_less_than_their_rounding(free, one, other):
    check_close(free[one], free[other], free["plain fp32"])
    assert not torch.equal(free[one], free[other]), "chosen to be different computations"


# --- where DeepSeek rounds to BF16 and this runtime does not ---

# Where the first changed tensor must be when one simulation is missing. "csa first" has an indexer in layer 0.
MISSING = {
    "linear_inputs": "layers.0.attn.q",
    "kv": "layers.0.attn.kv",
    "index_queries": "layers.0.attn.selected",
    "index_keys": "layers.0.attn.indexer.keys",
    "hadamard": "layers.0.attn.indexer.keys",
}
SELECTED = "layers.0.attn.selected"

# The tensor of layer 0 in which each choice shows first, and a bound on its relative change there.
#   q_norm: at most eight roundings of 2^-8 lie between the two
#   probabilities: each is off by 2^-8; the errors of many keys add up as the values themselves do; two more in `out`
# Selections are counted: the share of entries that change. Eight of 75 scores are taken, so the next one is some 7 % of
# a standard deviation away; noise of one to three roundings of 2^-8 in a score of that size exchanges the two in up to
# one of three positions, which is 4 % of the entries.
LOCAL = {
    "q_norm": ("layers.0.attn.q", 2**-5),
    "index_weights": (SELECTED, 0.04),
    "index_scores": (SELECTED, 0.04),
    "probabilities": ("layers.0.attn.out", 2**-6),
}


@pytest.fixture(scope="module")
def chosen(case) -> Callable[[Choices], tuple[Tensor, dict[str, Tensor]]]:
    return functools.cache(case("csa first").oracle)


def local_change(name: str, found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Relative change of a tensor, or the share of selected entries that are not selected any more."""
    if not name.endswith("selected"):
        return relative(found[name], exact[name])
    kept = (found[name][:, :, None] == exact[name][:, None]).any(2) | (found[name] < 0)
    return float(1 - kept.float().mean())


@pytest.mark.parametrize("part", MISSING)
def test_a_missing_simulation_would_be_seen(chosen, exact, part):
    """The bound of the tests above is equality; each simulation moves the logits of most positions beyond it."""
    logits, trace = exact("csa first")
    without = Choices(FP32, replace(Simulation(), **{part: False}))
    moved_logits, moved_trace = chosen(without)
    assert first_difference(trace, moved_trace) == MISSING[part]
    changed = (moved_logits != logits).any(1).float().mean()
    # the indexer has no choice up to position 32, where top-k is still all entries; the others act from the first token
    assert changed > (1 - 36 / LENGTH if part.startswith(("index", "hadamard")) else 0.99) * 0.9


@pytest.mark.parametrize("choice", LOCAL)
def test_what_a_deliberate_difference_changes(chosen, exact, free, choice):
    logits, trace = chosen(Choices(replace(FP32, **{choice: True})))
    name, bound = LOCAL[choice]
    assert first_difference(exact("csa first")[1], trace) == name
    assert 0 < local_change(name, trace, exact("csa first")[1]) < bound
    check_close(logits, free["exact"], free["plain fp32"])


@pytest.mark.parametrize("ours", ["reference", "cpu"])
def test_distance_from_deepseek_with_all_its_roundings(free, ours):
    check_close(free[ours], free["DeepSeek in fp32"], free["plain fp32"])


def test_report(case, free, chosen, exact, shadow):
    """The tables of audits/deployed-numerics.md; run with -s."""
    print("\n| op | numbers | changed by reference | changed by blocked |\n|---|---|---|---|")
    for name, one in shadow(REFERENCE).items():
        if one.numbers:
            print(f"| {name} | {one.numbers} | {one.changed} | {shadow(CPU)[name].changed} |")
    header = "| logits of | against | relative distance | median position | same argmax |\n|---|---|---|---|---|"
    pairs = [(name, "exact") for name in free if name != "exact"]
    pairs += [("cpu", "reference"), ("reference", "DeepSeek in fp32"), ("cpu", "DeepSeek in fp32")]
    for title, runs in (("random", free), ("demo", free_runs(case("demo"), exact("demo")[0]))):
        print(f"\n{title}\n\n{header}")
        for one, other in pairs:
            print(f"| {one} | {other} | {distance(runs[one], runs[other])} |")
    base, trace = exact("csa first")
    columns = ("changed in the oracle", "looked at", "change there", "relative distance", "median position", "argmax")
    print(f"\n| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    changes = {f"{name} in BF16": (Choices(replace(FP32, **{name: True})), LOCAL[name][0]) for name in LOCAL}
    changes["all four in BF16"] = (Choices(DEEPSEEK), SELECTED)
    for name, place in MISSING.items():
        counted = SELECTED if "indexer" in place else place
        changes[f"no {name}"] = (Choices(FP32, replace(Simulation(), **{name: False})), counted)
    for name, (choices, place) in changes.items():
        logits, changed = chosen(choices)
        print(f"| {name} | {place} | {local_change(place, changed, trace):.4f} | {distance(logits, base)} |")
    assert 2**0.5 * distance(free["plain fp32"], base).relative < 0.5, "too coarse a yardstick to say anything"
