"""Rows of one call have the bits of calls of one row, for as many as a draft and its token are: on the CPU and Triton.

One table of all ops that a model calls, at the widths of the demo and, on the CPU, of V4-Flash; whole models are in
`tests.model.test_rewind` and `test_triton_model`. That nothing of another row enters is tested with each op.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fathom.kernels.formats import rows as forms
from fathom.kernels.formats.stored import Dense
from fathom.kernels.linear.reference import Product
from fathom.kernels.ops import CPU, Ops
from tests.grids import on_demand
from tests.kernels.every_backend import TRITON, both_dtypes, on_triton, seeded
from tests.kernels.test_experts import layer
from tests.kernels.test_linear import FORMS

ROWS = 8  # a token and seven drafted
HERE = torch.device("cpu")


class Widths(NamedTuple):
    """Of a model."""

    hidden: int
    heads: int
    head_dim: int
    rope: int
    index_heads: int
    index_dim: int
    experts: int
    inner: int
    n: int  # entries that the first row sees


WIDTHS = {
    "demo": Widths(256, 4, 128, 64, 4, 64, 8, 128, 75),
    "V4-Flash, fewer experts": Widths(4096, 64, 512, 64, 64, 128, 12, 256, 2100),
}
Rows = Callable[[int, int], object]  # an op's result for rows ``first .. first + n - 1``


def some(op: Callable[..., object], *given: Tensor, rest: tuple[object, ...] = (), **named: object) -> Rows:
    return lambda first, n: op(*(one[first : first + n] for one in given), *rest, **named)


def cases(ops: Ops, of: Widths, dtype: torch.dtype) -> dict[str, Rows]:
    """Each op with inputs of `ROWS` rows, cut to some of them."""
    g = seeded(of, str(dtype))
    hc, window, ratio, k, position = 4, 128, 4, 40, 4 * of.n - 5

    def rand(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=g).to(kind)

    def f32(*shape: int) -> Tensor:
        return rand(*shape, kind=torch.float32)

    x, normed, q = rand(ROWS, of.hidden), f32(of.hidden), rand(ROWS, of.heads, of.head_dim)
    cos, sin = f32(ROWS, of.rope // 2), f32(ROWS, of.rope // 2)
    queries, index_weights = rand(ROWS, of.index_heads, of.index_dim), f32(ROWS, of.index_heads)
    streams, base = rand(ROWS, hc, of.hidden), f32(hc * (hc + 2))
    fn, scale = f32(hc * (hc + 2), hc * of.hidden), f32(3)
    post, comb = f32(ROWS, hc), f32(ROWS, hc, hc)
    logits = f32(ROWS, of.experts)
    ids = torch.rand(ROWS, of.experts, generator=g).argsort(1)[:, :6]
    ring, sink = rand(window + ROWS - 1, of.head_dim), f32(of.heads)
    selected = torch.rand(ROWS, of.n - 2, generator=g).argsort(1)[:, :k].sort(1).values.int()
    entries, keys = rand(of.n + 2, of.head_dim), rand(of.n + 2, of.index_dim)
    narrow, packed = (
        forms.fp8_entries(of.n + 2, of.head_dim, of.rope, HERE),
        forms.fp4_keys(of.n + 2, of.index_dim, HERE),
    )
    forms.write(narrow, 0, entries)
    forms.write(packed, 0, keys)
    kv, gate = f32(ROWS, 2, of.head_dim), f32(ROWS, 2, of.head_dim)
    grouped = [rand(2, of.n + ROWS, of.head_dim) for _ in range(2)]

    def attend(older: object, ratio: int, picks: Tensor | None) -> Rows:
        def run(first: int, n: int) -> object:
            own = None if picks is None else picks[first : first + n]
            return ops.attend(q[first : first + n], ring, position + first, window, older, ratio, own, sink)

        return run

    made = {
        "rms_norm": some(ops.rms_norm, x, rest=(normed, 1e-6)),
        "rotate": some(ops.rotate, q, cos, sin),
        "rotate_halves": some(ops.rotate_halves, q[..., : of.rope], cos, sin),
        "norm_rotate": some(lambda y, c, s: ops.norm_rotate(y, None, 1e-6, c, s, 64), q, cos, sin),
        "norm_rotate, one head": some(
            lambda y, c, s: ops.norm_rotate(y, normed[: of.head_dim], 1e-6, c, s, 64), q[:, 0], cos, sin
        ),
        "simulate_fp8": some(ops.simulate_fp8, x, rest=(128,)),
        "simulate_fp4": some(ops.simulate_fp4, x, rest=(32,)),
        "hadamard": some(ops.hadamard, queries),
        "round_index": some(ops.round_index, queries, rest=(32,)),
        "pool": some(ops.pool, kv, gate, rest=(None, None)),
        "pool, overlapping": some(ops.pool, kv, gate, kv + 1, gate - 1),
        "hyper_weights": some(ops.hyper_weights, streams, rest=(fn, scale, base, 20, 1e-6, 1e-6)),
        "head_weights": some(ops.head_weights, streams, rest=(fn[:hc], scale[:1], base[:hc], 1e-6, 1e-6)),
        "collapse": some(ops.collapse, streams, post),
        "read_streams": some(ops.read_streams, streams, rest=(fn, scale, base, 20, 1e-6, 1e-6, normed, 1e-6)),
        "expand": some(ops.expand, x, streams, post, comb),
        "route": some(ops.route, logits, rest=(f32(of.experts), 6, 1.5)),
        "route_weights": some(ops.route_weights, logits, ids, rest=(1.5,)),
        "swiglu": some(lambda y, w: ops.swiglu(y, y + 1, 10.0, w), x, f32(ROWS)),
        "attend, window": attend(None, 0, None),
        "attend, all": attend(entries, ratio, None),
        "attend, selected": attend(entries, ratio, selected),
        "attend_grouped": lambda first, n: ops.attend_grouped(q[first : first + n], *grouped, of.n + first, None),
        "attend_grouped, window": lambda first, n: ops.attend_grouped(q[first : first + n], *grouped, of.n + first, 20),
    }
    for name, stored in {"": keys, ", fp4": packed}.items():
        made[f"select{name}"] = lambda first, n, stored=stored: ops.select(
            queries[first : first + n], index_weights[first : first + n], stored, position + first, ratio, k
        )
    if dtype == torch.bfloat16:
        made |= {
            "attend, all, fp8": attend(narrow, ratio, None),
            "attend, selected, fp8": attend(narrow, ratio, selected),
        }
    return made


def products(ops: Ops, of: Widths, dtype: torch.dtype) -> dict[str, Rows]:
    """The same of ops that read weights, in every stored form."""
    g, made = seeded(of, str(dtype), "products"), {}

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(dtype)

    x, a, weights = rand(ROWS, of.hidden), rand(ROWS, 6, of.inner), rand(ROWS, 6).float().abs()
    chosen = torch.rand(ROWS, of.experts, generator=g).argsort(1)[:, :6].sort(1).values
    for name, form in FORMS.items():
        weight = form(g, 200, of.hidden)
        made[f"linear, {name}"] = some(ops.linear, x, rest=(weight,))
        made[f"linear, {name}, wide"] = some(ops.linear, x, rest=(weight,), wide=True)
        if not isinstance(weight, Dense) or weight.data.dtype != torch.float16:
            made[f"grouped_linear, {name}"] = some(
                ops.grouped_linear, rand(ROWS, 2, of.hidden), rest=(form(g, 256, of.hidden), 2)
            )
    several = [Product(FORMS["fp8"](g, 200, of.hidden)), Product(FORMS["bf16"](g, 72, of.hidden), wide=True)]
    for deployed in (False, True):
        made[f"linears, deployed {deployed}"] = some(
            lambda y, deployed=deployed: ops.linears(y, several, deployed=deployed), x
        )
    scored, bias = Dense(rand(of.experts, of.hidden).bfloat16()), rand(of.experts).float()
    made["gate"] = some(ops.gate, x, rest=(scored, bias, None, 6, 1.5))
    made["gate, by token id"] = some(lambda y, ids: ops.gate(y, scored, None, ids, 6, 1.5), x, chosen)
    for form in ("fp4", "bf16"):
        w1, w3, w2 = layer(form, of.experts, of.hidden, of.inner, 3)[0]
        deployed = form == "fp4"
        made[f"experts, {form}"] = some(ops.experts, x, chosen, weights, rest=(w1, w3, w2, 10.0), deployed=deployed)
        made[f"experts_up, {form}"] = some(ops.experts_up, x, chosen, weights, rest=(w1, w3, 10.0), deployed=deployed)
        made[f"experts_down, {form}"] = some(ops.experts_down, a, chosen, rest=(w2,), deployed=deployed)
    return made


def parts(found: object) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else list(found)


def differing(ops: Ops, of: Widths, dtype: torch.dtype, threads: int, counts: Sequence[int]) -> list[str]:
    """Calls of so many rows whose bits are not those of calls of one row on one thread."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        made = cases(ops, of, dtype) | products(ops, of, dtype)
        alone = {name: [parts(run(row, 1)) for row in range(max(counts))] for name, run in made.items()}
        torch.set_num_threads(threads)
        wrong = []
        for name, run in made.items():
            for n in counts:
                for at, found in enumerate(parts(run(0, n))):
                    wanted = torch.cat([row[at] for row in alone[name][:n]])
                    if not torch.equal(found.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8)):
                        wrong.append(f"{name}, {n} rows")
        return wrong
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2])
@both_dtypes
@pytest.mark.parametrize("widths", WIDTHS)
def test_rows_of_a_call_are_calls_of_a_row(widths, dtype, threads):
    assert not differing(CPU, WIDTHS[widths], dtype, threads, range(1, ROWS + 1))


@on_triton
@pytest.mark.interpreted
def test_the_interpreter_rounds_each_product_and_adds_them_in_order():
    """As no processor's BLAS does, which keeps the rest of 2^-24 where it adds a product unrounded to a sum.

    That is of tiles; a thread along a row keeps it, and adds in order.
    """
    rest, big = 1 + 2.0**-12, 2.0**30
    x, w = torch.tensor([[1.0, rest, 0, 0, 0], [0, 0, big, 1, -big]]), torch.tensor([[-1 - 2.0**-11, rest, 1, 1, 1]])
    assert TRITON.linear(x.repeat(9, 1), Dense(w)).tolist() == 9 * [[0.0], [0.0]]
    assert TRITON.linear(x, Dense(w)).tolist() == [[2.0**-24], [0.0]]


@on_triton
@both_dtypes
@pytest.mark.parametrize("counts", [(2, 5), *on_demand(((2, 5, ROWS),))])  # two rows at once, then four and one
def test_rows_of_a_launch_are_launches_of_a_row(dtype, counts):
    """In the interpreter: what a program adds up, in which splits, is the same; how a tensor core adds is not seen."""
    assert not differing(TRITON, WIDTHS["demo"], dtype, 1, counts)
