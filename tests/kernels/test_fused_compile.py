"""Every Triton kernel compiles for Hopper at real dimensions; no GPU is needed for that."""

import re

import pytest

from tests.kernels.compilation import FILES, HERE, check, compiler

HOPPER = 90
FUSED = [path for path in sorted((HERE.parents[1] / "kernels" / "fused").glob("*.py")) if path.stem != "__init__"]
TEXTS = {path.stem: path.read_text(encoding="utf-8") for path in FUSED}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return compiler(HOPPER, tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize("name", FILES)
def test_kernels_compile_and_fit(name, compiled):
    assert compiled("CASES")[name]
    check(compiled("CASES")[name], HOPPER)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_more_cases_compile_and_fit(name, compiled):
    check(compiled("MORE")[name], HOPPER)


def test_every_file_of_kernels_is_compiled():
    ops = {name for name, text in TEXTS.items() if "@triton.jit" in text}
    assert ops - {"codes", "rounding", "weight_tiles"} == {stem.removeprefix("compile_") for stem in FILES}


def test_every_kernel_that_is_launched_is_compiled(compiled):
    """In the cases that `make test` compiles: what is left to the slow tests are other constants of the same."""
    text = "\n".join(TEXTS.values())
    functions = re.findall(r"@triton\.jit[^\n]*\ndef (_\w+)", text)
    launched = {name for name in functions if re.search(rf"\b{name}\[", text)}
    assert launched == {kernel["kernel"] for kernels in compiled("CASES").values() for kernel in kernels}
