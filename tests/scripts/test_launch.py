"""Whether a launcher started this process, and what it says of it."""

import re
from pathlib import Path

import pytest

from fathom.model.errors import ConfigError
from fathom.runtime.group.store import Launch
from fathom.scripts.cli import run_alone
from fathom.scripts.launch import launched

BY_HAND = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
TORCHRUN = {**BY_HAND, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}


def test_nothing_was_launched():
    assert launched({}) is None
    assert launched({"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "PATH": "/bin"}) is None


def test_by_hand_and_by_torchrun():
    assert launched(BY_HAND) == Launch(1, 4, 0, "10.0.0.1", 29500, kept_by_launcher=False, attempt=0)
    assert launched(TORCHRUN) == Launch(1, 4, 0, "10.0.0.1", 29500, kept_by_launcher=True, attempt=2)


def test_who_keeps_the_store():
    assert launched(BY_HAND | {"RANK": "0"}).keeps_store
    assert not launched(BY_HAND).keeps_store
    assert not launched(TORCHRUN | {"RANK": "0"}).keeps_store


def test_one_process_is_a_launch():
    assert launched(TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"}).size == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"RANK": "4"}, "RANK=.4.: want 0 to 3"),
        ({"RANK": "-1"}, "RANK=.-1.: want 0 to 3"),
        ({"RANK": "one"}, "RANK='one'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=.0.: want 1 to any number"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT=.65536.: want 1 to 65535"),
        ({"MASTER_PORT": ""}, "MASTER_PORT not set"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR not set"),
        ({"TORCHELASTIC_RESTART_COUNT": "x"}, "TORCHELASTIC_RESTART_COUNT"),
    ],
)
def test_a_broken_environment_is_named(change, said):
    with pytest.raises(ConfigError, match=said):
        launched(BY_HAND | change)


def test_all_that_is_missing_is_named():
    with pytest.raises(ConfigError, match="RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT not set"):
        launched({"WORLD_SIZE": "2"})


@pytest.mark.parametrize(("rank", "said"), [(0, "this script runs alone, and torchrun started 2 of it\n"), (1, "")])
def test_a_script_that_knows_no_ranks_does_its_work_once_or_not_at_all(monkeypatch, capsys, rank, said):
    places = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "MASTER_ADDR": "localhost", "MASTER_PORT": 29500}
    for name, value in places.items():
        monkeypatch.setenv(name, str(value))
    worked = []
    assert run_alone(lambda: worked.append(1) or 0) == 2
    assert capsys.readouterr().err == said
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert worked == []
    assert run_alone(lambda: worked.append(1) or 0) == 0
    assert worked == [1]


def test_every_script_runs_on_ranks_or_alone():
    scripts = Path(__file__).resolve().parents[2] / "scripts"
    for path in scripts.glob("*.py"):
        source = path.read_text(encoding="utf-8")
        if 'if __name__ == "__main__":' in source and path.stem != "fathom":  # which runs one of the others
            assert re.search(r"sys\.exit\((run_alone|run_on_ranks)\(main\)\)", source), path.name
