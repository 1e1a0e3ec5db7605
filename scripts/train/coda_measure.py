"""What a network knows with each memory: perplexity and divergence on documents that were held out, and codes found."""

import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fathom.model.variants.coda_attention import Differential, Tokens
from fathom.probes.demo_language.language import Answer, needle_document
from fathom.probes.demo_language.prompts import GAP
from fathom.probes.demo_language.vocabulary import PAD
from fathom.scripts.train.coda_network import Bounded, Memory, attentions, inference_memory
from fathom.scripts.train.llama_network import Network

CODES: Final = 8  # told and asked for in each document of the demo language
PARTS: Final = 4  # of a document, by which what is found is counted
STRETCHES: Final = 16  # of a document, by which its loss is told
LARGEST: Final = math.log(sys.float_info.max)


class Document(NamedTuple):
    """What was held out: token ids, and the codes that are asked for in them; of a text none."""

    ids: list[int]
    answers: Sequence[Answer] = ()


@dataclass
class Line:
    """What one network showed with one memory at one length; loss and divergence are in nats of a token.

    Attributes
    ----------
    name, length
        What ran, and the tokens of its documents.
    losses, answers, divergences
        Of every token, of every code asked for, and from the base with a full cache.
    same, tokens
        How many likeliest tokens are the base's, and of how many.
    stretches
        Losses by the part of the document, `STRETCHES` of them.
    right, asked
        Codes found and asked for, by the part of the document that told them, the oldest first.
    """

    name: str
    length: int
    losses: list[float] = field(default_factory=list)
    answers: list[float] = field(default_factory=list)
    divergences: list[float] = field(default_factory=list)
    same: int = 0
    stretches: list[list[float]] = field(default_factory=lambda: [[] for _ in range(STRETCHES)])
    right: list[int] = field(default_factory=lambda: [0] * PARTS)
    asked: list[int] = field(default_factory=lambda: [0] * PARTS)

    @property
    def loss(self) -> float:
        """Mean over all tokens; nan where that of a token is."""
        return fmean(self.losses)

    @property
    def perplexity(self) -> float:
        """Over all tokens."""
        return perplexity(self.losses)

    @property
    def surprise(self) -> float:
        """Perplexity over the codes asked for alone."""
        return perplexity(self.answers)

    @property
    def divergence(self) -> float:
        """Mean KL from the base with a full cache."""
        return fmean(self.divergences)

    @property
    def agreement(self) -> float:
        """Share of likeliest tokens that are the base's."""
        return self.same / len(self.losses)

    @property
    def recall(self) -> float:
        """Share of codes found."""
        return sum(self.right) / sum(self.asked)

    def to_json(self) -> dict[str, object]:
        """What a page tells of it."""
        numbers = {name: getattr(self, name) for name in ("name", "length", "perplexity", "divergence", "agreement")}
        by_stretch = {"perplexity_by_stretch": [perplexity(part) if part else None for part in self.stretches]}
        codes = {"surprise": self.surprise, "right": self.right, "asked": self.asked} if self.answers else {}
        return numbers | {"tokens": len(self.losses)} | by_stretch | codes


def perplexity(losses: Sequence[float]) -> float:
    """The exponential of the mean of losses, at least one; infinite where no float holds it."""
    mean = fmean(losses)
    return math.exp(mean) if not mean > LARGEST else math.inf


@dataclass(frozen=True)
class Learned:
    """What a layer's own CoDA parameters have become."""

    noise: float  # mean lambda over tokens and heads
    gate_of_codes: float  # mean write gate of values told; nan in a text, which tells none
    gate_of_others: float  # of all other tokens
    eta: float  # mean rate of the summary bank, over KV heads


class Case(NamedTuple):
    """A network and the cache it runs with; None: everything is remembered."""

    name: str
    network: Network
    bounded: Bounded | None


def cases(base: Network, stages: Sequence[Network], bounded: Bounded) -> list[Case]:
    """What is compared: the five of the article, then the second phase with parts of its memory taken away.

    `stages` are the adapted network before training and after each phase.
    """
    fresh, first, second = stages
    settings = bounded.settings
    no_exact = replace(settings, exact=0, exact_at_start=None)
    no_summary = replace(settings, summary=0, summary_at_start=None)
    alone = replace(no_exact, summary=0, summary_at_start=None)
    return [
        Case("base, full cache", base, None),
        Case("cold swap: base weights, bounded", fresh, bounded),
        Case("phase 1, unbounded", first, None),
        Case("phase 1, bounded", first, bounded),
        Case("phase 2, bounded", second, bounded),
        Case("... without the exact bank", second, bounded._replace(settings=no_exact)),
        Case("... without the summary bank", second, bounded._replace(settings=no_summary)),
        Case("... without both: the window alone", second, bounded._replace(settings=alone)),
        Case("phase 2, unbounded", second, None),
    ]


