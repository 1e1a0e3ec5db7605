"""Compiled loops: how they are dealt to threads, kept on disk and refused, and the numbers that lanes hold."""

import ast
import gc
import inspect
import os
import shutil
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from numba import types

from fathom.kernels import compiled, lanes
from tests.grids import on_demand

ROOT = Path(__file__).parents[2]
F32, U32 = types.float32[::1], types.uint32[::1]


@compiled.loop
def _mark(low, high, out, by):
    for i in range(low, high):
        out[i] += by


@compiled.compiled((F32, types.float32))
def mark_all(out, by):
    compiled.each(_mark, len(out), (out, by))


@compiled.compiled((F32, types.float32, types.int64))
def mark_some(out, by, work):
    compiled.each_of(_mark, len(out), work, (out, by))


@compiled.loop
def _greedy(low, high, out):
    for i in range(low, high):
        out[i] = np.empty(int(out[i])).size


@compiled.compiled((F32,))
def allocate(out):
    compiled.each(_greedy, len(out), (out,))


@compiled.compiled((F32, F32))
def exponentials(x, out):
    for i in range(0, len(x), 16):
        lanes.store(out, i, lanes.exp(lanes.load(x, i)))


@compiled.compiled((F32, types.uint16[::1]))
def narrowed(x, out):
    for i in range(0, len(x), 16):
        lanes.store(out, i, lanes.load(x, i))


@compiled.compiled((F32, F32))
def totals(x, out):
    for i in range(len(out)):
        out[i] = lanes.total(lanes.load(x, 16 * i))


@pytest.fixture
def on_threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("on_threads")
@pytest.mark.parametrize("on_threads", [1, 2, 3], indirect=True)
@pytest.mark.parametrize("count", [0, 1, 2, 7, 1000])
def test_every_item_is_dealt_once(count):
    out = np.zeros(count, np.float32)
    mark_all(out, 3.0)
    mark_some(out, 4.0, 0)
    mark_some(out, 5.0, 1 << 40)
    assert (out == 12).all()


@pytest.mark.usefixtures("on_threads")
@pytest.mark.parametrize("on_threads", [1, 2], indirect=True)
@pytest.mark.parametrize("which", [0, 3])
def test_memory_that_a_loop_does_not_get_is_an_error(which):
    sizes = np.ones(4, np.float32)
    allocate(sizes)
    sizes[which] = 2.0**58
    with pytest.raises(MemoryError):
        allocate(sizes)


def test_other_types_than_those_compiled_for_are_refused():
    with pytest.raises(TypeError):
        mark_all(np.zeros(4), 1.0)


def test_exponentials_are_within_two_ulp_and_keep_what_is_not_finite():
    x = torch.cat(
        (torch.linspace(-104, 89, 160_000), torch.tensor([0.0, -0.0, 1e-30, -87.4, -103.9, 88.7, 88.8, -1e38] * 2))
    )
    out = torch.empty_like(x)
    exponentials(x.numpy(), out.numpy())
    exact = x.double().exp()
    held = exact < torch.finfo(torch.float32).max
    step = torch.nextafter(exact[held].float(), torch.tensor(np.inf)).double() - exact[held].float().double()
    assert ((out[held].double() - exact[held]).abs() <= 2 * step).all()
    assert out[~held].isinf().all()
    odd = torch.tensor([np.nan, np.inf, -np.inf, 1000.0, -1000.0, 0.0] + [0.0] * 10)
    exponentials(odd.numpy(), out.numpy())
    assert out[0].isnan()
    assert out[1:6].tolist() == [np.inf, 0.0, np.inf, 0.0, 1.0]


