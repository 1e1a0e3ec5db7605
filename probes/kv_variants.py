"""Experiment `kv-variants`: what each way to remember keeps and costs, on a V4 checkpoint and on a small Llama."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import ClassVar, Final, NamedTuple

import torch

from fathom.model.errors import ConfigError
from fathom.model.llama.config import LlamaConfig
from fathom.model.observe.sites import Site
from fathom.model.state import State
from fathom.model.variants.grouped import ShardLayer
from fathom.probes.demo_language.prompts import fact_prompts, needle_prompts
from fathom.probes.evaluation import Run, Share, Window, ask, compare, read, summary
from fathom.probes.finding import (
    Finding,
    HeatMap,
    Part,
    Report,
    Scatter,
    Table,
    Text,
    at_least,
    exactly,
    judged,
    vacuous,
)
from fathom.probes.needle import asked, begun, of_prompt
from fathom.probes.probe import Probe, Progress, room
from fathom.probes.subject import Subject, speaks_demo_language
from fathom.runtime.generate import Generation, generate
from fathom.runtime.load import load_any
from fathom.runtime.memory import new_state
from fathom.runtime.options import RunOptions
from fathom.runtime.sampling import Sampling

FULL_CACHE: Final = "full"
PLAIN: Final = RunOptions("plain", "fp32")  # so that what differs is the cache, see `DEPLOYED`
# By rules of --kv. V4's demo has 16-token windows and 1 entry per 4 or 128 tokens: 8 slots are HCA's for 1024 tokens.
V4: Final[dict[str, tuple[str, ...]]] = {
    FULL_CACHE: (),
    "shard, 8 bits": ("all=shard:bits=8",),
    "shard, 6 bits": ("all=shard",),
    "shard, 4 bits": ("all=shard:bits=4",),
    "coda on HCA, 8 + 4 + 4": ("hca=coda:window=8,exact=4,summary=4",),
    "coda on CSA, 256 + 64 + 64": ("csa=coda",),
    "coda on both, 64 + 16 + 16": ("all=coda:window=64,exact=16,summary=16",),
    "shard on CSA, coda on HCA": ("csa=shard", "hca=coda:window=8,exact=4,summary=4"),
}
BOUNDED: Final = ("all=coda:window=64,exact=16,summary=16,block=64",)  # what scripts.train_coda trains adapters for
ABSENT: Final = "qjl=", "dp=2", "values=1", "basis="  # knobs of `--kv` that no row has
TITLES: Final = {"v4": "The demo checkpoint (V4)", "llama": "The small Llama-family model"}
FIDELITY, RECALL = "bytes, fidelity, text", "codes found"  # tables of each model

SPARE: Final = 400  # tokens of questions behind a document, and more
COUNTED: Final = 32768  # tokens for which bytes are counted as well
TOLD: Final = 1024  # tokens of the documents that facts and greedy text follow
LOST: Final = 0.05  # share of the codes from which a variant counts as losing them
WORTH: Final = 0.1  # share of the full cache's bytes from which a variant counts as saving any


def grouped(columns: int) -> dict[str, tuple[str, ...]]:
    """Variants of layers with grouped heads, whose keys have so many columns; 192 of Llama-3.1-8B's 1024 are 3/16."""
    rank, half = columns * 3 // 16 // 2 * 2, columns // 2
    return {
        FULL_CACHE: (),
        f"shard, rank {rank}, stream 8 bits": (f"all=shard:rank={rank}",),
        f"shard, rank {half}, stream 8 bits": (f"all=shard:rank={half}",),
        f"shard, rank {columns}, stream 8 bits": (f"all=shard:rank={columns}",),
        f"shard, rank {columns}, stream 4 bits": (f"all=shard:rank={columns},bits=4",),
        f"shard, rank {half} by DP, stream 8 bits": (f"all=shard:rank={half},dp=1,group={half // 4}",),
        "coda, 512 + 128 + 128": ("all=coda:window=512,exact=128,summary=128",),
        "coda, 256 + 64 + 64": ("all=coda",),
        "coda, 256 + 64 + 64, published": ("all=coda:published=1",),
        "coda, 64 + 16 + 16": BOUNDED,
    }


