"""Cases of Llama-3.1-8B: Shard's attention, CoDA's differential attention, and the scan of what CoDA's ring lets go."""

import copy
import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kernels.differential import banks
from kernels.differential import cpu as differential_cpu
from kernels.differential import triton as differential
from kernels.formats.stored import CodebookValues, CodedRows, EigenKeys
from kernels.rope import reference as rope_reference
from kernels.shard import cpu as shard_cpu
from kernels.shard import triton as shard
from model.cache.gqa import all_heads
from model.variants.coda import CodaCache
from model.variants.coda_settings import CodaSettings
from scripts.bench.device import counts
from scripts.bench.device.case import Call, Case, Target, Tolerance
from scripts.bench.device.draw import Draw
from scripts.bench.device.shapes import EPS, LLAMA

HEADS, KV, D, RANK, SLOTS = LLAMA
RING, EXACT, SUMMARY = SLOTS
EXACT_KEYS = 68  # keys at both ends of Shard's context that are kept as they are
NARROW = torch.bfloat16
# operands of fp16 are off by 2^-12 of themselves, so logits of up to 8 by 2^-8; queries, keys and results of BF16 each
# bring half a step of their own
SHARD = Tolerance(of_each=2**-6, of_rms=2**-5)
# the noise query is rounded to BF16, and masses before they multiply values; the norm divides by what is left
NOISE = Tolerance(of_each=2**-6, of_rms=2**-5)
MOVED = Tolerance(of_each=2**-6, of_rms=2**-10)  # a BF16 average may round the other way
ETA = 0.5  # logit of how far a summary slot moves


def shards() -> Iterator[Case]:
    """Decode over a prompt in Shard's form, and over its stream of 8-bit keys and 4-bit values."""
    for n in (8192, 131072):
        middle = counts.shard_middle(n, HEADS, KV, D, RANK)
        stream = counts.shard_stream(n, KV, D, 8, 4, HEADS)
        for what, cost, target in (
            ("prompt, rank 192", middle, Target(of_flops=0.4)),
            ("stream, 8 + 4 bits", stream, Target(of_bytes=0.6)),
        ):
            yield Case(
                "shard", f"{what}, one token at {n}", cost, _shard(n, what[0] == "p"), str(SHARD), "cpu, in fp32",
                target, n == 8192,
            )  # fmt: skip


def _shard(n: int, prompt: bool) -> Callable[[Draw], Call]:  # noqa: FBT001 -- one of two things to build
    def build(draw: Draw) -> Call:
        q, keys, values = draw.normal(1, HEADS, D), draw.normal(EXACT_KEYS, KV, D), draw.normal(EXACT_KEYS, KV, D)
        middle = _middle(draw, n) if prompt else None
        stream = None if prompt else shard.Stream(_rotated(draw, n, 8), _rotated(draw, n, 4), draw.position(n))

        def error(ours: Tensor) -> float:
            streamed = None if stream is None else shard_cpu.Stream(stream.keys, stream.values, n)
            expected = shard_cpu.attend(q.float(), keys.float(), values.float(), middle, streamed, None)
            return SHARD.error(ours, expected)

        return Call(lambda: shard.attend(q, keys, values, middle, stream, None), error)

    return build


