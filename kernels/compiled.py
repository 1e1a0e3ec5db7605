"""Loops compiled for this processor by numba (LLVM), and run by the threads that torch has.

A loop is a Python function decorated with `loop`. Entry points are decorated with `compiled` and the list of their type
signatures; all of them are compiled before a run, never in the middle of it. `each` deals the items of a loop to
torch's own threads, by the call of OpenMP that a C compiler makes of a parallel loop, so that there is one pool of
threads, and `torch.set_num_threads` is the one place that says how many.

No fast-math flag is set: sums have the order that is written, whatever the number of threads, NaN and infinity pass on,
and only `lanes.fma` and `lanes.multiply` fuse a product with a sum.

Compiled code is kept on disk, in a folder for each module, named after what it was compiled from: the statements of the
module and of all that it imports of this project, see `digest`.
"""

import ast
import ctypes
import fcntl
import gc
import hashlib
import importlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from threading import RLock
from typing import Any, Final, TypeAlias

import llvmlite.binding
import numba
import numpy as np
import torch
from llvmlite import ir
from numba import carray, config, njit, types
from numba.core import caching, cgutils
from numba.extending import intrinsic
from torch import Tensor

_RAW: Final = {  # what numba has no name for, by the integers that `lanes.load` takes for it
    torch.bfloat16: torch.uint16, torch.float16: torch.int16, torch.int8: torch.uint8,
    torch.float8_e4m3fn: torch.uint8, torch.float8_e8m0fnu: torch.uint8,
}  # fmt: skip
_KEPT: Final = "compiled_array"  # the attribute of a tensor
_OPENMP: Final = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
_OPTIONS: Final = {"nogil": True, "error_model": "numpy", "boundscheck": False, "no_cfunc_wrapper": True}  # of numba
ALONE: Final = 1 << 15  # numbers that one thread reads in the time in which others wake
DAMAGED: Final = (EOFError, pickle.UnpicklingError)  # a file of numba's that was cut off
PROJECT: Final = Path(__file__).parents[1]  # the folder of the package `fathom`
SELF: Final = Path(__file__).read_bytes()  # what finds statements and imports
BEGAN: Final = time.time()
PROCESSES: Final = 8  # at most, that compile
Reader: TypeAlias = Callable[[int, int], None]  # of an address and a number of bytes
_ALL: Final[list["Compiled"]] = []
_readers: Final[list[Reader]] = []
_settings: Final = RLock()


def array(x: Tensor) -> Any:
    """Return the numbers of a contiguous tensor as a flat array; bfloat16 as uint16, narrower ones as uint8."""
    assert x.is_contiguous(), f"a tensor of strides {x.stride()}"
    raw = _RAW.get(x.dtype)
    return (x if raw is None else x.view(raw)).numpy().reshape(-1)  # numpy's reshape is the cheaper one


def kept_array(x: Tensor) -> Any:
    """`array` of a parameter, or of what all layers of a call share: made once, and kept with the tensor."""
    found = getattr(x, _KEPT, None)
    if found is None:
        # of a view, as the array holds what it is made of, and this tensor the array
        if not x.is_contiguous():
            return array(x.contiguous())  # a copy of its own time
        found = array(x.view(-1))
        setattr(x, _KEPT, found)
    return found


def address(x: Tensor | None) -> int:
    """Where the numbers of a contiguous tensor lie, 0 for None: for `numbers`, and quicker than `array`.

    The caller keeps the tensor.
    """
    if x is None:
        return 0
    assert x.is_contiguous(), f"a tensor of strides {x.stride()}"
    if _readers:
        note_read(x)
    return x.data_ptr()


@contextmanager
def reading(note: Reader) -> Iterator[None]:
    """Inside the ``with``, tell of all memory that compiled loops are given, as torch cannot see what they read."""
    _readers.append(note)
    try:
        yield
    finally:
        _readers.remove(note)


def watched() -> bool:
    """Whether anybody wants to know what is read."""
    return bool(_readers)