class Variant(NamedTuple):
    """What one variant showed."""

    rules: tuple[str, ...]  # of --kv
    nbytes: dict[int, int]  # of all caches behind a prompt of so many tokens, in BF16
    kl: dict[int, float]  # from the full cache, mean over tokens decoded behind a document of so many, nats
    same: dict[int, float]  # share of these tokens with the same likeliest token
    codes: dict[int, list[tuple[bool, float]]]  # found, and how deep it was told, of documents of so many tokens
    facts: float  # share of taught facts that are right behind a document
    greedy: list[int]  # tokens of each text before the first that differs from the full cache's

    def found(self) -> Share:
        """Codes of all lengths."""
        return Share.of(right for answers in self.codes.values() for right, _ in answers)


Variants = dict[str, Variant]


@dataclass(frozen=True)
class KvVariants(Probe):
    """Compare variants with the full cache, model by model; the fields are knobs."""

    name: ClassVar[str] = "kv-variants"
    question: ClassVar[str] = "What does a layer remember, by variant: bytes, fidelity, recall?"
    reads: ClassVar[tuple[Site, ...]] = ()
    by_name: ClassVar[bool] = True
    in_variants: ClassVar[bool] = True
    options: ClassVar[RunOptions] = PLAIN
    background: ClassVar[str] = """\
Every variant runs the same weights on the same tokens as the full cache. Documents are of the demo language, with codes
told once each. `python -m scripts.evaluate` compares variants on any text and any checkpoint."""
    noticed: ClassVar[str] = ""

    llama: str = ""  # folder of what `scripts.train_llama` wrote
    adapters: str = ""  # file of adapters that `scripts.train_coda` wrote for it
    lengths: tuple[int, ...] = (2048, 8192)  # tokens of the documents read
    recalled: tuple[int, ...] = (512, 1024, 2048, 4096)  # tokens of documents with codes
    documents: int = 4  # with codes, of each length
    questions: int = 8  # for codes, behind each of them
    decoded: int = 64  # tokens decoded behind each document
    asked: int = 57  # facts
    texts: int = 8  # documents that are continued
    written: int = 150  # greedy tokens

    def needs(self, subject: Subject) -> str | None:
        """Say why this checkpoint cannot be asked."""
        if not subject.speaks_demo_language:
            return "the checkpoint does not speak the demo language: no document has answers that it could know"
        if (subject.options.numerics, subject.options.dtype) != (PLAIN.numerics, PLAIN.dtype):
            return "what differs would not be the cache alone: it runs with --numerics plain --dtype fp32"
        return room(subject, max(*self.lengths, *self.recalled, TOLD) + SPARE)

    def measure(self, subject: Subject, progress: Progress) -> Report:
        """Measure all variants of the checkpoint, and of the Llama where one is given."""
        options, models = subject.options, 1 + bool(self.llama)
        chunk = options.prefill_chunk
        runs = {kv: Run(name, subject.load(replace(options, kv=kv)).model, chunk) for name, kv in V4.items()}
        found = {"v4": self._measured(runs, subject.seed, lambda share, what: progress(share / models, what))}
        if self.llama:
            runs = self._llama_runs(options)
            found["llama"] = self._measured(runs, subject.seed, lambda share, what: progress((1 + share) / 2, what))
        return self.report(found, chunk)

    def _llama_runs(self, options: RunOptions) -> dict[tuple[str, ...], Run]:
        """The Llama once for each variant; with adapters also for CoDA's query mechanism."""
        folder, chunk = Path(self.llama), options.prefill_chunk
        whole = load_any(folder, options).model
        config = whole.config
        if not isinstance(config, LlamaConfig) or not speaks_demo_language(folder):
            raise ConfigError(f"llama={self.llama}: no Llama-family model of the demo language")
        variants = grouped(config.num_key_value_heads * config.head_dim)
        runs = {kv: Run(name, load_any(folder, replace(options, kv=kv)).model, chunk) for name, kv in variants.items()}
        if self.adapters:
            trained = load_any(folder, replace(options, kv=BOUNDED, coda_adapters=self.adapters)).model
            runs[*BOUNDED, "--coda-adapters"] = Run("coda, 64 + 16 + 16, trained", trained, chunk)
        return runs

    def _measured(self, runs: Mapping[tuple[str, ...], Run], seed: int, progress: Progress) -> Variants:
        """Measure all variants of one model, the full cache first."""
        every = list(runs.values())
        counted = [n for n in (*self.lengths, COUNTED) if n <= every[0].model.config.max_position_embeddings]
        kl: dict[str, dict[int, float]] = {run.name: {} for run in every}
        same: dict[str, dict[int, float]] = {run.name: {} for run in every}
        for at, length in enumerate(self.lengths):
            progress(0.3 * at / len(self.lengths), f"{length} tokens in all variants")
            ids = needle_prompts(length + self.decoded + 100, 1, seed)[0].ids[: length + self.decoded + 1]
            scores = compare(every, [Window(list(ids), 0, length, self.decoded)], lambda _: None, decode=True)
            for run, one in zip(every, (summary(score, scores[0]) for score in scores), strict=True):
                kl[run.name][length], same[run.name][length] = one.get("kl", 0.0), one.get("same_likeliest", 1.0)
        out, texts = Variants(), list[list[int]]()
        for at, (rules, run) in enumerate(runs.items()):
            progress(0.3 + 0.7 * at / len(runs), run.name)
            codes = {length: list(self._codes(run, length, seed)) for length in self.recalled}
            written = [self._written(run, prompt.ids) for prompt in needle_prompts(TOLD, self.texts, seed)]
            texts = texts or written
            nbytes = {length: held_bytes(run, length) for length in counted}
            facts, greedy = self._facts(run, seed), agreed(texts, written)
            out[run.name] = Variant(rules, nbytes, kl[run.name], same[run.name], codes, facts, greedy)
        return out

    def _codes(self, run: Run, length: int, seed: int) -> Iterator[tuple[bool, float]]:
        """Ask for codes, the question decoded token by token behind the compressed document."""
        for prompt in needle_prompts(length, self.documents, seed, self.questions):
            document = of_prompt(prompt, length)
            for answer in asked(run, begun(run, document), document, token_by_token=True):
                yield answer.greedy, answer.depth

    def _facts(self, run: Run, seed: int) -> float:
        """Share of taught facts that are right behind a document which holds none of them."""
        document = needle_prompts(TOLD, 1, seed)[0].ids[:TOLD]
        prompts = fact_prompts()[:: len(fact_prompts()) // self.asked][: self.asked]
        longest = max(len(prompt.ids) for prompt in prompts)
        state = new_state(run.model, len(document) + longest, run.chunk, len(document))
        read(run.model, state, document, run.chunk)
        found = ask(run.model, state, [prompt.ids[1:] for prompt in prompts])  # without a second BOS
        right = (int(rows[-1].argmax()) == prompt.answer for rows, prompt in zip(found, prompts, strict=True))
        return Share.of(right).share

    def _written(self, run: Run, ids: Sequence[int]) -> list[int]:
        """A greedy continuation, past any EOS."""
        state = new_state(run.model, len(ids) + self.written, run.chunk, len(ids))
        return list(
            generate(
                run.model,
                state,
                ids,
                eos=(),
                limit=self.written,
                sampling=Sampling(),
                progress=lambda _: None,
                record=Generation(),
            )
        )

    # --- what it means

    def report(self, found: Mapping[str, Variants], chunk: int) -> Report:
        """The page, from what was measured of each model."""
        findings = [finding for kind, variants in found.items() for finding in _findings(TITLES[kind], variants)]
        parts: list[Part] = [_bytes_and_divergence(found), _codes_found(found)]
        for kind, variants in found.items():
            parts += [self._table(TITLES[kind], variants), _recall(TITLES[kind], variants), _rules(variants)]
        parts += [Text("How it was measured", self._how(chunk)), Text("Where the originals claim other numbers", "")]
        parts += [Text("", "\n".join(line for kind, one in found.items() for line in self._claims(TITLES[kind], one)))]
        told = " ".join(_verdict(TITLES[kind], variants) for kind, variants in found.items())
        return Report(told, tuple(findings), tuple(parts), NOT_CLAIMED)

    def _table(self, title: str, variants: Variants) -> Table:
        full = variants[FULL_CACHE]
        columns = [*(f"bytes, {_k(n)}" for n in full.nbytes), *(f"KL, {_k(n)}" for n in full.kl)]
        columns += [*(f"top-1, {_k(n)}" for n in full.kl), "facts", "greedy texts", "median tokens"]
        rows: list[list[float | str | None]] = []
        for name, one in variants.items():
            kl = ["0" if name == FULL_CACHE else f"{value:.1e}" for value in one.kl.values()]
            same = [f"{100 * share:.0f} %" for share in one.same.values()]
            sizes = [f"{size:,}" for size in one.nbytes.values()]
            texts = Share.of(count == self.written for count in one.greedy)
            rows.append([name, *sizes, *kl, *same, f"{100 * one.facts:.0f} %", str(texts), _median(one.greedy)])
        return Table(f"{title}: {FIDELITY}", ("variant", *columns), rows)

    def _claims(self, title: str, variants: Variants) -> Iterator[str]:
        """What the articles say, beside what was found here."""
        full, shard = (
            variants[FULL_CACHE],
            [name for name in variants if name.startswith("shard") and "coda" not in name],
        )
        texts = (
            f"{name}, {Share.of(count == self.written for count in variants[name].greedy)},"
            f" {_median(variants[name].greedy)}"
            for name in shard
        )
        yield (
            f'- "Lossless at 8 bits" (Shard, 750 of 750 tokens on five prompts) is a count. {title}, texts that are the'
            f" same and median tokens before the first that differs: {'; '.join(texts)}. Exact by construction is only"
            " what is not compressed: sinks and window."
        )
        last, first = list(full.nbytes)[-1], variants[shard[0]]
        ratio = full.nbytes[last] / first.nbytes[last]
        yield (
            "- Shard's 7x to 11x is of layers with 1,024 columns of keys at rank 192 (`tests/model/test_cache_shard.py`"
            f" counts the nine published figures). {title}, {shard[0]}: {ratio:.1f}x at {_k(last)}, with"
            f" {first.found().share:.0%} of the codes found (full cache: {full.found().share:.0%})."
        )
        bounded = {name: one for name, one in variants.items() if name.startswith("coda") and _saves(variants, name)}
        found = "; ".join(f"{name}, {one.found().share:.0%}" for name, one in bounded.items())
        yield f"- CoDA's size is constant. {title}, codes that are found with it: {found}."

    def _how(self, chunk: int) -> str:
        return HOW.format(
            chunk=chunk,
            decoded=self.decoded,
            recalled=", ".join(map(str, self.recalled)),
            facts=self.asked,
            told=f"{TOLD:,}",
            texts=self.texts,
            written=self.written,
        )


def held_bytes(run: Run, context: int) -> int:
    """Bytes that the caches of a prompt of `context` tokens hold when it has been read, in BF16; nothing is run."""
    formats = run.model.arithmetic.formats._replace(dtype=torch.bfloat16)
    state = State(run.model.config, context, run.chunk, formats, torch.device("meta"), context)
    total = sum(state.nbytes().values())
    for cache in state.layers:
        if isinstance(cache, ShardLayer):  # what holds the prompt until it is compressed is let go
            total -= sum(part.nbytes for name, part in cache.shard.buffers().items() if name.startswith("prompt."))
    return total


def agreed(wanted: Sequence[Sequence[int]], found: Sequence[Sequence[int]]) -> list[int]:
    """How many tokens of each continuation are the same, up to the first that differs."""
    return [
        next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))
        for one, other in zip(wanted, found, strict=True)
    ]


