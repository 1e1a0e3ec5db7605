"""What `scripts.evaluate --needle` measures: codes told once in a long text, and found again or not."""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import Any, Final

from fathom.model.architectures import Config
from fathom.model.errors import CapacityError, ConfigError
from fathom.model.files import read_text
from fathom.probes.demo_language.prompts import needle_prompts
from fathom.probes.evaluation import Run, varied_layers
from fathom.probes.finding import Part, Table, Text
from fathom.probes.needle import (
    Answer,
    Document,
    Right,
    asked,
    begun,
    depth_map,
    english,
    guesses,
    of_prompt,
    share,
    told_apart,
    written,
)
from fathom.probes.subject import speaks_demo_language
from fathom.runtime.text.encoding import before_text
from fathom.runtime.text.tokenizer import Tokenizer
from fathom.scripts.parts.evaluate_text import size
from fathom.scripts.paths import MAX_TEXT_BYTES

EXPLAINED: Final = """\
Documents of filler tell people's codes, each once, at even depths, and end with a question for each, the answers to
those before it given.

- *told apart*: the right code is likelier than each of the wrong ones that it is held against, codes of the document
  and others. *guesses*: the largest share that guessing explains, three standard errors included.
- *written*: greedy decoding writes the right code, token by token.
- *margin*: logarithm of the right code's probability over that of the likeliest wrong one.
- *caches*: what all caches hold behind the longest document."""


class Codes:
    """Documents that tell people's codes, and questions for them, put to one run after the other."""

    title = "Is a code that was told once in a long text found again?"

    def __init__(self, args: argparse.Namespace, config: Config) -> None:
        """Make the documents; ConfigError or CapacityError where one does not fit the model or the text."""
        self.args = args
        most = config.max_position_embeddings
        if args.lengths[-1] > most:
            raise CapacityError(f"--lengths {args.lengths[-1]}: the model has {most} positions")
        self.demo = args.text is None and speaks_demo_language(args.model)
        self.documents = list(self._in_demo() if self.demo else self._in_english(config))
        self.room = max(document.room for document in self.documents)
        self.right: Right = written if self.demo else told_apart
        self._right = "written" if self.demo else "told_apart"
        self.explained = [Text("How it was measured", EXPLAINED)]

    def _in_demo(self) -> Iterator[Document]:
        for length in self.args.lengths:
            for prompt in needle_prompts(length, self.args.documents, self.args.seed, self.args.needles):
                yield of_prompt(prompt, length)

    def _in_english(self, config: Config) -> Iterator[Document]:
        tokenizer = Tokenizer(self.args.model, config.vocab_size)
        haystack = None if self.args.text is None else read_text(self.args.text, MAX_TEXT_BYTES, ConfigError)
        for length in self.args.lengths:
            for number in range(self.args.documents):
                seed = self.args.seed * self.args.documents + number
                before = tokenizer.encode(before_text(config, tokenizer))
                yield english(tokenizer, before, length, self.args.needles, seed, haystack=haystack)

    def work(self, runs: int) -> int:
        """Tokens that `measure` tells of: one run is asked after the other."""
        return runs * sum(document.room for document in self.documents)

    def measure(self, runs: Sequence[Run], advance: Callable[[int], None]) -> list[dict[str, Any]]:
        """Ask every run every question: shares of right answers, margins, and the answers themselves."""
        return [self._measured(run, advance) for run in runs]

    def _measured(self, run: Run, advance: Callable[[int], None]) -> dict[str, Any]:
        answers, varied, held, seconds = list[Answer](), dict[int, bool](), dict[str, int](), 0.0
        for document in self.documents:
            started = time.perf_counter()
            state = begun(run, document)
            seconds += time.perf_counter() - started
            held = state.nbytes()  # the last document is the longest
            answers += asked(run, state, document)
            advance(document.room)
            end = state.position
            for layer, seen in varied_layers(run.model, len(document.ids), (end - 1, end)).items():
                varied[layer] = seen or varied.get(layer, False)
        margins = [answer.margin for answer in answers]
        return {
            "questions": len(answers),
            "told_apart": share(answers, told_apart),
            "written": share(answers, written),
            "guesses": guesses(answers),
            "smallest_margin": min(margins),
            "mean_margin": fmean(margins),
            "cache_bytes": held,
            "varied_layers": list(varied),
            "exact_layers": [layer for layer, seen in varied.items() if not seen],
            "tokens_per_s": sum(len(document.ids) for document in self.documents) / seconds,
            "answers": [answer._asdict() for answer in answers],
        }

    def facts(self) -> dict[str, Any]:
        """What was read."""
        text = None if self.args.text is None else self.args.text.name
        made = "documents of the demo language" if self.demo else "English sentences"
        return {
            "text": text or made,
            "lengths": list(self.args.lengths),
            "documents": self.args.documents,
            "needles": self.args.needles,
            "seed": self.args.seed,
        }

    def headline(self, runs: Sequence[dict[str, Any]]) -> str:
        """What was asked, in a sentence."""
        lengths = ", ".join(map(str, self.args.lengths))
        found = f"{100 * runs[0][self._right]:.1f} % by {runs[0]['name']}"
        many = f"{len(self.documents)} document{'s' if len(self.documents) > 1 else ''}"
        return f"{runs[0]['questions']} codes told in {many} of {lengths} tokens: {found}"

    def table(self, runs: Sequence[dict[str, Any]]) -> Table:
        """A row for each run: right answers in all and by length, margins, bytes."""
        rows: list[list[str | float | None]] = []
        for one in runs:
            answers = [Answer(**answer) for answer in one["answers"]]
            by_length = [[answer for answer in answers if answer.length == length] for length in self.args.lengths]
            rows.append([
                one["name"], f"{100 * one['told_apart']:.1f} %", f"{100 * one['written']:.1f} %",
                *(f"{100 * share(group, self.right):.1f} %" for group in by_length),
                f"{one['smallest_margin']:.3g}", f"{one['mean_margin']:.3g}",
                size(sum(one["cache_bytes"].values())), f"{one['tokens_per_s']:.0f}",
            ])  # fmt: skip
        lengths = tuple(f"at {length}" for length in self.args.lengths)
        columns = ("run", "told apart", "written", *lengths, "smallest margin", "mean margin", "caches", "tokens/s")
        return Table("Runs", columns, rows)

    def notes(self, runs: Sequence[dict[str, Any]]) -> list[str]:
        """Whether the first run, which all others are read against, does what is asked at all."""
        first = runs[0]
        if first["told_apart"] > first["guesses"]:
            return []
        found = f"tells apart {100 * first['told_apart']:.1f} %, no more than guesses ({100 * first['guesses']:.1f} %)"
        return [f"{first['name']}: VACUOUS, {found}: the model cannot do this task, and no run can lose anything by it"]

    def pictures(self, runs: Sequence[dict[str, Any]]) -> list[Part]:
        """Right answers by depth and length, for each run."""
        return [depth_map(one["name"], [Answer(**answer) for answer in one["answers"]], self.right) for one in runs]
