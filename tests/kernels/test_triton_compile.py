"""Every Triton kernel compiles at real dimensions, for Hopper and Blackwell; no GPU is needed for that.

By the Triton that is installed, and by the oldest that the project promises, which GPU machines bring.
"""

import pytest

from tests.grids import on_demand
from tests.kernels.compilation import (
    FILES,
    OLDEST,
    PROJECT,
    WITH_KERNELS,
    check,
    check_every_kernel_that_is_launched,
    compiler,
    oldest_version,
)
from tests.kernels.every_backend import on_triton

# A pair for each GPU and each Triton; the other two repeat both, so they are on demand.
TARGETS = [("installed", 90), ("oldest", 100), *on_demand((("installed", 100),), (("oldest", 90),))]
ROWS = ["compile_linear", "compile_gate", "compile_experts"]
pytestmark = on_triton


@pytest.fixture(scope="module", params=TARGETS, ids=lambda target: f"{target[0]}-sm_{target[1]}")
def target(request):
    return request.param


@pytest.fixture(scope="module")
def capability(target):
    return target[1]


@pytest.fixture(scope="module")
def version(target):
    """Of the Triton that compiles, as the program has to say it."""
    import triton  # noqa: PLC0415 -- not every platform has it

    return triton.__version__ if target[0] == "installed" else oldest_version()


@pytest.fixture(scope="module")
def compiled(capability, version, tmp_path_factory):
    import triton  # noqa: PLC0415

    before = () if version == triton.__version__ else (OLDEST,)
    assert all(folder.is_dir() for folder in before), f"no {OLDEST}: `make test` brings Triton {version} there"
    return compiler(capability, tmp_path_factory.mktemp("cache"), *before)


@pytest.mark.parametrize("name", FILES)
def test_kernels_compile_and_fit(name, compiled, capability, version):
    assert {kernel["triton"] for kernel in compiled("FAST")[name]} == {version}
    check(compiled("FAST")[name], capability)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_more_cases_compile_and_fit(name, compiled, capability):
    check(compiled("SLOW")[name], capability)


def test_threads_lie_along_rows_in_one_order(compiled):
    """Of all kernels that multiply whole rows: else a token's bits hung on what is multiplied beside it."""
    told = [
        (kernel["kernel"], kernel["case"], kernel["along lanes"]) for name in ROWS for kernel in compiled("FAST")[name]
    ]
    assert not [one for one in told if not all(one[2])]
    assert {name for name, _, along in told if along} == {"_few", "_linears", "_gate", "_few_up", "_few_down"}


def test_assembly_of_four_bytes_has_four_columns_of_a_row(compiled):
    """Not one of each of four rows, as a compiler lays them that does not know how rows are aligned."""
    kernels = compiled("FAST")["compile_expert_codes"]
    assert all(all(kernel["packed"]) for kernel in kernels), kernels
    # one for scales that lie near each other, one for others; of a tile of 128 also of the two for what is left
    cases = {kernel["case"] for kernel in kernels if "exact" not in kernel["case"]}
    assert {(kernel["case"], kernel["kernel"]): len(kernel["packed"]) for kernel in kernels if kernel["packed"]} == {
        (case, name): 6 if case.startswith("96") else 2
        for case in cases
        for name in ("_gate_up_of_codes", "_down_of_codes")
    }


@pytest.mark.slow
def test_threads_lie_along_rows_in_more_cases_too(compiled):
    found = [kernel["along lanes"] for name in ROWS for kernel in compiled("SLOW")[name]]
    assert all(map(all, found))
    assert sum(map(len, found)) > len(ROWS)


def test_the_oldest_is_what_the_project_promises():
    (promised,) = (of for of in PROJECT["project"]["dependencies"] if of.startswith("triton"))
    assert promised.startswith(f"triton>={oldest_version().removesuffix('.0')};")


def test_every_file_of_kernels_is_compiled():
    assert {stem.removeprefix("compile_") for stem in FILES} == WITH_KERNELS


def test_every_kernel_that_is_launched_is_compiled(compiled):
    check_every_kernel_that_is_launched(kernel for kernels in compiled("FAST").values() for kernel in kernels)