def test_bfloat16_is_rounded_as_torch_rounds_it():
    """Random bits, and each number half way between two of bfloat16, with its neighbours."""
    words = torch.randint(-(1 << 31), 1 << 31, (1 << 20,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    halves = ((torch.arange(1 << 16) << 16) + 0x8000).to(torch.int32)
    x = torch.cat((words, halves, halves - 1, halves + 1)).view(torch.float32)
    out = torch.empty(len(x), dtype=torch.bfloat16)
    narrowed(x.numpy(), out.view(torch.uint16).numpy())
    expected, nan = x.bfloat16(), x.isnan()
    assert torch.equal(out.isnan(), nan)
    assert torch.equal(out[~nan].view(torch.int16), expected[~nan].view(torch.int16))


def test_lanes_add_up_in_halves():
    x = np.array([2.0**24, *([1.0] * 7), -(2.0**24), *([1.0] * 7)], np.float32)
    out = np.zeros(1, np.float32)
    totals(x, out)
    parts = x
    while len(parts) > 1:
        parts = parts[: len(parts) // 2] + parts[len(parts) // 2 :]
    assert out[0] == parts[0] == 14.0


def test_an_array_that_is_kept_with_a_tensor_lets_it_go():
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(64, dtype=dtype)
        first = compiled.kept_array(x)
        assert compiled.kept_array(x) is first
        x[3] = 2
        assert np.shares_memory(first, compiled.array(x))
        gone = weakref.ref(x)
        del x, first
        gc.collect()
        assert gone() is None


LOADED = """
import torch
from fathom.kernels.norm.cpu import rms_norm
print(rms_norm(torch.full((1, 32), 3.0), None, 0.0)[0, 0].item())
"""
PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from fathom.kernels import compiled
from fathom.kernels.norm.cpu import rms_norm
compiled.folder.cache_clear()
print(compiled.folder())
print(rms_norm(torch.full((1, 32), 3.0), None, 0.0)[0, 0].item())
"""


def test_without_a_folder_that_can_be_written_loops_run_all_the_same(tmp_path):
    """The project's folder and the user's are read-only here, as far as the program can tell."""
    blocked = "import pathlib\ndef no(*a, **k): raise OSError('read-only')\npathlib.Path.mkdir = no\n"
    environment = os.environ | {"HOME": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-c", blocked + PROGRAM, str(ROOT)],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    assert ran.stdout.split() == ["None", "1.0"]


@pytest.mark.parametrize(("ending", "length"), [("nbi", 20), ("nbc", 0), *on_demand(("nbi", 0), ("nbc", 20))])
def test_kept_code_that_was_cut_off_is_compiled_again(ending, length, tmp_path):
    """Both kinds of files that numba keeps; the run after it finds them whole."""
    said = []
    for cut in (False, True, False):
        for path in tmp_path.glob(f"**/*.{ending}") if cut else ():
            os.truncate(path, length)
        program = f"import fathom.kernels.compiled, pathlib; place = pathlib.Path({str(tmp_path / 'kept')!r})\n"
        program += "def where():\n    place.mkdir(exist_ok=True)\n    return place\n"
        program += "where.cache_clear = lambda: None\nfathom.kernels.compiled.folder = where\n"
        ran = subprocess.run(
            [sys.executable, "-c", program + LOADED], capture_output=True, text=True, check=True, cwd=ROOT
        )
        said.append("damaged" in ran.stderr)
        assert ran.stdout.split() == ["1.0"]
    assert said == [False, True, False]


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A copy of the kernels' sources, by which modules are told apart."""
    shutil.copytree(ROOT / "kernels", tmp_path / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(compiled, "PROJECT", tmp_path)
    monkeypatch.setattr(compiled, "folder", lambda: tmp_path)
    yield tmp_path / "kernels"
    compiled.digest.cache_clear()


def holding():
    """Modules of the project that hold compiled functions, below the folder of kernels."""
    files = {Path(one.function.__code__.co_filename) for one in compiled._ALL}
    return {path.relative_to(ROOT / "kernels") for path in files if path.is_relative_to(ROOT / "kernels")}


def digests(sources):
    compiled.digest.cache_clear()
    return {str(path): compiled.digest(sources / path) for path in holding()}


def test_comments_docstrings_and_lines_do_not_count(sources):
    before, kinds = digests(sources), ast.Module | ast.ClassDef | ast.FunctionDef
    for path in sources.rglob("*.py"):
        text = path.read_text("utf-8")
        lines = text.splitlines(keepends=True)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, kinds) and ast.get_docstring(node) is not None:
                at = node.body[0].lineno - 1
                lines[at] = lines[at].replace('"""', '"""Otherwise: ', 1)
        path.write_text("# Why.\n\n" + "".join(lines), "utf-8")
    assert (sources / "lanes.py").read_text("utf-8").count("Otherwise: ") > 10
    assert digests(sources) == before


@pytest.mark.parametrize(
    ("file", "old", "new", "changed"),
    [
        (
            "norm/cpu.py",
            "@compiled(",
            "@compiled(*(), ",
            {"norm/cpu.py", "hyper/cpu.py", "rope/cpu.py", "experts/cpu.py"},
        ),
        ("formats/groups.py", "FP8_BLOCK", "FP8_BLOCKS", {"formats/cpu.py", "linear/cpu.py", "attention/cpu_few.py"}),
        ("quantise/reference.py", "", "ONE_MORE = 1\n", {"quantise/cpu.py", "rope/cpu.py", "experts/cpu.py"}),
        ("linear/triton.py", "", "ONE_MORE = 1\n", set()),
        ("ops.py", "", "ONE_MORE = 1\n", set()),
    ],
)
def test_a_statement_counts_in_its_module_and_in_those_that_import_it(sources, file, old, new, changed):
    before, path = digests(sources), sources / file
    text = path.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new) if old else text + new, "utf-8")
    other = {name for name, digest in digests(sources).items() if digest != before[name]}
    assert changed <= other if changed else not other
    assert other < set(before)


@pytest.mark.parametrize("file", ["lanes.py", "compiled.py"])
def test_a_number_of_what_all_share_changes_all(sources, file):
    before = digests(sources)
    tree = ast.parse((sources / file).read_text("utf-8"))
    number = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and type(node.value) is int][-1]
    number.value += 1
    (sources / file).write_text(ast.unparse(tree), "utf-8")
    assert [name for name, digest in digests(sources).items() if digest == before[name]] in ([], ["gate/cpu.py"])


