"""Choosing tokens: greedy ties, temperature, top-p, seeds, and that no device computes another token."""

import math
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fathom.probes.shared.alive import peak_alive
from fathom.runtime import sampling as parts
from fathom.runtime.plan.rehearsal import HEAD_ROWS
from fathom.runtime.sampling import Sampling, likelihood, sample

LOGITS = torch.tensor([0.0, 2.0, 1.0, 2.0, -1.0])
V4 = 129_280  # tokens of DeepSeek-V4's vocabulary
LAST = 1 - 2**-53  # the largest draw
HUGE = torch.finfo(torch.float32).max


def normal(tokens: int, seed: int = 0) -> torch.Tensor:
    return 4 * torch.randn(tokens, generator=torch.Generator().manual_seed(seed))


def masses(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    return parts._masses(logits, logits.max().double(), temperature)


def resolution(tokens: int) -> float:
    """How far the distribution may be off: masses are integers, and the exponential is off by 2^-45."""
    return tokens / 2 ** (54 - tokens.bit_length()) + 2**-45


@pytest.fixture
def drawn(monkeypatch):
    """What is sampled with a given draw."""

    def token(logits: torch.Tensor, sampling: Sampling, draw: float) -> int:
        monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.tensor(draw, dtype=torch.float64))
        return sample(logits, sampling, torch.Generator())

    return token


def draws(sampling: Sampling, count: int) -> torch.Tensor:
    generator = sampling.generator()
    tokens = torch.tensor([sample(LOGITS, sampling, generator) for _ in range(count)])
    return torch.bincount(tokens, minlength=len(LOGITS)).double() / count


def test_greedy_takes_the_lowest_id_of_equal_maxima():
    assert sample(LOGITS, Sampling(), torch.Generator()) == 1
    for zeros in ([-0.0, 0.0], [0.0, -0.0]):
        assert sample(torch.tensor([-1.0, *zeros]), Sampling(), torch.Generator()) == 1
    logits = normal(V4)
    logits[[70_000, 500, 129_279]] = 99.0
    assert sample(logits, Sampling(), torch.Generator()) == 500


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_frequencies_follow_the_softmax(temperature):
    expected = (LOGITS.double() / temperature).softmax(0)
    # 4 standard deviations of a frequency over n draws: sqrt(p (1 - p) / n) <= 0.5 / sqrt(n)
    assert (draws(Sampling(temperature, seed=1), 4000) - expected).abs().max() < 4 * 0.5 / 4000**0.5


def test_top_p_keeps_the_smallest_sufficient_set():
    p = LOGITS.double().softmax(0)  # descending: tokens 1 and 3 (equal), 2, 0, 4
    kept = draws(Sampling(1.0, top_p=float(p[1] + p[3]) + 1e-6, seed=2), 3000) > 0
    assert kept.tolist() == [False, True, True, True, False], "the set must reach top_p, so the third token stays"
    kept = draws(Sampling(1.0, top_p=float(p[1] + p[3]) - 1e-6, seed=3), 3000) > 0
    assert kept.tolist() == [False, True, False, True, False]
    assert draws(Sampling(1.0, top_p=1e-9, seed=4), 50)[1] == 1, "the most likely token, of equal ones the lower id"


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-30, 0.004])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_the_smallest_temperatures_leave_equal_maxima_alone(temperature, top_p):
    assert draws(Sampling(temperature, top_p, seed=1), 50)[[0, 2, 4]].sum() == 0
    assert masses(LOGITS, temperature).tolist() == [0, 2**50, 0, 2**50, 0]


@pytest.mark.parametrize("temperature", [1e60, sys.float_info.max])
def test_the_largest_temperatures_make_all_tokens_equal(temperature):
    assert masses(torch.tensor([-HUGE, 0.0, HUGE]), temperature).tolist() == [2**51] * 3


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0), Sampling(1.0, 0.5)])
def test_a_vocabulary_of_one_token(sampling):
    assert sample(torch.tensor([-3.0]), sampling, sampling.generator()) == 0


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0), Sampling(1.0, 0.5)])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("count", [1, 5])
def test_logits_that_are_not_finite_are_refused(sampling, value, count):
    with pytest.raises(AssertionError, match="the caller checks for logits that are not finite"):
        sample(LOGITS.masked_fill(torch.arange(5) < count, value), sampling, sampling.generator())


