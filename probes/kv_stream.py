"""Experiment `kv-stream`: what Shard's codes of decoded tokens change in a text, and nothing else.

The prompt fits into sinks and window, which are exact, so that no basis and no codebook of a prompt is in the run: what
differs from the full cache is what left the window while tokens were decoded.
"""

import json
import math
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Final, NamedTuple

import torch

from fathom.model.errors import ConfigError
from fathom.model.llama.census import NORM, parameters
from fathom.model.llama.config import LlamaConfig
from fathom.model.observe.sites import Site
from fathom.model.variants.choice import GroupedShard
from fathom.probes.demo_language.prompts import needle_prompts
from fathom.probes.evaluation import Run, Share, Window, compare, summary
from fathom.probes.finding import Finding, Part, Report, Table, Text, exactly, judged, measured, vacuous
from fathom.probes.kv_variants import FULL_CACHE, PLAIN, agreed
from fathom.probes.probe import Probe, Progress, one_rank
from fathom.probes.subject import Subject, speaks_demo_language
from fathom.runtime.generate import Generation, generate
from fathom.runtime.load import load_any
from fathom.runtime.memory import new_state
from fathom.runtime.options import RunOptions
from fathom.runtime.sampling import Sampling
from fathom.runtime.tensorfile import write_safetensors

