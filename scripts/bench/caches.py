"""`variants` and `compare-coda`: a layer's cache by Shard and by CoDA beside what they are measured against.

Speed depends on no value that a cache holds. So caches of a long context are filled with the rows of a short one, over
and over, and nothing is fitted to thousands of tokens only to be timed.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear as torch_linear
from torch.nn.functional import scaled_dot_product_attention

from fathom.kernels.formats import coded_rows
from fathom.kernels.ops import CPU
from fathom.kernels.rope import reference as rope
from fathom.model.cache.entries import Entries
from fathom.model.cache.full import FullCache
from fathom.model.cache.gqa import Heads, KvShape, all_heads
from fathom.model.variants.coda import CodaCache
from fathom.model.variants.coda_attention import Differential, Tokens, prefill, step
from fathom.model.variants.coda_settings import CodaSettings
from fathom.model.variants.shard import ShardCache, ShardSettings
from fathom.scripts.bench.turns import JSON, Case, Rounds, Side, constant, near, timed

ON_CPU: Final = torch.device("cpu")
SAMPLE: Final = 512  # tokens that are really drawn
ROOM: Final = 128  # tokens that a cache can take beyond its context: one for each round
PROMPT: Final = 1024  # tokens of the prompt that Shard's prefill is timed with: compression takes longer than attention
PRODUCTS: Final = "its products alone"
AS_FAST: Final = {"ms": 1.0}
JUDGED: Final = 200  # tokens after which a step is held against the full cache's
# How far it may be, by the bits of its stream or, without one, in the prefill form. Codes of 8 and 4 bits are off by
# 4.1e-5 and 9.5e-3 of a number's square, and values at two bits, beside keys of a rank, by a tenth of theirs.
APART: Final = {8: 2e-2, 4: 0.2, None: 0.4}


class Grouped(NamedTuple):
    """A layer with grouped heads, and the rank of its keys."""

    name: str
    heads: int  # query heads
    kv_heads: int
    d: int
    rank: int


class Shared(NamedTuple):
    """The layers of V4 as attention and indexer see them."""

    heads: int
    d: int
    index_heads: int
    index_d: int
    top_k: int
    window: int


LLAMA: Final = Grouped("Llama-3.1-8B", 32, 8, 128, 192)
SMALL: Final = Grouped("a small model", 8, 2, 64, 48)
FLASH: Final = Shared(64, 512, 64, 128, 512, 128)


def _settle(args: argparse.Namespace) -> tuple[Rounds, float]:
    """One thread, no denormals; rounds, and multiplications a millisecond of a large fp32 product, at its best."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # which `coda-gqa-l` needs for its speed
    torch.manual_seed(0)
    square = torch.randn(1024, 1024)
    product_of_two = timed(lambda: square @ square)
    return Rounds(args.seconds, 5, 30), 1024**3 / min(product_of_two()[0]["ms"] for _ in range(20))