def note_read(*given: Any) -> None:
    """Tell of tensors and arrays that a loop or a launch is given, also of those inside of tuples."""
    for x in given:
        if isinstance(x, tuple):
            note_read(*x)
        elif isinstance(x, Tensor | np.ndarray):
            at, size = (x.data_ptr(), reach(x)) if isinstance(x, Tensor) else (x.ctypes.data, x.nbytes)
            for note in _readers:
                note(at, size)


def reach(x: Tensor) -> int:
    """Bytes from the first number of a tensor to the end of its last, whatever lies between them."""
    if not x.numel():
        return 0
    return (sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) + 1) * x.element_size()


@intrinsic
def _pointer(typing: Any, at: Any, kind: Any) -> Any:
    """An address as a pointer to numbers of a type."""
    wanted = types.CPointer(kind.dtype)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], context.get_value_type(wanted))

    return wanted(types.int64, kind), generate


class Compiled:
    """A function that is compiled for the types it is given here, before a run by `prepare` or when it is first called.

    A call with other types is a TypeError: nothing is compiled for them in the middle of a run.
    """

    def __init__(self, function: Callable[..., Any], signatures: tuple[tuple[Any, ...], ...]) -> None:
        self.function, self.signatures = function, signatures
        self.missing = list(signatures)
        self.code: Any = None
        _ALL.append(self)

    @property
    def name(self) -> str:
        """Module and name."""
        return f"{self.function.__module__}.{self.function.__name__}"

    @property
    def digest(self) -> str:
        """Of the sources that it is compiled from."""
        return _place(Path(self.function.__code__.co_filename))

    def __call__(self, *args: Any) -> Any:
        """Run it."""
        if _readers:
            note_read(*args)
        try:
            return self.code(*args)
        except TypeError:
            if not self.missing:
                raise
        self.compile(self.signatures)
        return self.code(*args)

    def compile(self, signatures: Sequence[tuple[Any, ...]]) -> None:
        """Compile it for these types, or read that from disk."""
        wanted = [
            signature for signature in self.signatures if signature in signatures or signature not in self.missing
        ]
        where = folder()
        try:
            self._add(wanted, keep=where is not None)
        except DAMAGED:
            print(f"compiled loops in {where} are damaged: compiling them again", file=sys.stderr, flush=True)
            if where is not None:
                shutil.rmtree(where / self.digest, ignore_errors=True)
            self._again(wanted, keep=where is not None)
        except OSError:  # what is compiled cannot be kept, on a full disk: once more, without keeping it
            self._again(wanted, keep=False)

    def _again(self, signatures: Sequence[tuple[Any, ...]], *, keep: bool) -> None:
        self.code, self.missing = None, list(self.signatures)
        self._add(signatures, keep=keep)

    def _add(self, signatures: Sequence[tuple[Any, ...]], *, keep: bool) -> None:
        with _compiling():
            if self.code is None:
                _link()
                self.code = njit(**_OPTIONS)(self.function)
                if keep:
                    self.code._cache = _Kept(self.function)  # noqa: SLF001 (`njit` takes none but numba's own)
            self.code.disable_compile(val=False)
            for signature in signatures:
                if signature in self.missing:
                    self.code.compile(signature)
                    self.missing.remove(signature)
            self.code.disable_compile()


class _Place(caching._CacheLocator):  # type: ignore[misc] # noqa: SLF001 (numba gives it no other name)
    """Where code is kept: numba's own places are named after a line, and forget it when a byte of the file changes."""

    def __init__(self, where: Path) -> None:
        self.where = where

    @classmethod
    def from_function(cls, function: Callable[..., Any], file: str) -> "_Place":
        """Return the folder of what is compiled from these sources."""
        del function
        where = folder()
        assert where is not None, "nothing is kept without a folder"
        return cls(where / _place(Path(file)))

    def get_cache_path(self) -> str:
        """Return the folder."""
        return str(self.where)

    def get_source_stamp(self) -> str:
        """Return nothing: the folder's name says all."""
        return ""

    def get_disambiguator(self) -> str:
        """Return nothing: names of functions are their module's own."""
        return ""


