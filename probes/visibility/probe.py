"""Visibility: what each token can see, found by changing others."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from model.config import LayerKind, ModelConfig
from model.observe import sites
from model.observe.observer import listening
from model.observe.sites import Site
from probes.finding import JSON, Finding, Part, Report, Text, exactly, judged, vacuous
from probes.probe import Probe, Progress, room
from probes.shared.exact import exact_linears
from probes.shared.recorder import Recorder
from probes.shared.trace import OF_TOKENS, Difference, Joined, first_difference, joined, traced
from probes.subject import Subject, run_tokens
from probes.visibility.page import BIN, picture, reached, staircase
from probes.visibility.reach import Reach, reach


@dataclass(frozen=True)
class Visibility(Probe):
    """Three experiments: what was selected, what one layer can see, and whether the future changes the past."""

    name: ClassVar[str] = "visibility"
    question: ClassVar[str] = "Does any token see a later one, or a block that is not finished yet?"
    reads: ClassVar[tuple[Site, ...]] = OF_TOKENS
    background: ClassVar[str] = """\
A token may look at what came before it. In a V4 model there are three ways to break that rule without an error: the
sliding window may be off by one; a layer may look at a compressed entry (one row per 4 or per 128 tokens) whose block
is not finished, and so at tokens that come later; and the indexer may select such an entry. In prefill the later tokens
are all there, so a leak makes a prompt look *better* understood than it can be, and decode, where the future does not
exist yet, then disagrees with prefill. The rule for a token at position t is: entries e < (t + 1) // ratio, and the
last `sliding_window` positions, its own included.

The probe asks by experiment, in three ways. It reads every selection of the indexer. It runs each attention layer by
itself, changes one row of its input, and notes which rows of the output move: exactly those may that have the changed
token in their window or in an entry they attend to. And in the whole model it changes token t + 1 of the prompt, then
everything after t, and demands that nothing up to t moves by a bit, at any site of any layer.

A change must not reach the past by way of rounding either. Attention, norms and mHC see the same shapes whatever the
tokens are, but a routed expert gets the tokens that were routed to it, and a product with one row is summed in another
order than one with two. So in the third experiment, and only there, matrix products are summed in fp64, in tiles of
fixed size, and activations are bf16."""
    noticed: ClassVar[str] = """\
We expected to need the fp64 sums, and on this checkpoint they change nothing: with the run's own fp32 products not one
bit before t moved either. The formats are why. An E4M3 activation times an E2M1 weight has few bits, and hardly a sum
of such products has to be rounded in fp32: an exact sum has no order. In plain fp32 the effect is there in very short
prompts, always at `experts.output`, where an expert's batch had got a token more or a token less.

