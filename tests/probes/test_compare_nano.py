"""`compare` on a runtime that nobody here wrote or changed: the package nano-deepseek-v4, with the faults it came with.

What runs it needs the package, 0.2.0 of PyPI, beside what this project needs; it is not installed with the tests.
"""

import json
from importlib.metadata import version
from pathlib import Path

import pytest

from fathom.probes.faults import FAULTS
from tests.probes import nano_page

AUDITS = Path(__file__).resolve().parents[2] / "audits"
SAID = json.loads((AUDITS / "nano.json").read_text(encoding="utf-8"))


def check(found):
    """Five faults are named at once; each equation that is replaced takes one of them away, and nothing is left."""
    faults = [run["replaced"]["fault"] for run in found[1:]]
    assert len(faults) == 5
    assert set(faults) <= set(FAULTS)
    for run, left in zip(found, (faults[n:] for n in range(len(found))), strict=True):
        assert {one["fault"] for one in run["explained"]} == set(left)
        assert (run["unexplained"], run["not_tried"], run["counts"]["not judged"]) == ([], [], 0)
        assert all(one["share"] > 0.999 for one in run["explained"])
        assert sum(run["counts"].values()) == 90
        assert (run["numerics"], run["dtype"]) == ("plain", "fp32")
    differ = [run["counts"]["differs"] for run in found]
    assert differ == sorted(set(differ), reverse=True), "fewer with each"
    assert (found[0]["first"]["layer"], found[0]["first"]["site"]) == (0, "attention.post")
    assert differ[-1] == 0


def test_the_page_says_what_was_asked_of_the_run():
    check(SAID["runs"])
    facts = {name: value for name, value in SAID.items() if name not in ("runs", "parts")}
    made = nano_page.page(SAID["runs"], facts)
    assert made.markdown() == (AUDITS / "nano.md").read_text(encoding="utf-8")
    assert json.loads(made.files()["nano.json"]) == SAID


@pytest.mark.slow
def test_its_five_faults_are_named_at_once_and_leave_with_its_equations(tmp_path):
    pytest.importorskip("nano_deepseek_v4")
    assert version(nano_page.PACKAGE) == SAID["version"], "another version has other faults"
    found = nano_page.runs(tmp_path)
    check(found)
    assert [run["counts"] for run in found] == [run["counts"] for run in SAID["runs"]]
    assert [run["explained"] for run in found] == [
        [one | {"share": pytest.approx(one["share"], abs=1e-3)} for one in run["explained"]] for run in SAID["runs"]
    ]
