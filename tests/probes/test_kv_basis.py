"""The experiment of bases: its cells are ratios of losses, its summary is what the fits say."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from fathom.kernels.formats.basis_fit import Loss
from fathom.probes.finding import Verdict
from fathom.probes.kv_basis import QUICK, cell
from fathom.probes.probe import run_probe, silent
from fathom.probes.subject import Subject
from fathom.runtime.options import RunOptions


def test_the_page_says_what_the_fits_say():
    probe = replace(QUICK, contexts=(8192, 1048576))
    report = run_probe(probe, Subject(options=RunOptions("plain", "fp32")), silent).report
    (table,) = report.parts
    assert [row[0] for row in table.rows] == ["8K", "1024K"]
    bold = sum(cell.startswith("**") for row in table.rows for cell in row[1:])
    assert ("in no layer." in report.summary) == (bold == 0)
    (found,) = report.findings
    assert found.verdict is Verdict.PASS
    assert found.measured <= found.bound.value == 98


def test_a_basis_of_more_bytes_than_it_replaces_fails():
    config = Subject().config
    fitted = SimpleNamespace(based=Loss(1, 1, 1), rotated=Loss(2, 2, 2), row_bytes=98, pays=True)
    report = replace(QUICK, contexts=(8192,)).report(config, {(6, 8192): {1: fitted}}, {1: 9})
    assert [finding.verdict for finding in report.findings] == [Verdict.FAIL]
    none = SimpleNamespace(based=None, rotated=Loss(2, 2, 2), pays=False, why_none="too few entries")
    report = replace(QUICK, contexts=(8192,)).report(config, {(6, 8192): {1: none}}, {1: 9})
    assert [finding.verdict for finding in report.findings] == [Verdict.VACUOUS]


@pytest.mark.parametrize(
    ("based", "pays", "says"),
    [
        (Loss(1.0, 2.0, 6.0), True, "**0.50, 1.00, 2.00**"),
        (Loss(1.0, 2.0, 6.0), False, "0.50, 1.00, 2.00"),
        (None, False, "few"),
    ],
)
def test_a_cell_is_the_ratio_of_losses(based, pays, says):
    assert cell(SimpleNamespace(based=based, rotated=Loss(2.0, 2.0, 3.0), pays=pays, why_none="few")) == says
