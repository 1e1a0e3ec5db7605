"""Dumps are messy: what a recording is understood as, and what is refused."""

import json

import pytest
import torch
from safetensors.torch import save_file

from fathom.model.config import ModelConfig
from fathom.model.errors import ConfigError
from fathom.probes.judge.recording import Recording, read_map
from fathom.runtime.options import DEMO

CONFIG = ModelConfig.from_file(DEMO / "config.json")  # 4 heads of 128, hidden 128, 4 streams, window entries 4 and 128
T = 12
TOKENS = torch.arange(T)


def draw(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def opened(tmp_path, tensors, names=None):
    path = tmp_path / "r.safetensors"
    save_file({"tokens": TOKENS} | {name: x.contiguous() for name, x in tensors.items()}, path)
    return Recording(path, CONFIG, names)


STREAMS, QUERY = draw(T, 4, 128), draw(T, 4, 128)


@pytest.mark.parametrize(
    ("name", "stored", "wanted", "told"),
    [
        ("layers.0.streams", STREAMS, STREAMS, ""),
        ("layers.0.streams", STREAMS[None], STREAMS, "without its batch axis"),
        ("layers.0.streams", STREAMS.flatten(1), STREAMS, ""),
        ("layers.0.streams", STREAMS.flatten(1)[None], STREAMS, "without its batch axis"),
        ("layers.1.attention.query", QUERY.transpose(0, 1), QUERY, "axes in the order [1, 0, 2]"),
        ("layers.1.attention.query", QUERY.transpose(0, 1)[None], QUERY, "axes in the order [1, 0, 2]"),
        ("layers.1.attention.query", QUERY.permute(1, 2, 0), QUERY, "axes in the order [2, 0, 1]"),
        ("layers.1.attention.entry", QUERY[:3, 0], QUERY[:3, 0], ""),
        ("embedded", STREAMS[:, 0].half(), STREAMS[:, 0].half().float(), ""),
    ],
)
def test_what_can_be_read_in_one_way_only_is_read_so_and_told(tmp_path, name, stored, wanted, told):
    recording = opened(tmp_path, {name: stored})
    assert torch.equal(recording.rows(name, None), wanted.double())
    assert told in " ".join(recording.told)
    assert bool(recording.told) == bool(told)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {"layers.0.streams": draw(T, 4, 127)},
            "'layers.0.streams' is [12, 4, 127]: in no way [t s hidden] = [12, 4, 128]",
        ),
        ({"layers.0.streams": draw(T - 1, 4, 128)}, "of 12 tokens"),
        ({"layers.0.streams": draw(T, 4, 128, 1, 1, 1)}, "in no way"),
        ({"layers.9.streams": STREAMS}, "no site among its tensors ('layers.9.streams': layer 9 is beyond"),
        ({"layers.0.attention.entry": QUERY[:3, 0]}, "layer 0 is SWA, which has no attention.entry"),
        ({"layers.0.streams": STREAMS.long()}, "is I64, want a float dtype"),
        (
            {"unheard": STREAMS},
            "no site among its tensors ('unheard': no site); scripts/exporters/README",
        ),
        ({"positions": torch.tensor([3, 2])}, "positions do not ascend"),
        ({"positions": torch.tensor([3, 12])}, "positions[1] is 12, want 0 to 11"),
    ],
)
def test_what_can_not_is_refused_in_one_line_that_names_it(tmp_path, tensors, message):
    with pytest.raises(ConfigError) as error:
        opened(tmp_path, tensors)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_axes_of_one_length_are_not_guessed(tmp_path):
    path, square = tmp_path / "r.safetensors", draw(4, 4, 4)
    save_file({"tokens": torch.arange(4), "layers.0.attention.comb": square}, path)
    assert torch.equal(
        Recording(path, CONFIG).rows("layers.0.attention.comb", None), square.double()
    )  # as it should be
    save_file({"tokens": torch.arange(4), "layers.0.attention.query": draw(128, 4, 4)}, path)
    with pytest.raises(ConfigError, match="in 2 ways"):
        Recording(path, CONFIG)


