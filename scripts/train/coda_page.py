"""The comparison as a page: what the cold swap breaks, and what each phase of the training gives back."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import exp, isnan
from typing import Final

from fathom.probes.finding import Part, Plot, Table, Text, finite
from fathom.probes.report import Page
from fathom.scripts.train.coda_measure import CODES, PARTS, STRETCHES, Learned, Line, gap_of, perplexity
from fathom.scripts.train.documents import TOKENS_PER_STEP
from fathom.scripts.train.recipe import Recipe

BASE, COLD, FIRST_BOUNDED, SECOND, SECOND_UNBOUNDED = 0, 1, 3, 4, 8  # of `scripts.train.coda_measure.cases`
DRAWN: Final = (BASE, COLD, FIRST_BOUNDED, SECOND)
NAME: Final = "train-coda"
NAMED: Final = 3  # files of a text in prose; the foot of the page has all of them
TITLE: Final = "Training CoDA adapters: the cold swap, and what two phases give back"

ROWS: Final = """\
- *base, full cache*: the checkpoint as it is, every token remembered.
- *cold swap*: the same weights over the bounded cache, `{kv}` in each layer. Adapters as they start: lambda about
  {noise:.4f}, and every write gate {gate:.3f}, so that no token is worth more than another.
- *phase 1*: after {recipe.phase1_steps} updates of differential attention over everything.
- *phase 2*: after {recipe.phase2_steps} more updates over the bounded cache, with gradients through the banks; also
  with parts of that cache taken away, and over everything.

Every bounded row is computed by the cache of inference (`model/variants/coda.py`), not by the one that trained it."""

TRAINED: Final = """\
{material} Only the adapters move: q, k, v and o projections at a peak rate of {recipe.rate:g}; lambda and theta at
{recipe.coda_rate:g}; write gate and eta at {recipe.bank_rate:g}; phase 2 at {recipe.bounded_scale:g} of each. AdamW,
{schedule}. The published rates are {published.rate:g} and {published.coda_rate:g}, and half of both, in 2,000 and 600
sequences for 7 billion parameters; this model has {parameters:,}.

In phase 2 a block of {recipe.block} tokens attends to ring and banks as the blocks before left them, and then writes.
{evicted} Which token goes to which slot has no gradient. Gradient checkpointing is refused there: a layer computed a
second time would attend to banks that the first time has written."""
KEPT: Final = """\
Evicted keys and values, the gate and eta stay in the graph, so the loss of a token reaches the gate of one that left
the ring long before."""
DETACHED: Final = """\
What left the ring is a constant (`--detach-evicted`): no loss reaches it, nor the write gate."""

CLAIMED: Final = """\
One seed, one model, {documents}; what can be compared is the order of the rows. The package's page gives for Mistral
7B a perplexity of 4.81 for the base, 2,464 bounded without phase 2 (where its own table has 27.88, as the start of
phase 2) and 5.94 with it. Nothing here confirms or denies these figures.

Measured in {seconds:.0f} s of processor time, {training:.0f} s of them training."""

MEANT: Final = """\
*Perplexity* is of every token. *KL* is from the base with a full cache, in nats of a token, and *same* the share of
tokens at which both think one token the likeliest."""
CODES_MEANT: Final = """ Most tokens are filler, of which nothing far back says anything: *of answers* is the perplexity
of the codes asked for alone (there are 90 to guess from). *Codes found* is greedy, the words before each answer forced;
the other columns split it by the quarter of the document that told the code, the oldest first. All are told at least
{gaps} before the first question."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What decides the numbers of a run."""

    checkpoint: str
    weights: str
    config: str
    text: tuple[str, ...]  # names of the files; none: documents of the demo language
    text_sha256: str | None
    held_out: tuple[str, ...]  # none: the end of the text
    kv: str
    detach_evicted: bool
    seed: int
    recipe: Recipe
    device: str
    threads: int
    torch: str
    commit: str
    command: str
    parameters: int
    seconds: float
    training: float

    def foot(self) -> dict[str, object]:
        """As the foot of a page has them."""
        recipe = {name.replace("_", " "): value for name, value in asdict(self.recipe).items()}
        elsewhere = ("recipe", "seconds", "training", "parameters")
        own = {name: value for name, value in asdict(self).items() if name not in elsewhere}
        return own | recipe | {"dtype": "fp32"}


