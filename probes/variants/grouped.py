"""Both variants on a grouped-query layer: exact where they say so, one result however tokens come, no drift."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from model.cache.gqa import all_heads
from model.errors import StateError
from model.variants.coda import CodaCache
from model.variants.coda_attention import Tokens, prefill, step
from model.variants.coda_settings import CodaSettings
from model.variants.shard import KvShape, ShardCache, ShardSettings
from probes.finding import JSON, Finding, at_most, broken, exactly, judged, measured
from probes.probe import Progress
from probes.shared.parts import Parts
from probes.variants.drawn import DIVERGENCE, GROUPS, WIDTH, Drawn, attended, divergence, draw, frequencies, off

CPU = torch.device("cpu")
# fp32 sums of a softmax, in whichever order: 1.8e-6 and 4.3e-6 of the largest output were seen in the published code
SAME = at_most(5e-6)
CUTS = (1, 4, 7, 128)  # tokens per call
GROWTH = at_most(1.5)  # all tokens are drawn alike: an error that does not build up stays as it is
SHARD = ShardSettings(rank=64)
CODA = (48, 16, 16)  # window, exact, summary: small, so that everything has been evicted to and from


def coda_cache(parts: Parts, window: int, exact: int = 0, summary: int = 0) -> CodaCache:
    """An empty cache of the corrected rules, in fp32."""
    settings = CodaSettings(window=window, exact=exact, summary=summary, rope="half")
    return parts.coda(settings, all_heads(GROUPS), WIDTH, torch.full((GROUPS,), -3.0), torch.float32, CPU)


def shard_cache(
    parts: Parts, prompt: int, context: int, settings: ShardSettings = SHARD, *, interleaved: bool = False
) -> ShardCache:
    """An empty cache in fp32."""
    shape = KvShape(all_heads(GROUPS), WIDTH, frequencies(), interleaved)
    return parts.shard(shape, settings, prompt, context, torch.float32, CPU)


def steps(cache: CodaCache, drawn: Drawn) -> Tensor:
    """Outputs of the tokens, one step each."""
    rows = (slice(i, i + 1) for i in range(len(drawn.q)))
    return torch.cat([step(cache, Tokens(drawn.q[i], drawn.k[i], drawn.v[i], None, None), None) for i in rows])


def blocks(cache: CodaCache, drawn: Drawn, size: int) -> Tensor:
    """Outputs of the tokens in blocks of prefill."""
    return prefill(cache, Tokens(drawn.q, drawn.k, drawn.v, None, None), None, size)


def calls(cache: ShardCache, drawn: Drawn, sizes: int, stop: int | None = None) -> Tensor:
    """Outputs of the tokens that the cache does not have, in calls of `sizes`."""
    first = cache.count
    parts = torch.arange(first, len(drawn.q) if stop is None else stop).split(sizes)
    return torch.cat([cache.attend(drawn.q[part], drawn.k[part], drawn.v[part]) for part in parts])


def exact(parts: Parts, length: int, seed: int) -> Iterator[Finding]:
    """As long as nothing is evicted or compressed, both are the full cache."""
    few = SHARD.sinks + SHARD.window
    every = draw(max(length, few), seed)
    drawn = _rows(every, 0, length)
    wanted = attended(drawn)
    found = {f"blocks of {n}": blocks(coda_cache(parts, length, 8, 8), drawn, n) for n in (1, 3, length)}
    found["one block longer than the prompt"] = blocks(coda_cache(parts, length, 8, 8), drawn, 2 * length)
    found["steps"] = steps(coda_cache(parts, length, 8, 8), drawn)
    yield _worst(f"GQA, coda, window {length} and {length} tokens: distance from the full cache", found, wanted)
    window = length // 3
    ring = {"steps": steps(coda_cache(parts, window), drawn)}
    what = f"GQA, coda, window {window} without banks: distance from attention to {window} tokens"
    yield _worst(what, ring, attended(drawn, window))
    short = _rows(every, 0, few)
    prompts = {f"prompt of {n}": calls(shard_cache(parts, n, few), short, 7) for n in (0, few // 2, few)}
    yield _worst(f"GQA, shard, {few} tokens, no more than sinks and window: distance", prompts, attended(short))


def _worst(what: str, found: dict[str, Tensor], wanted: Tensor) -> Finding:
    distances = {name: off(out, wanted) for name, out in found.items()}
    worst = max(distances, key=lambda name: distances[name] if distances[name] >= 0 else float("inf"))  # NaN is worst
    return judged(what, distances[worst], SAME, of="the largest output", worst=worst)


def cut_alike(parts: Parts, cuts: Sequence[int], prompt: int, seed: int) -> Iterator[Finding]:
    """What is stored does not depend on how tokens are grouped into calls."""
    length = max(prompt, SHARD.sinks + SHARD.window) + max(cuts)
    # of very different lengths, so that a norm that tokens share would show
    drawn = draw(length, seed)
    size = torch.logspace(-1, 1, length)[torch.randperm(length, generator=torch.Generator().manual_seed(seed))]
    drawn = drawn._replace(k=drawn.k * size[:, None, None], v=drawn.v * size.flip(0)[:, None, None])
    kept: dict[int, dict[str, Tensor]] = {}
    for cut in cuts:
        cache = shard_cache(parts, prompt, length)
        if prompt:
            calls(cache, drawn, cut, prompt)
        calls(cache, drawn, cut)
        kept[cut] = {name: part.clone() for name, part in cache.tensors(length).items()}
    yield differing(f"GQA, shard, calls of {', '.join(map(str, cuts))}: stored tensors that differ", kept)
    stop = SHARD.sinks + 2 * SHARD.window
    alone = shard_cache(parts, 0, stop)
    calls(alone, drawn, stop, stop)
    rows = alone.tensors(stop)["stream.values.norm"].float()
    true = drawn.v[SHARD.sinks : SHARD.sinks + len(rows) // GROUPS].norm(dim=-1).flatten()
    largest = float(((rows - true).abs() / true).max())
    # float16 rounds a length by 2^-11 of itself
    yield judged("GQA, shard, length stored with a row, off the row's own, largest", largest, at_most(2.0**-10))


def differing(what: str, kept: dict[int, dict[str, Tensor]], layer: int | None = None) -> Finding:
    """Count the tensors that differ from those of the first cut."""
    first, *others = kept.values()
    names = [(cut, name) for cut, other in zip(list(kept)[1:], others, strict=True) for name in first
             if not torch.equal(first[name], other[name])]  # fmt: skip
    evidence: dict[str, JSON] = {"first": f"{names[0][1]}, calls of {names[0][0]}"} if names else {}
    return judged(what, len(names), exactly(0), layer=layer, tensors=len(first) * len(others), **evidence)


class _Case(NamedTuple):
    """A cache that is saved, how one like it is made, and how it goes on."""

    name: str
    position: int
    make: Callable[[], CodaCache | ShardCache]
    run: Callable[[CodaCache | ShardCache, Drawn], Tensor]


def restored(parts: Parts, prompts: Sequence[int], seed: int, more: int = 24) -> Iterator[Finding]:
    """A cache that is put back goes on to the bit: of shard, while each prompt is read, right after it, and beyond."""
    window, few = CODA[0], SHARD.sinks + SHARD.window
    cases = [_Case("coda", p, lambda: coda_cache(parts, *CODA), _step_on) for p in (window - 10, 3 * window + 17)]
    for prompt in prompts:
        cases += [
            _Case("shard", p, lambda prompt=prompt: shard_cache(parts, prompt, prompt + 2 * few), _call_on)  # type: ignore[misc]
            for p in (prompt - 30, prompt, prompt + few + 17)
            if p > 0
        ]
    drawn = draw(max(case.position for case in cases) + more, seed)
    for name, position, make, run in cases:
        cache, other = make(), make()
        run(cache, _rows(drawn, 0, position))
        what = f"GQA, {name}, saved at {position} and put back: outputs that differ"
        try:
            other.restore(position, {part: tensor.clone() for part, tensor in cache.tensors(position).items()})
        except StateError as error:  # what a cache gave, a cache does not take
            yield broken(what, str(error))
            continue
        tail = _rows(drawn, position, position + more)
        wrong = (run(cache, tail) != run(other, tail)).flatten(1).any(1)
        yield judged(what, int(wrong.sum()), exactly(0), of=more)


def _rows(drawn: Drawn, low: int, high: int) -> Drawn:
    return Drawn(*(part[low:high] for part in drawn))


def _step_on(cache: CodaCache | ShardCache, drawn: Drawn) -> Tensor:
    assert isinstance(cache, CodaCache)
    return steps(cache, drawn)


def _call_on(cache: CodaCache | ShardCache, drawn: Drawn) -> Tensor:
    assert isinstance(cache, ShardCache)
    return torch.cat([cache.attend(*part) for part in zip(*(x.split(5) for x in drawn), strict=True)])


class Drift(NamedTuple):
    """Divergence from the full cache as a sequence goes on."""

    name: str
    curve: list[tuple[float, float]]  # position, mean KL of the tokens since the last
    growth: float  # median of the last quarter's tokens over that of the second's, whose first fill the window
    last: float  # mean of the last quarter
    largest: float  # of one token


def drift(name: str, each: Tensor) -> Drift:
    """From the divergence of each token [n]."""
    quarters = each.chunk(4)
    size = max(1, len(each) // 32)
    curve = [(float((i + 1) * size), float(part.mean())) for i, part in enumerate(each.split(size))]
    growth = float(quarters[-1].median() / quarters[1].median())
    return Drift(name, curve, growth, float(quarters[-1].mean()), float(each.max()))


def drifts(parts: Parts, count: int, seed: int, progress: Progress, *, coda: bool) -> list[Drift]:
    """Decode `count` tokens with shard, and perhaps with coda, one by one and from nothing."""
    drawn = draw(count, seed)
    whole = attended(drawn)
    progress(0.1, f"{count} steps with shard")
    found = [drift("shard, 8 bits", divergence(whole, calls(shard_cache(parts, 0, count), drawn, 64)))]
    if coda:
        progress(0.5, f"{count} steps with coda")
        out = steps(coda_cache(parts, *CODA), drawn)
        found.append(drift("coda, {}+{}+{}".format(*CODA), divergence(whole, out)))
    return found


def drift_finding(of: str, one: Drift, layer: int | None = None) -> Finding:
    """An error that builds up shows at the end; of tokens that are drawn."""
    what = f"{of}: {DIVERGENCE}, median of the last quarter over that of the second"
    return judged(what, one.growth, GROWTH, layer=layer, mean_of_the_last=one.last, largest=one.largest)


def divergence_finding(of: str, one: Drift, divergence: str = DIVERGENCE) -> Finding:
    """A number to know."""
    return measured(f"{of}: {divergence}, mean of the last quarter", one.last, largest=one.largest)
