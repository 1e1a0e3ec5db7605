"""Cases whose bytes are the context of one sequence: index scores, top-k, attention."""

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kernels.attention import reference as attention_reference
from kernels.attention import triton as attention
from kernels.formats import rows
from kernels.indexer import reference as indexer_reference
from kernels.indexer import topk
from kernels.indexer import triton as indexer
from scripts.bench.device import counts
from scripts.bench.device.case import Call, Case, Target, Tolerance
from scripts.bench.device.draw import Draw
from scripts.bench.device.shapes import (
    FLASH,
    HEAD_DIM,
    INDEX_DIM,
    INDEX_HEADS,
    MILLION,
    MODELS,
    PRO,
    RATIOS,
    ROPE,
    V4,
    WINDOW,
)

CHUNK = 8192  # tokens of a prefill
CHECKED = 4  # tokens of it that are compared
CSA, HCA = RATIOS["CSA"], RATIOS["HCA"]
CONTEXTS = {"4K": 4096, "128K": 131072, "1M": MILLION}
# 64 ulp of fp32 of the sum of 64 x 128 products' sizes, 60 times a score
SCORES = Tolerance(of_each=2**-12, of_rms=2**-11)
# a selected entry may score below the k-th by this share of the row's largest score: the two are as good as equal
PICKED = 2**-12
# masses are rounded to BF16 before they multiply keys: half a step of it, 2^-9, of the mean size of keys; and a step of
# the result each. `KEYS` is in the numbers of the keys, which are of unit size
STEP, KEYS = 2**-7, 2**-9