def variants(args: argparse.Namespace) -> Iterator[Case]:
    """What a cache variant costs in time: Shard beside the full cache and beside torch's own attention.

    One decoded token after a context, and a prompt; processor time of one core, denormals flushed. Asked for: decode
    from 8K on as fast as the full cache.

    A full cache is asked for one thing a token: to widen its row to fp32, and to multiply. Shard's prefill form is
    asked for the same products and, before them, for KV heads x d x rank multiplications that rebuild the key. A core
    that reads faster than it multiplies cannot gain from the bytes that this saves, and the decode stream's look-ups,
    one for one or two numbers, are no faster than widening BF16. *Its products alone* are what these multiplications
    take at the rate of a product of two matrices of 1024 x 1024 in fp32. What the forms are for is the memory of a
    prompt: layers read it one after the other, and of one at a time its keys and values are held in full
    (`scripts.plan --kv` counts them, and the prompt's streams between layers). `torch` is its own attention to the same
    BF16 rows (`scaled_dot_product_attention` with grouped heads). A prompt is read by the same op on both sides; the
    rest is the one compression at its end.

    Of V4's layers, the rows are what a variant changes of a step: selection (CSA) and attention; projections and
    compressors do not know of it. Coded rows cost a look-up for one or two numbers, and a rotation of the queries and
    of the result.
    """
    rounds, rate = _settle(args)
    for n, shape in product(args.context, (LLAMA, SMALL)):
        # multiplications: keys rebuilt, scores, sums
        products = n * (shape.kv_heads * shape.d * shape.rank + 2 * shape.heads * shape.d)
        sides = grouped_step(shape, n, None)
        bound = {PRODUCTS: constant(ms=products / rate)} if shape is LLAMA else {}
        label = f"{shape.name}, rank {shape.rank}, {n} tokens"
        yield Case("Shard's prefill form, decode", label, sides | bound, rounds, _near_full(shape, None), AS_FAST)
        for bits in (8, 4):
            sides, label = grouped_step(shape, n, bits), f"{shape.name}, stream of {bits} bits, {n} tokens"
            yield Case("Shard's stream, decode", label, sides, rounds, _near_full(shape, bits), AS_FAST)
    n = min(PROMPT, *args.context)
    sides, label = grouped_prompt(SMALL, n, 512), f"{SMALL.name}, {n} tokens"
    yield Case("Shard, a prompt with its compression", label, sides, rounds, near(0.0))
    for n, ratio in product(args.context, (4, 128)):
        sides, label = shared_step(FLASH, n, ratio, 6, 8), f"{'CSA' if ratio == 4 else 'HCA'}, {n} tokens"
        yield Case("Shard on V4's layers, decode", label, sides, rounds)


def _near_full(shape: Grouped, bits: int | None) -> Callable[..., JSON]:
    """Whether a step is near the full cache's after few tokens: the rows of a long context are not its own."""

    def agree(*_: object) -> JSON:
        return near(APART[bits])(*(side()[1] for side in grouped_step(shape, JUDGED, bits).values()))

    return agree


