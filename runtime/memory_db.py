"""Documents that are read once and asked as often as one likes: what `scripts.memory_db` does, for programs.

::

    memory = Memory.open("llama", RunOptions("plain", kv=("all=coda",)))
    memory.ingest(text)
    memory.ask(" The code of Alice is", max_new_tokens=1).text
    memory.save("book.state")

A `Memory` is one document's state and the model that read it; `empty` gives another one of the same model. With the
bounded ``coda`` on every layer of a Llama-family model a state has one size, however long its document; any other
variant will do, V4 checkpoints too, but for `merge`. `model/variants/README.md` says more.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from fathom.model.architectures import config_from_file
from fathom.model.errors import StateError
from fathom.model.state import State
from fathom.model.variants.coda_merge import Kept
from fathom.runtime.errors import PromptError
from fathom.runtime.generate import Generation, generate, prefill
from fathom.runtime.load import AnyLoaded, load_any, read_any_config
from fathom.runtime.memory import new_state
from fathom.runtime.merge import merge, mergeable
from fathom.runtime.options import RunOptions
from fathom.runtime.quantised_state import coded_bits, load_any_state, read_any_saved
from fathom.runtime.sampling import Sampling
from fathom.runtime.statefile import copy_state, save_state, saved_options, saved_position
from fathom.runtime.text.encoding import raw_text
from fathom.runtime.text.segments import Text
from fathom.runtime.text.tokenizer import StreamDecoder, Tokenizer

GREEDY = Sampling()


class Answer(NamedTuple):
    """What a model said after a question."""

    text: str
    prompt: list[int]  # token ids that were run: one still to be run of the document's, and the question's
    tokens: list[int]  # chosen ones, the end-of-sequence token included
    ended: str  # "eos" or "limit"


class Memory:
    """What is left of a document in a model, and the model.

    Parameters
    ----------
    loaded, tokenizer, options
        The model, what its texts are cut with, and how it was loaded; `open` and `load` read them.

    """

    def __init__(self, loaded: AnyLoaded, tokenizer: Tokenizer, options: RunOptions) -> None:
        self.loaded, self.tokenizer, self.options = loaded, tokenizer, options
        self.name = "this memory"  # in messages: the file, where it came from one
        self.state: State | None = None  # None: no document yet
        self.pending: int | None = None  # a token that was chosen and is still to be run, in a state of `generate`
        self.bits: int | None = None  # of keys and values, where they were loaded from a quantised state

    @classmethod
    def open(cls, model: str | Path, options: RunOptions, *, context: int | None = None) -> Self:
        """Load a checkpoint, without a document.

        Parameters
        ----------
        model
            Its directory.
        options
            Numerics, dtype, variants, adapters, device; a Llama-family model needs ``numerics="plain"``.
        context
            Positions that are going to be needed: refused before any weight is read where the machine is too small.

        Raises
        ------
        CapacityError, CheckpointError, ConfigError
            With one line that names the culprit.

        """
        config = read_any_config(Path(model), options)
        tokenizer = Tokenizer(Path(model), config.vocab_size)
        return cls(load_any(Path(model), options, context=context), tokenizer, options)

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: str | Path,
        *,
        adapters: str | None = None,
        basis: str | Path | None = None,
        device: str = "cpu",
        chunk: int = RunOptions().prefill_chunk,
        context: int | None = None,
    ) -> Self:
        """Load a checkpoint and a state that was saved by it, exact or quantised, in this or any other process.

        Parameters
        ----------
        path
            Of the state, which is never changed. It says numerics, dtype and variants.
        model
            Directory of the checkpoint.
        adapters, basis
            Files that the state was made with, to be named again.
        device, chunk
            Where to run, and tokens per call of a document or question.
        context
            As `open`.

        Raises
        ------
        StateError
            For a damaged state, or one of another model, other weights or adapters; otherwise as `open`.

        """
        config = config_from_file(Path(model) / "config.json")
        named = None if basis is None else Path(basis)
        options = saved_options(Path(path), config, device, chunk, adapters, named)
        memory = cls.open(model, options, context=context or saved_position(Path(path)) or 1)
        memory.restore(path)
        return memory

    def restore(self, path: str | Path) -> None:
        """Take the document of a saved state in place of this one; StateError as `load`."""
        path = Path(path)
        saved, bits = read_any_saved(path, self.loaded), coded_bits(path)
        state = new_state(self.loaded.model, max(saved.position, 1), self.options.prefill_chunk, saved.prompt)
        load_any_state(path, state, self.loaded)
        self.state, self.pending, self.bits, self.name = state, saved.pending, bits, str(path)

    def empty(self) -> "Memory":
        """Return a memory of the same model, without a document."""
        return Memory(self.loaded, self.tokenizer, self.options)

    @property
    def tokens(self) -> int:
        """How many tokens were read."""
        return 0 if self.state is None else self.state.position

    def banks(self) -> list[dict[str, float | None]]:
        """What bounded caches hold and what became of the rest, layer by layer; see `State.banks`."""
        return [] if self.state is None else self.state.banks()

    def ingest(self, document: str | Sequence[int], progress: Callable[[int], None] = lambda _: None) -> int:
        """Read a document, or the next part of it: returns how many tokens it has.

        Parameters
        ----------
        document
            Text as it is, without any chat format; or its token ids, the model's first ones (BOS) included.
        progress
            Called after each call of the model with the number of tokens it held.

        Raises
        ------
        CapacityError, PromptError, StateError
            More tokens than the model has positions, or none; a state that was quantised, or whose prompt a variant
            has compressed, cannot be read on.

        """
        ids = self._ids(document, continued=self.state is not None)
        if self.state is not None:
            self._exact("read on")
            if self.state.prompt is not None:
                raise StateError(f"{self.name}: a shard layer takes a document in one go")
        ids = [*([] if self.pending is None else [self.pending]), *ids]
        state = self._room(len(ids))
        prefill(self.loaded.model, state, ids, progress)
        self.state, self.pending = state, None
        return len(ids)

    def ask(
        self,
        question: str | Sequence[int],
        *,
        max_new_tokens: int = 32,
        sampling: Sampling = GREEDY,
        tell: Callable[[str], None] = lambda _: None,
    ) -> Answer:
        """Continue the document with a question, and return what the model says then; the memory stays as it was.

        Parameters
        ----------
        question
            Text that follows the document as it is: a space or line end at its start matters. Or token ids.
        max_new_tokens
            Where to stop, if the model does not.
        sampling
            How tokens are chosen; the likeliest by default.
        tell
            Called with each piece of text as it comes.

        """
        tokens = [*([] if self.pending is None else [self.pending]), *self._ids(question, continued=True)]
        state, record, decoder = (
            self._room(len(tokens) + max_new_tokens - 1),
            Generation(),
            StreamDecoder(self.tokenizer),
        )
        stream = generate(
            self.loaded.model,
            state,
            tokens,
            eos=self.loaded.model.config.eos_token_ids,
            limit=max_new_tokens,
            sampling=sampling,
            progress=lambda _: None,
            record=record,
        )
        pieces = []
        for piece in (*(decoder.push(token) for token in stream), decoder.finish()):
            tell(piece)
            pieces.append(piece)
        return Answer("".join(pieces), tokens, record.tokens, record.ended)

    def save(self, path: str | Path) -> None:
        """Write the state; StateError where it was quantised: an exact one cannot be had back from it."""
        assert self.state is not None, "no document was read"
        self._exact("saved")
        save_state(Path(path), self.state, self.loaded, self.pending)

    def merge(self, other: "Memory") -> Kept:
        """Put another document of the same model behind this one; what does not fit is lost. `other` stays as it is.

        Returns what is in the merged state, summed over layers. StateError where either cannot be merged:
        `runtime.merge` says which can.
        """
        assert self.state is not None, "no document was read"
        assert other.state is not None, "no document was read"
        assert other.loaded is self.loaded, "two models"
        loaded = mergeable(self.loaded, self.name)
        for memory in (self, other):
            memory._exact("merged")  # noqa: SLF001 -- its own class
            if memory.pending is not None:
                raise StateError(f"{memory.name}: an answer is under way, one token is still to be run")
        most = loaded.model.config.max_position_embeddings
        state = self._room(max(0, min(other.tokens, most - self.tokens)))
        kept = merge(loaded, state, other.state)
        self.state = state
        return kept

    def _ids(self, text: str | Sequence[int], *, continued: bool) -> list[int]:
        """Return token ids of a text; PromptError where there are none."""
        if not text:
            raise PromptError("a document or question is empty")
        if not isinstance(text, str):
            return list(text)
        segments = [Text(text)] if continued else raw_text(text, self.loaded.model.config, self.tokenizer)
        return self.tokenizer.encode(segments, continued=continued)

    def _room(self, tokens: int) -> State:
        """Return a state that holds what this one does, with room for so many tokens more."""
        model, chunk = self.loaded.model, self.options.prefill_chunk
        if self.state is None:
            return new_state(model, tokens, chunk, tokens)
        state = new_state(model, self.state.position + tokens, chunk, self.state.prompt)
        copy_state(self.state, state)
        return state

    def _exact(self, done: str) -> None:
        if self.bits is not None:
            raise StateError(f"{self.name}: quantised to {self.bits} bits; such a state is asked, not {done}")
