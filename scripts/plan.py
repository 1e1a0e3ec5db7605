"""Plan the memory of a run before anything is allocated: weights by kind, caches, what a call holds; for each rank.

With --context it shows that plan, whether it fits, and from how many ranks on it does. Without it shows what fits: the
largest context by number of ranks, in the memory that is told or found, or by GPU where neither is.

Only config.json and the headers of the checkpoint's files are read; or config.json alone, of a file or of a release by
its name: then the weights are those that DeepSeek publishes for such a model. Exit status 1 when nothing that was asked
for fits in the memory, 0 when something does.
"""

import argparse
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from fathom.model.architectures import config_from_file
from fathom.model.checkpoint.published import EXPERT_DTYPES, published_configs
from fathom.model.errors import ConfigError
from fathom.model.llama.config import LlamaConfig
from fathom.runtime.options import DEMO, NEW_TOKENS
from fathom.runtime.plan.gpus import GPUS
from fathom.scripts.cli import arguments, run_alone
from fathom.scripts.flags import add_draft, add_json, add_model, add_run_options, add_variants, positions, positive
from fathom.scripts.hub import HEADERS
from fathom.scripts.paths import Models, Reads


class ModelOrRelease(Models):
    """The action of --model here: the name of a release stands for its config.json."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Store it as --config, or what is no such name as --model."""
        releases, name = published_configs(), str(values).lower()
        if Path(str(values)).is_dir() or (name not in releases and not (close := get_close_matches(name, releases, 1))):
            super().__call__(parser, namespace, values, option_string)
        elif name in releases:
            namespace.config = releases[name]
        else:
            raise ConfigError(f"--model {values}: no such folder; did you mean {close[0]}?")


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m scripts.plan", description=__doc__)
    alone = "a config.json: weights as DeepSeek publishes them"
    add_model(
        p,
        HEADERS,
        default=None,
        action=ModelOrRelease,
        more=", or the name of a release, " + ", ".join(published_configs()),
        instead=lambda what: what.add_argument("--config", action=Reads, help=alone),
    )
    p.add_argument(
        "--expert-dtype",
        choices=EXPERT_DTYPES,
        help="with --config, how routed experts are stored (default: what its expert_dtype says)",
    )
    p.add_argument("--context", type=positions, help="positions to hold, as 128K or 1M (default: all that fit)")
    p.add_argument(
        "--prompt-tokens",
        type=positions,
        help="of the positions those of the prompt, which --kv shard of a Llama-family model keeps in fewer bytes"
        " (default: not known, each part of the plan is for the prompt that takes most); of V4 on several --ranks,"
        " tokens of the prompt for which --experts auto chooses (default: those of one call)",
    )
    p.add_argument(
        "--new-tokens",
        type=positive,
        help=f"of V4 on several --ranks, tokens of the answer for which --experts auto chooses (default {NEW_TOKENS})",
    )
    p.add_argument(
        "--ranks", type=positive, help="ranks, one GPU each (default: 1, and without --context every number that goes)"
    )
    memory = p.add_mutually_exclusive_group()
    memory.add_argument(
        "--memory-gib",
        type=_gib,
        help="GiB for each rank (default: this machine's, where it has the device; its memory is shared by CPU ranks)",
    )
    memory.add_argument(
        "--gpu", type=str.lower, choices=GPUS, metavar="GPU", help=f"the same of one of {', '.join(GPUS)}"
    )
    add_run_options(p, device="cuda")
    add_draft(p)
    add_variants(p)
    add_json(p, "the same")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = arguments(parser(), argv)
    config = config_from_file(args.config or (args.model or DEMO) / "config.json")
    if args.expert_dtype is not None and isinstance(config, LlamaConfig):
        raise ConfigError(f"--expert-dtype: {args.config} is of a {config.model_type} model, which has none")
    if args.expert_dtype is not None and args.config is None:
        raise ConfigError(
            "--expert-dtype: means nothing without --config; a checkpoint says itself how they are stored"
        )
    if args.gpu is not None and args.device != "cuda":
        raise ConfigError(f"--gpu {args.gpu}: --device is {args.device}")
    if args.context is None:
        from fathom.scripts.parts.plan_largest import show_largest

        return show_largest(args, config)
    from fathom.scripts.parts.plan_tables import show_plan

    return show_plan(args, config)


def _gib(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1 << 30:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of GiB above 0")
    return value


if __name__ == "__main__":
    sys.exit(run_alone(main))