class _Kept(caching.FunctionCache):  # type: ignore[misc]
    """Code on disk, at its `_Place`."""

    class _impl_class(caching.CompileResultCacheImpl):  # type: ignore[misc]
        _locator_classes = (_Place,)


@contextmanager
def _compiling() -> Iterator[None]:
    """Settings of numba, which has them for a whole process.

    Loops have their vectors already: LLVM's levels above 1 find nothing and take a sixth of the time, Python's search
    for cycles among millions of nodes a tenth.
    """
    with _settings:
        before, collects = config.OPT, gc.isenabled()
        config.OPT = type(before)(1)
        gc.disable()
        try:
            yield
        finally:
            config.OPT = before
            if collects:
                gc.enable()


Signature: TypeAlias = tuple[Any, ...]
Wanted: TypeAlias = dict[Compiled, list[Signature]]
Wants: TypeAlias = Callable[[str, Signature], bool]  # whether a run calls a function, by its name, with these types


def compiled(*signatures: tuple[Any, ...]) -> Callable[[Callable[..., Any]], Compiled]:
    """Compile a function for arguments of these types, those of numba."""
    return lambda function: Compiled(function, signatures)


loop: Final = njit(no_cpython_wrapper=True, **_OPTIONS)  # of a part, which Python never calls; compiled with its caller


@loop
def numbers(at, kind):
    """The flat array at an `address`, of a numpy type; how long it is, is not known."""
    return carray(_pointer(at, kind), (1 << 40,))


@loop
def aligned(count, like):
    """A flat array of zeros, of a type as another, that begins a cache line: of 64 bytes, none then lies in two."""
    given = np.zeros(count + 64 // like.itemsize, like.dtype)
    begin = (64 - given.ctypes.data % 64) // like.itemsize
    return given[begin : begin + count]


def kept(wants: Wants) -> bool:
    """Whether all that `prepare` makes ready is on disk already."""
    where = folder()
    return where is not None and all(mark.exists() for mark in _marks(where, _wanted(wants)))


def prepare(wants: Wants) -> None:
    """Compile what a run may call, or read it from disk: of each function the types that it `wants`.

    What is not on disk is compiled by several processes at once, as numba has one thread in each. Who else wants the
    same waits for it.
    """
    wanted, where = _wanted(wants), folder()
    if where is not None:
        with (where / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            marks = _marks(where, wanted)
            if not all(mark.exists() for mark in marks):
                _compile_in_processes(wanted)
                with suppress(OSError):  # a full disk: the next run compiles again
                    for mark in marks:
                        mark.parent.mkdir(exist_ok=True)  # loops that this process had already left nothing there
                        mark.touch()
    for one, signatures in wanted.items():
        one.compile(signatures)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _compile_in_processes(wanted: Wanted) -> None:
    """Leave compiled code on disk. Each process takes the next function that none has taken, what is long first."""
    which = {one: [one.signatures.index(signature) for signature in own] for one, own in wanted.items()}
    order = sorted(wanted, key=lambda one: -len(which[one]) * Path(one.function.__code__.co_filename).stat().st_size)
    functions = [(one.function.__module__, one.function.__name__, which[one]) for one in order]
    program = "import json, sys; path, *rest = json.load(open(sys.argv[1])); sys.path[:] = path;"
    program += " from fathom.kernels import compiled; compiled.compile_free(*rest)"
    with tempfile.TemporaryDirectory() as taken:
        task = Path(taken) / "task.json"
        task.write_text(json.dumps([sys.path, taken, functions]))
        command = [sys.executable, "-c", program, str(task)]
        others = [subprocess.Popen(command) for _ in range(min(cores(), PROCESSES) - 1)]  # noqa: S603
        try:
            compile_free(taken, functions)
        finally:
            for process in others:
                process.wait()  # what one leaves undone is compiled by who called


def compile_free(taken: str, functions: Sequence[tuple[str, str, Sequence[int]]]) -> None:
    """Compile functions, by module, name and numbers of signatures, that no other process has taken."""
    for module, name, which in functions:
        try:
            Path(taken, f"{module}.{name}").touch(exist_ok=False)
        except FileExistsError:
            continue
        one: Compiled = getattr(importlib.import_module(module), name)
        one.compile([one.signatures[number] for number in which])


def signatures(name: str) -> tuple[Signature, ...]:
    """All types of a function."""
    return next(one.signatures for one in _ALL if one.name == name)


def _wanted(wants: Wants) -> Wanted:
    found = {one: [signature for signature in one.signatures if wants(one.name, signature)] for one in _ALL}
    return {one: own for one, own in found.items() if own}


def _marks(where: Path, wanted: Wanted) -> list[Path]:
    """Files that say that each of these is there, compiled for the processor that LLVM finds here."""
    processor = llvmlite.binding.get_host_cpu_name(), llvmlite.binding.get_host_cpu_features().flatten()
    told = [(one.digest, repr((processor, one.name, of))) for one, signatures in wanted.items() for of in signatures]
    return [where / place / f"mark-{hashlib.sha256(what.encode()).hexdigest()[:16]}" for place, what in told]


@cache
def folder() -> Path | None:
    """Where compiled code is kept: beside Python's own, else in the user's cache; None where neither can be written."""
    for where in (Path(__file__).parent / "__pycache__" / "compiled", Path.home() / ".cache" / "fathom"):
        try:
            where.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=where):  # its owner may touch a file of a folder that nobody may write
                pass
        except OSError:
            continue
        return where
    return None


@cache
def digest(source: Path) -> str:
    """Return a name of what a module's code is compiled from: its statements and those of all that it imports of ours.

    Comments, docstrings and the lines that things stand in are not counted, as no loop can see them; the version of
    numba is.
    """
    found = _sources(source)
    told = [numba.__version__, os.path.relpath(source, PROJECT), *(found[one] for one in sorted(found))]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:16]