def drawn(n: int, shape: Grouped, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of n tokens in BF16; keys near a few directions, with their rotation."""
    g = torch.Generator().manual_seed(seed)
    directions = torch.randn(12, shape.kv_heads * shape.d, generator=g) / 12**0.5
    plain = torch.randn(n, 12, generator=g) @ directions + 0.1 * torch.randn(n, shape.kv_heads * shape.d, generator=g)
    keys = rope.rotate_halves(plain.unflatten(1, (-1, shape.d)), *rope.angles(torch.arange(n), _freqs(shape)))
    q, values = (torch.randn(n, heads, shape.d, generator=g) for heads in (shape.heads, shape.kv_heads))
    return q.bfloat16(), keys.bfloat16(), values.bfloat16()


def _freqs(shape: Grouped) -> Tensor:
    return rope.frequencies(shape.d, 500_000.0)


def _empty_shard(shape: Grouped, bits: int | None, n: int, room: int) -> ShardCache:
    """For n tokens and `room` more: n of the prompt, or with bits none, all in the stream."""
    layer = KvShape(all_heads(shape.kv_heads), shape.d, _freqs(shape), interleaved=False)
    settings = ShardSettings(rank=shape.rank) if bits is None else ShardSettings(rank=shape.rank, stream_bits=bits)
    return ShardCache(layer, settings, n if bits is None else 0, n + room, torch.bfloat16, ON_CPU)


def shard_cache(shape: Grouped, bits: int | None, n: int) -> ShardCache:
    """Return a cache that holds n tokens, and takes `ROOM` more."""
    short = min(n, SAMPLE)
    few = _empty_shard(shape, bits, short, 0 if short < n else ROOM)
    few.attend(*drawn(short, shape))
    if short == n:
        return few
    cache, held = _empty_shard(shape, bits, n, ROOM), few.tensors(short)
    cache.restore(n, {name: _repeated(held[name], want) for name, want in cache.shapes(n).items()})
    return cache


def _repeated(rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Rows over and over, until they are as many as `shape` has."""
    return rows if rows.shape == shape else rows[torch.arange(shape[0]) % len(rows)]


def _empty_full(shape: Grouped, most: int) -> FullCache:
    return FullCache(all_heads(shape.kv_heads), shape.d, None, most, torch.bfloat16, ON_CPU)


def grouped_step(shape: Grouped, n: int, bits: int | None) -> dict[str, Side]:
    """One decoded token after n: by Shard; by the full cache, and by torch's own attention to the same rows."""
    shard, full = shard_cache(shape, bits, n), _empty_full(shape, n + 1)
    _, keys, values = drawn(min(n, SAMPLE), shape)
    for held, rows in ((full.keys, keys), (full.values, values)):
        held.write(0, _repeated(rows, (n, *rows.shape[1:])))
    token = [part[:1] for part in drawn(1, shape, seed=1)]

    def by_torch() -> Tensor:
        for held, new in ((full.keys, token[1]), (full.values, token[2])):
            held.write(n, new)
        keys, values = (part.data[None, :, : n + 1] for part in (full.keys, full.values))
        q = token[0].transpose(0, 1)[None]
        return scaled_dot_product_attention(q, keys, values, enable_gqa=True)[0].transpose(0, 1)

    calls = {
        "shard": lambda: shard.attend(*token),
        "full": lambda: full.attend(_heads(token), n, CPU),
        "torch": by_torch,
    }
    return {name: timed(call) for name, call in calls.items()}


def grouped_prompt(shape: Grouped, n: int, chunk: int) -> dict[str, Side]:
    """A prompt of n tokens, read in chunks; shard compresses it at its end."""
    parts = list(zip(*(part.split(chunk) for part in drawn(n, shape)), strict=True))

    def by_shard() -> Tensor:
        cache = _empty_shard(shape, None, n, 0)
        return torch.cat([cache.attend(*part) for part in parts])

    def by_full() -> Tensor:
        cache = _empty_full(shape, n)
        return torch.cat([cache.attend(_heads(part), i * chunk, CPU) for i, part in enumerate(parts)])

    return {"shard": timed(by_shard), "full": timed(by_full)}


def _heads(tokens: Sequence[Tensor]) -> Heads:
    """Heads of a layer without write gates."""
    q, k, v = tokens
    return Heads(q, k, v, None)


def shared_step(shape: Shared, n: int, ratio: int, bits: int, key_bits: int) -> dict[str, Side]:
    """What a variant changes of a V4 layer's step after n tokens: selection, where there is one, and attention."""
    g, count = torch.Generator().manual_seed(n), n // ratio
    sample = min(count, SAMPLE)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=g)

    entries, keys = (_repeated(normal(sample, d).bfloat16(), (count, d)) for d in (shape.d, shape.index_d))
    q, ring = (normal(*size).bfloat16() for size in ((1, shape.heads, shape.d), (shape.window + 1, shape.d)))
    index_q, head_weights = normal(1, shape.index_heads, shape.index_d), torch.rand(1, shape.index_heads, generator=g)
    sink = torch.zeros(shape.heads)

    def by(rows: Entries, index: Entries) -> Tensor:
        chosen = None
        if ratio == 4:
            chosen = CPU.select(index_q, head_weights, index.view(), n - 1, ratio, shape.top_k)
        return CPU.attend(q, ring, n - 1, shape.window, rows.view(), ratio, chosen, sink)

    coded = [
        Entries(ratio, coded_rows.allocate(count, *size, ON_CPU, 0))
        for size in ((shape.d, bits), (shape.index_d, key_bits))
    ]
    plain = [Entries(ratio, torch.empty_like(part)) for part in (entries, keys)]
    for held in (coded, plain):
        for part, given in zip(held, (entries, keys), strict=True):
            part.append(given)
    return {"shard": timed(partial(by, *coded)), "full": timed(partial(by, *plain))}


# --- CoDA

PACKAGE: Final = "coda_gqa_l"
BASE: Final = 10_000.0
STEPS: Final = 8  # decoded tokens of a call
EPS: Final = 1e-6
BLOCK: Final = 256  # tokens of a block of the prefill
LAYER: Final = (16, 4, 64)  # query heads, KV heads and width of a head
SLOTS: Final = (256, 64, 64)  # window, exact bank and summary bank
CODA_APART: Final = 1e-4  # fp32, sums in another order


