"""`Subject`: the runtime under test, and what it is given to read."""

import itertools
import pickle
import random
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fathom.kernels.ops import CPU, REFERENCE, Ops
from fathom.model.architectures import config_from_file
from fathom.model.checkpoint import strict_json
from fathom.model.checkpoint.census import census
from fathom.model.checkpoint.checkpoint import Checkpoint
from fathom.model.checkpoint.folder import TOKENIZER
from fathom.model.checkpoint.weights import Weights, open_weights
from fathom.model.config import LayerKind, ModelConfig
from fathom.model.errors import ConfigError
from fathom.model.ranks.ranks import ALONE, Group
from fathom.model.state import State
from fathom.model.transformer import Transformer
from fathom.probes.demo_language.prompts import needle_prompts
from fathom.probes.demo_language.vocabulary import vocabulary_size
from fathom.probes.fault import PARTS, Fault, Parts
from fathom.probes.faults import FAULTS
from fathom.runtime.group.processes import watched_load_any
from fathom.runtime.group.watchdog import Watch
from fathom.runtime.load import AnyLoaded, LoadedV4
from fathom.runtime.options import DEMO, RunOptions
from fathom.runtime.text.encoding import raw_ids
from fathom.runtime.text.tokenizer import Tokenizer

OPS = {ops.name: ops for ops in (CPU, REFERENCE)}  # that another process finds by name


