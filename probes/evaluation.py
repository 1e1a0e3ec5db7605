"""What a run gives: likelihood of a text, divergence from another run, answers to questions, bytes, speed.

Every comparison of a run with another one, or with known answers, counts with what is here: perplexity and KL on a text
(`compare`), the tokens behind a document (`answers`, `Questions`), and the standard error of either.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil
from statistics import stdev
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fathom.model.architectures import Model
from fathom.model.cache.entries import Entries
from fathom.model.cache.full import Positions
from fathom.model.cache.gqa import GqaCache
from fathom.model.llama.config import LlamaConfig
from fathom.model.state import State
from fathom.model.variants.choice import Coda, Full, GroupedCoda, GroupedShard, Shard, Variant
from fathom.probes.demo_language.prompts import Prompt
from fathom.runtime.memory import new_state

PIECE: Final = 1 << 21  # logits at a time: of a whole call they would be the largest tensors of the run
BLOCKS: Final = 32  # of a text, whose means give a standard error
SHORTEST_BLOCK: Final = 16  # tokens: what is far apart is hardly correlated, neighbours are


@dataclass(frozen=True)
class Run:
    """One way to run a model."""

    name: str
    model: Model
    chunk: int  # tokens of a call


class Window(NamedTuple):
    """Tokens that are run together, from an empty state."""

    ids: list[int]
    first: int  # which token of the text its first token of text is
    prompt: int  # tokens that are read before the first that is scored is predicted by others than the last of them
    scored: int  # its last so many tokens


def windows(ids: Sequence[int], before: Sequence[int], context: int, stride: int) -> list[Window]:
    """Cut a text into windows of at most `context` tokens, each of which scores its last `stride` and begins with BOS.

    Parameters
    ----------
    ids
        Of the text, two or more.
    before
        What the model reads before a text: BOS, or nothing.
    context
        Tokens of a window, `before` included.
    stride
        Tokens by which a window begins behind the one before it. What stands before its last `stride` tokens is its
        prompt: read, and scored by the window before, if by any.

    """
    room = min(context - len(before), len(ids))
    stride = min(stride, room)
    prompt = room - stride
    found = []
    for first in range(0, len(ids) - prompt, stride):
        part = list(ids[first : first + room])
        scored = len(part) - prompt - (not before and not prompt)  # nothing predicts the first token of all
        if scored:
            found.append(Window([*before, *part], first, len(before) + len(part) - scored - 1, scored))
    return found


@dataclass
class Scores:
    """Of one run, for each scored token of a text, in order."""

    name: str
    nats: list[Tensor] = field(default_factory=list)  # [t] float64, minus the logarithm of the token's probability
    divergence: list[Tensor] = field(default_factory=list)  # [t] float64, KL from the first run, nats
    same: list[Tensor] = field(default_factory=list)  # [t] bool, whether the likeliest token is the first run's
    cache_bytes: dict[str, int] = field(default_factory=dict)  # by component, behind the first window
    # layers with a variant; whether a token was scored that saw something else than a full cache gives
    varied_layers: dict[int, bool] = field(default_factory=dict)
    tokens: int = 0  # run, the unscored included
    seconds: float = 0.0  # of the calls, without those of the head


def compare(
    runs: Sequence[Run], texts: Sequence[Window], progress: Callable[[int], None], *, decode: bool = False
) -> list[Scores]:
    """Run a text's windows in all runs, call by call in turn, and hold each against the first of them.

    Memory knows nothing of the text's length but for three numbers of each token and run: logits are made and let go
    in pieces.

    Parameters
    ----------
    runs
        The reference first. Their vocabularies are one.
    texts
        Of one text, see `windows`.
    progress
        Called with the number of tokens that all runs have read since.
    decode
        Whether scored tokens are read one by one, as generation reads them.

    """
    out = [Scores(run.name) for run in runs]
    for text in texts:
        states = [new_state(run.model, len(text.ids) - 1, run.chunk, text.prompt) for run in runs]
        prompted = any(state.prompt is not None for state in states)  # what a prompt is read in is one step then
        for first, stop in _steps(text, max(run.chunk for run in runs), decode=decode, prompted=prompted):
            rows = [
                _called(run, state, text.ids[first:stop], scores)
                for run, state, scores in zip(runs, states, out, strict=True)
            ]
            skipped = max(0, len(text.ids) - text.scored - 1 - first)  # of these rows
            _score(runs, out, [one[skipped:] for one in rows], text.ids[first + skipped + 1 : stop + 1])
            progress(stop - first)
            if skipped < stop - first:
                for run, scores in zip(runs, out, strict=True):
                    last = first + (stop - first - 1) // run.chunk * run.chunk
                    for layer, varied in varied_layers(run.model, text.prompt, (last, stop)).items():
                        scores.varied_layers[layer] = varied or scores.varied_layers.get(layer, False)
        for state, scores in zip(states, out, strict=True):
            scores.cache_bytes = scores.cache_bytes or state.nbytes()
    return out


def summary(scores: Scores, reference: Scores) -> dict[str, Any]:
    """What one run gave, and how far it is from the reference, as JSON values; None where it cannot be told.

    Perplexity is the exponential of the mean over all scored tokens. Its standard error follows from that of the mean,
    as the error of its ratio to the reference's follows from that of the mean difference.
    """
    nats, kl, same = (torch.cat(part) for part in (scores.nats, scores.divergence, scores.same))
    gain = nats - torch.cat(reference.nats)
    perplexity, ratio = (float(part.mean().exp()) for part in (nats, gain))
    error, gain_error = standard_error(nats), standard_error(gain)
    found = {
        "name": scores.name,
        "tokens": len(nats),
        "nats": float(nats.mean()),
        "perplexity": perplexity,
        "perplexity_error": None if error is None else perplexity * error,
        "cache_bytes": scores.cache_bytes,
        "varied_layers": list(scores.varied_layers),
        "exact_layers": [layer for layer, varied in scores.varied_layers.items() if not varied],
        "tokens_per_s": scores.tokens / scores.seconds,
    }
    if scores is reference:
        return found
    return found | {
        "perplexity_ratio": ratio,
        "perplexity_ratio_error": None if gain_error is None else ratio * gain_error,
        "kl": float(kl.mean()),
        "kl_error": standard_error(kl),
        "kl_median": float(kl.median()),
        "kl_99": float(kl.kthvalue(ceil(0.99 * len(kl))).values),
        "kl_worst": float(kl.max()),
        "kl_worst_token": int(kl.argmax()),  # among those that are scored
        "same_likeliest": float(same.double().mean()),
    }


def _steps(text: Window, chunk: int, *, decode: bool, prompted: bool) -> Iterator[tuple[int, int]]:
    """Calls of a window, as spans of its tokens; the prompt ends one, and is one where it is `prompted`."""
    end = len(text.ids) - 1  # the last token is predicted and not run
    read = [text.prompt] if prompted and text.prompt else calls(text.prompt, chunk)
    sizes = [*read, *([1] * (end - text.prompt) if decode else calls(end - text.prompt, chunk))]
    first = 0
    for size in sizes:
        yield first, first + size
        first += size


def _called(run: Run, state: State, ids: Sequence[int], scores: Scores) -> Tensor:
    started = time.perf_counter()
    hidden = read(run.model, state, ids, run.chunk)
    scores.seconds += time.perf_counter() - started
    scores.tokens += len(ids)
    return hidden


def _score(runs: Sequence[Run], out: Sequence[Scores], rows: Sequence[Tensor], targets: Sequence[int]) -> None:
    """Take in the hidden rows [t, hidden] of each run, each of which should predict its target."""
    wanted = torch.tensor(targets, dtype=torch.int64)
    size = max(1, PIECE // runs[0].model.config.vocab_size)
    for first in range(0, len(wanted), size):
        part, reference = wanted[first : first + size], None
        for run, scores, hidden in zip(runs, out, rows, strict=True):
            logits = run.model.logits(hidden[first : first + size]).cpu().double().log_softmax(-1)
            reference = logits if reference is None else reference
            scores.nats.append(-logits.gather(1, part[:, None])[:, 0])
            scores.divergence.append(_divergence(reference, logits))
            scores.same.append(reference.argmax(-1) == logits.argmax(-1))


def divergence(wanted: Tensor, found: Tensor) -> Tensor:
    """KL of `found` from `wanted`, logits [t, vocab]: [t] float64 nats, ``sum_v p (log p - log q)`` with p of `wanted`.

    Equal rows give exactly 0.
    """
    return _divergence(wanted.double().log_softmax(-1), found.double().log_softmax(-1))


def _divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL of logarithms of probabilities [t, vocab]; a token that p excludes counts nothing: 0 log 0 = 0."""
    return torch.where(p.exp() > 0, p.exp() * (p - q), 0.0).sum(-1).clamp(min=0)


