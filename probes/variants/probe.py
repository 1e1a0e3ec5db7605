"""Cache variants: exact where they say so, honest about bytes and scratch, the same however tokens come."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from model.config import LayerKind, ModelConfig
from model.observe.sites import Site
from model.transformer import Transformer
from probes.finding import Finding, Report
from probes.probe import Probe, Progress, one_rank, room
from probes.subject import Subject
from probes.variants import banks, basis, codes, grouped, page, runs, sizes
from probes.variants.grouped import CUTS, Drift

REFERENCE = "reference"  # the op set that decodes whole caches, on purpose


@dataclass(frozen=True)
class Variants(Probe):
    """Hold coda and shard to their equations, on grouped-query layers and on the layers of the model."""

    name: ClassVar[str] = "variants"
    question: ClassVar[str] = "Do the cache variants keep what they promise to keep, and take the bytes they say?"
    reads: ClassVar[tuple[Site, ...]] = ()
    of_fathom: ClassVar[bool] = True
    in_variants: ClassVar[bool] = True
    background: ClassVar[str] = """\
A layer need not remember everything. **CoDA** keeps a window of what is newest, some entries that were like no other,
and means of the rest, in memory that no context fills. **Shard** keeps everything as codes: of the tokens of a prompt
keys in their own eigenbasis and values from a codebook; of later ones, and of V4's entries, a length and Lloyd-Max
codes of the row after a Hadamard rotation, or of its coefficients in a basis that was fitted beforehand. Both were
published for layers with grouped queries (GQA), and are here for those and, in another form, for the layers of V4.

Lossy by design is where mistakes hide. An answer that is a little off is what one expects, so nobody asks whether it is
the loss that was paid for or a fault: a mean left out of the scores, a rotation by the wrong sign, codes that depend on
how a prompt was cut into calls, a codebook of 8 bits that is as good as one of 5, an entry that is in no bank and one
that is in two, a mean of a hundred entries that weighs as much as one. The memory that such a cache is there to save is
easily spent again, on keys that are decoded all at once or buffers that nobody counts.

So each promise is held to something outside of the code: to full attention in float64 while nothing is evicted; to
rotations as products of complex numbers; to Max's table of quantisers; to the figures in the published articles; to the
memory that a run has written to; to itself, cut otherwise or put back from a save, bit by bit."""
    noticed: ClassVar[str] = """\
**A mean of KL says little about a document.** A few tokens make up most of Shard's divergence on a document of the
demo: they stand where a layer selected other entries than with the full cache, and the tokens after them are as close
as ever. A first form of this probe judged how much that mean grew through a document, and passed or failed by one
token; by the median it failed too, for text is not alike in all its parts. So what is judged now is drawn, and alike
throughout; of the document, the numbers are told.

**Eight bits exchange entries all the same.** The recall of a selection is near one and not one even where keys are
normal.

**Two of the faults are the published designs.** CoDA as published lets a mean weigh as much as one token, and offers
each token to both banks; on V4's layers either is a fault here.

