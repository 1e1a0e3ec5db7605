"""Fixtures of the tests of `deployed` numerics: a checkpoint each is written and the oracle run once for all files."""

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tests.deepseek_arithmetic import FP32, Choices
from tests.deployed_cases import Case, make_case


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    return functools.cache(lambda name: make_case(name, tmp_path_factory.mktemp("checkpoint")))


@pytest.fixture(scope="session")
def exact(case) -> Callable[[str], tuple[Tensor, dict[str, Tensor]]]:
    """Logits and trace of the oracle with this runtime's choices."""
    return functools.cache(lambda name: case(name).oracle(Choices(FP32)))
