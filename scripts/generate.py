"""`python -m scripts.generate`: one prompt through a checkpoint. Text to stdout as it comes, the rest to stderr."""

import argparse
import contextlib
import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from model.errors import CapacityError, ConfigError
from model.ranks import Group
from model.state import State
from runtime.decoding import check_graph, decoding
from runtime.encoding import EFFORTS
from runtime.errors import PromptError
from runtime.generate import Generation, generate
from runtime.group import connected, watched_load_any
from runtime.load import DEMO, AnyLoaded, read_any_config
from runtime.memory import new_state
from runtime.options import RunOptions
from runtime.parsing import parse_completion
from runtime.report import report
from runtime.sampling import Sampling
from runtime.segments import THINK_START
from runtime.statefile import Saved, load_state, read_saved, save_state, saved_position
from runtime.tokenizer import StreamDecoder, Tokenizer
from runtime.watch import Watch
from scripts.cli import arguments, run_on_ranks
from scripts.flags import (
    add_graph,
    add_op_set,
    add_rank_timeout,
    add_run_options,
    add_variants,
    chosen_ops,
    positive,
    run_options,
    writable,
)
from scripts.prompts import check_prompt_flags, prompt_segments

LONG_PREFILL = 256  # tokens from which a prefill has a progress bar
MIB = 1024 * 1024


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m scripts.generate", description=__doc__)
    p.add_argument("--model", type=Path, default=DEMO, help="checkpoint directory (default: the demo checkpoint)")
    # Prompt
    prompt = p.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", help="a question, or with --raw any text")
    prompt.add_argument("--prompt-file", type=Path, help="the same from a UTF-8 file")
    prompt.add_argument(
        "--messages",
        type=Path,
        help="a conversation as JSON: a list of messages, or messages and tools (see the README)",
    )
    p.add_argument("--raw", action="store_true", help="no chat format: BOS, then the prompt as it is")
    p.add_argument("--think", action="store_true", help="let the model reason before it answers")
    p.add_argument(
        "--effort",
        metavar="REVISION:LEVEL",
        help="reasoning effort with --think; " + ", ".join(f"{r}:{'|'.join(levels)}" for r, levels in EFFORTS.items()),
    )
    # Sampling
    p.add_argument("--max-new-tokens", type=positive, default=128, help="stop after so many (default 128)")
    p.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    p.add_argument("--top-p", type=float, default=1.0, help="nucleus mass in (0, 1] (default 1)")
    p.add_argument("--seed", type=int, default=0, help="of the sampling generator (default 0)")
    # Runtime
    p.add_argument("--max-context", type=positive, help="positions to hold (default: what this run needs)")
    add_run_options(p)
    add_op_set(p)
    add_graph(p)
    add_variants(p)
    add_rank_timeout(p)
    # Output
    p.add_argument("--json", type=Path, help="write text, tokens and report there")
    p.add_argument("--save-state", type=Path, help="write the caches there afterwards")
    p.add_argument("--load-state", type=Path, help="continue from such a file: its last answer, or a --prompt")
    return p


def main(argv: Sequence[str] | None = None, watch: Watch | None = None) -> int:
    """Run the command line, as one of several ranks where there is a watch; returns the exit status."""
    args = arguments(parser(), argv, watch)
    with connected(watch, args.device, args.rank_timeout) as group:
        return _generate(args, watch, group)


def _generate(args: argparse.Namespace, watch: Watch | None, group: Group) -> int:
    sampling, options = _sampling(args), run_options(args)
    if group.rank == 0:
        for path in (args.json, args.save_state):
            writable(path)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal that cannot show a character must not end the run
        sys.stdout.reconfigure(errors="replace")
    check_prompt_flags(args)
    config = read_any_config(args.model, options)
    tokenizer = Tokenizer(args.model, config.vocab_size)
    segments = prompt_segments(args, config, tokenizer)
    # Before the weights: a bad prompt should not wait for them.
    prompt = tokenizer.encode(segments, continued=args.load_state is not None)
    ops = chosen_ops(args, options, config)
    if args.graph and args.max_new_tokens > 1:
        check_graph(config, options.device, ops, group.size)
    held = 0 if args.load_state is None else saved_position(args.load_state) + 2  # a pending token, and an EOS after it
    context = args.max_context or held + len(prompt) + args.max_new_tokens - 1
    console = Console(stderr=True)
    with console.status(f"loading {args.model}", spinner="line"):
        loaded = watched_load_any(watch, args.model, options, ops, group, context=context)
    state, prompt = _state(args, loaded, options, prompt)
    by = decoding(loaded.model, state, graph=args.graph, steps=args.max_new_tokens - 1)
    record = Generation()
    with prefill_progress(console, len(prompt)) as advance:
        stream = generate(
            loaded.model,
            state,
            prompt,
            eos=config.eos_token_ids,
            limit=args.max_new_tokens,
            sampling=sampling,
            progress=advance,
            record=record,
            decode=by.step,
        )
        text = print_text(stream, StreamDecoder(tokenizer))
    data = report(loaded, options, state, record, by)
    if args.save_state is not None and group.rank == 0:  # nothing that the other ranks wait for comes after it
        save_state(args.save_state, state, loaded, record.pending)
    console.print(_summary(data))
    if args.json is not None and group.rank == 0:
        data |= {"text": text, "tokens": record.tokens, "prompt": prompt, "sampling": asdict(sampling)}
        if segments and not args.raw:  # the rest of a saved answer is no whole message
            data["message"] = _message(tokenizer, record.tokens, thinking=segments[-1] == THINK_START)
        args.json.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


