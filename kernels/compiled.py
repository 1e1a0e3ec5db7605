"""Loops compiled for this processor by numba (LLVM), and run by the threads that torch has.

A loop is a Python function under `loop`. What calls it stands under `compiled`, with the types that it is compiled for,
all of them at once: nothing is compiled in the middle of a run. `each` deals the items of a loop to torch's own
threads, by the call of OpenMP that a C compiler makes of a parallel loop, so that there is one pool of threads, and
`torch.set_num_threads` is the one place that says how many.

No fast-math flag is set: sums have the order that is written, whatever the processor and the number of threads, NaN and
infinity pass on, and only `lanes.fma` fuses a product with a sum.

Compiled code is kept on disk, in a folder named after what it was compiled from: a change of any source makes another.
"""

import ctypes
import hashlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import llvmlite.binding
import numpy as np
import torch
from llvmlite import ir
from numba import carray, config, njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

_RAW: Final = {  # what numba has no name for, by the integers that `lanes.load` takes for it
    torch.bfloat16: torch.uint16, torch.float16: torch.int16, torch.int8: torch.uint8,
    torch.float8_e4m3fn: torch.uint8, torch.float8_e8m0fnu: torch.uint8,
}  # fmt: skip
_OPENMP: Final = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
_ALL: Final[list["Compiled"]] = []


def array(x: Tensor) -> Any:
    """Return the numbers of a contiguous tensor as a flat array; bfloat16 as uint16, narrower ones as uint8."""
    assert x.is_contiguous(), f"a tensor of strides {x.stride()}"
    raw = _RAW.get(x.dtype)
    return (x if raw is None else x.view(raw)).view(-1).numpy()


def address(x: Tensor | None) -> int:
    """Where the numbers of a contiguous tensor lie, 0 for None: for `numbers`, and quicker than `array`.

    The caller keeps the tensor.
    """
    assert x is None or x.is_contiguous(), f"a tensor of strides {x.stride()}"
    return 0 if x is None else x.data_ptr()


@intrinsic
def _pointer(typing: Any, at: Any, kind: Any) -> Any:
    """An address as a pointer to numbers of a type."""
    wanted = types.CPointer(kind.dtype)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], context.get_value_type(wanted))

    return wanted(types.int64, kind), generate


class Compiled:
    """A function that is compiled when it is called first, or before a run by `prepare`."""

    def __init__(self, function: Callable[..., Any], signatures: tuple[tuple[Any, ...], ...]) -> None:
        self.function, self.signatures = function, signatures
        self.code: Callable[..., Any] | None = None
        _ALL.append(self)

    def __call__(self, *args: Any) -> Any:
        """Run it."""
        return (self.code or self.build())(*args)

    def build(self) -> Callable[..., Any]:
        """Compile it, or read it from disk."""
        _link()
        folder, before = _folder(), config.CACHE_DIR
        config.CACHE_DIR = str(folder or "")
        try:
            made = njit(cache=folder is not None, nogil=True, error_model="numpy", boundscheck=False)(self.function)
            for signature in self.signatures:
                made.compile(signature)
        finally:
            config.CACHE_DIR = before
        made.disable_compile()
        self.code = made
        return made


def compiled(*signatures: tuple[Any, ...]) -> Callable[[Callable[..., Any]], Compiled]:
    """Compile a function for arguments of these types, those of numba."""
    return lambda function: Compiled(function, signatures)


loop: Final = njit(  # of a part; compiled with what calls it, and by nothing else
    nogil=True, error_model="numpy", boundscheck=False, no_cpython_wrapper=True, no_cfunc_wrapper=True
)


@loop
def numbers(at, kind):
    """The flat array at an `address`, of a numpy type; how long it is, is not known."""
    return carray(_pointer(at, kind), (1 << 40,))


@loop
def aligned(count):
    """A flat array of float32 zeros that begins a cache line: of vectors of 64 bytes, none then lies in two."""
    given = np.zeros(count + 16, np.float32)
    begin = (64 - given.ctypes.data % 64) // 4
    return given[begin : begin + count]


def kept() -> bool:
    """Whether all that a run may call is on disk already."""
    folder = _folder()
    return folder is not None and (folder / "complete").exists()


