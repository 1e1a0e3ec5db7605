"""The most bytes of tensors alive at once while a function runs, as Python sees them: not inside of ops, nor threads.

Beside `tests.peak_memory`, which counts what torch's allocator gives out: there gloo's threads let go of the tensors of
a collective sooner or later, so that on several ranks two runs of the same code differ.
"""

import weakref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

F32 = 4


class _Alive(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.sizes, self.total, self.peak = {}, 0, 0

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # nothing here is compiled, and to say so torch would import its compiler, for 3 s

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {id_of(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and id_of(x) not in given and id_of(x) not in self.sizes:
                storage = x.untyped_storage()
                self.sizes[id_of(x)] = storage.nbytes()
                self.total += storage.nbytes()
                weakref.finalize(storage, self.gone, id_of(x))
        inside = 0  # torch sums bfloat16 in fp32 by way of a copy
        if func is torch.ops.aten.sum.default and args[0].dtype == torch.bfloat16:
            inside = args[0].numel() * F32
        self.peak = max(self.peak, self.total + inside)
        return out

    def gone(self, key):
        self.total -= self.sizes.pop(key)


def id_of(x):
    """The storage behind a tensor, whichever Python object stands for it."""
    return x.untyped_storage()._cdata


def live_bytes(run):
    """The most bytes alive at once, beyond those from before."""
    with _Alive() as alive:
        run()
    return alive.peak
