"""Saving a sequence's state to safetensors and loading it back, bound to the model it came from.

The file holds, layer by layer, what `model.cache` says must survive, and as metadata: the fingerprints of config and
weights, numerics, dtype, cache formats and variants, position, the length of the prompt where a cache depends on it,
the chosen token that is still to be run, and a checksum of all of it. A file that does not match in every point is
refused. Capacity and chunk are not part of it: a larger state may take it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from model.errors import StateError
from model.state import State
from runtime.digest import digest as _digest
from runtime.load import AnyLoaded

FORMAT = "fathom-state-4"  # 2: cache formats; 3: variants; 4: the prompt's length


class Saved(NamedTuple):
    """What a state file says of itself, checked against the run that wants it."""

    position: int  # tokens it holds
    prompt: int | None  # of them and those to come, how many are the prompt's; None: no cache depends on that
    pending: int | None  # a chosen token that is still to be run
    sha256: str
    metadata: dict[str, str]  # all but the checksum


def save_state(path: Path, state: State, loaded: AnyLoaded, pending: int | None) -> None:
    """Write `state` to `path`; an existing file is replaced only once the new one is complete.

    StateError when it cannot be written.
    """
    tensors = _tensors(state)
    metadata = _binding(loaded) | {
        "position": str(state.position),
        "prompt": "" if state.prompt is None else str(state.prompt),
        "pending": "" if pending is None else str(pending),
    }
    metadata["sha256"] = _digest(tensors, metadata)
    partial = path.with_name(path.name + ".partial")
    try:
        save_file(tensors, partial, metadata)
        partial.replace(path)
    except SafetensorError as error:
        raise StateError(f"{path}: cannot be written ({str(error).splitlines()[0]})") from error
    finally:
        partial.unlink(missing_ok=True)


def read_saved(path: Path, loaded: AnyLoaded) -> Saved:
    """Read what a state file says of itself, without its content.

    StateError, with one line naming the file, when it is no state file, or was made by another model, other weights,
    numerics, dtype or cache formats.
    """
    with _opened(path) as file:
        metadata: dict[str, str] = file.metadata() or {}
    for key, expected in _binding(loaded).items():
        if metadata.get(key) != expected:
            raise StateError(f"{path}: saved with {key} {metadata.get(key)!r}, this run has {expected!r}")
    config = loaded.model.config
    position = _number(path, metadata, "position", config.max_position_embeddings)
    prompt = _number(path, metadata, "prompt", config.max_position_embeddings) if metadata.get("prompt") else None
    pending = _number(path, metadata, "pending", config.vocab_size - 1) if metadata.get("pending") else None
    return Saved(position, prompt, pending, metadata.pop("sha256", ""), metadata)


def saved_position(path: Path) -> int:
    """How many tokens a state file says it holds, before there is a model to hold the rest of it against.

    StateError when it is no state file.
    """
    with _opened(path) as file:
        return _number(path, file.metadata() or {}, "position", (1 << 63) - 1)


def load_state(path: Path, state: State, loaded: AnyLoaded) -> int | None:
    """Fill the empty `state` from `path` and return the pending token, if any.

    StateError as `read_saved`, and when the content is damaged or does not fit the state's context.
    """
    saved = read_saved(path, loaded)
    if saved.position > state.max_context:
        raise StateError(f"{path}: holds {saved.position} tokens, --max-context is {state.max_context}")
    if saved.prompt != state.prompt:
        raise StateError(f"{path}: of a prompt of {saved.prompt} tokens, this state is made for {state.prompt}")
    with _opened(path) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    if saved.sha256 != _digest(tensors, saved.metadata):
        raise StateError(f"{path}: the content does not match its checksum")
    _check_shapes(path, tensors, state, saved.position)
    for layer, cache in enumerate(state.layers):
        prefix = f"layers.{layer}."
        cache.restore(
            saved.position,
            {name.removeprefix(prefix): part for name, part in tensors.items() if name.startswith(prefix)},
        )
    state.position = saved.position
    return saved.pending


def _check_shapes(path: Path, tensors: dict[str, Tensor], state: State, position: int) -> None:
    """Refuse a file whose tensors are not those of `position`: a checksum can be made up, so it is not relied upon."""
    dtypes = {
        f"layers.{i}.{name}": dtype for i, cache in enumerate(state.layers) for name, dtype in cache.dtypes().items()
    }
    shapes = {
        f"layers.{layer}.{name}": shape
        for layer, cache in enumerate(state.layers)
        for name, shape in cache.shapes(position).items()
    }
    if tensors.keys() != shapes.keys():
        raise StateError(f"{path}: holds other tensors than this model's state, {min(tensors.keys() ^ shapes.keys())}")
    for name, part in tensors.items():
        if (tuple(part.shape), part.dtype) != (shapes[name], dtypes[name]):
            raise StateError(f"{path}: {name} is {list(part.shape)} {part.dtype}, want {list(shapes[name])}")


def _tensors(state: State) -> dict[str, Tensor]:
    return {
        f"layers.{layer}.{name}": part.contiguous()
        for layer, cache in enumerate(state.layers)
        for name, part in cache.tensors(state.position).items()
    }


def _binding(loaded: AnyLoaded) -> dict[str, str]:
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
    with path.open("rb"):  # the library's own error for a missing file does not name it
        pass
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise StateError(f"{path}: no readable state file ({str(error).splitlines()[0]})") from error


def _number(path: Path, metadata: dict[str, str], key: str, largest: int) -> int:
    text = metadata.get(key, "")
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= largest):
        raise StateError(f"{path}: {key} is {text[:40]!r}, want a number up to {largest}")
    return int(text)
