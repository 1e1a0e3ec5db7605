"""`kernels`: two ways to compute the same op, tiles and checks, on one CPU core; the measurements behind choices."""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import product
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

from fathom.kernels.attention import cpu as attention_cpu
from fathom.kernels.formats import reference as formats_reference
from fathom.kernels.formats.stored import Dense, Fp4, Fp8, NvFp4, Weight
from fathom.kernels.ops import CPU, REFERENCE
from fathom.model.observe import invariants, sites
from fathom.model.observe.observer import PLACES, Point, listening, observed
from fathom.model.state import State
from fathom.model.transformer import Transformer
from fathom.runtime.load import load
from fathom.runtime.options import DEMO, RunOptions
from fathom.scripts.bench.turns import JSON, Case, Rounds, near, timed, wall

ROUNDS: Final = Rounds(1.0, 15, 50)
CONTEXT: Final = 2048  # tokens before the first step whose checks are timed: windows, selections, entries are all full
STEPS: Final = 8  # decoded tokens of a call
CHUNK: Final = 512
# Of `model.observe.invariants`, those whose arguments can be given again: none looks at a cache that has gone on.
REPEATABLE: Final = ("finite", "width", "count", "room", "columns", "routing", "selection")

# Both sides round to BF16, whose steps are at most 2^-7 of a number, what they add up in another order.
BF16_NEAR: Final = near(2**-7)

Run = Callable[[], Any]


def kernels(args: argparse.Namespace) -> Iterator[Case]:
    """Choices of the CPU's kernels, pair by pair.

    Times are processor time of one core. attend, select, linear, gemm and activations are the measurements behind
    choices in `kernels`; tripwires and sites are what being watched costs the demo: the ratio is their share of
    a run; threads, on the wall clock, says from which size of a model on more threads than one pay.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for part in args.only or PARTS:
        yield from PARTS[part]()


def _case(
    table: str,
    label: str,
    sides: Mapping[str, Run],
    agree: Callable[..., JSON] | None = None,
    now: Callable[[], float] = time.thread_time,
) -> Case:
    return Case(table, label, {name: timed(call, now) for name, call in sides.items()}, ROUNDS, agree)


def attend() -> Iterator[Case]:
    """Selected entries: masked dense tiles against gathered rows, by visible entries over top-k."""
    for heads, width, k, lengths in ((16, 128, 256, (1, 16, 128, 512)), (64, 512, 512, (1, 16))):
        for t, times in product(lengths, (1, 1.5, 2, 4, 10, 20, 40)):
            n = int(k * times)
            q, ring = torch.randn(t, heads, width).bfloat16(), torch.randn(128 + t, width).bfloat16()
            selected = torch.rand(t, n).argsort(1)[:, :k].sort(1).values.int()
            given = (q, ring, 4 * n, 128, torch.randn(n, width).bfloat16(), 4, selected, torch.zeros(heads))
            call = partial(attention_cpu.attend, *given)
            label = f"{heads} x {width}, {t} tokens, {times:g} x {k}"
            ways = {"dense": float("inf"), "gather": 0.0}
            sides = {name: partial(call, dense_up_to=up_to) for name, up_to in ways.items()}
            yield _case("attend", label, sides, BF16_NEAR)


def weights(height: int, columns: int) -> dict[str, Weight]:
    """Random weights of each stored form."""
    packed = torch.randint(0, 256, (height, columns // 2), dtype=torch.uint8)
    e4m3 = torch.randn(height, columns).to(torch.float8_e4m3fn)
    return {
        "bf16": Dense(torch.randn(height, columns).bfloat16()),
        "fp8": Fp8(e4m3, torch.ones(height // 128, columns // 128).to(torch.float8_e8m0fnu)),
        "fp4": Fp4(packed.view(torch.int8), torch.ones(height, columns // 32).to(torch.float8_e8m0fnu)),
        "nvfp4": NvFp4(packed, e4m3[:, : columns // 16].contiguous(), torch.tensor(0.5)),
    }


def _both(table: str, label: str, op: str, given: tuple[object, ...]) -> Case:
    """An op of both sets."""
    sides = {ops.name: partial(getattr(ops, op), *given) for ops in (CPU, REFERENCE)}
    return _case(table, label, sides, None if op == "select" else BF16_NEAR)


def linear() -> Iterator[Case]:
    """Linears in each stored form."""
    for (form, weight), t in product(weights(2048, 1024).items(), (1, 4, 16, 64, 512)):
        x = torch.randn(t, 1024).bfloat16()
        yield _both("linear", f"{form}, 2048 x 1024, {t} tokens", "linear", (x, weight))


def gemm() -> Iterator[Case]:
    """Linears beside torch's product of a matrix that is decoded already, in fp32 and in bfloat16."""
    for (form, weight), t in product(weights(2048, 4096).items(), (1, 4, 16, 64, 256)):
        x, whole = torch.randn(t, 4096).bfloat16(), formats_reference.decode(weight)
        sides: dict[str, Run] = {"cpu": partial(CPU.linear, x, weight)}
        for dtype, name in ((torch.float32, "torch, fp32"), (torch.bfloat16, "torch, bf16")):
            sides[name] = partial(functional.linear, x.to(dtype), whole.to(dtype))
        yield _case("gemm", f"{form}, 2048 x 4096, {t} tokens", sides, BF16_NEAR)