def _message(tokenizer: Tokenizer, tokens: list[int], *, thinking: bool) -> dict[str, Any]:
    """Parse the answer back into an assistant message; what is wrong with it, when it is not one (cut short, say)."""
    if not all(map(tokenizer.names, tokens)):
        return {"error": "tokenizer.json has no name for some of the tokens"}
    try:
        return parse_completion(tokenizer.decode_segments(tokens), thinking=thinking)
    except PromptError as error:
        return {"error": str(error)}


def _sampling(args: argparse.Namespace) -> Sampling:
    if not 0 <= args.temperature < float("inf"):
        raise ConfigError(f"--temperature {args.temperature}: want a number >= 0")
    if not 0 < args.top_p <= 1:
        raise ConfigError(f"--top-p {args.top_p}: want a number in (0, 1]")
    if not 0 <= args.seed < 2**63:
        raise ConfigError(f"--seed {args.seed}: want 0 to 2^63 - 1")
    return Sampling(args.temperature, args.top_p, args.seed)


def _state(
    args: argparse.Namespace, loaded: AnyLoaded, options: RunOptions, prompt: list[int]
) -> tuple[State, list[int]]:
    """Return a state that holds this run, filled from --load-state, and the tokens to run."""
    held = 0
    read_as_prompt: int | None = len(prompt)
    if args.load_state is not None:
        saved = read_saved(args.load_state, loaded)
        held, prompt = saved.position, _continuation(args, saved, loaded.model.config.eos_token_ids, prompt)
        read_as_prompt = saved.prompt
    needed = held + len(prompt) + args.max_new_tokens - 1  # the last new token is not run
    context = args.max_context or needed
    if context < needed:
        parts = f"{held} saved, {len(prompt)} prompt and {args.max_new_tokens} new tokens"
        raise CapacityError(f"--max-context {context}: {parts} need {needed}")
    state = new_state(loaded.model, context, options.prefill_chunk, read_as_prompt)
    if args.load_state is not None:
        load_state(args.load_state, state, loaded)
    return state, prompt


def _continuation(args: argparse.Namespace, saved: Saved, eos: Sequence[int], prompt: list[int]) -> list[int]:
    """Return the tokens to run after a saved state: its pending one, and a prompt as the next turn."""
    if not prompt:
        if saved.pending is None or saved.pending in eos:
            raise PromptError(f"{args.load_state}: the saved answer is finished, so a prompt is needed")
        return [saved.pending]
    pending = [] if saved.pending is None else [saved.pending]
    if not args.raw and saved.pending not in eos:
        pending.append(eos[0])  # an answer cut short by --max-new-tokens: in a conversation every answer ends with EOS
    return pending + prompt


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


def print_text(tokens: Iterator[int], decoder: StreamDecoder) -> str:
    """Print tokens as whole characters while they come; returns all of the text."""
    pieces = []
    for token in tokens:
        pieces.append(decoder.push(token))
        print(pieces[-1], end="", flush=True)
    pieces.append(decoder.finish())
    print(pieces[-1], flush=True)
    return "".join(pieces)


def _summary(data: dict[str, Any]) -> Table:
    """Return the report for the eye."""

    def rate(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f} tokens/s"

    o, size = data["options"], data["cache_bytes"]
    prompt = f"{data['prompt_tokens']} tokens in {data['prefill_s']:.2f} s, {rate(data['prefill_tokens_per_s'])}"
    answer = f"{data['new_tokens']} tokens in {data['decode_s']:.2f} s, {rate(data['decode_tokens_per_s'])}"
    by = data["decode"] if data["decode_eager_because"] is None else f"eager ({data['decode_eager_because']})"
    caches = ", ".join(f"{name.replace('_', ' ')} {part / MIB:.2f}" for name, part in size.items())
    peak = f"peak {data['peak_memory_bytes'] / MIB:.0f} MiB"
    chosen = f"numerics {o['numerics']}, {o['dtype']}, chunk {o['prefill_chunk']}, {data['threads']} threads"
    table = Table.grid(padding=(0, 2))
    table.add_row("prompt", prompt)
    table.add_row("answer", f"{answer}, ended by {data['ended']}")
    table.add_row("memory", f"{peak}; caches for {data['max_context']} tokens, MiB: {caches}")
    if data["ranks"]["count"] > 1:
        table.add_row("ranks", _ranks(data["ranks"]))
    table.add_row("ran on", f"{o['device']}, ops {data['ops']}, decode {by}, {chosen}")
    return table


def _ranks(ranks: dict[str, Any]) -> str:
    calls = ", ".join(f"{calls} by {dispatch}" for dispatch, calls in ranks["dispatch_calls"].items())
    weights = ", ".join(f"{size / MIB:.2f}" for size in ranks["weight_bytes"])
    whole = "; ".join(ranks["replicated"]) or "none that could be sharded"
    return f"{ranks['count']}; calls {calls}; weights by rank, MiB: {weights}; replicated: {whole}"


if __name__ == "__main__":
    sys.exit(run_on_ranks(main))