EXACT: Final = GroupedShard().sinks + GroupedShard().window  # tokens of a prompt of which nothing is coded
STREAMS: Final = {  # settings of `--kv all=shard`, the finest first
    "8 bits": "bits=8",
    "4 bits": "bits=4",
    "4 bits with QJL": "bits=4,qjl=1",
}
RANDOM: Final = "a random Llama"
TRAINED: Final = "the small Llama of scripts.train_llama"
RANK: Final = 24  # of a prompt's keys, of which there are none to code
CONFIG: Final = {  # of the random Llama
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
    "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5, "rope_theta": 1e4, "rope_scaling": None, "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


class Stream(NamedTuple):
    """What one stream showed, beside the full cache."""

    alike: list[int]  # tokens of each text before the first that differs
    kl: float  # mean over the same tokens, given, nats
    same: float  # share of them with the same likeliest token


Streams = dict[str, Stream]  # by name, the full cache first


@dataclass(frozen=True)
class KvStream(Probe):
    """Continue short prompts greedily with each stream, and with the full cache; the fields are knobs."""

    name: ClassVar[str] = "kv-stream"
    question: ClassVar[str] = "Do Shard's codes of decoded tokens change a text?"
    reads: ClassVar[tuple[Site, ...]] = ()
    by_name: ClassVar[bool] = True
    in_variants: ClassVar[bool] = True
    options: ClassVar[RunOptions] = PLAIN
    background: ClassVar[str] = """\
Of what is decoded Shard keeps the newest tokens as they are, in a window, and of older ones a code: a length, and
Lloyd-Max codes of the row after a Hadamard rotation. With QJL one of the bits of a key's number is the sign of a random
projection of what the others leave out. Its authors report that codes of eight bits changed no token."""
    noticed: ClassVar[str] = ""

    llama: str = ""  # folder of what `scripts.train_llama` wrote
    texts: int = 12
    written: int = 150  # greedy tokens of each
    marks: tuple[int, ...] = (20, 60, 150)  # tokens of a text within which they are compared
    forced: int = 3  # texts that all streams read as the full cache wrote them

    def needs(self, subject: Subject) -> str | None:
        """Say why it cannot be measured."""
        if (subject.options.numerics, subject.options.dtype) != (PLAIN.numerics, PLAIN.dtype):
            return "what differs would not be the cache alone: it runs with --numerics plain --dtype fp32"
        return one_rank(subject, "ranks hold the caches of one rank, by heads")

    def vacuous(self, subject: Subject) -> str | None:
        """Say when nothing leaves the window."""
        del subject
        return None if self.written > 1 else "no token leaves the window"

    def measure(self, subject: Subject, progress: Progress) -> Report:
        """Measure a random Llama, and the trained one where it is given."""
        found: dict[str, Streams] = {}
        with tempfile.TemporaryDirectory() as folder:
            config = write_random(Path(folder), subject.seed)
            drawn = random.Random(f"prompts {subject.seed}")  # noqa: S311 -- prompts, not secrets
            prompts = [[drawn.randrange(config.vocab_size) for _ in range(EXACT)] for _ in range(self.texts)]
            found[RANDOM] = self._measured(Path(folder), prompts, subject.options, progress)
        if self.llama:
            if not speaks_demo_language(Path(self.llama)):
                raise ConfigError(f"llama={self.llama}: no model of the demo language")
            documents = [list(one.ids[:EXACT]) for one in needle_prompts(4 * EXACT, self.texts, subject.seed)]
            found[TRAINED] = self._measured(Path(self.llama), documents, subject.options, progress)
        return self.report(found)

    def _measured(self, folder: Path, prompts: Sequence[list[int]], options: RunOptions, progress: Progress) -> Streams:
        """Every text with every stream, the full cache first."""
        rules = {FULL_CACHE: ()} | {name: (f"all=shard:rank={RANK},{of}",) for name, of in STREAMS.items()}
        runs = [
            Run(name, load_any(folder, replace(options, kv=kv)).model, options.prefill_chunk)
            for name, kv in rules.items()
        ]
        texts: dict[str, list[list[int]]] = {}
        for at, run in enumerate(runs):
            progress(at / len(runs), run.name)
            texts[run.name] = [self._written(run, prompt) for prompt in prompts]
        windows = [
            Window([*prompt, *text], 0, len(prompt) - 1, len(text))
            for prompt, text in zip(prompts[: self.forced], texts[FULL_CACHE], strict=False)
        ]
        scores = compare(runs, windows, lambda _: None, decode=True)
        out = Streams()
        for run, score in zip(runs, scores, strict=True):
            one = summary(score, scores[0])
            kl, same = one.get("kl", 0.0), one.get("same_likeliest", 1.0)
            out[run.name] = Stream(agreed(texts[FULL_CACHE], texts[run.name]), kl, same)
        return out

    def _written(self, run: Run, ids: Sequence[int]) -> list[int]:
        """A greedy continuation, past any EOS."""
        state = new_state(run.model, len(ids) + self.written, run.chunk, len(ids))
        return list(
            generate(
                run.model,
                state,
                ids,
                eos=(),
                limit=self.written,
                sampling=Sampling(),
                progress=lambda _: None,
                record=Generation(),
            )
        )

    # --- what it means

    def report(self, found: dict[str, Streams]) -> Report:
        """The page, from what was measured of each model."""
        findings = [finding for model, streams in found.items() for finding in self._findings(model, streams)]
        parts: list[Part] = [self._table(model, streams) for model, streams in found.items()]
        told = "; ".join(
            f"{model}: {', '.join(f'{name} {self._texts(one)}' for name, one in _coded(streams))}"
            for model, streams in found.items()
        )
        return Report(
            f"Texts of {self.written} tokens that do not change when Shard codes the decoded tokens. {told}.",
            tuple(findings),
            (
                *parts,
                Text(
                    "How it was measured",
                    HOW.format(exact=EXACT, texts=self.texts, written=self.written, forced=self.forced),
                ),
            ),
            NOT_CLAIMED,
        )

    def _texts(self, one: Stream) -> Share:
        return Share.of(count == self.written for count in one.alike)

    def _tokens(self, one: Stream, mark: int) -> float:
        """Share of the first tokens of all texts that stand before the first that differs."""
        return sum(min(count, mark) for count in one.alike) / (mark * len(one.alike))

    def _findings(self, model: str, streams: Streams) -> Iterator[Finding]:
        full, fine, coarse = (streams[name] for name in (FULL_CACHE, *list(STREAMS)[:2]))
        yield judged(f"{model}: divergence of the full cache from itself, nats", full.kl, exactly(0))
        what = f"{model}: divergence with {{}} over that with {{}}".format(*list(STREAMS)[1::-1])
        if not fine.kl:
            yield vacuous(what, "the finest stream changes no distribution: nothing of it is attended to")
        else:
            yield measured(what, coarse.kl / fine.kl)
        for name, one in _coded(streams):
            texts = self._texts(one)
            what = f"{model}, {name}: texts as with the full cache"
            yield measured(what, texts.right, of=texts.total, tokens=self.written)
            for mark in self.marks:
                what = f"{model}, {name}: share of {mark} tokens before the first that differs"
                yield measured(what, self._tokens(one, mark))
            yield measured(f"{model}, {name}: divergence from the full cache, nats", one.kl)

    def _table(self, model: str, streams: Streams) -> Table:
        columns = ("stream", "texts as with the full cache", *(f"of {mark} tokens" for mark in self.marks))
        rows = [
            [
                name,
                str(self._texts(one)),
                *(f"{self._tokens(one, mark):.1%}" for mark in self.marks),
                f"{one.kl:.1e}" if one.kl else "0",
                f"{one.same:.1%}",
            ]
            for name, one in streams.items()
        ]
        return Table(f"{model[0].upper()}{model[1:]}", (*columns, "KL, nats", "same likeliest"), rows)


def _coded(streams: Streams) -> list[tuple[str, Stream]]:
    return [(name, one) for name, one in streams.items() if name != FULL_CACHE]


def write_random(folder: Path, seed: int) -> LlamaConfig:
    """Write a checkpoint of random weights, logits of unit scale; returns its config."""
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    config = LlamaConfig.from_file(folder / "config.json")
    g = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(one.shape, generator=g) * (math.sqrt(1 / one.shape[1]) if one.kind == "matrix" else 1.0)
        for name, one in parameters(config).items()
        if len(one.shape) == 2
    }
    norms = {name: torch.ones(one.shape) for name, one in parameters(config).items() if len(one.shape) == 1}
    assert NORM in norms, "norms have one axis"
    write_safetensors(folder / "model.safetensors", tensors | norms, {"format": "pt"})
    return config


HOW: Final = """\
- *Prompts*: {exact} tokens, as many as sinks and window hold, so that nothing of them is coded: {texts} of random ids
  for the random Llama, the beginnings of as many documents of the demo language for the trained one. Each is continued
  greedily for {written} tokens, past any end token, in fp32 and plain numerics.
- *texts, tokens*: how many texts are the full cache's to the last token; and of the first tokens of all texts
  the share that stands before the first that differs.
- *KL, same likeliest*: with the full cache's text given, so that all streams read the same tokens; divergence of each
  distribution from the full cache's, mean over the tokens of {forced} texts."""
NOT_CLAIMED: Final = """\
How often a large model's text changes. Random weights decide between tokens by less than trained ones do, so their
texts change the sooner; a small model of a small language decides by more than most."""

FULL = KvStream()
QUICK = KvStream(texts=2, written=40, marks=(20, 40), forced=1)