def compare_coda(args: argparse.Namespace) -> Iterator[Case]:
    """A layer of CoDA-GQA-L beside its package, projections included.

    Processor time of one core, denormals flushed. Asked for: at least three times as fast.

    The layer that is timed is not the one that `generate` runs: `CodaLayer` of `scripts/bench/caches.py`: one
    product for all projections, and attention of queries and noise in one op (`differential_attend`), as
    `scripts.train_coda` measures it too. `generate --coda-adapters` runs `model/llama/attention.py`, with a product
    for each projection and the noise as more heads of the cache's ordinary attention; that has not been timed.

    Both sides have the same weights, in the same memory, and give the same outputs to 1e-4. A prompt is matrix products
    on both sides: *its products alone* are what these take at the rate of a product of two matrices of 1024 x 1024 in
    fp32, and so what could be gained there. A decoded token is the weights, read once, and many small calls, in number
    of which the two differ.
    """
    rounds, rate = _settle(args)
    layer = CodaLayer(*LAYER, coda_settings(*SLOTS))
    absent = "" if find_spec(PACKAGE) else f" (the package {PACKAGE} is not installed)"
    cases = {f"prompt of {n} tokens": (n, layer.prompt(n, BLOCK)) for n in args.context}
    for label, (n, sides) in cases.items():
        bound = {PRODUCTS: constant(ms=1e9 * prompt_products(n) / rate)}
        yield Case("A prompt", label + absent, {**sides, **bound}, rounds, near(CODA_APART), {"ms": 3.0})
    n = args.context[0]
    sides = layer.decoding(n, BLOCK)
    yield Case("Decode", f"{STEPS} tokens after {n}{absent}", sides, rounds, near(CODA_APART), {"ms": 3.0})


def prompt_products(n: int) -> float:
    """10^9 multiplications of a prompt: projections; two scores for each of slots and half a block, a sum of values."""
    heads, kv_heads, d = LAYER
    width, seen = heads * d, min(sum(SLOTS), n) + BLOCK / 2
    projections = width * (2 * width + 2 * kv_heads * d + heads + 1)
    return n * (projections + 3 * heads * d * seen) / 1e9


def coda_settings(window: int, exact: int, summary: int) -> CodaSettings:
    """Published rules with the package's own order of candidates, so that both sides remember the same."""
    published = CodaSettings.published(window=window, exact=exact, summary=summary, rope="interleaved")
    fields = {name: getattr(published, name) for name in published.__slots__}
    return CodaSettings(**fields | {"candidate_order": "unsorted", "memory_init": "zeros"})