def test_tokens_must_be_there_and_in_the_vocabulary(tmp_path):
    path = tmp_path / "r.safetensors"
    save_file({"layers.0.streams": STREAMS}, path)
    with pytest.raises(ConfigError, match="has no tensor tokens"):
        Recording(path, CONFIG)
    save_file({"tokens": TOKENS + 1020, "layers.0.streams": STREAMS}, path)
    with pytest.raises(ConfigError, match=r"tokens\[4\] is 1024, want 0 to 1023"):
        Recording(path, CONFIG)


def test_a_layer_that_the_model_has_not_is_left_out_as_is_what_is_no_site(tmp_path):
    recording = opened(tmp_path, {"layers.9.streams": STREAMS, "layers.0.streams": STREAMS.clone(), "cache": draw(2)})
    assert sorted(recording.others) == ["cache", "layers.9.streams"]


def test_a_prompt_of_one_token_keeps_its_axis(tmp_path):
    path, comb = tmp_path / "r.safetensors", draw(1, 4, 4)
    for stored in (comb, comb[None]):
        save_file({"tokens": torch.tensor([3]), "layers.0.attention.comb": stored.contiguous()}, path)
        assert torch.equal(Recording(path, CONFIG).rows("layers.0.attention.comb", None), comb.double())


def test_tokens_may_have_another_name(tmp_path):
    path = tmp_path / "r.safetensors"
    save_file({"ids": TOKENS, "h": STREAMS}, path)
    recording = Recording(path, CONFIG, {"ids": "tokens", "h": "layers.0.streams"})
    assert torch.equal(recording.tokens, TOKENS)


def test_the_dtype_is_not_known_where_nothing_shows_it(tmp_path):
    """A table's rows, fp32 in all runs, and what every run has in a narrow format."""
    recording = opened(tmp_path, {"embedded": STREAMS[:, 0].bfloat16(), "logits": draw(T, 1024)})
    assert recording.run_dtype() is None
    fp32 = opened(tmp_path, {"embedded": STREAMS[:, 0].bfloat16(), "layers.0.streams": STREAMS})
    assert fp32.run_dtype() is torch.float32


def test_rows_of_some_positions(tmp_path):
    positions = torch.tensor([2, 5, 11])
    recording = opened(
        tmp_path, {"positions": positions, "layers.0.streams": STREAMS[positions], "embedded": STREAMS[:, 0]}
    )
    assert torch.equal(recording.rows("layers.0.streams", torch.tensor([5, 11])), STREAMS[[5, 11]].double())
    assert recording.rows("layers.0.streams", torch.tensor([5, 6])) is None
    assert torch.equal(recording.rows("embedded", torch.tensor([6])), STREAMS[[6], 0].double())


def test_logits_of_the_last_token_alone(tmp_path):
    last = draw(1, 1024)
    recording = opened(tmp_path, {"logits": last})
    assert recording.at("logits").tolist() == [T - 1]
    assert torch.equal(recording.rows("logits", torch.tensor([T - 1])), last.double())
    assert recording.told == ["logits [1, 1024] read as the last token's row"]


def test_their_names_are_mapped_and_others_left_out(tmp_path):
    mapping = tmp_path / "map.json"
    mapping.write_text(json.dumps({"model.layers.0.out": "layers.0.streams"}))
    recording = opened(tmp_path, {"model.layers.0.out": STREAMS, "kv_cache": draw(3)}, read_map(mapping))
    assert torch.equal(recording.rows("layers.0.streams", None), STREAMS.double())
    assert recording.others == ["kv_cache"]
    for names, message in (
        ({"x": "layers.0.streams"}, "has no tensor 'x', which --map names"),
        ({"kv_cache": "keys"}, "is no site"),
    ):
        with pytest.raises(ConfigError, match=message):
            opened(tmp_path, {"kv_cache": draw(3), "layers.0.streams": STREAMS}, names)
    mapping.write_text('{"a": 1}')
    with pytest.raises(ConfigError, match="want a JSON object"):
        read_map(mapping)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_dtype_of_a_run_is_what_its_numbers_fit_in_however_they_are_stored(tmp_path, dtype):
    tensors = {f"layers.{n}.streams": STREAMS.to(dtype).float().clone() for n in range(3)}
    recording = opened(tmp_path, tensors | {"layers.3.streams": STREAMS})  # one that was dumped before it was rounded
    assert recording.run_dtype() is dtype