def gap_of(length: int) -> int:
    """Tokens of a document of so many between the last code told and the first question, at the least."""
    return min(GAP, length // 4)


def documents(length: int, count: int, seed: int) -> list[Document]:
    """Documents that tell codes and then ask for all of them, the first `gap_of` tokens after the last or later."""
    rng, made = random.Random(f"codes measured {length} {seed}"), []  # noqa: S311 -- documents, not secrets
    for _ in range(count):
        drawn = needle_document(rng, length, CODES, CODES, chat=False, gap=gap_of(length))
        told = [answer for answer in drawn.answers if answer.source >= 0]
        made.append(Document(drawn.ids[: len(drawn.ids) - drawn.ids.count(PAD)], told))
    return made


@torch.no_grad()
def measure(
    compared: Sequence[Case], length: int, held: Sequence[Document], advance: Callable[[int], None] = lambda _: None
) -> list[Line]:
    """Run each document through the caches of inference (`model.variants.coda`) and look at what was thought likely.

    The first case is what the others diverge from. `advance` is called with 1 after each document of each case.
    """
    lines = [Line(case.name, length) for case in compared]
    for document in held:
        base: Tensor | None = None
        for case, line in zip(compared, lines, strict=True):
            memory = None if case.bounded is None else inference_memory(case.network, case.bounded)
            ids = torch.tensor([document.ids], device=case.network.freqs.device)
            logits = case.network(ids, torch.arange(ids.shape[1], device=ids.device)[None], memory)[0, :-1].float()
            likely = logits.log_softmax(-1)  # [t - 1, vocab]: of the token after each
            base = likely if base is None else base
            _note(line, document, length, likely, base)
            advance(1)
    return lines


def _note(line: Line, document: Document, length: int, likely: Tensor, base: Tensor) -> None:
    """Add what a document showed; likely and base are log-probabilities [t - 1, vocab]."""
    ids = torch.tensor(document.ids[1:], device=likely.device)
    losses = cross_entropy(likely, ids, reduction="none").tolist()
    line.losses += losses
    line.divergences += (base.exp() * (base - likely)).sum(-1).tolist()
    line.same += int((likely.argmax(-1) == base.argmax(-1)).sum())
    for at, loss in enumerate(losses):
        line.stretches[at * STRETCHES // length].append(loss)
    for answer in document.answers:
        part = answer.source * PARTS // length
        line.asked[part] += 1
        line.right[part] += int(likely[answer.position].argmax()) == answer.token
        line.answers.append(losses[answer.position])


@torch.no_grad()
def learned(network: Network, held: Sequence[Document], bounded: Bounded) -> list[Learned]:
    """Lambda, gates and eta of each layer, over documents that run bounded."""
    kept: list[list[Tokens]] = [[] for _ in attentions(network)]
    for document in held:
        ids = torch.tensor([document.ids], device=network.freqs.device)
        caches = inference_memory(network, bounded)
        memory = [[_keeping(own, seen)] for (own,), seen in zip(caches, kept, strict=True)]
        network(ids, torch.arange(ids.shape[1], device=ids.device)[None], memory)
    told = torch.cat([_told(document) for document in held])
    found = []
    for layer, seen in zip(attentions(network), kept, strict=True):
        lam = torch.cat([tokens.lam for tokens in seen if tokens.lam is not None])
        gates = torch.cat([tokens.gates for tokens in seen if tokens.gates is not None]).cpu()
        eta = float(layer.summary_eta_logit.sigmoid().mean())
        found.append(Learned(float(lam.mean()), float(gates[told].mean()), float(gates[~told].mean()), eta))
    return found


def _keeping(memory: Memory, seen: list[Tokens]) -> Memory:
    def kept(tokens: Tokens, differential: Differential) -> Tensor:
        seen.append(tokens)
        return memory(tokens, differential)

    return kept


def _told(document: Document) -> Tensor:
    """Which tokens are codes at their first mention: [t] bool."""
    at = torch.zeros(len(document.ids), dtype=torch.bool)
    at[[answer.source for answer in document.answers]] = True
    return at
