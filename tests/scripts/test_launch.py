"""Whether a launcher started this process, and what it says of it."""

import pytest

from model.errors import ConfigError
from runtime.store import Launch
from scripts.launch import launched

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
