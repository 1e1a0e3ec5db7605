"""Saving a sequence's state to safetensors and loading it back, bound to the model it came from.

The file holds, layer by layer, what `model.cache` says must survive, and as metadata: the fingerprints of config and
weights, numerics, dtype, cache formats and variants, position, the length of the prompt where a cache depends on it,
the chosen token that is still to be run, of a conversation its turns, and a checksum of all of it. A file that does not
match in every point is refused. Capacity and chunk are not part of it: a larger state may take it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fathom.model.architectures import Config
from fathom.model.cache.components import Part
from fathom.model.choices import ENTRY_FORMATS, KEY_FORMATS, NUMERICS
from fathom.model.errors import ConfigError, StateError, quoted, shown
from fathom.model.files import regular_file_size
from fathom.model.llama.config import LlamaConfig
from fathom.model.rounding import Rounding
from fathom.model.state import State
from fathom.runtime.arithmetic import DTYPES
from fathom.runtime.digest import digest
from fathom.runtime.load import AnyLoaded
from fathom.runtime.options import RunOptions
from fathom.runtime.tensorfile import write_safetensors

FORMAT = "fathom-state-5"  # 2: cache formats; 3: variants; 4: the prompt's length; 5: frontiers by position


BASIS: Final = "basis="  # setting of a variant, told as a digest

Forms = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # shape and dtype of each tensor, by name


class FileTensors(Mapping[str, Tensor]):
    """The tensors of an open file, each read when it is asked for, and every time."""

    def __init__(self, path: Path, file: Any) -> None:
        self.path, self.file = path, file
        self.names = frozenset(file.keys())
        self.forms: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}  # of those that were read once

    def __getitem__(self, name: str) -> Tensor:
        """Read one tensor."""
        if name not in self.names:
            raise KeyError(name)
        try:
            found: Tensor = self.file.get_tensor(name)
        except SafetensorError as error:
            raise StateError(f"{self.path}: cannot be read ({str(error).splitlines()[0]})") from error
        self.forms[name] = (tuple(found.shape), found.dtype)
        return found

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self.names)

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self.names)


class Saved(NamedTuple):
    """What a state file says of itself, checked against the run that wants it."""

    position: int  # tokens it holds
    prompt: int | None  # of them and those to come, how many are the prompt's; None: no cache depends on that
    pending: int | None  # a chosen token that is still to be run
    sha256: str
    metadata: dict[str, str]  # all but the checksum


class Snapshot(NamedTuple):
    """What a state held at a position, copied into the host's memory."""

    position: int
    tensors: dict[str, Tensor]

    def restore(self, state: State) -> None:
        """Fill `state`, which is empty and made as the copied one was."""
        _restore(state, self.position, self.tensors)


def snapshot(state: State) -> Snapshot:
    """Copy what `state` holds. All ranks of a run must ask, and each gets all heads, as in a file."""
    copied = {
        f"layers.{layer}.{name}": part.to("cpu", copy=True)
        for layer, cache in enumerate(state.layers)
        for name, part in cache.saved(state.position)
    }
    return Snapshot(state.position, copied)


def save_state(
    path: Path, state: State, loaded: AnyLoaded, pending: int | None, conversation: str | None = None
) -> None:
    """Write `state` to `path`; an existing file is replaced only once the new one is complete.

    OSError naming it when it cannot be written. All ranks of a run must call it, and the first writes: caches may be
    split among them, and are then whole, one tensor at a time and in the first rank's memory all of them.
    `conversation` is what `runtime.conversation` writes of the turns.
    """
    metadata = _made_by(loaded) | {
        "position": str(state.position),
        "prompt": "" if state.prompt is None else str(state.prompt),
        "pending": "" if pending is None else str(pending),
    }
    if conversation is not None:
        metadata["conversation"] = conversation
    writes = loaded.model.arithmetic.ranks.rank == 0
    tensors = _tensors(state, keep=writes)
    if writes:
        write_file(path, tensors, metadata)