def _middle(draw: Draw, n: int) -> shard.Middle:
    half = torch.float16
    basis = draw.bytes(KV * D, RANK).view(torch.int8)
    basis.clamp_(-127, 127)
    none = torch.zeros(0, dtype=torch.int8)
    scales = draw.uniform(RANK, low=0.1).mul(0.002).to(half), draw.uniform(RANK, low=0.1).mul(0.2).to(half)
    stored = EigenKeys(draw.bytes(n, RANK // 2), basis, *scales, draw.normal(KV * D, dtype=half), none)
    codebook, largest = draw.normal(256, 4, dtype=half, scale=0.5), draw.uniform(KV, D, low=0.5).to(half)
    freqs = rope_reference.frequencies(D, 500_000.0).to(draw.device)
    values = CodebookValues(draw.bytes(n, KV * D // 4), codebook, largest)
    return shard.Middle(stored, values, EXACT_KEYS // 2, freqs, interleaved=False)


def _rotated(draw: Draw, n: int, bits: int) -> CodedRows:
    norm = draw.uniform(n * KV, low=0.5).mul(D**0.5).to(torch.float16)
    return CodedRows(norm, draw.bytes(n * KV, D * bits // 8), bits, None)


def differentials() -> Iterator[Case]:
    """A decoded token, and a block of a prompt, against CoDA's slots."""
    for t in (1, 512):
        cost = counts.differential(t, sum(SLOTS), HEADS, KV, D, own=t > 1)

        def build(draw: Draw, t: int = t) -> Call:
            rows, own = draw.normal(2, KV, sum(SLOTS), D), draw.normal(2, t, KV, D)
            theta = draw.normal(HEADS, D // 2, dtype=torch.float32)
            noise = differential.Noise(draw.uniform(t, HEADS), theta.cos(), theta.sin())
            past = differential.Past(rows[0], rows[1], None)
            given = differential.Own(own[0], own[1], RING) if t > 1 else None
            q, weight = draw.normal(t, HEADS, D), draw.uniform(D, low=0.5)

            def error(ours: Tensor) -> float:
                expected = differential_cpu.differential_attend(q, noise, weight, EPS, past, given)
                return NOISE.error(ours, expected)

            return Call(lambda: differential.differential_attend(q, noise, weight, EPS, past, given), error)

        target = Target(us=8.0) if t == 1 else None
        label = f"{t} token{'s' if t > 1 else ''} to {sum(SLOTS)} slots"
        yield Case("differential", label, cost, build, str(NOISE), "cpu", target, t == 1)


def scans() -> Iterator[Case]:
    """Tokens that leave the ring, offered to both banks one after the other."""
    for n in (1, 64):
        cost = counts.evictions(n, KV, D, EXACT, SUMMARY)
        yield Case(
            "banks", f"{n} evicted", cost, _scan(n), f"decisions alike; rows {MOVED}",
            "model.variants.coda, step by step", Target(us=8.0 * n), n == 1,
        )  # fmt: skip


def _scan(n: int) -> Callable[[Draw], Call]:
    """From a cache that has seen a few hundred tokens of some clusters."""

    def build(draw: Draw) -> Call:
        settings = CodaSettings(window=RING, exact=EXACT, summary=SUMMARY, rope="half")
        cache = CodaCache(
            settings, all_heads(KV), D, torch.full((KV,), ETA, device=draw.device), NARROW, draw.device, seed=0
        )
        if draw.values:
            pool = draw.normal(24, 2, KV, D)
            for i, _ in enumerate(itertools.repeat(None, RING + 48)):
                k, v = pool[i * 7 % 24] + draw.normal(2, KV, D, scale=0.3 + i % 3)
                cache.write(k[None], v[None], draw.uniform(1))
        own = copy.deepcopy(cache)
        ring = torch.stack((own.keys[:, :RING], own.values[:, :RING]))
        both = [banks.Bank(bank.rows, bank.used, bank.targets.data, bank.start) for bank in (own.exact, own.summary)]
        saved = own.tensors(own.position)
        held = banks.Banks(
            both[0], both[1], own.exact.last_used, saved["active"].to(draw.device), saved["counts"].to(draw.device)
        )
        same = set(banks.Rules._fields) - {"by_value", "blend", "eta"}
        rules = banks.Rules(
            **{name: getattr(settings, name) for name in same},
            by_value=own.summary.by_value, blend=own.summary.blend, eta=own.summary.eta,
        )  # fmt: skip
        now, first = cache.position, max(0, cache.position - RING)
        places = draw.position(first), draw.position(now)

        def error(_: None) -> float:
            for i in range(n):
                cache.evict(first + i, 1)
                cache.position += 1
            expected = cache.tensors(cache.position)
            alike = all(torch.equal(getattr(held, name).cpu(), expected[name].cpu()) for name in ("active", "counts"))
            if not alike or not torch.equal(own.exact.used, cache.exact.used):
                return float("inf")
            return max(MOVED.error(a.rows, b.rows) for a, b in zip(both, (cache.exact, cache.summary), strict=True))

        return Call(lambda: banks.evict(held, rules, ring, own.gates, *places, n), error)

    return build


GROUPED: dict[str, Callable[[], Iterator[Case]]] = {
    "shard": shards,
    "differential": differentials,
    "banks": scans,
}
