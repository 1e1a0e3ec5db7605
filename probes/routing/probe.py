"""Probe: which experts a token goes to, with what weight, and what they make of it."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from model.moe import HashGate
from model.observe import sites
from model.observe.observer import listening
from model.observe.sites import Site
from model.transformer import Transformer
from probes.finding import Finding, Report, at_most, exactly, judged, measured
from probes.probe import Probe, Progress, one_rank
from probes.routing import layer as routing_layer
from probes.routing import page as routing_page
from probes.routing.clamp import Counter, Pushes, grid_error, push, push_findings
from probes.routing.layer import Captured, Routed
from probes.shared.moe import Experts, U
from probes.shared.narrow import f64
from probes.shared.recorder import Recorder
from probes.subject import Subject, run_tokens

GRID_BOUND = 2.0**-20  # SwiGLU in fp32: an exponential and three roundings, an ulp or two each
MOSTLY = 0.9  # share of outputs equal to float64's from which on the summary gives it; in fp32 few are
PUSHED_ROWS = 16  # tokens that each pushed expert is given
NOT_CLAIMED = """\
That the routing is good: the oracle takes gate, bias and table of the checkpoint as they are. Loads are those of this
one prompt. The inputs of each layer are the run's own, so a fault of an earlier layer does not show here."""


