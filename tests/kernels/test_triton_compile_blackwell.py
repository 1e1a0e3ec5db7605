"""Every Triton kernel compiles for Blackwell too: a file of its own, that another process may test meanwhile."""

import pytest

from tests.kernels.compilation import FILES, check, check_every_kernel_that_is_launched, compiler

BLACKWELL = 100


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return compiler(BLACKWELL, tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize("name", FILES)
def test_kernels_compile_and_fit_on_blackwell(name, compiled):
    assert compiled("FAST")[name]
    check(compiled("FAST")[name], BLACKWELL)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_more_cases_compile_and_fit_on_blackwell(name, compiled):
    check(compiled("SLOW")[name], BLACKWELL)


def test_every_kernel_that_is_launched_is_compiled_for_blackwell(compiled):
    check_every_kernel_that_is_launched(kernel for kernels in compiled("FAST").values() for kernel in kernels)
