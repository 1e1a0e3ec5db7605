"""Probe: what deployed numerics costs, and whether what rounds rounds as it should."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kernels.ops import Ops
from model.config import LayerKind, ModelConfig, check_deployed
from model.errors import ConfigError
from model.observe import sites
from model.observe.sites import Site
from model.transformer import Transformer
from probes.finding import Finding, Report, at_least, at_most, judged, measured, vacuous
from probes.probe import Probe, Progress, one_rank
from probes.quantisation import cost as rounding_cost
from probes.quantisation import page as quantisation_page
from probes.quantisation import scales as stored_scales
from probes.quantisation.cases import DTYPES, Rounding, cases, roundings
from probes.quantisation.cost import WATCHED, costs
from probes.quantisation.pair import CHOICES, COMPARED, Pair, run_pair
from probes.shared.moe import Experts
from probes.shared.narrow import KV_GROUP, LINEAR_GROUP
from probes.shared.recorder import Recorder
from probes.subject import Subject

REAL = (sites.ATTENTION_INPUT, sites.LATENT, sites.EXPERTS_INPUT, sites.SHARED_GATE, sites.INDEX_QUERY)
# Frozen after measuring the demo on 18 documents of 192 to 2048 tokens: a mean KL of 3.4e-5 to 1.7e-4 nats, and not one
# decided position at which the likeliest token changed. Three times the worst: a bit of mantissa less in every
# rounding would cost four times as much.
DEMO_KL = 5e-4
DEMO_DECIDED = 0.999
NOT_CLAIMED = """\
That deployed numerics is as good as plain for other checkpoints: the bounds on KL and on the likeliest token were
frozen on the demo and are applied to it alone. The differences by depth are between two free runs: each layer's
includes all that the layers before it added. Quality on tasks is not measured here."""


@dataclass(frozen=True)
class Quantisation(Probe):
    """Run deployed and plain numerics side by side, and hold every rounding against an independent cast."""

    name: ClassVar[str] = "quantisation"
    question: ClassVar[str] = "What does the deployed rounding cost, and does everything that rounds round right?"
    reads: ClassVar[tuple[Site, ...]] = tuple(
        site for site in sites.SITES if site in {*COMPARED, *CHOICES, *WATCHED, sites.LOGITS}
    )
    background: ClassVar[str] = """\
DeepSeek serves V4 with narrow activations: the input of every FP8 or FP4 matrix is rounded to E4M3 (three bits of
mantissa), one scale for 128 columns; KV and compressed entries likewise for 64 columns, but for the dims that carry
positions; index queries and keys to E2M1 (one bit) for 32 columns, after a Hadamard transform that spreads outliers.
This is `deployed` numerics. `plain` rounds none of it, as Hugging Face transformers does.

All these scales are powers of two, stored in one byte of exponent. Runtimes went wrong here in silence: scales that
were no powers of two, packed as if they were (a quarter of the value lost); scales of the neighbour block; FP4 unpacked
high nibble first; and byte 0x80, which is -0 in one dialect of E4M3 and NaN in another.