@dataclass(frozen=True)
class Subject:
    """A checkpoint, how it is run, and the fault that is injected, if any.

    Every model that a probe asks for comes from `load` here, so that a fault is in all of them: a probe compares the
    run with an oracle of its own (fp32 formulas, numpy, the file's bytes), never with a healthy copy of the run.
    """

    directory: Path = DEMO
    options: RunOptions = field(default_factory=RunOptions)
    ops: Ops = CPU
    fault: Fault | None = None
    seed: int = 0
    prompt: str | None = None  # text to run; None: see `tokens`
    group: Group = ALONE  # the ranks that run it: each of them runs the same probes, in the same order
    watch: Watch | None = field(default=None, compare=False, repr=False)  # over these ranks
    # not taken over by `dataclasses.replace`: the models of one fault are not those of another
    _loaded: dict[tuple[RunOptions, Ops], AnyLoaded] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    # what several probes make of one run, by what made it: made once
    shared: dict[object, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __reduce__(self) -> tuple[object, ...]:
        """In another process: the same, alone, nothing loaded yet; op set and fault are found there by their names.

        Raises
        ------
        pickle.PicklingError
            They have none, see `cannot_travel`.

        """
        if (why := cannot_travel(self)) is not None:
            raise pickle.PicklingError(why)
        fault = None if self.fault is None else self.fault.name
        return _arrived, (self.directory.resolve(), self.options, self.ops.name, fault, self.seed, self.prompt)

    def load(self, options: RunOptions | None = None, ops: Ops | None = None) -> LoadedV4:
        """Return a V4 checkpoint loaded as by `load_any`; ConfigError for one of the other family."""
        loaded = self.load_any(options, ops)
        if not isinstance(loaded.model, Transformer):
            raise ConfigError(f"{self.directory}: a {loaded.model.config.model_type} model, want DeepSeek-V4")
        return loaded

    def load_any(self, options: RunOptions | None = None, ops: Ops | None = None) -> AnyLoaded:
        """Return the checkpoint loaded with these options and ops (the run's where None), the fault in place.

        A model is loaded once for each pair and handed out again; probes leave models as they found them. A fault in
        an op is a fault of the run's op set: an oracle's op set that is asked for by name stays healthy.
        """
        options, chosen = options or self.options, ops or self.ops
        if (options, chosen) not in self._loaded:
            faulty = chosen if self.fault is None or chosen.name != self.ops.name else self.fault.ops(chosen)
            loaded = watched_load_any(self.watch, self.directory, options, faulty, self.group)
            if self.fault is not None:
                assert isinstance(loaded.model, Transformer), "faults are of V4"
                self.fault.inject(loaded.model)
                if loaded.head is not None:
                    self.fault.head(loaded.head)
            self._loaded[options, chosen] = loaded
        return self._loaded[options, chosen]

    def with_options(self, **changes: object) -> RunOptions:
        """The run's options with some fields changed, for `load`.

        Another numerics or dtype takes caches of its dtype: not every one can be stored in a narrow form.
        """
        if {"numerics", "dtype"} & changes.keys():
            changes = {"entry_format": "dtype", "key_format": "dtype"} | changes
        return replace(self.options, **changes)  # type: ignore[arg-type]

    @cached_property
    def model(self) -> Transformer:
        """The model of the run itself."""
        return self.load().model

    @cached_property
    def config(self) -> ModelConfig:
        """The checkpoint's config.json."""
        return ModelConfig.from_file(self.directory / "config.json")

    @property
    def parts(self) -> Parts:
        """The parts of the cache variants beside a model, the fault in place."""
        return PARTS if self.fault is None else self.fault.parts(PARTS)

    @property
    def file_weights(self) -> Weights:
        """The parameters as the files hold them, whatever became of those that a model holds: an oracle's."""
        checkpoint = Checkpoint.open(self.directory)
        return open_weights(checkpoint, census(checkpoint.shapes(), self.config), only=())

    @cached_property
    def speaks_demo_language(self) -> bool:
        """Whether the demo's documents, with their known answers, mean anything to this checkpoint."""
        return speaks_demo_language(self.directory)

    @property
    def reads(self) -> str:
        """What `tokens` returns, in words, for the page's front matter."""
        if self.prompt is not None:
            return "the text given with --prompt-file, repeated"
        return "documents of the demo language" if self.speaks_demo_language else "random token ids"

    def tokens(self, count: int) -> list[int]:
        """`count` token ids to run, BOS first as of any text, the same in every call and every process.

        The given text, repeated as needed; else a needle document of the demo language where the checkpoint speaks it;
        else ids drawn at random from the whole vocabulary, but for that of V4.1's images.
        """
        if self.prompt is not None:
            given = raw_ids(self.prompt, self.config, Tokenizer(self.directory, self.config.vocab_size))
            if not given.text:
                raise ConfigError("--prompt-file: the text is empty")
            return [*given.before, *(given.text * (count // len(given.text) + 1))][:count]
        if self.speaks_demo_language:
            length = max(64, count + count // 8 + 32)  # documents come out a little shorter than asked for
            ids = list(needle_prompts(length, 1, seed=self.seed)[0].ids)
            assert len(ids) >= count, f"a document of {len(ids)} tokens, want {count}"
            return ids[:count]
        drawn = random.Random(f"tokens {self.seed}")  # noqa: S311 -- a prompt, not a secret
        every = (drawn.randrange(self.config.vocab_size) for _ in itertools.count())
        texts = (id_ for id_ in every if id_ not in self.config.of_images)
        return [self.config.bos_token_id, *itertools.islice(texts, count - 1)]


def _arrived(
    directory: Path, options: RunOptions, ops: str, fault: str | None, seed: int, prompt: str | None
) -> Subject:
    return Subject(directory, options, OPS[ops], None if fault is None else FAULTS[fault], seed, prompt)


def cannot_travel(subject: Subject) -> str | None:
    """Why another process cannot run this subject; None when it can."""
    if OPS.get(subject.ops.name) != subject.ops:
        return f"the op set {subject.ops.name} has no name that another process knows"
    if subject.fault is not None and FAULTS.get(subject.fault.name) != subject.fault:
        return f"the fault {subject.fault.name} has no name that another process knows"
    return None


def speaks_demo_language(directory: Path) -> bool:
    """Whether a checkpoint reads the demo's language, by its tokenizer and the size of its vocabulary.

    What tokenizer.json puts before a text may be another: BOS, as `scripts.train_llama` writes it.
    """
    tokenizer, demo = (folder / TOKENIZER for folder in (directory, DEMO))
    if not tokenizer.is_file() or tokenizer.stat().st_size > 2 * demo.stat().st_size:  # it may be any file
        return False
    same = _without_template(tokenizer) == _without_template(demo)
    return same and config_from_file(directory / "config.json").vocab_size == vocabulary_size()


def _without_template(path: Path) -> Any:
    """A tokenizer.json but for its post_processor; None for a damaged one, which is told where it is needed."""
    try:
        fields = strict_json.parse(path.read_bytes())
    except ValueError:
        return None
    return {**fields, "post_processor": None} if isinstance(fields, dict) else None


def selects_all(config: ModelConfig) -> int:
    """Tokens up to which the indexer of some CSA layer selects every entry; 0 without such a layer.

    In a run of twice as many, attention in tiles reads selected entries in both of its ways: it gathers them from one
    and a half times as many on.
    """
    kinds = zip(config.layer_kinds, config.compress_ratios, strict=True)
    return max((config.index_topk * ratio for kind, ratio in kinds if kind is LayerKind.CSA), default=0)


def another(token: int, config: ModelConfig, by: int = 1) -> int:
    """Another id of a text, so many further."""
    following = (token + by) % config.vocab_size
    return another(following, config) if following in config.of_images else following


def all_open(config: ModelConfig) -> int:
    """Tokens up to which V4.1's candidates hold all entries, so that they restrict no selection; 0 without any."""
    if config.v41 is None:
        return 0
    restricted = [n for n in range(config.num_hidden_layers) if restricts(config, n)]
    entries = config.v41.candidate_blocks * config.v41.candidate_block_size
    return max((entries * config.ratio(layer) for layer in restricted), default=0)


def restricts(config: ModelConfig, layer: int) -> bool:
    """Whether a layer of V4.1 selects among candidates."""
    return config.v41 is not None and layer > config.v41.candidate_source and config.selects(layer)


def run_tokens(model: Transformer, tokens: list[int], chunk: int, state: State | None = None) -> tuple[Tensor, State]:
    """Run `tokens` in calls of `chunk`; returns the hidden rows [t, hidden] of all of them, and the state.

    Without `state`, in a new one that holds exactly these tokens.
    """
    if state is None:
        state = model.new_state(len(tokens), chunk)
    ids = torch.tensor(tokens, dtype=torch.int64, device=model.device)
    return torch.cat([model(part, state) for part in ids.split(chunk)]), state