def select() -> Iterator[Case]:
    """The indexer's selection."""
    for t, heads, width, n, k in ((1, 16, 64, 4096, 256), (128, 16, 64, 4096, 256), (1, 64, 128, 32768, 512)):
        q, keys, mixed = torch.randn(t, heads, width), torch.randn(n, width), torch.randn(t, heads)
        yield _both("select", f"{t} tokens, {heads} x {width}, top {k} of {n}", "select", (q, mixed, keys, 4 * n, 4, k))


def activations() -> Iterator[Case]:
    """Ops that are bounded by the chunk in both op sets."""
    for t in (1, 512):
        streams, x = torch.randn(t, 4, 1024).bfloat16(), torch.randn(t, 1024).bfloat16()
        pre, comb, q = torch.rand(t, 4), torch.rand(t, 4, 4), torch.randn(t, 16, 64).bfloat16()
        given: dict[str, tuple[object, ...]] = {
            "hyper_weights": (streams, torch.randn(24, 4096), torch.ones(3), torch.zeros(24), 20, 1e-6, 1e-6),
            "collapse": (streams, pre),
            "expand": (x, streams, pre, comb),
            "simulate_fp8": (x, 128),
            "simulate_fp4": (q, 32),
        }
        for op, arguments in given.items():
            yield _both("activations", f"{op}, {t} tokens", op, arguments)


class _Decoding:
    """Decodes on and on: each call runs `STEPS` tokens of the demo after `CONTEXT` others."""

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.state = _filled(model, model.config.max_position_embeddings)

    def __call__(self) -> None:
        for _ in range(STEPS):
            token = torch.tensor([self.state.position % self.model.config.vocab_size])
            self.model.logits(self.model(token, self.state))


def _filled(model: Transformer, max_context: int) -> State:
    state = model.new_state(max_context, CHUNK)
    for ids in (torch.arange(CONTEXT) % model.config.vocab_size).split(CHUNK):
        model(ids, state)
    return state


def _demo() -> tuple[Transformer, dict[str, Run]]:
    """The demo, and what is run of it."""
    model = load(DEMO, RunOptions()).model
    return model, {
        f"decode, {STEPS} tokens": _Decoding(model),
        f"prefill, {CONTEXT} tokens": partial(_filled, model, CONTEXT),
    }


def tripwires() -> Iterator[Case]:
    """The checks of a run, made again on the same tensors: the ratio is their share of the run."""

    def noting(made: list[Run], check: Callable[..., object], *given: object) -> object:
        made.append(partial(check, *given))
        return check(*given)

    for label, call in _demo()[1].items():
        made: list[Run] = []
        with ExitStack() as stack:
            for name in REPEATABLE:
                check = partial(noting, made, getattr(invariants, name))
                stack.enter_context(mock.patch.object(invariants, name, check))
            call()
        again = partial(lambda checks: [check() for check in checks], made)
        yield _case("tripwires", f"{label}, {len(made)} checks", {"run": call, "its tripwires": again})


def idle_sites() -> Iterator[Case]:
    """Sites that nobody listens at: the ratio is their share of a run."""
    model, runs = _demo()
    observer = observed(model)

    def idle(passes: list[tuple[sites.Site, int | None, Tensor]]) -> None:
        with observer.unchecked():
            for site, layer, tensor in passes:
                observer.passes(Point(layer, ((site, PLACES[site]._replace(output=-1)),)), None, (), tensor)

    for label, call in runs.items():
        passes: list[tuple[sites.Site, int | None, Tensor]] = []

        def note(site: sites.Site, passes: list[tuple[sites.Site, int | None, Tensor]] = passes) -> sites.Listener:
            return lambda layer, tensor: passes.append((site, layer, tensor[:0]))

        with listening(model, {site: note(site) for site in sites.SITES}):
            call()
        sides: dict[str, Run] = {"run": call, "its sites": partial(idle, passes)}
        yield _case("sites", f"{label}, {len(passes)} passes", sides)


def threads() -> Iterator[Case]:
    """One thread against one for each core: a token's linears by the bytes of their weights, alone and beside a load.

    The matrices are of 4 MiB, and read one after the other, as in a model.
    """
    cores = len(os.sched_getaffinity(0))
    x = torch.randn(1, 1024).bfloat16()

    def token(count: int, matrices: list[Dense]) -> None:
        torch.set_num_threads(count)
        for weight in matrices:
            CPU.linear(x, weight)

    for beside in ("alone", "beside one busy process"):
        with ExitStack() as stack:
            if beside != "alone":
                busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
                stack.callback(busy.wait)
                stack.callback(busy.kill)
            for mib in (4, 16, 64, 256, 1024):
                matrices = [Dense(torch.randn(2048, 1024).bfloat16()) for _ in range(mib // 4)]
                sides: dict[str, Run] = {f"{count} threads": partial(token, count, matrices) for count in (1, cores)}
                yield _case("threads", f"{mib} MiB, {beside}", sides, now=wall)
    torch.set_num_threads(1)


PARTS: Final[dict[str, Callable[[], Iterator[Case]]]] = {
    "attend": attend,
    "select": select,
    "linear": linear,
    "gemm": gemm,
    "activations": activations,
    "tripwires": tripwires,
    "sites": idle_sites,
    "threads": threads,
}