def standard_error(values: Tensor) -> float | None:
    """Of the mean of [t] values that are alike where they are neighbours; None of too few.

    By means over up to 32 stretches, which are hardly correlated as long as they are long.
    """
    count = min(BLOCKS, len(values) // SHORTEST_BLOCK)
    if count < 2:
        return None
    return float(stdev(float(block.mean()) for block in values.tensor_split(count)) / count**0.5)


def calls(tokens: int, chunk: int) -> list[int]:
    """Lengths of the calls that read so many tokens."""
    return [chunk] * (tokens // chunk) + [tokens % chunk] * (tokens % chunk > 0)


def read(model: Model, state: State, ids: Sequence[int], chunk: int) -> Tensor:
    """Run tokens in calls of `chunk`: the normed output [t, hidden] of all of them.

    What is `unread` of a prompt that layers read one after the other is one call.
    """
    left, found = torch.tensor(ids, dtype=torch.int64, device=model.device), []
    while len(left):
        part, left = left.tensor_split([max(chunk, state.unread)])
        found.append(model(part, state))
    return torch.cat(found)


def varied_layers(model: Model, prompt: int, call: tuple[int, int]) -> dict[int, bool]:
    """Layers that do not remember in full, and whether the last token of a call sees that; see `seen_let_go`."""
    formats, config = model.arithmetic.formats, model.config
    variants = {layer: formats.variant(layer) for layer in range(config.num_hidden_layers)}
    return {
        layer: seen_let_go(variant, 1 if isinstance(config, LlamaConfig) else config.ratio(layer), prompt, call) > 0
        for layer, variant in variants.items()
        if not isinstance(variant, Full)
    }


def seen_let_go(variant: Variant, ratio: int, prompt: int, call: tuple[int, int]) -> int:
    """How many rows that were let go the last token of a call sees as something else: tokens, or V4's entries.

    While there are none a layer gives what a full cache gives, and a comparison with that shows nothing.

    Parameters
    ----------
    variant
        Of the layer.
    ratio
        Tokens of an entry; 1 of layers with grouped heads.
    prompt
        Tokens of the prompt.
    call
        Positions of the call, the first and the one behind the last.

    """
    first, stop = call
    match variant:
        case Shard():
            return stop // ratio
        case Coda(window):  # evicts when the call has attended
            return max(0, first // ratio - window)
        case GroupedShard():
            return max(0, stop - variant.sinks - variant.window) if stop > prompt else 0
        case GroupedCoda():  # attends block by block, and evicts behind each
            aligned = first if variant.published else 0
            block = aligned + (stop - 1 - aligned) // variant.block * variant.block
            return max(0, max(first, block) - variant.window)
    return 0


class Snapshot(NamedTuple):
    """A point of a sequence to come back to: what a call overwrites, and how many rows there were of all else."""

    position: int
    counts: list[dict[str, int]]  # by layer and component
    parts: list[dict[str, dict[str, Tensor]]]


def snapshot(state: State) -> Snapshot:
    """Remember a state as it is now. Entries, and rows of a full cache, are only ever added: their number is enough."""
    counts, parts = [], []
    for cache in state.layers:
        grown = {
            name: component.count if isinstance(component, Entries) else state.position
            for name, component in cache.components.items()
            if isinstance(component, Entries | Positions)
        }
        others = {name: c.tensors(state.position) for name, c in cache.components.items() if name not in grown}
        counts.append(grown)
        parts.append({name: {part: x.clone() for part, x in saved.items()} for name, saved in others.items()})
    return Snapshot(state.position, counts, parts)


def restore(state: State, saved: Snapshot) -> None:
    """Bring a state back to where it was; what came after is forgotten."""
    for cache, counts, parts in zip(state.layers, saved.counts, saved.parts, strict=True):
        for name, component in cache.components.items():
            if isinstance(component, Entries):
                component.count = counts[name]
            elif name in parts:
                component.restore(saved.position, parts[name])
        if isinstance(cache, GqaCache):
            cache.position = saved.position
    state.position = saved.position


def ask(model: Model, state: State, questions: Iterable[Sequence[int]]) -> list[Tensor]:
    """Run questions, each from `state`, and leave the state as it was.

    Returns
    -------
    list of Tensor
        Logits [t, vocab] float32 after each token of each question.

    """
    saved, out = snapshot(state), []
    for question in questions:
        out.append(model.logits(read(model, state, question, state.chunk)))
        restore(state, saved)
    return out


def margin(logits: Tensor, right: int) -> float:
    """Logit of the right token above the best of the others, of [vocab]: above 0 where greedy decoding says it."""
    best = logits.topk(2)
    return float(logits[right] - best.values[int(best.indices[0] == right)])


@dataclass(frozen=True)
class Share:
    """Right answers of all."""

    right: int
    total: int

    @staticmethod
    def of(answers: Iterable[bool]) -> "Share":
        """Count them."""
        counted = list(answers)
        return Share(sum(counted), len(counted))

    @property
    def share(self) -> float:
        """NaN where nothing was asked."""
        return self.right / self.total if self.total else float("nan")

    def __str__(self) -> str:
        return f"{self.right} of {self.total}" if self.total else "-"


def right_answers(run: Run, prompt: Prompt) -> list[bool]:
    """For each answer of a prompt, whether the likeliest token after it is the right one; what is before is given."""
    ids, model = torch.tensor(prompt.ids, device=run.model.device), run.model
    state = new_state(model, len(ids), run.chunk, len(ids))
    found: list[bool] = []
    for part in [ids] if state.unread else ids.split(run.chunk):
        first, hidden = state.position, model(part, state)
        asked = [answer for answer in prompt.answers if first <= answer.position < state.position]
        if asked:
            likeliest = model.logits(hidden[[answer.position - first for answer in asked]]).argmax(-1).tolist()
            found += [token == answer.token for token, answer in zip(likeliest, asked, strict=True)]
    return found
