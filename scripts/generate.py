"""`python -m scripts.generate`: one prompt through a checkpoint. Text to stdout as it comes, the rest to stderr.

With --prompts-file it takes the prompts of a file one after the other, each in a state of its own, and adds a line of
JSON to --out for each, as soon as its answer is there.
"""

import argparse
import io
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from fathom.model.errors import CapacityError
from fathom.runtime.errors import PromptError
from fathom.runtime.options import NEW_TOKENS, RunOptions, usual
from fathom.runtime.output import write_json
from fathom.runtime.text.encoding import is_v41
from fathom.runtime.text.tokenizer import IdStream, StreamDecoder
from fathom.scripts.cli import arguments, run_on_ranks
from fathom.scripts.console import Console
from fathom.scripts.flags import (
    add_draft,
    add_graph,
    add_json,
    add_model,
    add_op_set,
    add_prompt_format,
    add_rank_timeout,
    add_run_options,
    add_sampling,
    add_threads,
    add_variants,
    check_sampling,
    count,
    positions,
    positive,
    run_options,
)
from fathom.scripts.parts.answers import (
    likelihoods,
    logprobs_table,
    message,
    prefill_progress,
    print_text,
    summary_table,
)
from fathom.scripts.paths import Reads, Tensors, Writes
from fathom.scripts.prompts import Prompt, check_logprobs, check_prompts_file, read_prompt, read_prompts

if TYPE_CHECKING:
    from fathom.model.ranks.ranks import Group
    from fathom.model.state import State
    from fathom.runtime.group.watchdog import Watch
    from fathom.runtime.load import AnyLoaded
    from fathom.runtime.statefile import Saved


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m scripts.generate", description=__doc__)
    add_model(p)
    # Prompt
    prompt = p.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", help="a question, or with --raw any text")
    prompt.add_argument("--prompt-file", action=Reads, help="the same from a UTF-8 file")
    prompt.add_argument(
        "--messages",
        action=Reads,
        help="a conversation as JSON: a list of messages, or messages and tools (see scripts/README.md)",
    )
    prompt.add_argument(
        "--prompts-file",
        action=Reads,
        metavar="F.jsonl",
        help='prompts, a line of JSON each: {"prompt": TEXT} or {"messages": [...], "tools": [...]}, both with an "id"'
        " if you like; a string alone is a prompt, a list alone are messages",
    )
    prompt.add_argument(
        "--tokens",
        action=Reads,
        metavar="F.json",
        help="a JSON list of token ids, run as they are: no BOS is added. Of a model without tokenizer.json the answer"
        " is token ids too",
    )
    add_prompt_format(p)
    # Sampling
    p.add_argument(
        "--max-new-tokens", type=positive, default=NEW_TOKENS, help=f"stop after this number (default {NEW_TOKENS})"
    )
    add_sampling(p)
    # Runtime
    p.add_argument("--max-context", type=positions, help="positions to hold, as 128K (default: what this run needs)")
    add_run_options(p)
    add_op_set(p)
    add_graph(p)
    add_draft(p)
    add_variants(p)
    add_threads(p)
    add_rank_timeout(p)
    # Output
    p.add_argument(
        "--logprobs",
        type=count,
        metavar="N",
        help="tell how likely each token was, and the N likeliest: log_softmax of the logits as they are, before"
        " temperature and top-p",
    )
    add_json(p, "text, tokens and report")
    p.add_argument("--out", action=Writes, metavar="F.jsonl", help="with --prompts-file: an answer a line")
    p.add_argument("--resume", action="store_true", help="go on with such a file where a run was broken off")
    p.add_argument("--save-state", action=Writes, help="write the caches there afterwards")
    p.add_argument("--load-state", action=Tensors, help="continue from such a file: its last answer, or with a prompt")
    return p


def main(argv: Sequence[str] | None = None, watch: "Watch | None" = None) -> int:
    """Run the command line, as one of several ranks where there is a watch; returns the exit status."""
    args = arguments(parser(), argv, watch)
    check_sampling(args)
    check_prompts_file(args)
    if args.prompts_file is not None:
        prompts = read_prompts(args, run_options(args))
        from fathom.scripts.parts.generate_many import run_many

        return run_many(args, prompts, watch)
    prompt = read_prompt(args, run_options(args))  # before torch and the weights: a bad one should not wait for them
    check_logprobs(args.logprobs, prompt.config)
    return run(args, prompt, watch)


