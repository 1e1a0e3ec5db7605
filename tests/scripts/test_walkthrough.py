"""The notebook runs from its first cell to its last, and its text says what comes out."""

import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "scripts" / "walkthrough.ipynb"


@pytest.mark.usefixtures("_in_a_folder_of_its_own")
def test_all_cells_run_in_order(capsys):
    cells = [cell for cell in json.loads(NOTEBOOK.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] for cell in cells)
    names = {}
    for cell in cells:
        exec("".join(cell["source"]), names)
    out = capsys.readouterr().out
    assert out.startswith("agrees None")
    assert "differs at layer 0 attention.mixed, position 0" in out
    assert "sink-dropped explains 100%: The softmax has no sink." in out
    told = dict(line.rsplit(maxsplit=1) for line in out.splitlines()[-7:])
    assert told.pop("attention.mixed") == "differs"
    assert set(told.values()) == {"agrees"}
    assert {"attention.query_unnormed", "attention.query_unrotated"} <= told.keys()


@pytest.fixture
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
