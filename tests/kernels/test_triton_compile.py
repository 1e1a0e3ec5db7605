"""Every Triton kernel compiles for Hopper at real dimensions; no GPU is needed for that."""

import pytest

from tests.kernels.compilation import FILES, WITH_KERNELS, check, check_every_kernel_that_is_launched, compiler

HOPPER = 90


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return compiler(HOPPER, tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize("name", FILES)
def test_kernels_compile_and_fit(name, compiled):
    assert compiled("FAST")[name]
    check(compiled("FAST")[name], HOPPER)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_more_cases_compile_and_fit(name, compiled):
    check(compiled("SLOW")[name], HOPPER)


def test_every_file_of_kernels_is_compiled():
    assert {stem.removeprefix("compile_") for stem in FILES} == WITH_KERNELS


def test_every_kernel_that_is_launched_is_compiled(compiled):
    check_every_kernel_that_is_launched(kernel for kernels in compiled("FAST").values() for kernel in kernels)
