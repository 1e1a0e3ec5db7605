"""What a model and a state really hold: the bytes behind their tensors, found by walking the objects themselves.

The counterpart of the memory plan, which never sees a tensor; nothing here asks the plan, the census or the sharding.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from torch import Tensor

from fathom.model.state import State
from fathom.model.transformer import Transformer
from fathom.runtime.plan.weights import WeightKind

# Attributes of the model's objects -> kind; the first of these that a path has.
_KINDS: Final = {
    "attention_norm": WeightKind.NORMS,
    "experts_norm": WeightKind.NORMS,
    "q_norm": WeightKind.NORMS,
    "kv_norm": WeightKind.NORMS,
    "norm": WeightKind.NORMS,
    "indexer": WeightKind.INDEXER,
    "compressor": WeightKind.COMPRESSORS,
    "freqs": WeightKind.ROTARY,
    "attention_streams": WeightKind.MHC,
    "experts_streams": WeightKind.MHC,
    "hyper_head": WeightKind.MHC,
    "gate": WeightKind.GATES,
    "shared": WeightKind.SHARED,
    "experts": WeightKind.ROUTED,
    "attention": WeightKind.ATTENTION,
    "embedding": WeightKind.EMBEDDING,
    "head": WeightKind.EMBEDDING,
}


def held_weights(model: Transformer) -> dict[WeightKind, tuple[int, int]]:
    """Bytes of weights that a model holds: of mapped files, and of its own memory; by kind.

    A tensor that torch was given a buffer for, as it is for a mapped file, is counted by what the model sees of it; any
    other by all of its storage, and a storage that two tensors share once.
    """
    mapped: Counter[WeightKind] = Counter()
    own: Counter[WeightKind] = Counter()
    for path, tensor in _once(model):
        kind = _kind(path)
        if tensor.untyped_storage().resizable():
            own[kind] += tensor.untyped_storage().nbytes()
        elif "matrices" not in path:  # a stack of experts in a file is a view of what each of them is
            mapped[kind] += tensor.nbytes
    return {kind: (mapped[kind], own[kind]) for kind in _KINDS.values()}


def held_caches(state: State) -> int:
    """Bytes of the storages behind a state's tensors."""
    return sum(tensor.untyped_storage().nbytes() for _, tensor in _once(state))


def _kind(path: tuple[str, ...]) -> WeightKind:
    return next(kind for name, kind in _KINDS.items() if name in path)


def _once(root: Any) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Each tensor that can be reached, with the attributes that lead there; one that is reached twice comes once."""
    seen: set[tuple[int, int]] = set()
    for path, tensor in _tensors((), root, set()):
        storage = tensor.untyped_storage()
        place = (tensor.data_ptr(), tensor.nbytes) if not storage.resizable() else (storage.data_ptr(), 0)
        if tensor.nbytes == 0 or place not in seen:
            seen.add(place)
            yield path, tensor


def _tensors(path: tuple[str, ...], at: Any, visited: set[int]) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    if isinstance(at, Tensor):
        yield path, at
        return
    if id(at) in visited:
        return
    visited.add(id(at))
    for name, value in _inside(at):
        if name == "readers":  # of one input, each of which is an attribute of its own part too
            continue
        yield from _tensors((*path, str(name)), value, visited)


def _inside(at: Any) -> Iterable[tuple[Any, Any]]:
    """What a container or an object of the model's own classes holds, by name or place."""
    if isinstance(at, Mapping):
        return at.items()
    if isinstance(at, list | tuple):
        return enumerate(at)
    if type(at).__module__.startswith("fathom.model.") and hasattr(at, "__dict__"):
        attributes: dict[str, Any] = vars(at)
        return attributes.items()
    return ()
