"""Experiment `memory-plan`: published models by ranks and context, and its findings where the plan is wrong."""

from dataclasses import replace
from pathlib import Path

import pytest

from fathom.model.checkpoint.published import published_configs
from fathom.probes import memory_plan
from fathom.probes.finding import Bars
from fathom.probes.memory_plan import FULL, QUICK
from fathom.probes.subject import Subject
from fathom.runtime.plan import exchanges
from fathom.runtime.plan.planner import Planner
from fathom.scripts import probe
from fathom.scripts.probe import with_knobs

AUDITS = Path(__file__).resolve().parents[2] / "audits"


@pytest.fixture
def few(monkeypatch):
    """Two numbers of ranks and one context: a second instead of ten."""
    monkeypatch.setattr(memory_plan, "RANKS", (1, 8))
    monkeypatch.setattr(memory_plan, "CONTEXTS", {"1M": 1 << 20})
    return replace(QUICK, gpu_gb=40.0, chunk=512)


@pytest.mark.slow
def test_every_release_holds_every_finding():
    report = measured(replace(FULL, models=tuple(published_configs())))
    assert [finding.what for finding in report.findings if finding.failed] == []
    assert len({finding.what for finding in report.findings}) == 8 * len(published_configs())


def measured(asked):
    return asked.measure(Subject(), lambda *_: None)


def test_bars_add_up_to_what_is_needed_and_a_model_that_fits_is_said_to(few):
    report = measured(few)
    assert not any(finding.failed for finding in report.findings)
    bars = next(part for part in report.parts if isinstance(part, Bars))
    alone, of_eight = (sum(heights) for heights in zip(*bars.series.values(), strict=True))
    assert of_eight < 40 < alone
    assert f"fits on 8 GPUs of 40 GB: {of_eight:.2f} GB of each" in report.summary


def test_a_plan_whose_caches_are_a_row_short_fails(few, monkeypatch):
    whole = Planner.plan

    def short(self, context, *chunk):
        return whole(self, context - 128 * (context == 1 << 20), *chunk)

    monkeypatch.setattr(Planner, "plan", short)
    report = measured(replace(few, gpu_gb=1.0))
    assert [finding.what for finding in report.findings if finding.failed] == ["DeepSeek-V4-Flash: caches at 1M"]
    assert "fits on none of 1, 8 GPUs of 1 GB" in report.summary


@pytest.mark.parametrize(("way", "what"), [("_of_rows", "rows, in "), ("_of_whole", "whole, rows in ")])
def test_a_plan_that_forgets_an_exchange_fails(few, monkeypatch, way, what):
    whole = getattr(exchanges, way)

    def short(*given):
        return [one._replace(nbytes=one.nbytes - 1024) for one in whole(*given)]

    monkeypatch.setattr(exchanges, way, short)
    failed = [finding.what for finding in measured(few).findings if finding.failed]
    assert len(failed) == 2
    assert all(f"experts' exchanges of a call, {what}" in one for one in failed)


def test_a_model_that_is_not_published_is_named():
    told = with_knobs(QUICK, ["models=deepseek-v4-pro,llama"]).needs(Subject())
    assert told.startswith("llama: no published model of this name; there are deepseek-v4-")


@pytest.mark.slow
def test_the_committed_page_is_what_the_command_makes(tmp_path, capsys):
    assert probe.main([FULL.name, "--out", str(tmp_path)]) == 0, capsys.readouterr().out
    facts = "\n## How this page was made\n"
    name = f"{FULL.name}.md"
    made, kept = ((folder / name).read_text().partition(facts)[0] for folder in (tmp_path, AUDITS))
    assert made == kept
    for picture in tmp_path.glob("*.svg"):
        assert picture.read_text() == (AUDITS / picture.name).read_text()