def _findings(title: str, variants: Variants) -> Iterator[Finding]:
    """Without a full cache that finds its codes, and is equal to itself, the table would say nothing."""
    full, what = variants[FULL_CACHE], f"{title}: codes found with the full cache"
    if (found := full.found()).share < 1 - LOST:
        yield vacuous(what, f"{found}: a variant cannot lose what is not found")
    else:
        yield judged(what, found.share, at_least(1 - LOST), questions=found.total)
    yield judged(f"{title}: divergence of the full cache from itself, nats", max(full.kl.values()), exactly(0))


def _verdict(title: str, variants: Variants) -> str:
    """The smallest variant that keeps codes, what loses them, and what shows nothing."""
    full, names = variants[FULL_CACHE], [name for name in variants if name != FULL_CACHE]
    length, most = max(full.kl), full.found().share - LOST
    lose = [name for name in names if variants[name].found().share < most]
    idle = [name for name in names if not _saves(variants, name)]
    kept = [name for name in names if name not in (*lose, *idle)]
    told = "no variant that saves bytes finds 95 % of the codes that the full cache finds"
    if kept:
        best = min(kept, key=lambda name: variants[name].nbytes[length])
        sizes = [variants[name].nbytes[length] / length for name in (best, FULL_CACHE)]
        same = Share.of(count == max(full.greedy) for count in variants[best].greedy)
        told = (
            f"of the variants that find 95 % of the codes that the full cache finds, the smallest is {best}: at"
            f" {_k(length)} {sizes[0]:,.0f} bytes per token instead of {sizes[1]:,.0f} ({sizes[1] / sizes[0]:.1f} times"
            f" fewer), {variants[best].found()} codes found, {same} greedy texts unchanged"
        )
    lines = [f"**{title}: {told}.** Find less than 95 %: {'; '.join(lose) or 'none'}."]
    if idle:
        lines.append(
            f"Save less than {WORTH:.0%} of the bytes at {_k(length)}, so nothing is shown: {'; '.join(idle)}."
        )
    lines += [
        f"Same bytes and same codes found, so their difference is not shown: {one} and {other}."
        for one, other in combinations(names, 2)
        if variants[one].nbytes == variants[other].nbytes and variants[one].codes == variants[other].codes
    ]
    return " ".join(lines)