def page(lines: Sequence[Line], learned: Sequence[Learned], facts: Facts) -> Page:
    """Return the page: what each line showed at each length, and what the layers have learnt."""
    recipe, lengths = facts.recipe, list(dict.fromkeys(line.length for line in lines))
    at = {length: [line for line in lines if line.length == length] for length in lengths}
    codes = bool(lines[0].answers)
    meant = MEANT + (CODES_MEANT.format(gaps=gaps(lengths)) if codes else "")
    rows = ROWS.format(kv=facts.kv, recipe=recipe, noise=_sigmoid(recipe.lambda_bias), gate=_sigmoid(recipe.gate_bias))
    what = "documents of one small language by the generator that made the training data" if codes else "one text"
    parts: list[Part] = [
        _curves(at[max(lengths)]),
        *(table(at[length]) for length in lengths),
        Text("", " ".join(meant.split())),
        Text("The rows", rows),
        Text("How it was trained", _trained(facts, codes=codes)),
        learned_table(learned, recipe),
        Text("What this does not claim", CLAIMED.format(documents=what, **asdict(facts))),
    ]
    verdict, summary = headline(at[max(lengths)])
    data = {
        "facts": asdict(facts),
        "lines": [line.to_json() for line in lines],
        "learned": [asdict(layer) for layer in learned],
    }
    return Page(NAME, TITLE, verdict, summary, parts, facts.foot(), finite(data))


def table(lines: Sequence[Line]) -> Table:
    """What was measured at one length."""
    length, codes = lines[0].length, bool(lines[0].answers)
    if codes:
        title = f"{length} tokens, {CODES} codes in each of {sum(lines[0].asked) // CODES} documents"
    else:
        title = f"{length} tokens, {len(lines[0].losses) // (length - 1)} sequences"
    columns = ["", "perplexity", "KL", "same"]
    if codes:
        columns += ["of answers", "codes found", *(f"told in quarter {i + 1}" for i in range(PARTS))]
    rows: list[list[float | str | None]] = []
    for line in lines:
        row = [line.name, f"{line.perplexity:.2f}", f"{line.divergence:.4f}", f"{100 * line.agreement:.1f} %"]
        if codes:
            parts = (f"{r} of {a}" if a else "-" for r, a in zip(line.right, line.asked, strict=True))
            row += [f"{line.surprise:.2f}", f"{100 * line.recall:.1f} %", *parts]
        rows.append(list(row))
    return Table(title, tuple(columns), rows)


def headline(lines: Sequence[Line]) -> tuple[str, str]:
    """What the longest documents show: the first sentence, and those after it."""
    base, cold, first, second = (lines[i] for i in DRAWN)
    every = " and ".join(
        (", ".join(f"{line.perplexity:.2f}" for line in (base, cold, first)), f"{second.perplexity:.2f}")
    )
    far = ", ".join(f"{line.divergence:.4f}" for line in (cold, first, second))
    cost = second.loss - lines[SECOND_UNBOUNDED].loss
    text = (
        f"KL from the base, of the bounded three: {far} nats. {gained(base, cold, second)} The adapters of phase 2 lose"
        f" {cost:.4f} nats of a token by the bounded cache, against themselves unbounded."
    )
    if not base.answers:
        order = "for the base with a full cache, the cold swap, and bounded after phase 1 and phase 2"
        return f"At {base.length} tokens perplexity is {every} {order}", text
    answers = ", ".join(f"{line.surprise:.2f}" for line in (base, cold, first, second))
    found = (
        f"At {base.length} tokens the base finds {100 * base.recall:.1f} % of the codes with a full cache,"
        f" {100 * cold.recall:.1f} % after the cold swap, {100 * first.recall:.1f} % bounded after phase 1 alone and"
        f" {100 * second.recall:.1f} % after phase 2"
    )
    more = f"Perplexity of the answers, in the same order: {answers}; of all tokens: {every}."
    return found, f"{closed(base, cold, second)} {more} {text}"