The reach of single layers came out sharper than we had dared to demand: the rows that moved are the rows that should,
to the last one and on both sides, although an HCA entry averages a whole block of tokens and is then rounded to E4M3.
The rope columns, which are not rounded, give every token away."""

    # of the prompt, at least, run in one call, so that blocks of the future exist: three blocks of 128
    tokens: int = 384
    reach_of: tuple[int, ...] = tuple(range(260))  # positions changed in the input of single layers: 0 .. 2 * 128 + 3
    per_kind: int = 4  # layers of each kind that are looked at one by one
    # t of the third experiment: every residue of 4, and both sides of the ends and middles of blocks of 128
    last_kept: tuple[int, ...] = (0, 1, 2, 3, 6, 7, 63, 64, 126, 127, 128, 129, 254, 255, 256, 257, 258, 259)

    def needs(self, subject: Subject) -> str | None:
        """A prompt that leaves the window, and in which a block of each kind is finished."""
        return room(subject, self._length(subject.config))

    def _length(self, config: ModelConfig) -> int:
        return max(self.tokens, max(config.sliding_window, *config.compress_ratios) + 16)

    def measure(self, subject: Subject, progress: Progress) -> Report:
        """Run all three experiments."""
        config, recorder = subject.config, Recorder((sites.ATTENTION_INPUT, sites.SELECTED))
        length, block = self._length(config), max(config.compress_ratios)
        changed = tuple(sorted({*self.reach_of, max(0, block - 1)}))  # the last of a block among them
        with listening(subject.model, recorder.listeners()):
            run_tokens(subject.model, subject.tokens(length), length)
        csa = [layer for layer, kind in enumerate(config.layer_kinds) if kind is LayerKind.CSA]
        findings = [selections(config, {layer: recorder.rows(sites.SELECTED, layer) for layer in csa})] if csa else []
        reaches: list[Reach] = []
        layers = self._layers(config)
        for layer in layers:
            progress(0.6 * len(reaches) / len(layers), f"layer {layer}, token by token")
            inputs = recorder.rows(sites.ATTENTION_INPUT, layer).to(subject.model.device)
            reaches.append(reach(subject.model, config, layer, inputs, changed))
            findings += reached(reaches[-1])
        past = self._past(subject, progress)
        wrong = sum(int((one.moved & ~one.expected).sum()) for one in reaches)
        summary = (
            f"Changing one token in the input of single layers moved {sum(int(one.moved.sum()) for one in reaches)}"
            f" rows of their output, {wrong} of them rows that do not see the token; in the whole model, changing"
            f" what comes after t moved something before in {sum(int(one.measured or 0) for one in past)} of"
            f" {2 * len(self._kept(config))} runs."
        )
        return Report(summary, (*findings, *past), tuple(self._parts(config, reaches)), NOT_CLAIMED)

    def _kept(self, config: ModelConfig) -> tuple[int, ...]:
        """Where the third experiment cuts: behind one of them, the last token of a block changes."""
        return tuple(sorted({*self.last_kept, max(0, max(config.compress_ratios) - 2)}))

    def _layers(self, config: ModelConfig) -> list[int]:
        """Up to `per_kind` layers of each kind, the first and the last among them."""
        layers: set[int] = set()
        for kind in set(config.layer_kinds):
            of_kind = [layer for layer, one in enumerate(config.layer_kinds) if one is kind]
            step = max(1, -(-(len(of_kind) - 1) // (self.per_kind - 1)))
            layers |= {*of_kind[::step], of_kind[-1]}
        return sorted(layers)

    def _past(self, subject: Subject, progress: Progress) -> list[Finding]:
        """Change the future in the whole model, and look at the past."""
        model = subject.load(subject.with_options(dtype="bf16"), exact_linears(subject.ops)).model
        config, tokens = subject.config, subject.tokens(self._length(subject.config))
        kept = self._kept(config)
        other = [(token + config.vocab_size // 2) % config.vocab_size for token in tokens]

        def run(ids: list[int]) -> Joined:
            with traced(model, OF_TOKENS) as passed:
                run_tokens(model, ids, len(ids))
            return joined(passed)

        before = run(tokens)
        leaks: dict[str, list[tuple[int, Difference]]] = {"token t + 1": [], "every token after t": []}
        still = []
        for done, t in enumerate(kept):
            progress(0.6 + 0.4 * done / len(kept), f"changing what comes after {t}")
            alone = run([*tokens[: t + 1], other[t + 1], *tokens[t + 2 :]])
            rest = run([*tokens[: t + 1], *other[t + 1 :]])
            for what, after in zip(leaks, (alone, rest), strict=True):
                if leak := first_difference(before, after, _upto(config, t)):
                    leaks[what].append((t, leak))
            if before[sites.HIDDEN, None][t + 1] == alone[sites.HIDDEN, None][t + 1]:
                still.append(t + 1)
        findings = []
        for what, found in leaks.items():
            evidence: dict[str, JSON] = {"t": found[0][0], "first moved": str(found[0][1])} if found else {}
            findings.append(judged(f"runs where changing {what} moved the past", len(found), exactly(0), **evidence))
        if still:
            why = f"changing token {still[0]} did not move its own row: a model that does not read its input leaks none"
            findings.append(vacuous("a changed token moves its own row", why))
        return findings

    def _parts(self, config: ModelConfig, reaches: Sequence[Reach]) -> list[Part]:
        parts: list[Part] = []
        for kind in (LayerKind.HCA, LayerKind.CSA):
            of_kind = [one for one in reaches if config.layer_kind(one.layer) is kind]
            if of_kind and kind is LayerKind.HCA:
                parts.append(staircase(config, of_kind[0]))
            if of_kind and len(of_kind[0].positions) >= 2 * BIN:
                parts.append(picture(config, of_kind[0]))
        changed = reaches[0].positions
        text = (
            f"The prompt has {self._length(config)} tokens and is run in one call. The future was changed behind t ="
            f" {', '.join(map(str, self._kept(config)))}. Single layers had {len(changed)} positions between"
            f" {min(changed)} and {max(changed)} changed, one at a time."
        )
        return [*parts, Text("What was changed", text)]


def _upto(config: ModelConfig, t: int) -> Callable[[Site, int | None], int]:
    """How many rows of a site belong to tokens up to t: tokens, or entries of finished blocks."""

    def rows(site: Site, layer: int | None) -> int:
        if site.shape.startswith("t "):
            return t + 1
        assert layer is not None, site
        return (t + 1) // config.ratio(layer)

    return rows


def selections(config: ModelConfig, by_layer: dict[int, Tensor]) -> Finding:
    """Judge every selection [t, k]: distinct entries e < (t + 1) // ratio, and min(top-k, visible) of them."""
    wrong: list[dict[str, JSON]] = []
    for layer, rows in by_layer.items():
        visible = (torch.arange(len(rows)) + 1) // config.ratio(layer)
        for t, (row, seen) in enumerate(zip(rows.tolist(), visible.tolist(), strict=True)):
            chosen = [entry for entry in row if entry != -1]
            good = len(chosen) == len(set(chosen)) == min(config.index_topk, seen)
            if not good or not all(0 <= entry < seen for entry in chosen):
                wrong.append({"csa layer": layer, "t": t, "visible": seen, "selected": row})
    total = sum(len(rows) for rows in by_layer.values())
    what = f"selections of {total} that are not min(top-k, visible) finished blocks, all CSA layers"
    return judged(what, len(wrong), exactly(0), **(wrong[0] if wrong else {}))


NOT_CLAIMED = """\
That prefill in several calls sees what prefill in one call sees: the `boundaries` probe compares them. That the entries
a token may see are the *right* ones for it: `recall` looks at what the indexer chooses. Single layers are run with
first position 0 and the whole prompt in one call. Where a changed token moves a row, nothing is said about how much."""

FULL = Visibility()
QUICK = Visibility(tokens=144, reach_of=(0, 64, 127), last_kept=(62, 126))
