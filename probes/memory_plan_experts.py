"""The part of `memory-plan` on experts: what eight ranks exchange and how long that takes, whole and by rows."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Final, NamedTuple

from fathom.kernels.formats.groups import LINEAR_GROUP
from fathom.model.checkpoint.census import Census
from fathom.model.choices import PLAIN, ROWS, WHOLE
from fathom.model.config import ModelConfig
from fathom.model.ranks.dispatch import EACH
from fathom.probes.finding import Finding, Part, Table, Text, at_most, judged
from fathom.probes.memory import ITEM_BYTES
from fathom.runtime.options import RunOptions
from fathom.runtime.plan.exchanges import COMBINE, DISPATCH, EXCHANGE
from fathom.runtime.plan.experts import WAYS, Work, faster, planner
from fathom.runtime.plan.fullest import pairs
from fathom.runtime.plan.gpus import GPUS
from fathom.runtime.plan.planner import Planner
from fathom.runtime.plan.prefill import Prefill

RANKS: Final = 8
GPU: Final = "b200"
HOPPER: Final = "h200"  # whose link is beside it
CALLS: Final = (512, 4096, 8192)
HALVED: Final = (4096, 8192, 16384, 32768)
PROMPTS: Final = {"8K": 1 << 13, "1M": 1 << 20}
MB, MS = 1e6, 1e3

READING: Final = """\
On {ranks} ranks routed experts lie in one of two ways, `--experts`: by *rows*, each rank with rows of every expert, or
*whole*, each expert on one rank and the shared one on every rank. Bytes are counted, as the model exchanges them; times
are arithmetic, of a {gpu}'s nominal rates: {bandwidth:g} TB/s of memory, {link:g} GB/s received over NVLink, {fp8:g}
and {bf16:g} PFLOP/s of FP8 and BF16, and {exchange:g} microseconds for each exchange. **No exchange was measured: NCCL
does not run here.**

Whole experts hide exchanges: the shared expert's first matrices run while rows travel to experts, and a rank's tokens
may go in two halves, of which one travels while the experts of the other run. Each half reads the experts that it goes
to, so where reading takes longer than multiplying, routed experts of two halves take twice as long: tokens go in halves
where each expert gets {each} in one, of {name} from {halved} tokens on. Tokens are spread evenly over experts, by
expectation: the fullest of {ranks} ranks has {fullest:.2f} of the {k} experts of one token of {name}.
Attention's exchanges are the same both ways."""
BY_FORMULA: Final = """\
Received by a rank for the experts of a call of {tokens:,} tokens of {name}, by formulas from config.json that the plan
does not share. The last two are expert parallelism as others run it: each rank's sum comes back as one row. Here each
expert's output comes back by itself, so that a token's sum has the bits of one rank. Experts' ids and weights are in
the first two alone. Milliseconds are of all layers, without what each exchange takes for itself."""


class Ranked(NamedTuple):
    """A published model on several ranks, by where its experts lie."""

    name: str
    config: ModelConfig
    counted: Census
    options: RunOptions
    ways: Mapping[str, Planner]
    plain: Mapping[str, Planner]  # the same without rounded inputs, which have no FP8 codes


def _call(one: Planner, tokens: int, prompt: int) -> Prefill:
    """A call of so many tokens at the end of a prompt."""
    rates = GPUS[GPU].rates
    assert rates is not None, GPU
    return one.prefill(tokens, prompt, rates)


def ranked(name: str, config: ModelConfig, counted: Census, options: RunOptions) -> Ranked:
    """Plan a model both ways."""
    ways, plain = (
        {way: planner(config, counted, replace(options, numerics=numerics), RANKS, way) for way in WAYS}
        for numerics in (options.numerics, PLAIN)
    )
    return Ranked(name, config, counted, options, ways, plain)


def findings(model: Ranked) -> Iterator[Finding]:
    """Bytes of the experts' exchanges by formulas that the plan does not share; it rounds each exchange down."""
    wanted = by_formula(model.config, max(CALLS), ITEM_BYTES[model.options.dtype])
    for what, found in _of_plan(model).items():
        gap = abs(found - wanted[what])
        yield judged(
            f"{model.name}: experts' exchanges of a call, {what}, and by formula", gap, at_most(4), "B a layer"
        )