def closed(base: Line, cold: Line, second: Line) -> str:
    """How much of what the cold swap took phase 2 gives back; nothing to say where it took nothing."""
    lost = base.recall - cold.recall
    if lost <= 0:
        return "The cold swap loses no codes here."
    back = 100 * (second.recall - cold.recall) / lost
    return f"Of the codes that the cold swap loses, phase 2 gives back {back:.0f} %."


def gained(base: Line, cold: Line, second: Line) -> str:
    """How much of the loss of a token that the cold swap adds the training takes away."""
    added, left = (line.loss - base.loss for line in (cold, second))
    beyond = " It ends below the base: adapters learn the text too." if left < 0 else ""
    if added <= 0:
        return f"The cold swap costs no token here: nothing was to be given back.{beyond}"
    back = 100 * (added - left) / added
    return f"Of the {added:.4f} nats of a token that the cold swap costs, the training gives back {back:.0f} %.{beyond}"


def learned_table(learned: Sequence[Learned], recipe: Recipe) -> Table:
    """What the adapters' own parameters have become, by layer."""
    codes = not isnan(learned[0].gate_of_codes)  # as in a text, which tells none
    starts = [_sigmoid(value) for value in (recipe.lambda_bias, recipe.gate_bias, recipe.eta_logit)]
    columns = ("layer", "mean lambda", *(["write gate of told values"] if codes else []), "write gate of tokens", "eta")
    rows = list[list[float | str | None]]()
    for i, layer in enumerate(learned):
        gates = [f"{gate:.3f}" for gate in (layer.gate_of_codes, layer.gate_of_others) if not isnan(gate)]
        rows.append([i, f"{layer.noise:.4f}", *gates, f"{layer.eta:.3f}"])
    note = (
        f"On the documents measured. At the start: lambda {starts[0]:.4f}, gates {starts[1]:.3f}, eta {starts[2]:.3f}."
    )
    return Table("What the adapters learned", columns, rows, note)


def gaps(lengths: Sequence[int]) -> str:
    """Tokens between telling and asking, in words: by length, where documents of some lengths have fewer."""
    found = {length: gap_of(length) for length in lengths}
    if len(set(found.values())) == 1:
        return f"{gap_of(lengths[0])} tokens"
    return ", ".join(f"{gap} tokens (of {length})" for length, gap in found.items())


def _curves(lines: Sequence[Line]) -> Plot:
    """Perplexity by the place in a document: where the ring ends, bounded ones part from the base."""
    middle = [(i + 0.5) * lines[0].length / STRETCHES for i in range(STRETCHES)]
    series: dict[str, Sequence[tuple[float, float]]] = {
        lines[case].name: [(x, perplexity(part)) for x, part in zip(middle, lines[case].stretches, strict=True) if part]
        for case in DRAWN
    }
    return Plot("Perplexity by position", "position of the token", "perplexity", series, log_y=True)


def _trained(facts: Facts, *, codes: bool) -> str:
    """What it was trained on, and how."""
    recipe = facts.recipe
    if codes:
        tokens = TOKENS_PER_STEP * recipe.accumulate
        material = (
            f"Documents of the demo language, 64 to 1024 tokens each with up to 12 codes, {tokens} tokens an update."
        )
    else:
        tokens = recipe.length * recipe.batch * recipe.accumulate
        held = f"{_told(facts.held_out)} was held out" if facts.held_out else "its last sequences were held out"
        material = f"Sequences of {recipe.length} tokens of {_told(facts.text)}, {tokens} tokens an update; {held}."
    falls = (
        f"cosine to 0 at updates {recipe.phase1_decay} and {recipe.phase2_decay}"
        if recipe.decay == "cosine"
        else "linear decay over the second half of a phase"
    )
    schedule = f"warm-up of {recipe.phase1_warm_up} and {recipe.phase2_warm_up} updates, {falls}"
    return TRAINED.format(
        material=material,
        recipe=recipe,
        published=Recipe(),
        schedule=schedule,
        parameters=facts.parameters,
        evicted=DETACHED if facts.detach_evicted else KEPT,
    )


def _told(files: Sequence[str]) -> str:
    """The names of a text's files, or of many the first and how many more there are."""
    names = [f"`{name}`" for name in files[:NAMED]]
    return ", ".join(names) + (f" and {len(files) - NAMED} more files" if len(files) > NAMED else "")


def _sigmoid(x: float) -> float:
    return 1 / (1 + exp(-x))
