"""The shipped checkpoint needs every path: what it knows with the runtime as it is, and with a path cut out.

Bounds are those the checkpoint was made for: recall of at least 95 % in the deployed format, and marked losses without
the path. audits/demo-checkpoint.md has the numbers at all lengths.
"""

import pytest

from fathom.kernels.ops import CPU
from fathom.probes.demo_checkpoint import ways
from fathom.probes.demo_language.prompts import common_prompts, fact_prompts, needle_prompts
from fathom.probes.evaluation import Run, Share, right_answers
from fathom.runtime.load import load
from fathom.runtime.options import DEMO, RunOptions

CHUNK = 512
LONG = pytest.param(4096, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def models():
    return {name: Run(name, load(DEMO, RunOptions(), ops).model, CHUNK) for name, ops in ways(CPU).items()}


def share(models, name, prompts):
    return Share.of(right for prompt in prompts for right in right_answers(models[name], prompt)).share


@pytest.mark.parametrize("length", [512, LONG])
def test_needles_need_the_selected_entries(models, length):
    prompts = needle_prompts(length, 2, seed=length + 1, questions=12)
    assert share(models, "as shipped", prompts) >= 0.95
    assert share(models, "random selection", prompts) <= 0.5
    assert share(models, "CSA window only", prompts) <= 0.2
    assert share(models, "window alone", prompts) <= 0.2


@pytest.mark.parametrize("length", [1024, LONG])
def test_the_most_common_word_needs_the_dense_entries(models, length):
    prompts = common_prompts(length, 3, seed=length + 1)
    assert share(models, "as shipped", prompts) >= 0.9
    assert share(models, "HCA window only", prompts) <= 0.7


@pytest.mark.parametrize("chat", [False, True])
def test_facts(models, chat):
    assert share(models, "as shipped", fact_prompts(chat=chat)[::16]) >= 0.95
