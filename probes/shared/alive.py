"""The most bytes of tensors alive at once while something runs, as Python sees them: not inside of ops, nor threads.

What torch's allocator gives out would differ from run to run on several ranks, where gloo's threads let go of the
tensors of a collective sooner or later.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

F32: Final = 4  # bytes


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known: set[int] = set()
        self.total: int = 0
        self.peak: int = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is compiled, and to say so torch would import its compiler, for 3 s

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        leaves = tree_leaves((args, kwargs))
        given = {_place(x) for x in leaves if isinstance(x, Tensor)}
        given |= {x.data_ptr() for x in leaves if isinstance(x, UntypedStorage)}  # of `set_`, which allocates nothing
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and not x.is_meta and x.numel() and _place(x) not in given | self.known:
                storage = x.untyped_storage()
                self.known.add(_place(x))
                self.total += storage.nbytes()
                weakref.finalize(storage, self._gone, _place(x), storage.nbytes())
        # torch sums bf16 that lies apart by way of a copy in fp32
        summed = func is torch.ops.aten.sum.default and args[0].dtype == torch.bfloat16
        inside = summed and not args[0].is_contiguous()
        self.peak = max(self.peak, self.total + (args[0].numel() * F32 if inside else 0))
        return out

    def _gone(self, place: int, size: int) -> None:
        self.known.discard(place)
        self.total -= size


def _place(x: Tensor) -> int:
    """Where the memory behind a tensor begins, whichever part of it this is."""
    place: int = x.untyped_storage().data_ptr()
    return place


def peak_alive(run: Callable[[], object]) -> int:
    """The most bytes alive at once, beyond those from before."""
    count = _Count()
    with count:
        run()
    return count.peak