def parts(models: Sequence[Ranked]) -> list[Part]:
    """Tables of each model, and how to read them."""
    rates, first = GPUS[GPU].rates, models[0]
    assert rates is not None, GPU
    reading = READING.format(
        ranks=RANKS,
        gpu=GPU.upper(),
        bandwidth=rates.bandwidth / 1e12,
        link=rates.link / 1e9,
        fp8=rates.fp8 / 1e15,
        bf16=rates.bf16 / 1e15,
        exchange=EXCHANGE * 1e6,
        fullest=pairs(first.config, first.ways[WHOLE].call.shards.experts, 1),
        k=first.config.num_experts_per_tok,
        name=first.name,
        each=EACH,
        halved=f"{2 * EACH * first.config.n_routed_experts // first.config.num_experts_per_tok:,}",
    )
    tables = [table for model in models for table in (_bytes(model), _calls(model), _formulas(model), _halves(model))]
    return [Text(f"Experts on {RANKS} ranks", reading), *tables, _tokens(models)]


def by_formula(c: ModelConfig, tokens: int, item: int) -> dict[str, float]:
    """Bytes that a rank receives in a layer for the experts of a call, by ways to exchange."""
    k, hidden, inner, others = c.num_experts_per_tok, c.hidden_size, c.moe_intermediate_size, (RANKS - 1) / RANKS
    code = 1 + 1 / LINEAR_GROUP
    each = c.n_routed_experts - c.n_routed_experts // RANKS  # experts of all ranks but one
    missed = prod((each - at) / (c.n_routed_experts - at) for at in range(k))
    rows = tokens * others * (1 - missed)  # that come: one of a token to each other rank with one of its experts
    around = tokens * others * (k * 8 + hidden * item / RANKS)  # ids, weights, and the output's columns

    def by_rows(size: float) -> float:
        return around + tokens * others * size * (hidden + (k + 1) * inner)

    back = tokens / RANKS * k * others * hidden * item
    return {
        f"rows, in {item} bytes": by_rows(item),
        "rows, in FP8 codes": by_rows(code),
        f"whole, rows in {item} bytes": rows * hidden * item + back,
        "whole, rows in FP8 codes": rows * hidden * code + back,
        f"elsewhere: rows in {item} bytes, sums back": 2 * rows * hidden * item,
        "elsewhere: rows in FP8 codes, sums back": rows * hidden * (code + item),
    }


def _of_plan(model: Ranked) -> dict[str, float]:
    """What of these the plan counts."""
    tokens, found = max(CALLS), {}
    for planners, told in ((model.plain, f"in {ITEM_BYTES[model.options.dtype]} bytes"), (model.ways, "in FP8 codes")):
        rows, whole = (_received(_call(planners[way], tokens, tokens)) for way in (ROWS, WHOLE))
        found[f"rows, {told}"] = _of_experts(rows)
        found[f"whole, rows {told}"] = whole[DISPATCH] + whole[COMBINE]
    return found


def _received(call: Prefill) -> dict[str, float]:
    """Bytes that a rank receives in a layer, by exchange; of what not every layer has the mean."""
    layers = next(one.times for one in call.exchanges if one.what == "attention, input")
    return {one.what: one.times * one.nbytes / layers for one in call.exchanges}


def _of_experts(found: Mapping[str, float]) -> float:
    return sum(size for what, size in found.items() if what.startswith("experts, "))


def _bytes(model: Ranked) -> Table:
    """What a rank receives in a layer of a call."""
    prompt = min(PROMPTS.values())
    cases = [(way, tokens) for way in WAYS for tokens in CALLS]
    found = [_received(_call(model.ways[way], tokens, prompt)) for way, tokens in cases]
    names = [what for what in dict.fromkeys(what for one in found for what in one) if ", " in what]
    rows: list[list[float | str | None]] = [
        [what, *(f"{one[what] / MB:.1f}" if what in one else None for one in found)]
        for what in sorted(names, key=lambda what: what.partition(",")[0])
    ]
    rows.append(["all of experts", *(f"{_of_experts(one) / MB:.1f}" for one in found)])
    rows.append(["all", *(f"{sum(one[what] for what in names if what in one) / MB:.1f}" for one in found)])
    columns = ("exchange", *(f"{way}, {tokens:,}" for way, tokens in cases))
    note = "MB that a rank receives in a layer, the selection's as the mean of all layers, by tokens of a call."
    return Table(f"{model.name}: bytes between {RANKS} ranks", columns, rows, note)