class CodaLayer:
    """A layer ``heads * d`` wide, drawn from a seed: projections, rotation, differential attention to a CoDA cache."""

    def __init__(self, heads: int, kv_heads: int, d: int, settings: CodaSettings, seed: int = 0) -> None:
        g, width = torch.Generator().manual_seed(seed), heads * d
        self.sizes = (heads, kv_heads, d)
        # rows of queries, keys, values, lambda and gate: one product
        self.rows = [heads * d, kv_heads * d, kv_heads * d, heads, 1]
        self.weight = torch.randn(sum(self.rows), width, generator=g) * width**-0.5
        self.bias = torch.zeros(sum(self.rows))
        self.bias[-1 - heads :] = torch.randn(heads + 1, generator=g)
        self.out = torch.randn(width, width, generator=g) * width**-0.5
        self.theta = torch.randn(heads, d // 2, generator=g)
        self.differential = Differential(self.theta.cos(), self.theta.sin(), torch.ones(d), EPS)
        self.freqs, self.settings, self.eta_logit = rope.frequencies(d, BASE), settings, torch.full((kv_heads,), -3.0)

    def _cache(self) -> CodaCache:
        heads = all_heads(self.sizes[1])
        return CodaCache(self.settings, heads, self.sizes[2], self.eta_logit, torch.float32, ON_CPU)

    def _tokens(self, x: Tensor, first: int) -> Tokens:
        """What the cache is given for x [t, width] at positions ``first ..``."""
        heads, kv_heads, d = self.sizes
        projected = torch_linear(x, self.weight, self.bias)
        rotated, v, lam, gates = projected.split([self.rows[0] + self.rows[1], *self.rows[2:]], 1)
        turn = torch.complex(*rope.angles(torch.arange(first, first + len(x)), self.freqs))[:, None]
        pairs = torch.view_as_complex(rotated.unflatten(1, (heads + kv_heads, d // 2, 2)).contiguous())
        q, k = torch.view_as_real(pairs * turn).flatten(-2).split([heads, kv_heads], 1)
        return Tokens(q, k, v.unflatten(1, (kv_heads, d)), gates[:, 0].sigmoid(), lam.sigmoid())

    def _read(self, x: Tensor, cache: CodaCache, block: int) -> Tensor:
        """Read x [t, width] in blocks, each from its projections to its output, as a model's chunks do: [t, width]."""
        out = torch.empty_like(x)
        for part, place in zip(x.split(block), out.split(block), strict=True):
            mixed = prefill(cache, self._tokens(part, cache.position), self.differential, block)
            torch.mm(mixed.flatten(1), self.out.T, out=place)
        return out

    def _decoded(self, more: Tensor, cache: CodaCache) -> Tensor:
        steps = (step(cache, self._tokens(token, cache.position), self.differential) for token in more.split(1))
        return torch.cat([torch_linear(mixed.flatten(1), self.out) for mixed in steps])

    def prompt(self, n: int, block: int) -> dict[str, Side]:
        """A prompt of n tokens from an empty cache."""
        x, module = self._drawn(n), self._package()

        def theirs() -> Tensor:
            read: Tensor = module.prefill_chunked(x[None], _package_state(module), block_size=block)[0][0]
            return read

        package = {} if module is None else {"package": timed(theirs)}
        return {"coda": timed(lambda: self._read(x, self._cache(), block)), **package}

    def decoding(self, n: int, block: int) -> dict[str, Side]:
        """`STEPS` tokens decoded after a prompt of n, on and on."""
        x, more, module, cache = self._drawn(n), self._drawn(STEPS, seed=1), self._package(), self._cache()
        self._read(x, cache, block)
        package = {}
        if module is not None:
            state = _package_state(module)
            module.prefill_chunked(x[None], state, block_size=block)
            steps: Callable[[], Tensor] = lambda: torch.cat(  # noqa: E731 -- one line beside ours
                [module.step(token[None], state)[0][0] for token in more.split(1)]
            )
            package = {"package": timed(steps)}
        return {"coda": timed(lambda: self._decoded(more, cache)), **package}

    def _drawn(self, n: int, seed: int = 0) -> Tensor:
        heads, _, d = self.sizes
        return torch.randn(n, heads * d, generator=torch.Generator().manual_seed(seed))

    def _package(self) -> Any:
        """The package's module with these weights, or None where the package is not installed."""
        if find_spec(PACKAGE) is None:
            return None
        heads, kv_heads, d = self.sizes
        settings = self.settings
        made = import_module(PACKAGE).CoDAGQALandmarkPerf2(
            embed_dim=heads * d, num_heads=heads, num_kv_heads=kv_heads, window=settings.window,
            num_landmarks_exact=settings.exact, num_landmarks_summary=settings.summary, rope_base=BASE, eps=EPS,
            mem_init="zeros",
        )  # fmt: skip
        q, k, v, lam, gate = self.weight.split(self.rows)
        *_, lam_bias, gate_bias = self.bias.split(self.rows)
        given = {"q_proj.weight": q, "k_proj.weight": k, "v_proj.weight": v, "o_proj.weight": self.out}
        given |= {"lambda_proj.weight": lam, "write_proj.weight": gate, "theta": self.theta}
        given |= {"lambda_proj.bias": lam_bias, "write_proj.bias": gate_bias}
        for name, part in given.items():  # the same memory: neither side drives the other's weights out of a cache
            made.get_parameter(name).data = part
        return made.eval()


def _package_state(module: Any) -> Any:
    return module.init_state(batch_size=1, device=ON_CPU, dtype=torch.float32)
