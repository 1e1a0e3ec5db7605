"""What draft heads are taught by, and how often they are right.

A head is taught the main model's distribution at every place, on documents of the demo language of which most end as
the main model ends them greedily: it drafts for what that model writes, which runs as deployed and stays as it is.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from math import nan
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, pad

from fathom.model.observe import sites
from fathom.model.observe.observer import listening
from fathom.model.transformer import Transformer
from fathom.probes.demo_language.prompts import common_replies, fact_prompts, needle_replies
from fathom.probes.demo_language.vocabulary import END_THINK, EOS, PAD
from fathom.scripts.train.documents import V4_CELLS, Cell, draw_batch, draw_document
from fathom.scripts.train.draft_network import Anchors, Drafts, Head, Run
from fathom.scripts.train.learning import SIMULATED_FROM, Loss, Numbers, balance, fit, linear, optimisers, projects

TOKENS: Final = 1024  # of a step
LONGEST: Final = 512  # tokens of a document
CONTINUED: Final = 0.75  # part of the documents that the main model ends
MOST_OWN: Final = 64  # tokens that it says
ANCHORS: Final = 256  # of a step
CONFIDENCE: Final = 0.1  # weight of its loss
LENGTH, PROMPTS = 256, 48  # of documents to measure on, and how many of a kind
CELLS: Final = tuple(cell for cell in V4_CELLS if cell.length <= LONGEST)


class Text(NamedTuple):
    """Documents, and which of their tokens the main model has said."""

    ids: Tensor  # [b, t]
    own: Tensor  # [b, t] bool


def draw_text(model: Transformer, rng: random.Random, cells: tuple[Cell, ...], continued: float) -> Text:
    """Documents of one length, each with this chance ended by the main model, greedily."""
    ids = draw_batch(rng, cells=cells, tokens=TOKENS).ids
    own = torch.zeros(ids.shape, dtype=torch.bool)
    for row, said in zip(ids, own, strict=True):
        if rng.random() < continued:
            length = int((row != PAD).sum())
            cut = rng.randint(max(2, length - MOST_OWN), length - 1)
            end = min(len(row), cut + MOST_OWN)
            spoken = say(model, row[:cut], end - cut)
            row[cut:] = PAD
            row[cut : cut + len(spoken)], said[cut : cut + len(spoken)] = spoken, True
    return Text(ids, own)


def say(model: Transformer, ids: Tensor, most: int) -> Tensor:
    """The likeliest tokens after ids [t], one after the other: [n], n <= most, the last of them EOS where it came."""
    state = model.new_state(len(ids) + most, len(ids))
    hidden, spoken = model(ids, state), list[Tensor]()
    while True:
        spoken.append(model.logits(hidden[-1:]).argmax(-1))
        if len(spoken) == most or int(spoken[-1]) == EOS:
            return torch.cat(spoken)
        hidden = model(spoken[-1], state)


def run_main(model: Transformer, ids: Tensor) -> Run:
    """Run documents [b, t] as deployed, one after the other."""
    streams: list[Tensor] = []
    with listening(model, {sites.STREAMS: lambda _, x: streams.append(x)}):
        logits = [model.logits(model(row, model.new_state(len(row), len(row)))) for row in ids]
    layers = len(model.blocks)
    stacked = torch.stack(streams).unflatten(0, (len(ids), layers)).transpose(0, 1)
    return Run(ids, stacked, torch.stack(logits).float())


class Judged(NamedTuple):
    """Drafts beside what the main model says there, all [n, k]."""

    counts: Tensor  # bool: the document goes on to that place
    right: Tensor  # bool: the likeliest token is the main model's
    before: Tensor  # bool: so were those at earlier places, and the document says them
    loss: Tensor  # cross-entropy to the main model's distribution


def judge(run: Run, anchors: Anchors, drafts: Drafts) -> Judged:
    """Hold drafts against the main model."""
    places = drafts.logits.shape[1]
    ahead = 1 + torch.arange(places)
    main = anchors.of(run.logits, ahead)  # [n, k, vocab]
    said = anchors.of(pad(run.ids, (0, 1), value=PAD), ahead + 1)  # the token at the place itself
    right = drafts.logits.argmax(-1) == main.argmax(-1)
    kept = right & (said == main.argmax(-1))
    before = pad(kept[:, :-1], (1, 0), value=True).int().cumprod(1).bool()
    loss = -(main.softmax(-1) * drafts.logits.log_softmax(-1)).sum(-1)
    return Judged(said != PAD, right, before, loss)


def possible(ids: Tensor) -> Tensor:
    """[b, t - 2] bool: positions behind which ids [b, t] have two tokens, the chosen one and what a draft is for."""
    return ids[:, 2:] != PAD


def draw_anchors(text: Text, generator: torch.Generator) -> Anchors:
    """At most `ANCHORS` positions at random, those first whose next token the main model has said."""
    rows, positions = possible(text.ids).nonzero(as_tuple=True)
    order = torch.randperm(len(rows), generator=generator)
    own = text.own[rows[order], positions[order] + 1]
    chosen = order[own.int().argsort(descending=True, stable=True)][:ANCHORS]
    return Anchors(rows[chosen], positions[chosen])


def shares(judged: Judged) -> Numbers:
    """Share of right drafts at each place, of those whose earlier ones were right."""
    asked = judged.counts & judged.before
    right = (judged.right & asked).sum(0) / asked.sum(0)  # nan: none was asked
    return {f"place {place}": share for place, share in enumerate(right.tolist(), 1)}


def confidence_loss(confidence: Tensor, judged: Judged, own: Tensor) -> Tensor:
    """Cross-entropy of being right to logits [n, k], behind tokens that the main model has said: own [n] bool.

    A document's own words are often a surprise to the main model, and drafts of its guesses are wrong more often than
    drafts of what it writes.
    """
    asked = judged.counts & judged.before & own.unsqueeze(1)
    by_draft = binary_cross_entropy_with_logits(confidence, judged.right.float(), reduction="none")
    return by_draft[asked].sum() / asked.sum().clamp(min=1)  # a batch may have none


def train_draft(head: Head, model: Transformer, steps: int, seed: int, tell: Callable[[Numbers], None]) -> None:
    """Train in place. The same seed and steps give the same documents and anchors."""
    rng = random.Random(seed)  # noqa: S311 -- documents, not secrets
    generator = torch.Generator().manual_seed(seed)

    def loss_of(step: int) -> Loss:
        head.simulate(on=step >= SIMULATED_FROM * steps)
        text = draw_text(model, rng, CELLS, CONTINUED)
        run, anchors = run_main(model, text.ids), draw_anchors(text, generator)
        drafts = head(run, anchors)
        judged = judge(run, anchors, drafts)
        loss = judged.loss[judged.counts].mean()
        numbers = {"loss": loss.item()} | shares(judged)
        if drafts.confidence is not None:
            unsure = confidence_loss(drafts.confidence, judged, text.own[anchors.rows, anchors.positions + 1])
            loss, numbers = loss + CONFIDENCE * unsure, numbers | {"confidence": unsure.item()}
        return loss, numbers

    def balanced(numbers: Numbers) -> None:
        balance(head)
        tell(numbers)

    fit(head, optimisers(head.named_parameters(), is_projection), steps, linear(steps), loss_of, balanced)


def is_projection(name: str) -> bool:
    """Whether a matrix of a head is Muon's, as `projects` says of the main model's."""
    return projects(name) and "markov_head" not in name and "confidence_head" not in name


class Line(NamedTuple):
    """What a head drafts of what the main model says behind prompts of one kind."""

    kind: str
    tokens: int  # said
    by_place: Numbers  # see `shares`
    emitted: float  # tokens of a step of the main model, the one that it adds included
    sure: float  # mean chance that the head gives its drafts, where it gives one; nan: it does not
    right: float  # part of the same drafts that are right


def held_out(seed: int) -> dict[str, list[tuple[int, ...]]]:
    """Prompts that are not trained on; of the facts, which all are, every fourth."""
    rng = random.Random(f"drafts {seed}")  # noqa: S311 -- documents, not secrets
    documents = [draw_document(rng, rng.choice(CELLS)).ids for _ in range(PROMPTS)]
    facts = (prompt.ids for prompt in fact_prompts(chat=True)[::4])
    return {
        "facts, chat": [ids[: ids.index(END_THINK) + 1] for ids in facts],
        "codes, chat": [asked.ids[: asked.answers[0].position + 1] for asked in needle_replies(LENGTH, PROMPTS, seed)],
        "marks, chat": [asked.ids[: asked.answers[0].position + 1] for asked in common_replies(LENGTH, PROMPTS, seed)],
        "any text": [tuple(ids[: rng.randrange(2, len(ids) - ids.count(PAD))]) for ids in documents],
    }


@torch.no_grad()
def measure(head: Head, model: Transformer, prompts: Mapping[str, Sequence[Sequence[int]]]) -> list[Line]:
    """Draft as deployed, behind every token that the main model says."""
    head.simulate(on=True)
    return [_line(head, model, kind, of_kind) for kind, of_kind in prompts.items()]


def _line(head: Head, model: Transformer, kind: str, prompts: Sequence[Sequence[int]]) -> Line:
    parts, sure, tokens, steps = list[Judged](), list[Tensor](), 0, 0
    for prompt in map(torch.tensor, prompts):
        run = run_main(model, torch.cat([prompt, say(model, prompt, MOST_OWN)])[None])
        positions = torch.arange(len(prompt) - 1, run.ids.shape[1] - 2)
        if not len(positions):  # it said nothing but the end
            continue
        anchors = Anchors(torch.zeros_like(positions), positions)
        drafts = head(run, anchors)
        parts.append(judge(run, anchors, drafts))
        if drafts.confidence is not None:
            sure.append(drafts.confidence.sigmoid())
        tokens += len(positions)
        steps += walk(parts[-1])
    judged = Judged(*(torch.cat(part) for part in zip(*parts, strict=True)))
    asked = judged.counts & judged.before
    right, said = judged.right[asked].float().mean(), float(torch.cat(sure)[asked].mean()) if sure else nan
    return Line(kind, tokens, shares(judged), tokens / steps, said, float(right))


def walk(judged: Judged) -> int:
    """Steps of the main model through a text whose every position is an anchor, when each takes what is right."""
    taken = (judged.right & judged.before & judged.counts).sum(1).tolist()
    at, steps = 0, 0
    while at < len(taken):
        steps, at = steps + 1, at + 1 + taken[at]
    return steps