# --- the distribution

ROWS = {
    "five": LOGITS,
    "V4": normal(V4),
    "V4, nearly flat": normal(V4) / 100,
    "V4, a tail too light to draw": torch.cat([torch.zeros(1), torch.full((V4 - 1,), -25.7)]),
    "wide": torch.tensor([-HUGE, 0.0, -1e-45, HUGE, HUGE / 2, 1e30]),
    "one": torch.tensor([7.0]),
}


@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0, 1e37])
@pytest.mark.parametrize("row", ROWS)
def test_masses_are_those_of_the_softmax(row, temperature):
    logits, found = ROWS[row], masses(ROWS[row], temperature)
    assert 0 < int(found.sum()) < 2**53
    expected = ((logits.double() - logits.max().double()) / temperature).softmax(0)
    off = (found.double() / found.sum().double() - expected).abs().sum() / 2
    assert off <= resolution(len(logits))


def test_a_light_tail_is_lost_as_the_docstring_says():
    found, expected = masses(ROWS["V4, a tail too light to draw"], 1.0), 129_279 * math.exp(-25.7)
    assert found[1:].sum() == 0
    assert 0.9 * resolution(V4) < expected < resolution(V4), "nearly the most that can be lost"


@pytest.mark.parametrize("top_p", [1.0, 0.7])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 20.0])
def test_equidistant_draws_hit_each_token_as_often_as_its_mass_says(drawn, temperature, top_p):
    """Without chance: a token has the draws of one interval, so their number is off by less than one."""
    logits, count = normal(40), 4096
    order = logits.sort(descending=True)
    expected = (logits.double() / temperature).softmax(0)
    before = expected[order.indices].cumsum(0) - expected[order.indices]
    expected[order.indices[before >= top_p]] = 0
    sampling = Sampling(temperature, top_p)
    tokens = torch.tensor([drawn(logits, sampling, (n + 0.5) / count) for n in range(count)])
    assert torch.equal(tokens, tokens.sort().values), "ids ascend as draws do"
    found = torch.bincount(tokens, minlength=len(logits))
    assert (found - count * expected / expected.sum()).abs().max() < 1 + 1e-6