**A window that evicts one entry too early is hard to see.** The first slots of either bank hold what they are given as
it is, so all outputs stay the same until these are full. What shows it is the index: the banks are attended to whatever
the indexer says, and an entry that is there too early changes the selection."""

    tokens: int = 275  # of a prompt: two entries of 128, and some that come after the last entry of four
    chunks: tuple[int, ...] = (3, 68, 275)  # tokens of a call; single tokens come in any case
    tail: int = 24  # tokens that come one by one
    length: int = 96  # of a sequence that coda's window holds, grouped-query
    cuts: tuple[int, ...] = CUTS  # rows that come at a time
    entries: int = 300  # that are drawn
    steps: int = 2048  # decoded one by one, grouped-query
    read: int = 2048  # tokens of a document read with each variant; 0: none
    prompt: int = 600  # that shard compresses
    prompts: tuple[int, ...] = (108, 0)  # after which shard is saved; the first one, cut otherwise too
    keys: int = 2048  # index keys, of which a quarter is selected, and entries over which attention is spread
    widths: tuple[int, ...] = (4, 6)  # bits of index keys, for comparison
    contexts: tuple[int, int] = (
        8192,
        32768,
    )  # tokens over which grouped-query scratch is compared: both of many tiles

    def needs(self, subject: Subject) -> str | None:
        """Several ranks hold the same caches."""
        config = subject.config
        entries = max(config.compress_ratios) * max(self.entries, self.steps, self.keys)
        why = one_rank(subject, "every rank holds the caches whole, and alike")
        return why or room(subject, max(self._length(config), self.read, entries))

    def vacuous(self, subject: Subject) -> str | None:
        """Too little to evict, to cut or to compare."""
        del subject
        if len(self.cuts) < 2:
            return "one way to cut has nothing to be compared with"
        if self.entries < 64 or self.steps < 512 or self.keys < 1024:
            return "too few entries, steps or keys to evict, to drift or to choose from"
        return None

    def _length(self, config: ModelConfig) -> int:
        """Tokens of the prompt: an entry of the longest block is finished, and passed before the tail."""
        return max(self.tokens, max(config.compress_ratios) + self.tail + 5)

    def measure(self, subject: Subject, progress: Progress) -> Report:
        """Grouped-query layers first, then those of the model."""
        given, seed = subject.parts, subject.seed
        progress(0.0, "grouped-query layers")
        llama, books = sizes.llama(given), codes.books(given)
        findings = [
            *grouped.exact(given, self.length, seed),
            *codes.identity(given, seed),
            *codes.rebuilt(given, seed, self.prompt),
            *codes.book_findings(books),
            *grouped.cut_alike(given, self.cuts, self.prompts[0], seed),
            *grouped.restored(given, self.prompts, seed),
            *sizes.published(given, llama),
            *sizes.counted(given, seed),
        ]
        scratch = sizes.scratch(given, self.contexts, seed)
        drawn = grouped.drifts(
            given, self.steps, seed, lambda share, what: progress(0.2 + 0.3 * share, what), coda=self.read > 0
        )
        findings += sizes.scratch_findings(scratch)
        findings.append(grouped.drift_finding(f"GQA, shard, {self.steps} steps", drawn[0]))
        findings += [grouped.divergence_finding(f"GQA, {one.name}, {self.steps} steps", one) for one in drawn]
        shown = page.Shown(llama, books, scratch, [], drawn, [], _left_out(subject.config))
        progress(0.5, "layers of the model")
        if any(kind is not LayerKind.SWA for kind in subject.config.layer_kinds):
            findings += self._coda(subject)
            progress(0.7, "layers of the model, shard")
            if rotated := not shown.left_out:
                findings += self._shard(subject, shown)
            progress(0.8, "a document with each variant")
            shown = shown._replace(v4=self._read(subject, progress, shard=rotated))
            findings += [
                grouped.divergence_finding(f"V4, {one.name}, {self.read} tokens", one, runs.DIVERGENCE)
                for one in shown.v4
            ]
        return Report(page.summary(findings, shown), tuple(findings), page.parts(shown), page.NOT_CLAIMED)

    def _coda(self, subject: Subject) -> Iterator[Finding]:
        length = self._length(subject.config)
        full, whole = _model(subject), _model(subject, *runs.kept_whole(subject.config, length))
        small = _model(subject, f"all={runs.SMALL}")
        ids = torch.tensor(subject.tokens(length), device=full.device)
        yield from runs.exact(full, whole, ids, self.chunks, self.tail)
        yield from banks.cut_alike(small, "coda", self.entries, self.cuts, subject.seed)
        yield from banks.counted(small, "coda", self.entries, subject.seed)
        yield from banks.masses(small, self.entries, subject.seed)
        yield from banks.means(small, self.entries, subject.seed)
        yield from runs.restored(small, "coda", ids, self.tail)

    def _shard(self, subject: Subject, shown: page.Shown) -> Iterator[Finding]:
        model, config = _model(subject, "all=shard"), subject.config
        ids = torch.tensor(subject.tokens(self._length(config)), device=model.device)
        yield from banks.cut_alike(model, "shard", self.entries, self.cuts, subject.seed)
        yield from banks.counted(model, "shard", self.entries, subject.seed)
        yield from banks.coded(model, self.entries, subject.seed)
        wide = _model(subject, f"all=shard:bits={banks.LOSSLESS}")
        yield from banks.attentions(wide, self.keys, subject.seed)
        if (why := basis.left_out(config)) is None:
            yield from basis.measure(model, self.entries, self.cuts, subject.seed)
        else:
            shown.left_out.append(why)
        yield from banks.drifts(model, self.steps, subject.seed)
        kept = banks.recalls(model, self.keys, self.keys // 4, self.widths, subject.seed)
        yield from banks.recall_findings(kept, self.keys // 4)
        for of_layer in kept.values():
            shown.kept[:] = of_layer
        yield from runs.restored(model, "shard", ids, self.tail)
        if subject.ops.name != REFERENCE:
            ops, heads = model.arithmetic.ops, config.num_attention_heads
            yield from banks.scratch(ops, heads, config.head_dim, 6)

    def _read(self, subject: Subject, progress: Progress, *, shard: bool) -> list[Drift]:
        if not self.read:
            return []
        variants = {"shard": _model(subject, "all=shard")} if shard else {}
        variants["coda, 9+4+4"] = _model(subject, f"all={runs.SMALL}")
        ids = torch.tensor(subject.tokens(self.read), device=subject.model.device)
        tell: Progress = lambda share, what: progress(0.8 + 0.2 * share, what)  # noqa: E731 -- a share of a share
        return runs.drifts(_model(subject), variants, ids, tell)


def _model(subject: Subject, *rules: str) -> Transformer:
    """The model with these rules of `--kv`, in numerics that round nothing but what a variant rounds."""
    return subject.load(subject.with_options(numerics="plain", dtype="fp32", kv=rules)).model


def _left_out(config: ModelConfig) -> list[str]:
    """What the model's layers do not have."""
    if all(kind is LayerKind.SWA for kind in config.layer_kinds):
        return ["The model has window layers alone: variants change nothing in it."]
    widths = {"head_dim": config.head_dim}
    if LayerKind.CSA in config.layer_kinds:
        widths["index_head_dim"] = config.index_head_dim
    odd = [f"{name} is {width}" for name, width in widths.items() if width & (width - 1) or width < 8]
    return [f"Shard on the model's layers: it rotates rows of a power of two, and {' and '.join(odd)}."] if odd else []


FULL = Variants()
QUICK = Variants(
    tokens=139,
    chunks=(),
    tail=6,
    length=48,
    cuts=(1, 128),
    entries=120,
    steps=512,
    read=0,
    prompt=120,
    prompts=(0,),
    keys=1024,
    widths=(),
    contexts=(8192, 16384),
)
