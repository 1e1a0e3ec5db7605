"""An answer and the report of a run, for the eye and as JSON: what commands that generate share. Imports no torch."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from fathom.model.choices import EXACT
from fathom.runtime.errors import PromptError
from fathom.runtime.text.dsml import V4_TAGS, V41_TAGS
from fathom.runtime.text.parsing import parse_completion
from fathom.runtime.text.segments import THINK_START, Segment
from fathom.runtime.text.tokenizer import IdStream, StreamDecoder, Tokenizer
from fathom.scripts.console import Console, summary, visible

if TYPE_CHECKING:
    from fathom.runtime.generate import Generation

LONG_PREFILL: Final = 256  # tokens from which a prefill has a progress bar
MIB: Final = 1 << 20


def message(tokenizer: Tokenizer, tokens: list[int], segments: Sequence[Segment], *, v41: bool) -> dict[str, Any]:
    """Parse the answer back into an assistant message; what is wrong with it, when it is not one (cut short, say).

    `segments` are those of the prompt, which ends by asking for reasoning, or not. `v41`: whether the model is a V4.1.
    """
    if not all(map(tokenizer.names, tokens)):
        return {"error": "tokenizer.json has no name for some of the tokens"}
    try:
        thinking, tags = segments[-1] == THINK_START, V41_TAGS if v41 else V4_TAGS
        return parse_completion(tokenizer.decode_segments(tokens), thinking=thinking, tags=tags)
    except PromptError as error:
        return {"error": str(error)}


def likelihoods(tokenizer: Tokenizer | None, record: "Generation") -> list[dict[str, Any]]:
    """How likely each chosen token was, as JSON values: see `runtime.sampling.likelihood`.

    Without a tokenizer a token has no text: None.
    """

    def told(token: int, logprob: float) -> dict[str, Any]:
        decoder = None if tokenizer is None else StreamDecoder(tokenizer)
        text = None if decoder is None else decoder.push(token) + decoder.finish()
        return {"token": token, "text": text, "logprob": logprob}

    return [
        told(one.token, one.logprob) | {"top": [told(token, logprob) for token, logprob in one.top]}
        for one in record.likelihoods
    ]


def logprobs_table(chosen: Sequence[dict[str, Any]]) -> Table:
    """How likely each token was, for the eye: natural logarithms, before temperature and top-p."""
    table = Table("token", title="log-probabilities, before temperature and top-p")
    table.add_column("logprob", justify="right")
    table.add_column("the likeliest", overflow="fold")

    def name(one: dict[str, Any]) -> str:
        return str(one["token"]) if one["text"] is None else visible(repr(one["text"]))

    for one in chosen:
        others = "  ".join(f"{name(each)} {each['logprob']:.4f}" for each in one["top"])
        table.add_row(name(one), f"{one['logprob']:.4f}", others)
    return table


@contextlib.contextmanager
def prefill_progress(console: Console, tokens: int) -> Iterator[Callable[[int], None]]:
    """Yield what `generate` reports prefilled tokens to: a bar for a long prompt, nothing for a short one."""
    if tokens < LONG_PREFILL:
        yield lambda _: None
        return
    columns = (
        TextColumn("prefill {task.completed}/{task.total} tokens"),
        BarColumn(),
        TextColumn("{task.fields[rate]} tokens/s, left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("prefill", total=tokens, rate="-")
        yield lambda count: _advance(bar, task, count)


def _advance(bar: Progress, task: TaskID, count: int) -> None:
    bar.advance(task, count)
    speed = bar.tasks[0].speed
    bar.update(task, rate="-" if speed is None else f"{speed:.0f}")
    if bar.finished:
        bar.stop()  # the text starts now


def print_text(tokens: Iterator[int], decoder: StreamDecoder | IdStream) -> str:
    """Print tokens as whole characters while they come; returns all of the text.

    A terminal gets no control characters, whatever the model says: they could do anything with it.
    """
    shown = visible if sys.stdout.isatty() else str
    pieces = []
    for token in tokens:
        pieces.append(decoder.push(token))
        print(shown(pieces[-1]), end="", flush=True)
    pieces.append(decoder.finish())
    print(shown(pieces[-1]), flush=True)
    return "".join(pieces)


def summary_table(data: dict[str, Any]) -> Table:
    """Return the report for the eye."""

    def rate(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f} tokens/s"

    o, size = data["options"], data["cache_bytes"]
    prompt = f"{data['prompt_tokens']} tokens in {data['prefill_s']:.2f} s, {rate(data['prefill_tokens_per_s'])}"
    answer = f"{data['new_tokens']} tokens in {data['decode_s']:.2f} s, {rate(data['decode_tokens_per_s'])}"
    by = data["decode"] if data["decode_eager_because"] is None else f"eager ({data['decode_eager_because']})"
    caches = ", ".join(f"{name.replace('_', ' ')} {part / MIB:.2f}" for name, part in size.items())
    peak = f"peak {data['peak_memory_bytes'] / MIB:.0f} MiB"
    scores = "" if o["index_scores"] == EXACT else f"index scores {o['index_scores']}, "
    scores += "" if data["fp8_products"] == EXACT else f"products of {data['fp8_products']} codes, "
    chosen = f"numerics {o['numerics']}, {o['dtype']}, {scores}chunk {o['prefill_chunk']}, {data['threads']} threads"
    rows = {
        "prompt": prompt,
        "answer": f"{answer}, ended by {data['ended']}",
        "memory": f"{peak}; caches for {data['max_context']} tokens, MiB: {caches}",
    }
    if data["drafts"] is not None:
        rows["drafts"] = _drafts(data["drafts"])
    if data["banks"]:
        rows["banks"] = _banks(data["banks"])
    if data["ranks"]["count"] > 1:
        rows["ranks"] = _ranks(data["ranks"])
    return summary(rows | {"ran on": f"{o['device']}, ops {data['ops']}, decode {by}, {chosen}"})


def _drafts(drafts: dict[str, Any]) -> str:
    """How many tokens were drafted and accepted, and how many by their place in a draft."""
    drafted, accepted = drafts["drafted"], drafts["accepted"]
    places = ", ".join(f"{some} of {all_}" for some, all_ in zip(accepted, drafted, strict=True))
    told = f"{drafts['drafter']}, {drafts['calls']} calls, accepted {sum(accepted)} of {sum(drafted)} tokens"
    return f"{told}, by place {places}" if drafted else told


def _banks(layers: list[dict[str, Any]]) -> str:
    """What bounded caches hold and what became of the rest, from the least to the most of the layers that have one."""

    def span(name: str) -> str:
        values = [layer[name] for layer in layers if layer.get(name) is not None]
        low, high = (f"{value:.2g}" if isinstance(value, float) else str(value) for value in (min(values), max(values)))
        return low if low == high else f"{low} to {high}"

    told = {
        "newest": "ring_used",
        "exact": "exact_used",
        "means": "summary_used",
        "evicted": "total_evictions",
        "entered the exact bank": "exact_inserts",
        "hits in it": "exact_hits",
        "kept out of it by their gate": "tokens_gated_out",
        "moves of a mean": "summary_updates",
        "behind means": "summarised",
        "likeness in the exact bank": "exact_nearest",
        "among means": "summary_nearest",
    }
    parts = [
        f"{word} {span(name)}" for word, name in told.items() if any(layer.get(name) is not None for layer in layers)
    ]
    return f"{len(layers)} bounded layers, in each: {', '.join(parts)}"


def _ranks(ranks: dict[str, Any]) -> str:
    calls = ", ".join(f"{calls} with {tokens} tokens" for tokens, calls in ranks["calls_by_tokens"].items() if calls)
    weights = ", ".join(f"{size / MIB:.2f}" for size in ranks["weight_bytes"])
    whole = "; ".join(ranks["replicated"]) or "none that could be sharded"
    experts = "" if ranks["experts"] is None else f"; experts {ranks['experts']}: {ranks['experts_because']}"
    return (
        f"{ranks['count']}{experts}; calls on each rank: {calls}; weights by rank, MiB: {weights}; replicated: {whole}"
    )
