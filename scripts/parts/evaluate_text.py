"""What `scripts.evaluate` measures on a text: perplexity, and how far runs are from a reference."""

import argparse
from collections.abc import Callable, Sequence
from math import floor, isfinite, log, log10
from typing import Any, Final

from fathom.model.architectures import Config
from fathom.model.errors import CapacityError, ConfigError
from fathom.model.files import read_text
from fathom.probes.evaluation import Run, compare, summary, windows
from fathom.probes.finding import Part, Scatter, Table, Text
from fathom.runtime.text.encoding import raw_ids
from fathom.runtime.text.tokenizer import Tokenizer
from fathom.scripts.paths import MAX_TEXT_BYTES

BEFORE: Final = 8  # tokens that are told before the one of the largest divergence
MIB: Final = 1 << 20
EXPLAINED: Final = """\
- *perplexity*: the exponential of the mean of minus the logarithm of each scored token's probability, given BOS (where
  the model has one) and what stands before it in its window. *±*: one standard error, by means over up to 32 stretches
  of the text, since neighbours are alike. *of reference*: the ratio of perplexities, whose error is that of the mean
  difference, token by token, and so much smaller.
- *bits/byte*: the same in bits, over the bytes of the scored text: it compares models of different tokenizers.
- *KL*: of the run's distribution from the reference's, at each scored token, over the whole vocabulary; mean, the value
  that 99 in 100 tokens stay below, and the largest with the place of its token in the text.
- *same likeliest*: share of scored tokens at which both find the same token likeliest.
- *caches*: what all caches hold behind the first window. *tokens/s*: of the model's calls, runs in turn, without the
  head; a machine that does other work makes it noise."""