def _saves(variants: Variants, name: str) -> bool:
    """Whether a variant takes a tenth less than the full cache, for the longest document that is compared."""
    full = variants[FULL_CACHE]
    return variants[name].nbytes[max(full.kl)] <= (1 - WORTH) * full.nbytes[max(full.kl)]


def _recall(title: str, variants: Variants) -> Table:
    """Codes found, by length and by quarter of the document in which they were told."""
    rows: list[list[float | str | None]] = []
    for name, one in variants.items():
        by_length = [Share.of(right for right, _ in answers) for answers in one.codes.values()]
        told = [answer for answers in one.codes.values() for answer in answers]
        quarters = [Share.of(right for right, depth in told if min(3, int(4 * depth)) == i) for i in range(4)]
        rows.append([name, str(one.found()), *map(str, (*by_length, *quarters))])
    lengths = map(_k, variants[FULL_CACHE].codes)
    columns = ("variant", "all", *lengths, "told in the first quarter", "second", "third", "last")
    return Table(f"{title}: {RECALL}", columns, rows)


def _rules(variants: Variants) -> Text:
    rules = [f"{name}: `{' '.join(one.rules)}`" for name, one in variants.items() if one.rules]
    return Text("", f"By `--kv`: {'; '.join(rules)}.")


def _bytes_and_divergence(found: Mapping[str, Variants]) -> Scatter:
    """A point for each variant but the full cache, at the longest document."""
    points: dict[str, Sequence[tuple[str, float, float]]] = {}
    for kind, variants in found.items():
        full = variants[FULL_CACHE]
        n = max(full.kl)
        points[TITLES[kind]] = [
            (name, one.nbytes[n] / full.nbytes[n], max(one.kl[n], 1e-9))
            for name, one in variants.items()
            if name != FULL_CACHE
        ]
    x, y = "bytes, as a share of the full cache's", "KL from the full cache, nats per token"
    note = "Further left is smaller, further down is nearer to the full cache."
    return Scatter("Bytes and divergence", x, y, points, log_x=True, log_y=True, note=note)


