"""Experiment `kv-basis`: where entries are better remembered in a basis than rotated, at the same bytes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

from fathom.kernels.formats.basis_fit import FIT, Fitted, rotated_bytes, shared_bytes
from fathom.model.config import ModelConfig
from fathom.model.observe.sites import Site
from fathom.probes.finding import Finding, Part, Report, Table, at_most, judged, vacuous
from fathom.probes.probe import Probe, Progress, room
from fathom.probes.subject import Subject
from fathom.runtime.calibrate import fit_layers, samples, with_entries

Fits = Mapping[tuple[int, int], Mapping[int, Fitted]]  # (bits, context) -> layer -> fit


@dataclass(frozen=True)
class KvBasis(Probe):
    """Fit a basis to the entries of each layer, for some bits and contexts; the fields are knobs."""

    name: ClassVar[str] = "kv-basis"
    question: ClassVar[str] = "Where do entries in a basis lose less than rotated ones, at the same bytes?"
    reads: ClassVar[tuple[Site, ...]] = ()
    by_name: ClassVar[bool] = True
    background: ClassVar[str] = f"""\
`shard` stores an entry rotated by Hadamard, a fixed number of bits each. With `basis=FILE` the nope dims are
coefficients in a basis fitted to the layer instead, more bits where their variance is, for at most the same bytes, the
basis included, spread over the entries of a context. `scripts.calibrate_kv` fits it, and uses it only where it loses
less in three ways: as predicted from the variances, on entries that the fit has not seen, and in what the layer's own
queries get from the entries that they attend to: in an HCA layer those that the fit has not seen, in a CSA layer all
that were selected. Mean and basis are of the first half of a layer's entries, {FIT} for each nope dim or more; scales
and bits of the next quarter; what is measured, of the last.

Each cell: squared error of the basis over that of the rotation, predicted, of unseen entries, of attention; **bold**
where the basis is used. Below 1 the basis is better."""
    noticed: ClassVar[str] = """\
Where predicted distortion alone decided, CSA layers would take a basis too, at long contexts. The average entry does
get better, by prediction and measured; what attention gives gets worse, as long as the context may be. What tokens
select are rare entries, which are unlike the mean and lie outside of the directions that the variance gave bits to. An
HCA layer attends to all of its entries, and there all three agree, on entries that nothing was fitted to: in a basis
whose bytes are spread over enough of them less is lost, and in one for a shorter context more."""

    tokens: int = 32768  # of the subject's documents
    bits: tuple[int, ...] = (4, 6)
    contexts: tuple[int, ...] = (2048, 8192, 32768, 131072, 1048576)

    def needs(self, subject: Subject) -> str | None:
        """Entries, and positions."""
        if not with_entries(subject.config):
            return "the model has SWA layers alone, which remember no entries"
        return room(subject, self.tokens)

    def measure(self, subject: Subject, progress: Progress) -> Report:
        """Run a text, and fit for every number of bits and every context."""
        ids, loaded = subject.tokens(self.tokens), subject.load()
        made = samples(loaded.model, ids, subject.options.prefill_chunk)
        cases, found = [(bits, context) for bits in self.bits for context in self.contexts], {}
        for at, (bits, context) in enumerate(cases):
            progress(at / len(cases), f"{bits} bits, {context} tokens")
            found[bits, context] = dict(fit_layers(subject.config, made, bits, context))
        counts = {layer: len(sample.entries) for layer, sample in made.items()}
        return self.report(subject.config, found, counts)

    def report(self, config: ModelConfig, found: Fits, counts: Mapping[int, int]) -> Report:
        """Which layers take a basis, from which context on; `counts` are entries by layer."""
        told = []
        for bits in self.bits:
            for layer in counts:
                taken = [context for context in self.contexts if found[bits, context][layer].pays]
                if taken:
                    kind = config.layer_kind(layer).name
                    told.append(f"{kind} layer {layer} at {bits} bits, from a context of {min(taken) // 1024}K on")
        where = "; ".join(told) if told else "no layer"
        entries = ", ".join(f"{count} of layer {layer}" for layer, count in counts.items())
        summary = (
            f"At the same bytes, a fitted basis loses less than the Hadamard rotation in {where}. Elsewhere the"
            f" rotation is kept. Entries: {entries}."
        )
        parts: list[Part] = [self._table(config, found, bits) for bits in self.bits]
        return Report(summary, tuple(self._findings(config, found)), tuple(parts), NOT_CLAIMED)

    def _findings(self, config: ModelConfig, found: Fits) -> Iterator[Finding]:
        """A basis that takes more than what it replaces would win by that."""
        for bits in self.bits:
            what = f"bytes of an entry in a basis, {bits} bits, the basis included"
            rotated, basis = rotated_bytes(config.head_dim, bits), shared_bytes(nope(config))
            held = [
                fitted.row_bytes + basis / (context // config.ratio(layer))
                for (coded, context), fits in found.items()
                for layer, fitted in fits.items()
                if coded == bits and fitted.based is not None
            ]
            none = "no layer had entries enough for a basis, or bytes enough beside it"
            yield judged(what, max(held), at_most(rotated), "B") if held else vacuous(what, none)

    def _table(self, config: ModelConfig, found: Fits, bits: int) -> Table:
        """A row for each context, a column for each layer."""
        layers = list(found[bits, self.contexts[0]])
        names = tuple(f"{config.layer_kind(layer).name} layer {layer}" for layer in layers)
        entry, basis = rotated_bytes(config.head_dim, bits), shared_bytes(nope(config))
        rows = [
            [f"{context // 1024}K", *(cell(found[bits, context][layer]) for layer in layers)]
            for context in self.contexts
        ]
        note = f"{entry} bytes an entry; a basis takes {basis:,} bytes a layer."
        return Table(f"{bits} bits", ("context", *names), rows, note)


def nope(config: ModelConfig) -> int:
    """Columns of an entry that are not rotated by RoPE."""
    return config.head_dim - config.qk_rope_head_dim


def cell(fitted: Fitted) -> str:
    """Losses of the basis over those of the rotation."""
    if fitted.based is None:
        return fitted.why_none
    shares = (based / rotated for based, rotated in zip(fitted.based, fitted.rotated, strict=True))
    text = ", ".join(f"{share:.2f}" for share in shares)
    return f"**{text}**" if fitted.pays else text


NOT_CLAIMED: Final = """\
These are entries of a small model: most of the energy of its nope dims is their mean, which a basis stores once. Of the
published models nothing is known here; `scripts.calibrate_kv` measures it on theirs."""

FULL = KvBasis()
QUICK = KvBasis(tokens=2048, bits=(6,), contexts=(131072,))