class Likelihood:
    """A text, cut into windows that all runs read: perplexity, and divergence from the first of them."""

    title = "How likely is a text, and how far from the reference are the probabilities of its tokens?"

    def __init__(self, args: argparse.Namespace, config: Config) -> None:
        """Read the text; ConfigError or CapacityError where there are not two tokens in it, or cannot be cut so."""
        text = read_text(args.text, MAX_TEXT_BYTES, ConfigError)
        if not text:
            raise ConfigError(f"{args.text}: the text is empty")
        self.args, self.tokenizer = args, Tokenizer(args.model, config.vocab_size)
        self.before, ids = raw_ids(text, config, self.tokenizer)
        # bytes that the tokenizer puts before a text
        self.added = sum(len(self.tokenizer.token_bytes(token)) for token in ids) - len(text.encode())
        self.ids = ids[: args.tokens]
        if len(self.ids) < 2:
            raise ConfigError(f"{args.text}: a text of one token, want two or more")
        self.windows = windows(self.ids, self.before, *self._sizes(config.max_position_embeddings))
        self.room = max(len(window.ids) for window in self.windows)
        self.explained = [Text("How it was measured", EXPLAINED)]

    def _sizes(self, most: int) -> tuple[int, int]:
        """Tokens of a window, and by how many the next one begins later."""
        asked, stride, least = self.args.context, self.args.stride, len(self.before) + 2
        if asked is not None and asked > most:
            raise CapacityError(f"--context {asked}: the model has {most} positions")
        if asked is not None and asked < least:
            raise ConfigError(f"--context {asked}: want {least} tokens or more")
        context = min(asked or most, len(self.before) + len(self.ids))
        room = context - len(self.before)
        if stride is not None and stride > room:
            raise ConfigError(f"--stride {stride}: of {context} tokens run together {room} can be scored")
        return context, stride or room

    def work(self, runs: int) -> int:
        """Tokens that `measure` tells of: of all runs together, which take turns."""
        del runs
        return sum(len(window.ids) - 1 for window in self.windows)

    def measure(self, runs: Sequence[Run], advance: Callable[[int], None]) -> list[dict[str, Any]]:
        """What each run gave, as `probes.evaluation.summary`, and what only the text tells."""
        scores = compare(runs, self.windows, advance, decode=self.args.decode)
        places = [  # of the tokens that are scored, in the text
            window.first + len(window.ids) - len(self.before) - window.scored + i
            for window in self.windows
            for i in range(window.scored)
        ]
        nbytes = sum(len(self.tokenizer.token_bytes(self.ids[at])) for at in places)
        nbytes -= self.added if places[0] == 0 else 0
        found = [summary(one, scores[0]) for one in scores]
        for one in found:
            one["bits_per_byte"] = one["tokens"] * one["nats"] / log(2) / nbytes if nbytes else None
            if "kl" in one:
                at = one["kl_worst_token"] = places[one["kl_worst_token"]]
                one["kl_worst_text"] = self.tokenizer.decode(self.ids[max(0, at - BEFORE) : at + 1])
        return found

    def facts(self) -> dict[str, Any]:
        """What was read."""
        window = self.windows[0]
        return {
            "text": self.args.text.name,
            "text_tokens": len(self.ids),
            "windows": len(self.windows),
            "context": self.room,
            "stride": window.scored,
            "prompt": window.prompt,
            "decode": self.args.decode,
        }

    def headline(self, runs: Sequence[dict[str, Any]]) -> str:
        """What was read, in a sentence."""
        scored, whole = runs[0]["tokens"], len(self.ids)
        cuts = f"{len(self.windows)} windows of {self.room} tokens" if len(self.windows) > 1 else "one window"
        left = f"; {whole - scored} are read before them and not scored" if whole > scored else ""
        return f"{self.args.text.name}: {scored} of {whole} tokens scored, in {cuts}{left}"

    def table(self, runs: Sequence[dict[str, Any]]) -> Table:
        """A row for each run, the reference first."""
        ends, compared = ("caches", "tokens/s"), len(runs) > 1
        middle = ("of reference", "KL, nats", "KL, 99 %", "worst", "at token", "same likeliest") if compared else ()
        rows: list[list[str | float | None]] = []
        for one in runs:
            bits = one["bits_per_byte"]
            row = [one["name"], with_error(one["perplexity"], one["perplexity_error"]), bits and f"{bits:.4f}"]
            if "kl" in one:
                row += [
                    with_error(one["perplexity_ratio"], one["perplexity_ratio_error"]),
                    with_error(one["kl"], one["kl_error"]),
                    f"{one['kl_99']:.2g}",
                    f"{one['kl_worst']:.2g}",
                    str(one["kl_worst_token"]),
                    f"{100 * one['same_likeliest']:.2f} %",
                ]
            else:
                row += ["reference", *[None] * 5] if compared else []
            rows.append([*row, size(sum(one["cache_bytes"].values())), f"{one['tokens_per_s']:.0f}"])
        return Table("Runs", ("run", "perplexity", "bits/byte", *middle, *ends), rows)

    def notes(self, runs: Sequence[dict[str, Any]]) -> list[str]:
        """Where the token of the largest divergence is, and where nothing differs."""
        same = "every distribution is the reference's, to the bit"
        found = {
            one["name"]: one["kl_worst"] and f"worst at the end of {one['kl_worst_text'][-60:]!a}" for one in runs[1:]
        }
        return [f"{name}: {told or same}" for name, told in found.items()]

    def pictures(self, runs: Sequence[dict[str, Any]]) -> list[Part]:
        """Divergence against the bytes that buy it; nothing where no run differs."""
        full = sum(runs[0]["cache_bytes"].values())
        points = [
            (one["name"], sum(one["cache_bytes"].values()) / full, one["kl"]) for one in runs[1:] if one["kl"] > 0
        ]
        if not points:
            return []
        x, y = "bytes of the caches, as a share of the reference's", "mean KL, nats"
        return [Scatter("Divergence against bytes", x, y, {self.args.model.resolve().name: points}, log_y=True)]


def with_error(value: float, error: float | None) -> str:
    """A number as exact as its error lets it be."""
    if not error or not isfinite(error):
        return f"{value:.4g}"
    digits = 1 - floor(log10(error))
    if digits > 6:
        return f"{value:.1e} ± {error:.0e}"
    told = max(0, digits)
    return f"{round(value, digits):.{told}f} ± {round(error, digits):.{told}f}"


def size(nbytes: int) -> str:
    """Bytes for the eye."""
    return f"{nbytes / MIB:.2f} MiB" if nbytes >= MIB else f"{nbytes / 1024:.1f} KiB"