def _codes_found(found: Mapping[str, Variants]) -> HeatMap:
    """Share of codes by variant and length."""
    rows = {f"{kind}: {name}": one.codes for kind, variants in found.items() for name, one in variants.items()}
    lengths = list(next(iter(rows.values())))
    values = [[Share.of(right for right, _ in codes[length]).share for length in lengths] for codes in rows.values()]
    note = "Share of the numbers that are told once in a document and asked for at its end."
    columns = tuple(map(_k, lengths))
    return HeatMap("Codes found", "tokens of the document", "variant", columns, tuple(rows), values, note)


def _median(counts: Sequence[int]) -> int:
    return sorted(counts)[len(counts) // 2]


def _k(n: int) -> str:
    return f"{n // 1024}K" if n % 1024 == 0 else str(n)


HOW: Final = """\
- *Numerics*: plain, fp32, for both models, so that what differs is the cache. (As deployed the full cache rounds its
  entries to FP8 and its index keys to FP4, which coded ones are not: a difference would be mostly that rounding.)
- *bytes*: all caches after a prompt of this length, read in calls of {chunk}, in BF16, counted from tensors
  (rings, entries, index keys, compressor states, banks, bases, codebooks). Layers read
  a prompt one after the other where Shard compresses it, so that one of them at a time holds it in full; the memory
  plan counts that.
- *KL, top-1*: {decoded} tokens decoded behind a document of this length, given, so that all variants read the same;
  divergence of the variant's distribution from the full cache's, mean in nats. Both models were trained on documents of
  up to 2,048 tokens: beyond, the text is as it may be, the comparison is not.
- *codes*: right answers, greedy, over documents of {recalled} tokens; the question is decoded token by token behind the
  compressed document, and the code it asks for was told at least 128 tokens before it, or a quarter of the document,
  where that is less. On the demo neither codes nor facts need HCA's entries (`audits/demo-checkpoint.md`, *HCA window
  only*): what a variant does to HCA layers shows in KL and in greedy text alone.
- *facts*: {facts} taught facts, each asked behind a document of {told} tokens which does not hold it.
- *greedy texts*: {texts} documents of {told} tokens continued for {written} tokens each; how many of them the variant
  writes exactly as the full cache does, and the median number of tokens before the first that differs.
- *stream*: what is decoded goes to Shard's stream when it leaves the window, and bytes are counted behind a prompt: few
  tokens get there here, so that the bits of a stream are barely exercised. `audits/kv-stream.md` has them alone.
- *trained* is the one row whose weights differ: adapters of `scripts.train_coda`, against the base's full cache. They
  were trained for fewer codes in a document than are told here; `audits/train-coda.md` asks what they were trained
  for."""
NOT_CLAIMED: Final = """\
Speed: `audits/kv-speed.md` has layers of published shapes. `shard` with `dp=2` and `coda` with `values=1` are on no
page; `shard` with `qjl=1` is on `audits/kv-stream.md`, with `basis=FILE` on `audits/kv-basis.md`. Two small models, of
which nothing follows for large ones: `python -m scripts.evaluate` measures those."""

FULL = KvVariants()
QUICK = KvVariants(lengths=(256,), recalled=(256,), documents=1, questions=4, decoded=16, asked=8, texts=1, written=16)