@pytest.mark.parametrize("top_p", [1.0, 0.999])
def test_the_smallest_and_the_largest_draw_hit_tokens_that_have_a_mass(drawn, top_p):
    logits = torch.tensor([-99.0, 0.5, 1.0, 0.0, -99.0])
    assert [drawn(logits, Sampling(1.0, top_p), draw) for draw in (0.0, LAST)] == [1, 3]
    flat = torch.zeros(V4)
    assert [drawn(flat, Sampling(1.0, 0.5), draw) for draw in (0.0, LAST)] == [0, V4 // 2 - 1]
    assert [drawn(flat, Sampling(1.0), draw) for draw in (0.0, LAST)] == [0, V4 - 1]


@pytest.mark.parametrize("top_p", [1e-300, 0.1, 0.25, 0.5, 0.5 + 2**-40, 0.9, 0.999999, LAST])
@pytest.mark.parametrize("temperature", [0.1, 1.0, 50.0])
def test_the_nucleus_is_that_of_integers_in_python(temperature, top_p):
    for seed in range(20):
        logits = normal(60, seed).round()  # with ties
        logits[logits == 0] *= torch.tensor([1.0, -1.0]).repeat(30)[logits == 0]  # of both signs
        whole = masses(logits, temperature)
        needed, kept, reached = math.ceil(int(whole.sum()) * top_p), [0] * 60, 0
        for token in sorted(range(60), key=lambda token: (-float(logits[token]), token)):
            if reached < needed:
                kept[token] = int(whole[token])
                reached += kept[token]
        assert kept[int(logits.argmax())] > 0
        assert parts._nucleus(whole, logits, top_p).tolist() == kept


def test_a_tie_at_the_border_goes_to_the_lower_id():
    flat, order = torch.zeros(8), torch.tensor([0.0, 1.0, -0.0, 0.0, -0.0, 1.0])
    mass = masses(flat, 1.0)
    for top_p, count in ((1e-9, 1), (0.125, 1), (0.5 - 2**-50, 4), (0.5, 4), (0.5 + 2**-50, 5), (LAST, 8)):
        kept = parts._nucleus(mass, flat, top_p) > 0
        assert kept.tolist() == [True] * count + [False] * (8 - count)
    whole = 2 * math.e + 4
    for more in range(5):
        kept = parts._nucleus(masses(order, 1.0), order, (2 * math.e + more - 0.5) / whole) > 0
        assert set(kept.nonzero().flatten().tolist()) == {1, 5, *(0, 2, 3, 4)[:more]}


def test_integers_ascend_as_numbers_descend():
    numbers = torch.tensor([HUGE, 2.0, 1.0, 1e-38, 1e-45, 0.0, -1e-45, -1e-38, -1.0, -2.0, -HUGE])
    assert (parts._descending(numbers).diff() > 0).all()
    assert parts._descending(torch.tensor([0.0, -0.0])).diff() == 0


# --- the exponential


@pytest.mark.parametrize("scale", [0, 36, 52])
def test_the_exponential_is_right_over_its_range(scale):
    generator = torch.Generator().manual_seed(1)
    drawn, halves = -54 * torch.rand(20_000, dtype=torch.float64, generator=generator), torch.arange(-1000, 1) / 2.0
    x = torch.cat([drawn, halves.double()])
    wanted = torch.tensor([math.exp2(value) for value in x.tolist()], dtype=torch.float64) * 2.0**scale
    assert ((parts._exp2(x.clone(), scale) - wanted).abs() <= 2**-50 * wanted).all()
    whole = torch.arange(-54.0, 1, dtype=torch.float64)
    assert torch.equal(parts._exp2(whole, scale), torch.tensor([2.0 ** (n + scale) for n in range(-54, 1)]).double())


def test_a_larger_logit_has_no_smaller_mass():
    for width in (60.0, 1.0, 1e-3):
        logits = torch.linspace(-width, 0, V4)
        assert (masses(logits, 1.0).diff() >= 0).all()
    beside = torch.tensor([-(n + 0.5) * math.log(2) for n in range(26)])  # where the integer next to x changes
    near = torch.stack([beside.nextafter(torch.tensor(-99.0)), beside, beside.nextafter(torch.tensor(99.0))], 1)
    found = masses(torch.cat([near.flatten(), torch.zeros(V4)]), 1.0)
    assert (found[:78].view(26, 3).diff(dim=1) >= 0).all()


# --- what does not depend on the device

SAMPLED = (Sampling(1.0, seed=1), Sampling(0.7, 0.9, seed=1))
# Rounded once for each element, as IEEE 754 says, or not at all. No exponential, and no sum of floating numbers.
EXACT = {
    "_to_copy",
    "add",
    "sub",
    "mul",
    "add_",
    "sub_",
    "mul_",
    "div_",
    "clamp_",
    "round",
    "round_",
    "ceil",
    "abs",
    "new_full",
}
EXACT |= {"aminmax", "argmax", "eq", "ne", "ge", "masked_fill", "select", "view", "detach"}
EXACT |= {"bitwise_not", "bitwise_and", "bitwise_xor", "bitwise_left_shift_", "__rshift__"}
OF_INTEGERS = {"cumsum", "sort", "gather", "scatter", "searchsorted"}


class Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.made.append((func.overloadpacket.__name__, args))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("sampling", [Sampling(), *SAMPLED])
def test_no_operation_depends_on_the_device_and_one_value_is_read(sampling):
    logits, generator = normal(100), sampling.generator()
    with Calls() as calls:
        sample(logits, sampling, generator)
    names = [name for name, _ in calls.made]
    assert names.count("_local_scalar_dense") == 1
    assert names.pop() == "_local_scalar_dense", "the last of all"
    assert set(names) - {"rand"} <= EXACT | OF_INTEGERS
    assert names.count("rand") == (sampling.temperature > 0), "on the CPU, see the next test"
    for name, args in calls.made:
        if name in OF_INTEGERS:
            assert not args[0].is_floating_point(), name
        if name == "div_":
            assert isinstance(args[1], torch.Tensor), "a number: CUDA would multiply by its reciprocal"


@pytest.mark.parametrize("sampling", [Sampling(), *SAMPLED])
def test_all_is_computed_where_the_logits_are(sampling):
    """On a device that has no values: whatever would look at one ends the run."""
    with Calls() as calls:
        token = parts._chosen(torch.empty(1000, device="meta"), sampling, sampling.generator())
    assert (token.shape, token.dtype, token.device.type) == ((), torch.int64, "meta")
    elsewhere = [
        (name, x.shape, x.dtype)
        for name, args in calls.made
        for x in args
        if isinstance(x, torch.Tensor) and x.device.type != "meta"
    ]
    assert elsewhere == ([("mul", (), torch.float64)] if sampling.temperature else []), "the draw alone"


@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_a_token_takes_one_draw_and_a_greedy_one_none(top_p):
    generator, other = (torch.Generator().manual_seed(3) for _ in range(2))
    for _ in range(3):
        sample(normal(1000), Sampling(1.0, top_p), generator)
        torch.rand((), dtype=torch.float64, generator=other)
        assert torch.equal(generator.get_state(), other.get_state())
    sample(normal(1000), Sampling(0.0, top_p), generator)
    assert torch.equal(generator.get_state(), other.get_state())


def test_a_nucleus_of_all_tokens_draws_as_none_does():
    for seed in range(50):
        logits, sampling = normal(V4 // 100, seed), Sampling(1.0, seed=seed)
        nearly = Sampling(1.0, LAST, seed)
        assert sample(logits, sampling, sampling.generator()) == sample(logits, nearly, nearly.generator())


def test_it_takes_less_memory_than_the_logits_that_a_plan_counts():
    logits = normal(10_000)
    for sampling in (Sampling(), *SAMPLED):
        taken = peak_alive(lambda how=sampling: sample(logits, how, how.generator()))
        assert taken < HEAD_ROWS * logits.nbytes / 2, "the other half is for what ops take inside, as a sort does"


def mass_by_floats(gap: float, temperature: float, unit: int) -> int:
    """A mass by Python's floats: one operation of IEEE 754 after the other."""
    x = max(gap / (-temperature * parts.LN2), -unit - 2.0)
    whole = round(x)
    rest, power = x - whole, 0.0
    for term in reversed(parts.TAYLOR):
        power = power * rest + term
    return round(power * 2.0 ** (whole + unit))


@pytest.mark.parametrize("temperature", [1e-320, 0.1, 1.0, 7.0, 1e30])
@pytest.mark.parametrize("row", ["five", "V4", "V4, nearly flat", "wide", "one"])
def test_masses_are_those_of_single_operations_in_order(row, temperature):
    logits = ROWS[row]
    found, most, unit = masses(logits, temperature), float(logits.max()), 53 - len(logits).bit_length()
    wanted = [mass_by_floats(most - logit, temperature, unit) for logit in logits[:5000].tolist()]
    assert found[:5000].tolist() == wanted


def test_a_seed_draws_the_tokens_that_it_drew_before():
    logits = (torch.arange(V4) * 7919 % 10007).float() / 1024
    found = [
        [sample(logits, sampling, sampling.generator()) for sampling in (Sampling(t, p, seed) for seed in range(4))]
        for t, p in ((1.0, 1.0), (0.5, 0.9), (2.0, 0.5))
    ]
    assert found == [[125404, 7884, 118613, 4395], [125380, 7860, 118608, 4371], [125409, 7884, 118613, 4395]]


def test_a_seed_repeats_and_another_differs():
    def run(seed: int) -> list[int]:
        sampling = Sampling(2.0, seed=seed)
        generator = sampling.generator()
        return [sample(LOGITS, sampling, generator) for _ in range(40)]

    assert run(5) == run(5)
    assert run(5) != run(6)


def test_the_likeliest_tokens_are_those_of_log_softmax_and_ties_go_to_the_lower_id():
    logits = torch.tensor([1.0, 3.0, 2.0, 3.0, 2.0, -1e30])
    wanted = logits.double().log_softmax(0)
    for count in range(7):
        found = likelihood(logits, 4, count)
        assert (found.token, found.logprob) == (4, float(wanted[4]))
        assert found.top == [(token, float(wanted[token])) for token in (1, 3, 2, 4, 0, 5)[:count]]