def run(args: argparse.Namespace, prompt: Prompt, watch: "Watch | None") -> int:
    """Run the prompt, as one of several ranks where there is a watch; returns the exit status."""
    from fathom.runtime.group.processes import connected

    with connected(watch, args.device, args.rank_timeout) as group:
        return _generate(args, prompt, watch, group)


def _generate(args: argparse.Namespace, given: Prompt, watch: "Watch | None", group: "Group") -> int:
    from fathom.runtime.decoding import check_graph, decoding
    from fathom.runtime.drafting import check_draft, drafting
    from fathom.runtime.generate import Generation, generate
    from fathom.runtime.group.processes import watched_load_any
    from fathom.runtime.op_sets import op_set
    from fathom.runtime.plan.experts import Work
    from fathom.runtime.process import set_process
    from fathom.runtime.report import report
    from fathom.runtime.sampling import Sampling
    from fathom.runtime.statefile import save_state, saved_position

    sampling, options = Sampling(args.temperature, args.top_p, args.seed), run_options(args)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal that cannot show a character must not end the run
        sys.stdout.reconfigure(errors="replace")
    config, tokenizer, segments, prompt = given
    ops = op_set(args.ops or usual(options.device), options, config)
    if args.graph and args.max_new_tokens > 1:
        check_graph(config, options.device, ops)
    check_draft(config, options, ops, graph=args.graph)
    held = 0 if args.load_state is None else saved_position(args.load_state) + 2  # a pending token, and an EOS after it
    context = args.max_context or held + len(prompt) + args.max_new_tokens - 1
    console = Console(stderr=True)
    with console.loading(args.model):
        work = Work(len(prompt), args.max_new_tokens)
        loaded = watched_load_any(watch, args.model, options, ops, group, context=context, work=work)
    set_process(args.threads, loaded)
    state, prompt = _state(args, loaded, options, prompt)
    by = decoding(loaded.model, state, graph=args.graph, steps=args.max_new_tokens - 1, head=loaded.head)
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
            drafting=drafting(options, loaded.head),
            alternatives=args.logprobs,
        )
        text = print_text(stream, IdStream() if tokenizer is None else StreamDecoder(tokenizer))
    data = report(loaded, options, state, [record], by)
    if args.save_state is not None:  # by all ranks; nothing that others wait for comes after it
        save_state(args.save_state, state, loaded, record.pending)
    if args.logprobs is not None:
        data["logprobs"] = likelihoods(tokenizer, record)
        console.print(logprobs_table(data["logprobs"]))
    console.print(summary_table(data))
    if args.json is not None and group.rank == 0:
        told = None if tokenizer is None else text
        data |= {"text": told, "tokens": record.tokens, "prompt": prompt, "sampling": asdict(sampling)}
        if tokenizer is not None and segments and not args.raw:  # the rest of a saved answer is no whole message
            data["message"] = message(tokenizer, record.tokens, segments, v41=is_v41(config))
        write_json(args.json, data)
    return 0


def _state(
    args: argparse.Namespace, loaded: "AnyLoaded", options: RunOptions, prompt: list[int]
) -> "tuple[State, list[int]]":
    """Return a state that holds this run, filled from --load-state, and the tokens to run."""
    from fathom.runtime.memory import new_state
    from fathom.runtime.statefile import load_state, read_saved

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
    state = new_state(loaded.model, context, options.prefill_chunk, read_as_prompt, options.draft_tokens)
    if args.load_state is not None:
        load_state(args.load_state, state, loaded)
    return state, prompt


def _continuation(args: argparse.Namespace, saved: "Saved", eos: Sequence[int], prompt: list[int]) -> list[int]:
    """Return the tokens to run after a saved state: its pending one, and a prompt as the next turn."""
    if not prompt:
        if saved.pending is None or saved.pending in eos:
            raise PromptError(f"{args.load_state}: the saved answer is finished, so a prompt is needed")
        return [saved.pending]
    pending = [] if saved.pending is None else [saved.pending]
    chat = not args.raw and args.tokens is None
    if chat and saved.pending not in eos:
        pending.append(eos[0])  # an answer cut short by --max-new-tokens: in a conversation every answer ends with EOS
    return pending + prompt


if __name__ == "__main__":
    sys.exit(run_on_ranks(main))