def prepare() -> Iterator[str]:
    """Compile everything, or read it from disk; yields the name of each function that was made ready."""
    for one in _ALL:
        if one.code is None:
            one.build()
        yield f"{one.function.__module__}.{one.function.__name__}"
    folder = _folder()
    if folder is not None:
        (folder / "complete").touch()


@cache
def _folder() -> Path | None:
    """Where compiled code is kept: beside Python's own, else in the user's cache; None where neither can be written."""
    own = Path(__file__).parent
    sources = sorted(own.glob("**/*.py"))
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
    for folder in (own / "__pycache__" / f"compiled-{digest}", Path.home() / ".cache" / "fathom" / digest):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "writable").touch()
        except OSError:
            continue
        return folder
    return None


@cache
def _link() -> None:
    """Tell LLVM where torch's own OpenMP is: of several in a process each would have threads of its own."""
    library = ctypes.CDLL(torch._C.__file__)  # noqa: SLF001 (its dependencies are searched too)
    for name in _OPENMP:
        llvmlite.binding.add_symbol(name, ctypes.cast(getattr(library, name), ctypes.c_void_p).value)


@intrinsic
def each(typing: Any, body: Any, count: Any, given: Any) -> Any:
    """``each(body, count, given)``: ``body(low, high, *given)`` on every thread, with its part of ``range(count)``."""
    generate = _dealt(typing, body, given)
    return types.void(body, types.int64, given), generate


@intrinsic
def each_if(typing: Any, many: Any, body: Any, count: Any, given: Any) -> Any:
    """`each` where there are `many` items, else on this thread alone: what is small takes less time than a thread."""
    generate = _dealt(typing, body, given)
    return types.void(types.boolean, body, types.int64, given), generate


def _dealt(typing: Any, body: Any, given: Any) -> Any:
    wanted = (types.int64, types.int64, *given.types)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        del signature
        called = body.get_call_type(typing, wanted, {})
        made = body.dispatcher.get_compile_result(called)
        context.add_linking_libs((made.library,))
        integer, number, raw = ir.IntType(64), ir.IntType(32), ir.IntType(8).as_pointer()
        held = ir.LiteralStructType([integer, values[-1].type])
        module = builder.module
        part = ir.Function(module, ir.FunctionType(ir.VoidType(), [raw]), module.get_unique_name("part"))
        part.linkage = "internal"
        part.attributes.add("noinline")  # there is one of it, for one thread and for many
        own = ir.IRBuilder(part.append_basic_block())
        total, arguments = (
            own.extract_value(own.load(own.bitcast(part.args[0], held.as_pointer())), i) for i in (0, 1)
        )

        def asked(name: str) -> Any:
            function = cgutils.get_or_insert_function(module, ir.FunctionType(number, []), name)
            return own.sext(own.call(function, []), integer)

        thread, threads = asked("omp_get_thread_num"), asked("omp_get_num_threads")
        low = own.sdiv(own.mul(total, thread), threads)
        high = own.sdiv(own.mul(total, own.add(thread, integer(1))), threads)
        unpacked = [own.extract_value(arguments, i) for i in range(len(given.types))]
        function = context.declare_function(module, made.fndesc)
        context.call_conv.call_function(own, function, called.return_type, wanted, [low, high, *unpacked])
        own.ret_void()
        slot = cgutils.alloca_once(builder, held)
        packed = builder.insert_value(ir.Constant(held, ir.Undefined), values[-2], 0)
        builder.store(builder.insert_value(packed, values[-1], 1), slot)
        shape = ir.FunctionType(ir.VoidType(), [part.type, raw, number, number])
        run = cgutils.get_or_insert_function(module, shape, "GOMP_parallel")
        data, always = builder.bitcast(slot, raw), ir.IntType(1)(1)
        with builder.if_else(builder.trunc(values[0], ir.IntType(1)) if len(values) == 4 else always) as (many, one):
            with many:
                builder.call(run, [part, data, number(0), number(0)])  # 0: as many threads as torch says
            with one:
                builder.call(part, [data])
        return context.get_dummy_value()

    return generate