def ours(source):
    """Whether a file is of this project, and not of the environment in its folder."""
    return source.is_relative_to(ROOT) and "site-packages" not in source.parts


def called(function, seen):
    """Functions that a loop can call, and so has compiled into it: by names of its module that it mentions."""
    if function in seen:
        return
    seen.add(function)
    codes = [function.__code__]
    for code in codes:
        codes += [const for const in code.co_consts if hasattr(const, "co_code")]
        named = [function.__globals__.get(name) for name in code.co_names]
        named += [getattr(one, name, None) for one in named if inspect.ismodule(one) for name in code.co_names]
        for value in named:
            parts = value if isinstance(value, tuple | list) else [value]
            for part in (getattr(part, "py_func", None) or getattr(part, "_defn", part) for part in parts):
                if inspect.isfunction(part) and ours(Path(part.__code__.co_filename)):
                    called(part, seen)


def test_all_that_a_loop_calls_stands_in_sources_that_count():
    for one in compiled._ALL:
        left, counted = [Path(one.function.__code__.co_filename)], set()
        while left:
            if (path := left.pop()) not in counted:
                counted.add(path)
                left += map(compiled._source, compiled._statements(path)[1])
        functions = set()
        called(one.function, functions)
        assert {Path(function.__code__.co_filename) for function in functions} <= counted, one.name
    assert len(functions) > 1


def test_other_words_compile_nothing_and_another_number_does(tmp_path):
    """In a process of its own each, as a user's are."""
    shutil.copytree(ROOT / "kernels", tmp_path / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "fathom.py", tmp_path)

    def kept():
        environment = os.environ | {"PYTHONPATH": str(tmp_path)}
        said = subprocess.check_output([sys.executable, "-c", LOADED], text=True, cwd=tmp_path, env=environment)
        assert said.split() == ["1.0"]
        return {path: path.stat().st_mtime_ns for path in tmp_path.glob("kernels/__pycache__/compiled/**/*.nb?")}

    source, first = tmp_path / "kernels" / "norm" / "cpu.py", kept()
    assert first
    text = source.read_text("utf-8")
    source.write_text(f"# Other words.\n{text}", "utf-8")
    assert kept() == first
    source.write_text(f"{text}\nONE_MORE = 1\n", "utf-8")
    again = kept()
    assert len(again) == 2 * len(first)
    assert first.items() < again.items()


def test_a_module_edited_since_it_was_imported_is_not_kept_under_its_new_name(tmp_path, monkeypatch):
    """What is compiled then is the old one, and no other process may find it."""
    source = tmp_path / "one.py"
    source.write_text("one = 1\n")
    monkeypatch.setattr(compiled, "BEGAN", source.stat().st_mtime + 1)
    assert compiled._place.__wrapped__(source) == compiled.digest.__wrapped__(source)
    monkeypatch.setattr(compiled, "BEGAN", source.stat().st_mtime - 1)
    assert compiled._place.__wrapped__(source) not in {compiled.digest.__wrapped__(source), compiled._place(source)}