@dataclass(frozen=True)
class Routing(Probe):
    """Compare routing and experts of a run with float64 from the files, layer by layer."""

    name: ClassVar[str] = "routing"
    question: ClassVar[str] = "Does every token reach the right experts, with the right weights, and does each clamp?"
    reads: ClassVar[tuple[Site, ...]] = (
        sites.EXPERTS_INPUT,
        sites.EXPERT_IDS,
        sites.EXPERT_WEIGHTS,
        sites.ROUTED_GATE,
        sites.ROUTED_UP,
        sites.SHARED_GATE,
        sites.SHARED_UP,
        sites.EXPERTS_OUTPUT,
    )
    background: ClassVar[str] = """\
Instead of one large feed-forward network, each layer has many small ones, the experts, and every token uses a few of
them, plus one shared expert that all tokens use. In the first layers a table says which: it is looked up by token id
(hash routing). Later the layer scores its experts for each token, `sqrt(softplus(x W^T))`, adds a bias that was trained
to keep the load even, and takes the best. The bias decides the choice only: the weights with which the experts are
summed are the scores without it, scaled to a fixed sum.

What went wrong in public runtimes, none of it with an error: the table was never filled, so every token went to expert
0; the bias entered the weights; the shared expert, which every rank holds, was summed once per rank; and SwiGLU's clamp
(`swiglu_limit`: the gate at most 10, the up projection within ±10) was lost in a refactor, for routed and shared
experts separately. The clamp acts on few values, so its loss shows as a stray token now and then.

This probe runs one prompt, takes gate, bias, table and experts from the checkpoint's files, and computes in float64
what each layer should have done with the inputs it got. Because prompts rarely reach the clamp, it also scales real
inputs until every expert that is tested must clamp."""
    noticed: ClassVar[str] = """\
- The experts' outputs are not close to float64, they are equal: with every rounding to bf16 and E4M3 in its place, the
  fp32 kernels and a numpy oracle that shares no arithmetic with them agree in all values that were recomputed. The
  bound is there for other machines.
- This prompt would never have shown a lost clamp of the shared expert: neither its gate nor its up gets there, in any
  layer. The routed experts do reach theirs, in some layers, with few of their values.
- Right answers say nothing here. `needle` passes with every one of these faults in place (see faults.md): either clamp
  lost, bias in the weights, shared expert counted twice, scales shifted by one block, even FP4's nibbles swapped.
- The bias matters for the choice: without it many tokens of a layer would go elsewhere.
- The load of the hash layer is not even, since words are not equally frequent, and nearly all of its tokens go
  elsewhere than the layer's own scores would send them."""

    tokens: int = 2048  # prompt: each of the demo's experts gets hundreds of them
    rows: int = 512  # tokens, spread over the prompt, whose experts are computed again in float64
    experts: int = 8  # routed experts of each layer that are pushed past the clamp

    def needs(self, subject: Subject) -> str | None:
        """Nothing is routed where all experts are chosen."""
        config = subject.config
        if config.num_experts_per_tok == config.n_routed_experts:
            return f"every token goes to all {config.n_routed_experts} experts"
        return one_rank(subject, "it takes weights out of the model, and a rank holds only its part of them")

    def vacuous(self, subject: Subject) -> str | None:
        """What no token of the run shows is known only from the run, and judged there."""
        del subject
        return None

    def measure(self, subject: Subject, progress: Progress) -> Report:
        """One prompt, watched; then each layer against its oracle."""
        model, config = subject.model, subject.config
        oracle = Experts(config, subject.file_weights, subject.options)
        tables, wrong = _tables(model, oracle)
        if wrong:
            return Report(f"{wrong} of the tables of hash routing are not the files': the model was not run.", tables)
        tokens = subject.tokens(min(self.tokens, config.max_position_embeddings))
        counter = Counter(config.swiglu_limit)
        progress(0.0, f"a prompt of {len(tokens)} tokens")
        captured = _run(model, tokens, subject.options.prefill_chunk, counter)
        layers: list[Routed] = []
        pushed: Pushes = {}
        for layer, seen in enumerate(captured):
            progress(0.2 + 0.8 * layer / len(captured), f"layer {layer} in float64")
            layers.append(routing_layer.compare(seen, layer, tokens, oracle, self.rows))
            pushed |= self._push(model, layer, seen, oracle)
        progress(1.0, "done")
        grid = grid_error(model.arithmetic.ops, config.swiglu_limit, model.device)
        k, scale, close = config.num_experts_per_tok, config.routed_scaling_factor, _close(subject)
        sums = max(layers, key=lambda one: one.sum_error)
        findings = (
            *tables,
            *routing_layer.findings(layers, close),
            # k weights of three roundings each, and their sum of one
            judged(f"weights sum to {scale:g}, largest relative error", sums.sum_error, at_most((k + 3) * U)),
            judged("SwiGLU over a grid past the clamp, largest relative error", grid, at_most(GRID_BOUND)),
            *push_findings(pushed, close),
            measured("values beyond the clamp, routed experts", counter.share("routed")),
            measured("values beyond the clamp, shared expert", counter.share("shared")),
            measured("near ties of the last expert and the next, left to fp32", sum(one.near_ties for one in layers)),
            measured("experts of all layers that no token reached", sum(int((one.load == 0).sum()) for one in layers)),
        )
        return Report(
            _summary(layers, pushed, counter, len(tokens)),
            findings,
            routing_page.parts(layers, pushed, counter, len(tokens)),
            NOT_CLAIMED,
        )

    def _push(self, model: Transformer, layer: int, seen: Captured, oracle: Experts) -> Pushes:
        """Push some routed experts and the shared one of a layer past the clamp."""
        moe, prefix = model.blocks[layer].experts, f"layers.{layer}.ffn"
        rows = seen.x[:: max(1, len(seen.x) // PUSHED_ROWS)][:PUSHED_ROWS]
        x = torch.from_numpy(rows).to(model.device, model.arithmetic.dtype)
        even = oracle.config.routed_scaling_factor / oracle.config.num_experts_per_tok
        weight = torch.full((len(x),), even, device=model.device)
        count = min(self.experts, len(moe.experts))
        some = sorted({e * len(moe.experts) // count for e in range(count)})
        routed = [push(model, moe.experts[e], f"{prefix}.experts.{e}", x, weight, oracle) for e in some]
        shared = push(model, moe.shared, f"{prefix}.shared_experts", x, None, oracle)
        return {("routed", layer): routed, ("shared", layer): [shared]}


def _close(subject: Subject) -> float:
    """Bound for outputs of experts against float64, as a share of them.

    Where something on the way is rounded to bf16 or E4M3, fp32 and float64 now and then fall on two sides of a
    rounding: 2^-8 is every value off by one last place of bf16. Else sums of fp32: 2^-16 is 256 of its last places.
    """
    narrow = subject.options.dtype == "bf16" or subject.options.numerics == "deployed"
    return 2.0**-8 if narrow else 2.0**-16


def _summary(layers: list[Routed], pushed: Pushes, counter: Counter, tokens: int) -> str:
    wrong = sum(len(one.wrong) for one in layers)
    worst = max(one.distance for each in pushed.values() for one in each)
    equal = min(one.equal for one in layers)
    median = max(float(np.median(one.mixture)) for one in layers)
    if equal == 1:
        outputs = "all recomputed outputs equal float64's bit for bit"
    elif equal >= MOSTLY:
        outputs = f"at least {equal:.1%} of the recomputed outputs of a layer equal float64's bit for bit"
    else:
        outputs = f"recomputed outputs are within {median:.2g} of float64, median token of the worst layer"
    return (
        f"Of {tokens * len(layers)} choices in {len(layers)} layers, {wrong} were not what gate, bias and table of the "
        f"files ask for; weights are off by at most {max(one.weight_error for one in layers):.2g} of what fp32 "
        f"rounding explains; {outputs}. The prompt took "
        f"{counter.share('routed'):.2%} of the routed experts' values beyond the clamp, and "
        f"{counter.share('shared'):.2%} of the shared expert's; pushed past it, outputs are within {worst:.2g} of the "
        f"equation."
    )


def _run(model: Transformer, tokens: list[int], chunk: int, counter: Counter) -> list[Captured]:
    """What passed each layer's experts; the clamp's hits are counted on the way."""
    kept = (sites.EXPERTS_INPUT, sites.EXPERT_IDS, sites.EXPERT_WEIGHTS, sites.EXPERTS_OUTPUT)
    recorder = Recorder(kept)
    with listening(model, counter.listeners() | recorder.listeners()):
        run_tokens(model, tokens, chunk)
    captured = []
    for layer in range(len(model.blocks)):
        x, ids, weights, output = (f64(recorder.rows(site, layer)) for site in kept)
        captured.append(Captured(x, ids.astype(np.int64), weights, output))
    return captured


def _tables(model: Transformer, oracle: Experts) -> tuple[tuple[Finding, ...], int]:
    """Judge the tables that the hash layers hold, and count those that are not the files'."""
    differing, layers = [], 0
    for layer, block in enumerate(model.blocks):
        if oracle.config.is_hash(layer):
            layers += 1
            gate = block.experts.gate
            table = oracle.weights.table(f"layers.{layer}.ffn.gate.tid2eid")
            if not isinstance(gate, HashGate) or not torch.equal(gate.table.cpu(), table):
                differing.append(layer)
    if not layers:
        return (), 0
    what = "tables of hash routing, as held, that are not the files'"
    return (judged(what, len(differing), exactly(0), layers=differing),), len(differing)


FULL = Routing()
QUICK = Routing(tokens=160, rows=24, experts=1)
