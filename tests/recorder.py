"""What a CUDA graph does, without CUDA: the launches of one call, recorded with their tensors, and run again.

`Recorder` sees every call of an ATen op, every launch of a Triton kernel and every exchange between ranks, and refuses
what a capture refuses: values read on the host, and tensors made of values of the host. A replay runs the same calls on
the same tensors with the same Python numbers, in order; what a call returned then is overwritten with what it returns
now. Memory that was allocated without a value holds NaN or -1 each time.
"""

import contextlib
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime import interpreter

from fathom.model.ranks import ranks as between

# by the op's name without its overload; `index` and the like by their arguments
READS = {"_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "equal", "allclose", "bincount"}
READS |= {"unique_dim", "_unique", "_unique2", "repeat_interleave", "argwhere"}
FROM_HOST = {"lift_fresh", "lift_fresh_copy", "lift"}
UNFILLED = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"}


class HostRead(AssertionError):
    """A call that waits for the device, or brings it something from the host."""


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def poison(x: Tensor) -> None:
    x.fill_(float("nan") if x.is_floating_point() else -1)


class Recorder(TorchDispatchMode):
    def __init__(self, *, counts_alone=False):
        """`counts_alone`: no kernel runs, and memory that they would fill holds zeros."""
        super().__init__()
        self.counts_alone = counts_alone
        self.calls = []  # ATen: func, args, kwargs, outputs that are no views of inputs
        self.names = Counter()  # of ATen ops that do work on the device
        self.kernels = Counter()
        self.exchanges = Counter()
        self.busy = False  # inside of Triton's interpreter, whose calls are no part of the record

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # nothing here is compiled, and to say so torch would import its compiler, for 3 s

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.busy:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        self.refuse(name, args)
        out = func(*args, **kwargs)
        known = {x.untyped_storage().data_ptr() for x in tensors((args, kwargs)) if x.numel()}
        fresh = [x for x in tensors(out) if x.numel() and x.untyped_storage().data_ptr() not in known]
        if self.counts_alone and name in UNFILLED:
            for x in fresh:
                x.zero_()
        works = bool(fresh) or func._schema.is_mutable
        if works and name not in UNFILLED:
            self.names[name] += 1
        if works:
            self.calls.append((name, func, args, kwargs, out, fresh))
        return out

    @staticmethod
    def refuse(name, args):
        if name in READS or name in FROM_HOST:
            raise HostRead(f"aten.{name}")
        if name.startswith(("index", "_index")) and any(
            x.dtype in {torch.bool, torch.uint8} for x in tensors(args[1:2])
        ):
            raise HostRead(f"aten.{name} by a mask")

    def launch(self, kernel, args, grid, kwargs):
        self.kernels[kernel.fn.__name__] += 1
        self.calls.append(("launch", kernel, args, grid, kwargs, None))

    def exchanging(self, name, exchange):
        """The same exchange, recorded."""

        def exchanged(*args, **kwargs):
            self.exchanges[name] += 1
            self.calls.append(("exchange", exchange, args, kwargs, None, None))
            self.busy = True
            try:
                exchange(*args, **kwargs)
            finally:
                self.busy = False

        return exchanged

    @contextlib.contextmanager
    def recording(self):
        """Record what happens inside."""
        run, tolist, gather, reduce = (
            interpreter.InterpretedFunction.run,
            Tensor.tolist,
            between._gather,
            dist.all_reduce,
        )

        def noted(kernel, *args, grid, warmup, **kwargs):
            assert not callable(grid), "a grid of a function"
            self.launch(kernel, args, grid, kwargs)
            if self.counts_alone:
                return None
            self.busy = True
            try:
                return run(kernel, *args, grid=grid, warmup=warmup, **kwargs)
            finally:
                self.busy = False

        def refused(_):
            raise HostRead("tolist")

        interpreter.InterpretedFunction.run, Tensor.tolist = noted, refused
        between._gather, dist.all_reduce = self.exchanging("gather", gather), self.exchanging("reduce", reduce)
        try:
            with self:
                yield self
        finally:
            interpreter.InterpretedFunction.run, Tensor.tolist = run, tolist
            between._gather, dist.all_reduce = gather, reduce

    @torch.inference_mode()
    def replay(self):
        for name, what, *rest in self.calls:
            if name == "launch":
                args, grid, kwargs, _ = rest
                what.run(*args, grid=grid, warmup=False, **kwargs)
                continue
            args, kwargs, out, fresh = rest
            if name == "exchange":
                what(*args, **kwargs)
                continue
            if name in UNFILLED:
                for x in fresh:
                    poison(x)
                continue
            again = what(*args, **kwargs)
            old = {id(x) for x in fresh}
            for recorded, new in zip(tensors(out), tensors(again), strict=True):
                if id(recorded) in old:
                    recorded.copy_(new)
