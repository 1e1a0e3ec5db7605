"""`python -m scripts.demo_document`: a fresh long document with a question, for the demo checkpoint.

The text goes to stdout, the right answer to stderr. Bindings and counts are drawn from the seed: no model can know
them.
"""

import argparse
import sys
from collections.abc import Sequence

from fathom.model.errors import ConfigError
from fathom.probes.demo_language.prompts import SHORTEST, common_prompts, needle_prompts
from fathom.probes.demo_language.vocabulary import vocabulary_size
from fathom.runtime.options import DEMO
from fathom.runtime.text.segments import ASSISTANT, USER, Text
from fathom.runtime.text.tokenizer import Tokenizer
from fathom.scripts.cli import arguments, run_alone
from fathom.scripts.console import Console
from fathom.scripts.flags import positive, seed

KINDS = {"needle": needle_prompts, "common": common_prompts}


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m scripts.demo_document", description=__doc__)
    p.add_argument("kind", choices=tuple(KINDS), help="needle: a code told once; common: the most common word")
    p.add_argument("--tokens", type=positive, default=4096, help="length of the document (default 4096)")
    p.add_argument("--seed", type=int, default=0, help="another seed, another document (default 0)")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = arguments(parser(), argv)
    if args.tokens < SHORTEST[args.kind]:
        raise ConfigError(f"--tokens {args.tokens}: a document of this kind has at least {SHORTEST[args.kind]}")
    prompt = KINDS[args.kind](args.tokens, 1, seed(args), chat=True)[0]
    tokenizer = Tokenizer(DEMO, vocabulary_size())
    segments = tokenizer.decode_segments(prompt.ids)
    user, assistant = segments.index(USER), segments.index(ASSISTANT)  # the first turn and where its answer begins
    text = "".join(segment.text for segment in segments[user:assistant] if isinstance(segment, Text))
    print(text)
    Console(stderr=True).say(f"the right answer:{tokenizer.decode([prompt.answers[0].token])}")
    return 0


if __name__ == "__main__":
    sys.exit(run_alone(main))