def write_file(path: Path, tensors: dict[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors and what is said of them, with a checksum of both; as `save_state`."""
    write_safetensors(path, tensors, {**metadata, "sha256": digest(tensors, dict(metadata))})


def read_saved(path: Path, loaded: AnyLoaded, tag: str = FORMAT) -> Saved:
    """Read what a state file says of itself, without its content; `tag` is the format that it must have.

    StateError, with one line naming the file, when it is no state file, or was made by another model, other weights,
    numerics, dtype or cache formats.
    """
    metadata = read_metadata(path)
    config = loaded.model.config
    for key, expected in (_made_by(loaded) | {"format": tag}).items():
        if metadata.get(key) != expected:
            llama = key == "weights" and isinstance(config, LlamaConfig)
            more = "; adapters count as weights, see --coda-adapters" if llama else ""
            raise StateError(f"{path}: saved with {key} {shown(metadata.get(key))}, this run has {expected!r}{more}")
    position = _number(path, metadata, "position", config.max_position_embeddings)
    prompt = _number(path, metadata, "prompt", config.max_position_embeddings) if metadata.get("prompt") else None
    if (prompt is not None) != loaded.model.arithmetic.formats.prompted:
        raise StateError(f"{path}: tells {'no' if prompt is None else 'a'} prompt, against what its kv says")
    pending = _number(path, metadata, "pending", config.vocab_size - 1) if metadata.get("pending") else None
    return Saved(position, prompt, pending, metadata.pop("sha256", ""), metadata)


def saved_position(path: Path) -> int:
    """How many tokens a state file says it holds, before there is a model to hold the rest of it against.

    StateError when it is no state file.
    """
    return _number(path, read_metadata(path), "position", (1 << 63) - 1)


def saved_options(
    path: Path, config: Config, device: str, chunk: int, adapters: str | None, basis: Path | None = None
) -> RunOptions:
    """Return the options of the run that a state file says it was made by, for a run that is to continue it.

    Parameters
    ----------
    path
        Of the state, exact or coded.
    config
        Of the model that continues; StateError for a state of another one, or one that names no options.
    device, chunk, adapters, basis
        What the file does not hold. Of a basis it holds what tells it from others; StateError when the state was made
        with one and none is named, or the other way round.

    """
    metadata = read_metadata(path)
    if (found := metadata.get("config")) != config.fingerprint:
        raise StateError(f"{path}: saved with config {shown(found)}, this run has {config.fingerprint!r}")
    dtypes = {str(dtype): name for name, dtype in DTYPES.items()}
    known = {"dtype": dtypes, "entry_format": ENTRY_FORMATS, "key_format": KEY_FORMATS}
    for key, values in known.items():
        if metadata.get(key) not in values:
            raise StateError(f"{path}: {key} is {shown(metadata.get(key))}, want {' or '.join(values)}")
    dtype, entries, keys = (metadata[key] for key in known)
    try:
        numerics = Rounding.of(metadata.get("numerics", "")).numerics
    except ConfigError:
        told, want = shown(metadata.get("numerics")), " or ".join(NUMERICS)
        raise StateError(f"{path}: numerics is {told}, want {want}, or a rounding") from None
    rules = _rules(path, metadata.get("kv", "").split(" "), basis)
    return RunOptions(numerics, dtypes[dtype], device, chunk, entries, keys, kv=rules, coda_adapters=adapters)


def _rules(path: Path, kv: Sequence[str], basis: Path | None) -> tuple[str, ...]:
    """Rules of `--kv` for layers that are told to have these variants; no file is read because a state names it."""
    layers: dict[str, list[str]] = {}  # by variant, since each rule reads its basis
    based = False
    for layer, variant in enumerate(kv):
        name, colon, settings = variant.partition(":")
        told = settings.split(",")
        kept = [part for part in told if not part.startswith(BASIS)]
        if len(kept) < len(told):
            based = True
            kept = [*kept, f"{BASIS}{basis}"]
        if variant != "full":
            layers.setdefault(f"{name}{colon}{','.join(kept)}", []).append(str(layer))
    if based and basis is None:
        raise StateError(f"{path}: made with a basis: name it with --basis")
    if basis is not None and not based:
        raise StateError(f"{path}: made without a basis, --basis is {basis}")
    return tuple(f"{','.join(numbers)}={variant}" for variant, numbers in layers.items())


def load_state(path: Path, state: State, loaded: AnyLoaded) -> int | None:
    """Fill the empty `state` from `path` and return the pending token, if any.

    StateError as `read_saved`, and when the content is damaged or does not fit the state's context. The file is mapped
    and taken over tensor by tensor: nothing else grows with the number of layers.
    """
    saved = read_saved(path, loaded)
    check_room(path, saved, state)
    with checked_file(path) as (tensors, _):
        check_forms(path, tensors.forms, forms(state, saved.position))
        fill(path, state, saved, tensors)
    return saved.pending


def read_metadata(path: Path) -> dict[str, str]:
    """What a file says of itself, unchecked; StateError when it is no safetensors file."""
    with _opened(path) as file:
        return dict(file.metadata() or {})


def read_file(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read what `write_file` wrote, all of it; StateError when it is not that any more."""
    with checked_file(path) as (tensors, metadata):
        return dict(tensors), metadata


@contextmanager
def checked_file(path: Path) -> Iterator[tuple[FileTensors, dict[str, str]]]:
    """Open what `write_file` wrote, to be read tensor by tensor; StateError when it is not that any more."""
    with _opened(path) as file:
        metadata, tensors = dict(file.metadata() or {}), FileTensors(path, file)
        if metadata.pop("sha256", "") != digest(tensors, metadata):
            raise StateError(f"{path}: the content does not match its checksum")
        yield tensors, metadata


def check_context(path: Path, saved: Saved, max_context: int) -> None:
    """Refuse a state file that holds more than a state of so many positions: StateError."""
    if saved.position > max_context:
        raise StateError(f"{path}: holds {saved.position} tokens, --max-context is {max_context}")


def check_room(path: Path, saved: Saved, state: State) -> None:
    """Refuse a state file that the empty `state` has no room for, or that is of another prompt: StateError."""
    check_context(path, saved, state.max_context)
    if saved.prompt != state.prompt:
        raise StateError(f"{path}: of a prompt of {saved.prompt} tokens, this state is made for {state.prompt}")


def fill(path: Path, state: State, saved: Saved, tensors: Mapping[str, Tensor]) -> None:
    """Fill the empty `state` with tensors whose forms were checked; StateError for content that cannot be."""
    try:
        _restore(state, saved.position, tensors)
    except StateError as error:
        raise StateError(f"{path}: {error}") from None


def _restore(state: State, position: int, tensors: Mapping[str, Tensor]) -> None:
    for layer, cache in enumerate(state.layers):
        try:
            cache.restore(position, Part(tensors, f"layers.{layer}."))
        except StateError as error:
            raise StateError(f"layer {layer}: {error}") from None
    state.restored(position)


def copy_state(source: State, target: State) -> None:
    """Fill the empty `target`, of the same model and as many positions or more, with what `source` holds."""
    for cache, other in zip(source.layers, target.layers, strict=True):
        other.restore(source.position, cache.tensors(source.position))
    target.restored(source.position)


def forms(state: State, position: int) -> Forms:
    """Shape and dtype of every tensor that `state` saves at `position`; it must be empty."""
    return {
        f"layers.{layer}.{name}": (shape, dtypes[name])
        for layer, cache in enumerate(state.layers)
        for dtypes in (cache.dtypes(),)
        for name, shape in cache.shapes(position).items()
    }


def check_forms(path: Path, found: Forms, wanted: Forms) -> None:
    """Refuse a file with other tensors than `wanted`: a checksum can be made up, so it is not relied upon."""
    if found.keys() != wanted.keys():
        other = quoted(min(found.keys() ^ wanted.keys()))
        raise StateError(f"{path}: holds other tensors than this model's state, {other}")
    for name, form in found.items():
        if form != wanted[name]:
            (shape, dtype), (right, kind) = form, wanted[name]
            raise StateError(f"{path}: {quoted(name)} is {list(shape)} {dtype}, want {list(right)} {kind}")


def _tensors(state: State, *, keep: bool) -> dict[str, Tensor]:
    """Return what the file holds, where heads were put together in the host's memory; nothing where it is not kept."""
    return {
        f"layers.{layer}.{name}": part.contiguous().cpu()
        for layer, cache in enumerate(state.layers)
        for name, part in cache.saved(state.position)
        if keep
    }


def _made_by(loaded: AnyLoaded) -> dict[str, str]:
    arithmetic = loaded.model.arithmetic
    return {
        "format": FORMAT,
        "config": loaded.model.config.fingerprint,
        "weights": loaded.weights_fingerprint,
        "numerics": arithmetic.numerics,
        "dtype": str(arithmetic.dtype),
        "entry_format": arithmetic.formats.entries,
        "key_format": arithmetic.formats.keys,
        "kv": " ".join(map(str, arithmetic.formats.variants)),
    }


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    regular_file_size(path, StateError)
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise StateError(f"{path}: no readable state file ({str(error).splitlines()[0]})") from error


def _number(path: Path, metadata: dict[str, str], key: str, largest: int) -> int:
    text = metadata.get(key, "")
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= largest):
        raise StateError(f"{path}: {key} is {text[:40]!a}, want a number up to {largest}")
    return int(text)