def _sources(source: Path) -> dict[Path, str]:
    """Hashes of the statements of a module and of all that it imports of ours."""
    found, left = dict[Path, str](), [source]
    while left:
        if (one := left.pop()) not in found:
            found[one], imported = _statements(one)
            left += map(_source, imported)
    return found


@cache
def _place(source: Path) -> str:
    """Return `digest`; of a module whose sources were edited since this process began, a name that no other run finds.

    What is compiled then is what was imported, which may not be what stands in the files.
    """
    edited = any(one.stat().st_mtime > BEGAN for one in _sources(source))
    return f"{digest(source)}-{os.getpid()}-{time.time_ns()}" if edited else digest(source)


def _statements(source: Path) -> tuple[str, list[str]]:
    """A hash of a module's statements, and what it imports of this project, anywhere; kept too, as it takes a while."""
    data, where = source.read_bytes(), folder()
    kept = None if where is None else where / f"{source.stem}-{hashlib.sha256(data + SELF).hexdigest()[:16]}.json"
    if kept is not None:
        with suppress(OSError, ValueError):
            statements, imported = json.loads(kept.read_text())
            return statements, imported
    tree, names = ast.parse(data), list[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            del node.body[0]
        elif isinstance(node, ast.Import):
            names += [one.name for one in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{one.name}" for one in node.names]
    found = hashlib.sha256(ast.dump(tree).encode()).hexdigest(), [name for name in names if name.startswith("fathom.")]
    if kept is not None:
        with suppress(OSError):  # a full disk: it is found anew
            kept.write_text(json.dumps(found))
    return found


def _source(name: str) -> Path:
    """The file of an imported module of this project, or of the module that a name is imported from."""
    place = PROJECT.joinpath(*name.split(".")[1:])
    files = [part for one in (place, place.parent) for part in (one.with_suffix(".py"), one / "__init__.py")]
    return next(file for file in files if file.is_file())


@cache
def _link() -> None:
    """Tell LLVM where torch's own OpenMP is: of several in a process each would have threads of its own."""
    library = ctypes.CDLL(torch._C.__file__)  # noqa: SLF001 (its dependencies are searched too)
    for name in _OPENMP:
        found = getattr(library, name, None)
        if found is None:
            raise OSError(
                f"torch's OpenMP has no {name}: compiled loops need a torch that was built with GNU's or LLVM's"
            )
        llvmlite.binding.add_symbol(name, ctypes.cast(found, ctypes.c_void_p).value)


def _each(typing: Any, body: Any, given: Any, work: tuple[Any, ...]) -> Any:
    wanted = (types.int64, types.int64, *given.types)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        del signature
        called = body.get_call_type(typing, wanted, {})
        made = body.dispatcher.get_compile_result(called)
        context.add_linking_libs((made.library,))
        integer, number, raw = ir.IntType(64), ir.IntType(32), ir.IntType(8).as_pointer()
        held = ir.LiteralStructType([integer, number.as_pointer(), values[-1].type])
        module = builder.module
        part = ir.Function(module, ir.FunctionType(ir.VoidType(), [raw]), module.get_unique_name("part"))
        part.linkage = "internal"
        part.attributes.add("noinline")  # there is one of it, for one thread and for many
        own = ir.IRBuilder(part.append_basic_block())
        given_here = own.load(own.bitcast(part.args[0], held.as_pointer()))
        total, failed, arguments = (own.extract_value(given_here, i) for i in range(3))

        def asked(name: str) -> Any:
            function = cgutils.get_or_insert_function(module, ir.FunctionType(number, []), name)
            return own.sext(own.call(function, []), integer)

        thread, threads = asked("omp_get_thread_num"), asked("omp_get_num_threads")
        low = own.sdiv(own.mul(total, thread), threads)
        high = own.sdiv(own.mul(total, own.add(thread, integer(1))), threads)
        unpacked = [own.extract_value(arguments, i) for i in range(len(given.types))]
        function = context.declare_function(module, made.fndesc)
        status, _ = context.call_conv.call_function(own, function, called.return_type, wanted, [low, high, *unpacked])
        with own.if_then(status.is_error, likely=False):
            own.store(number(1), failed)  # of several threads any
        own.ret_void()
        slot = cgutils.alloca_once(builder, held)
        failed = cgutils.alloca_once_value(builder, number(0))
        builder.store(number(0), failed)
        packed = ir.Constant(held, ir.Undefined)
        for i, one in enumerate((values[1], failed, values[-1])):
            packed = builder.insert_value(packed, one, i)
        builder.store(packed, slot)
        shape = ir.FunctionType(ir.VoidType(), [part.type, raw, number, number])
        run = cgutils.get_or_insert_function(module, shape, "GOMP_parallel")
        threads = number(0)  # as many as torch says
        if work:
            threads = builder.zext(builder.icmp_signed("<", values[2], integer(ALONE)), number)
        builder.call(run, [part, builder.bitcast(slot, raw), threads, number(0)])
        with builder.if_then(builder.icmp_unsigned("!=", builder.load(failed), number(0)), likely=False):
            context.call_conv.return_user_exc(builder, MemoryError, ("a loop has no memory for what it needs",))
        return context.get_dummy_value()

    return types.void(body, types.int64, *work, given), generate


@intrinsic
def each(typing: Any, body: Any, count: Any, given: Any) -> Any:
    """``each(body, count, given)``: ``body(low, high, *given)`` on every thread, with its part of ``range(count)``."""
    return _each(typing, body, given, ())


@intrinsic
def each_of(typing: Any, body: Any, count: Any, work: Any, given: Any) -> Any:
    """`each`; on this thread alone where the `work` of all items, in numbers read, is less than waking others costs."""
    return _each(typing, body, given, (types.int64,))


@intrinsic
def moved(typing: Any, like: Any, address: Any) -> Any:
    """The array at an address, of the type and length of another: a matrix of several that lie apart."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        one = context.make_array(like)(context, builder, value=values[0])
        one.data = builder.inttoptr(values[1], one.data.type)
        one.meminfo, one.parent = (ir.Constant(part.type, None) for part in (one.meminfo, one.parent))
        return one._getvalue()  # noqa: SLF001 (numba's own way to put an array together)

    return like(like, types.int64), generate