This probe runs one prompt in both numerics and says how far apart they are at every site and at the logits. Then it
looks at each rounding by itself: what it costs, and whether it is, bit for bit, the cast that a formula in float64
gives, on the prompt's tensors and on numbers made to lie on the edges. Last, it reads the stored scales."""
    noticed: ClassVar[str] = """\
- Nothing is off by a bit, signed zeros included. KV computed again from the layer's input through matrix, norm, bf16
  and rounding, and index queries and keys through Hadamard transform and rounding, equal what the run used.
- The indexer's selection is far less stable than the model: FP4 of index queries and keys alone exchanges nearly as
  many of the selected entries as all rounding together (in both tables, *entries in common*), and what the attention of
  these layers gathers (*mixed*) differs far more than in other layers. At the logits that costs little, and `needle`
  finds its codes in these numerics. What is exchanged are entries that hardly weigh: the overlap of two selections is a
  poor measure of harm, and a selection that is wrong in some entries may show in no answer.
- The likeliest token changes at some positions, which looks alarming and is not: all of these are near ties of plain's
  first two tokens. Where plain is decided it never changes.
- The difference does not grow with depth (*streams*), though every layer rounds anew. The demo was trained with these
  roundings.
- Some of the stored FP8 bytes are `0x80`, and none is a NaN of this dialect: one such byte, read as FNUZ, is enough to
  lose a row. All FP8 blocks and FP4 blocks use the upper half of their range, as a scale that is the smallest power of
  two must have it."""

    tokens: int = 4096  # prompt, run in both numerics
    rows: int = 256  # tokens, spread over the prompt, whose roundings are computed again in float64
    experts: int = 8  # routed experts of each layer whose stored bytes are looked at
    alone: bool = True  # run the prompt also with one kind of rounding at a time

    def needs(self, subject: Subject) -> str | None:
        """Deployed numerics has no meaning for widths that its groups do not divide."""
        try:
            check_deployed(subject.config)
        except ConfigError as error:
            return f"this model has no deployed numerics to compare with ({error})"
        return one_rank(subject, "it takes weights out of the model, and a rank holds only its part of them")

    def vacuous(self, subject: Subject) -> str | None:
        """Entries need closed windows."""
        tokens, ratio = self._count(subject.config), max(subject.config.compress_ratios)
        return f"{tokens} tokens close no window of {ratio}" if tokens < ratio else None

    def _count(self, config: ModelConfig) -> int:
        return min(max(self.tokens, max(config.compress_ratios) + 64), config.max_position_embeddings)

    def measure(self, subject: Subject, progress: Progress) -> Report:
        """Stored bytes, one prompt in both numerics, then each rounding by itself."""
        options, config = subject.with_options(numerics="deployed"), subject.config
        deployed = subject.load(options)
        plain = subject.load(subject.with_options(numerics="plain"))
        oracle = Experts(config, subject.file_weights, options)
        progress(0.0, "stored bytes")
        stored = stored_scales.survey(deployed.model, deployed.census, oracle.weights, self.experts)
        tokens = subject.tokens(self._count(config))
        some = [i * (len(tokens) - 1) // max(1, self.rows - 1) for i in range(self.rows)]
        recorder = Recorder(_watched(config.layer_kinds), some)
        chunk = subject.options.prefill_chunk
        runs = {"all": deployed.model}
        if self.alone:
            runs |= {name: subject.load(options, ops).model for name, ops in _one_kind(subject.ops).items()}
        pairs: dict[str, Pair] = {}
        for name, model in runs.items():
            done = len(pairs)

            def tick(share: float, done: int = done, name: str = name) -> None:
                progress(0.1 + 0.7 * (done + share) / len(runs), f"the prompt, rounding {name}, beside plain")

            pairs[name] = run_pair(model, plain.model, tokens, chunk, tick, recorder if name == "all" else None)
        pair = pairs["all"]
        progress(0.8, "roundings in float64")
        local = [costs(recorder, layer, oracle) for layer in range(len(config.layer_kinds))]
        progress(0.9, "rounding ops")
        ops = roundings(deployed.model.arithmetic.ops)
        for rounding in ops:
            _try(rounding, recorder, deployed.model, subject.seed)
        progress(1.0, "done")
        findings = (
            *(found for rounding in ops for found in rounding.findings()),
            *stored_scales.findings(stored),
            *rounding_cost.findings(local),
            *_at_the_logits(pair, of_demo=subject.speaks_demo_language and subject.prompt is None),
        )
        parts = quantisation_page.parts(pairs, local, stored, ops)
        return Report(quantisation_page.summary(pair, ops, stored), findings, parts, NOT_CLAIMED)


def _one_kind(ops: Ops) -> dict[str, Ops]:
    """Return op sets that round one kind of thing alone."""

    def only(group: int) -> Callable[[Tensor, int], Tensor]:
        return lambda x, columns: ops.simulate_fp8(x, columns) if columns == group else x

    return {
        "inputs of linears alone": ops._replace(simulate_fp8=only(LINEAR_GROUP), simulate_fp4=_unrounded),
        "KV and entries alone": ops._replace(simulate_fp8=only(KV_GROUP), simulate_fp4=_unrounded),
        "index queries and keys alone": ops._replace(simulate_fp8=_unrounded),
    }


def _unrounded(x: Tensor, group: int) -> Tensor:
    del group
    return x


def _watched(kinds: tuple[LayerKind, ...]) -> tuple[Site, ...]:
    """What this model has of `WATCHED`."""
    return tuple(site for site in WATCHED if LayerKind.CSA in kinds or not site.name.startswith("indexer."))


def _try(rounding: Rounding, recorder: Recorder, model: Transformer, seed: int) -> None:
    """Made inputs in fp32 and bf16, and those of the prompt."""
    for name, x in cases(rounding, seed).items():
        for dtype in DTYPES:
            rounding.add(f"{name}, {dtype}", x.to(model.device, dtype))
    for layer, kind in enumerate(model.config.layer_kinds):
        for site in REAL:
            if site is not sites.INDEX_QUERY or kind is LayerKind.CSA:
                x = recorder.rows(site, layer)
                if x.shape[-1] % rounding.group == 0:
                    rounding.add(f"{site.name} of layer {layer}", x.to(model.device))


def _at_the_logits(pair: Pair, *, of_demo: bool) -> list[Finding]:
    """Judge the demo by its frozen bounds; of other checkpoints measure."""
    worst = max(range(len(pair.kl)), key=pair.kl.__getitem__)
    mean = sum(pair.kl) / len(pair.kl)
    decided = pair.decided()
    same = sum(decided) / len(decided) if decided else 1.0
    kl, top = "KL from plain to deployed, mean over positions", "same likeliest token where plain is decided"
    found = [
        measured("KL from plain to deployed, worst position", pair.kl[worst], "nats", position=worst),
        measured("same likeliest token", sum(pair.agree) / len(pair.agree)),
    ]
    if not max(pair.kl):
        return [vacuous(kl, "both numerics gave the same logits: nothing was rounded"), *found]
    if not of_demo:
        return [measured(kl, mean, "nats"), measured(top, same, positions=len(decided)), *found]
    return [
        judged(kl, mean, at_most(DEMO_KL), "nats"),
        judged(top, same, at_least(DEMO_DECIDED), positions=len(decided)),
        *found,
    ]


FULL = Quantisation()
QUICK = Quantisation(tokens=192, rows=32, experts=2, alone=False)
