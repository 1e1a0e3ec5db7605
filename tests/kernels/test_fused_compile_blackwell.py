"""Every Triton kernel compiles for Blackwell too: a file of its own, that another process may test meanwhile."""

import pytest

from tests.kernels.compilation import FILES, check, compiler

BLACKWELL = 100


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return compiler(BLACKWELL, tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize("name", FILES)
def test_kernels_compile_and_fit_on_blackwell(name, compiled):
    assert compiled("CASES")[name]
    check(compiled("CASES")[name], BLACKWELL)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_more_cases_compile_and_fit_on_blackwell(name, compiled):
    check(compiled("MORE")[name], BLACKWELL)