def scores() -> Iterator[Case]:
    """Scores of a decoded token, and selections of a token and of a chunk; the models differ in k alone."""
    for form, (context, n) in itertools.product(counts.KEY_BYTES, CONTEXTS.items()):
        yield Case(
            "indexer", f"scores, {form} keys, one token at {context}",
            counts.index_scores(form, n // CSA, 1, stored=True), _scores(form, n // CSA), str(SCORES), "reference",
            Target(us=20.0),
        )  # fmt: skip
    for shape, form in itertools.product(MODELS, counts.KEY_BYTES):
        for t, (context, n) in itertools.product((1, CHUNK), CONTEXTS.items()):
            if t > n:
                continue
            cost = counts.index_scores(form, n // CSA, t, stored=False)
            target = Target(of_flops=1.0) if t == CHUNK else Target(us=55.0)
            yield Case(
                "indexer", f"select, {shape.name}, {form} keys, {t} tokens at {context}", cost,
                _select(shape, form, n, t), f"{PICKED:.2g} of the row's largest score",
                "reference" if t == 1 else f"reference, last {CHECKED} tokens", target,
                compiled=shape is PRO and (t, context) == (1, "1M") and form == "fp4",
            )  # fmt: skip


def _scores(form: str, n: int) -> Callable[[Draw], Call]:
    def build(draw: Draw) -> Call:
        keys = draw.keys(form, n, INDEX_DIM)
        q, weights = draw.normal(1, INDEX_HEADS, INDEX_DIM), draw.normal(1, INDEX_HEADS, dtype=torch.float32)

        def error(ours: Tensor) -> float:
            return SCORES.error(ours, indexer_reference.index_scores(q, weights, keys))

        return Call(lambda: indexer.index_scores(q, weights, keys), error)

    return build


def _select(shape: V4, form: str, context: int, t: int) -> Callable[[Draw], Call]:
    def build(draw: Draw) -> Call:
        keys, first = draw.keys(form, context // CSA, INDEX_DIM), context - t
        q, weights = draw.normal(t, INDEX_HEADS, INDEX_DIM), draw.normal(t, INDEX_HEADS, dtype=torch.float32)
        position, last = draw.position(first), min(t, CHECKED)

        def error(ours: Tensor) -> float:
            found = indexer_reference.index_scores(q[-last:], weights[-last:], keys)
            return picked_error(found, ours[-last:], context - last, CSA)

        return Call(lambda: indexer.select(q, weights, keys, position, CSA, shape.index_topk), error)

    return build


def picked_error(scores: Tensor, picked: Tensor, first: int, ratio: int) -> float:
    """How far below the k-th best score the worst selected entry lies, in units of `PICKED`; inf: not a selection.

    `scores` [t, n] are the reference's, `picked` [t, k] of tokens ``first ..``: distinct visible entries in ascending
    order, and -1 behind them where fewer are visible than k.
    """
    worst = 0.0
    for i, (row, found) in enumerate(zip(scores, picked.long(), strict=True)):
        seen = min((first + i + 1) // ratio, row.shape[0])
        wanted = min(seen, found.shape[0])
        kept, rest = found[:wanted], found[wanted:]
        ordered = bool((kept[1:] > kept[:-1]).all()) and bool((rest == -1).all())
        if not ordered or bool(((kept < 0) | (kept >= seen)).any()):
            return float("inf")
        if wanted:
            visible = row[:seen]
            least = visible.topk(wanted).values[-1]
            worst = max(worst, float((least - visible[kept].min()) / visible.abs().max().clamp_min(1e-30)) / PICKED)
    return worst


def selections() -> Iterator[Case]:
    """Top-k of scores that are there already."""
    for shape, t in itertools.product(MODELS, (1, 32, 512)):
        n, k = MILLION // CSA, shape.index_topk
        yield Case(
            "topk", f"{k} of {n}, {t} rows", counts.top_k(n, t, k), _top_k(n, t, k), "the same scores", "torch.topk",
            Target(us=35.0) if t == 1 else Target(us=60.0) if t == 32 else None, (shape, t) == (PRO, 1),
        )  # fmt: skip


def _top_k(n: int, t: int, k: int) -> Callable[[Draw], Call]:
    def build(draw: Draw) -> Call:
        given = draw.normal(t, n, dtype=torch.float32)
        first = draw.position(n * CSA)  # every row sees all

        def error(ours: Tensor) -> float:
            found = given.gather(1, ours.long()).sort(1).values
            return 0.0 if torch.equal(found, given.topk(k, dim=1).values.sort(1).values) else float("inf")

        return Call(lambda: topk.top_k(given, first, CSA, k), error)

    return build


def attentions() -> Iterator[Case]:
    """One token and a chunk: the window alone, selected entries, all entries."""
    for shape, t in itertools.product(MODELS, (1, CHUNK)):
        for kind, context in (("SWA", "4K"), ("CSA", "1M"), ("HCA", "4K"), ("HCA", "128K"), ("HCA", "1M")):
            for form in ("fp8",) if kind == "SWA" else ("fp8", "bf16"):
                position = max(CONTEXTS[context], t)
                n = 0 if kind == "SWA" else position // RATIOS[kind]
                seen = shape.index_topk if kind == "CSA" else n
                target = Target(us=15.0) if t == 1 else Target(of_flops=0.5)
                label = f"{kind}{'' if kind == 'SWA' else f', {form} entries'}, {shape.name}, {t} tokens at {context}"
                first = shape is FLASH and (t, kind, context, form) == (1, "CSA", "1M", "fp8")
                yield Case(
                    "attention", label, counts.attention(shape.heads, t, seen, min(n, t * seen), form),
                    _attention(shape, kind, form, position, t), f"{STEP:.2g} of each + {KEYS:.2g} of a key's size",
                    "reference" if t == 1 else f"reference, last {CHECKED} tokens",
                    None if kind == "SWA" else target, first,
                )  # fmt: skip


def _attention(shape: V4, kind: str, form: str, context: int, t: int) -> Callable[[Draw], Call]:
    def build(draw: Draw) -> Call:
        ratio, first, last = RATIOS.get(kind, 0), context - t, min(t, CHECKED)
        q, ring = draw.normal(t, shape.heads, HEAD_DIM), draw.normal(WINDOW + t - 1, HEAD_DIM)
        entries = draw.entries(form, context // ratio, HEAD_DIM, ROPE) if ratio else None
        selected = draw.chosen(t, shape.index_topk, first // ratio) if kind == "CSA" else None
        sink, position = draw.normal(shape.heads, dtype=torch.float32), draw.position(first)

        def error(ours: Tensor) -> float:
            picks = None if selected is None else selected[-last:]
            expected = attention_reference.attend(
                q[-last:], ring, context - last, WINDOW, entries, ratio, picks, sink
            )  # fmt: skip
            size = 1.0 if entries is None else float(rows.read(entries, 0, min(4096, context // ratio)).abs().mean())
            allowed = STEP * expected.float().abs() + KEYS * max(1.0, size)
            off = (ours[-last:].float() - expected.float()).abs() / allowed
            return float(off.nan_to_num(float("inf"), float("inf")).max())

        return Call(lambda: attention.attend(q, ring, position, WINDOW, entries, ratio, selected, sink), error)

    return build


CONTEXT: dict[str, Callable[[], Iterator[Case]]] = {"indexer": scores, "topk": selections, "attention": attentions}