def _calls(model: Ranked) -> Table:
    """How long a call at the end of a prompt takes, and the prompt."""
    rows: list[list[float | str | None]] = []
    for told, prompt in PROMPTS.items():
        for tokens in CALLS:
            for way in WAYS:
                call = _call(model.ways[way], tokens, prompt)
                taken = (call.multiplying, call.products["routed experts"], call.exchanging, call.hidden, call.seconds)
                ends = range(tokens, prompt + 1, tokens)
                whole = sum(_call(model.ways[way], tokens, end).seconds for end in ends)
                rows.append([told, tokens, way, *(f"{MS * part:.1f}" for part in taken), f"{whole:.3g}"])
    columns = ("prompt", "tokens of a call", "experts", "products, ms", "of routed experts", "exchanges, ms")
    note = f"By arithmetic, on {RANKS} {GPU.upper()}: the last call of a prompt, and all of them."
    return Table(
        f"{model.name}: calls on {RANKS} ranks", (*columns, "hidden, ms", "the call, ms", "the prompt, s"), rows, note
    )


def _formulas(model: Ranked) -> Table:
    """What the plan's bytes are beside."""
    planned, tokens, layers = _of_plan(model), max(CALLS), model.config.num_hidden_layers
    links = {name: rates.link for name in (HOPPER, GPU) if (rates := GPUS[name].rates) is not None}
    rows: list[list[float | str | None]] = []
    for what, size in by_formula(model.config, tokens, ITEM_BYTES[model.options.dtype]).items():
        ours = f"{planned[what] / MB:.1f}" if what in planned else None
        times = [f"{MS * layers * size / link:.1f}" for link in links.values()]
        rows.append([what, f"{size / MB:.1f}", ours, *times])
    columns = ("way", "MB a layer", "as planned", *(f"ms at {link / 1e9:g} GB/s" for link in links.values()))
    note = BY_FORMULA.format(tokens=tokens, name=model.name).replace("\n", " ")
    return Table(f"{model.name}: experts' exchanges by formula", columns, rows, note)


def _halves(model: Ranked) -> Table:
    """What it gains that tokens travel in two halves."""
    rows: list[list[float | str | None]] = []
    rates = GPUS[GPU].rates
    assert rates is not None, GPU
    for tokens in HALVED:
        once, halves = (model.ways[WHOLE].prefill(tokens, tokens, rates, parts) for parts in (1, 2))
        taken = model.ways[WHOLE].prefill(tokens, tokens, rates)
        chosen = 2 if taken.seconds == halves.seconds else 1
        times = [MS * one for of in (once, halves) for one in (of.products["routed experts"], of.hidden, of.seconds)]
        rows.append(
            [tokens, *(f"{time:.1f}" for time in times), f"{MS * (once.seconds - halves.seconds):+.1f}", chosen]
        )
    each = ("routed experts, ms", "hidden, ms", "the call, ms")
    columns = ("tokens of a call", *each, *(f"two halves: {what}" for what in each), "halves gain, ms", "parts taken")
    note = f"Whole experts on {RANKS} {GPU.upper()}, a call that is its prompt, by arithmetic."
    return Table(f"{model.name}: tokens that travel in halves", columns, rows, note)


def _tokens(models: Sequence[Ranked]) -> Table:
    """A decoded token, and what auto takes."""
    rows: list[list[float | str | None]] = []
    rates, work = GPUS[GPU].rates, Work(min(PROMPTS.values()))
    assert rates is not None, GPU
    for model in models:
        taken = faster(model.config, model.counted, model.options, RANKS, GPU, work)
        for way in WAYS:
            token = model.ways[way].token(work.prompt, rates)
            assert token is not None, "caches are in full"
            times = (token.reading, token.exchanging, token.launching, token.seconds)
            auto = f"{taken.seconds[way]:.3g}{', taken by auto' * (way == taken.way)}"
            rows.append([model.name, way, *(f"{MS * part:.2f}" for part in times), auto])
    answer = f"{work.prompt:,} tokens of prompt and {work.new} new ones, s"
    columns = ("model", "experts", "reading, ms", "exchanges, ms", "launches, ms", "a token, ms", answer)
    note = (
        f"A decoded token after {work.prompt:,} positions on {RANKS} {GPU.upper()}, by arithmetic. Of whole experts"
        " those of the fullest rank are read; launches are counted."
    )
    return Table(f"A token on {RANKS} ranks", columns, rows, note)
