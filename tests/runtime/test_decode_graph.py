"""Which runs decode by a graph, and how one is captured: torch.cuda is a stand-in that notes what is asked of it."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from fathom.kernels.ops import CPU
from fathom.model.checkpoint.mtp import Head
from fathom.model.errors import ConfigError
from fathom.model.llama.config import LlamaConfig
from fathom.model.observe import sites
from fathom.model.observe.observer import listening
from fathom.model.transformer import Transformer
from fathom.runtime import graph
from fathom.runtime.decoding import LISTENED, check_graph, decoding
from fathom.runtime.generate import Generation, generate
from fathom.runtime.graph import Captured
from fathom.runtime.load import load, read_config
from fathom.runtime.options import DEMO, RunOptions
from fathom.runtime.sampling import Sampling
from tests.llama_configs import LLAMA_3_2_1B


class FakeStep:
    model = SimpleNamespace(device="cuda:1")

    def __init__(self, log):
        self.log = log

    def place(self, token):
        self.log.append(("place", token))

    def run(self):
        self.log.append("run")

    def finish(self):
        self.log.append("finish")
        return torch.ones(3)


class FakeCuda:
    def __init__(self, log):
        self.log = log

    def CUDAGraph(self):
        return SimpleNamespace(replay=lambda: self.log.append("replay"))

    def device(self, device):
        assert device == "cuda:1"
        return contextlib.nullcontext()

    def Stream(self):
        return SimpleNamespace(wait_stream=lambda other: self.log.append(("side waits", other)), side=True)

    def current_stream(self):
        return SimpleNamespace(wait_stream=lambda _: self.log.append("waits for side"))

    @contextlib.contextmanager
    def noted(self, name):
        self.log.append(name)
        yield
        self.log.append(f"end of {name}")

    def stream(self, side):
        assert side.side
        return self.noted("side stream")

    def graph(self, _, capture_error_mode):
        assert capture_error_mode == "thread_local"
        return self.noted("capture")


def test_a_step_is_warmed_up_aside_captured_once_and_replayed(monkeypatch):
    log = []
    monkeypatch.setattr(graph.torch, "cuda", FakeCuda(log))
    step = Captured(FakeStep(log))
    flat = [entry[0] if isinstance(entry, tuple) else entry for entry in log]
    assert flat == [
        *("place", "side waits", "side stream", "run", "run", "run", "end of side stream", "waits for side"),
        *("capture", "run", "end of capture"),
    ]
    log.clear()
    assert step(7).shape == (3,)
    assert log == [("place", 7), "replay", "finish"]


def test_a_run_that_cannot_have_a_graph_says_why():
    model = load(DEMO, RunOptions()).model
    state = model.new_state(16, 8)
    for asked, why in ((False, "--no-graph"), (None, "--device cpu: CUDA graphs are of CUDA devices")):
        by = decoding(model, state, graph=asked, steps=3)
        assert (by.how, by.why_eager) == ("eager", why)
    with pytest.raises(ConfigError, match="--graph: --device cpu"):
        decoding(model, state, graph=True, steps=3)


def test_a_graph_is_what_a_gpu_decodes_by_where_there_can_be_one(monkeypatch):
    """Unasked; a run that cannot have one says why, where asking for one is refused with the same words."""
    ops = CPU._replace(name="triton")
    model, state = load(DEMO, RunOptions(), ops).model, object()
    monkeypatch.setattr(Transformer, "device", torch.device("cuda"))
    monkeypatch.setattr(graph, "TRITON", ops)
    monkeypatch.setattr(graph, "Step", lambda model, state: (model, state))
    monkeypatch.setattr(graph, "Captured", lambda step: ("captured", *step))
    head = SimpleNamespace(kind=Head.MTP)
    for asked in (None, True):
        monkeypatch.setattr(graph, "refusal", lambda _: None)
        assert decoding(model, state, graph=asked, steps=3) == ("graph", None, ("captured", model, state))
        assert decoding(model, state, graph=asked, steps=0)[:2] == ("eager", "no token to decode")
        assert decoding(model, state, graph=False, steps=3)[:2] == ("eager", "--no-graph")
        with listening(model, {sites.LOGITS: lambda *_: None}):
            assert_eager(model, state, asked, LISTENED)
        for given, why in (
            ({"head": head}, "--draft mtp: a draft head hears nothing of a captured call"),
            ({}, "--kv coda: a captured call writes full caches only"),
        ):
            monkeypatch.setattr(graph, "refusal", lambda _, why=why: why)
            assert_eager(model, state, asked, why, **given)


def assert_eager(model, state, asked, why, **given):
    if asked:
        with pytest.raises(ConfigError, match=f"--graph: {why}"):
            decoding(model, state, graph=asked, steps=3, **given)
    else:
        assert decoding(model, state, graph=asked, steps=3, **given)[:2] == ("eager", why)


def test_generation_decodes_by_the_step_it_is_given():
    model = load(DEMO, RunOptions()).model
    state, seen = model.new_state(16, 8), []

    def step(token):
        seen.append(token)
        return torch.eye(model.config.vocab_size)[5 + len(seen)]

    options = {"eos": [], "limit": 4, "sampling": Sampling(), "progress": lambda _: None}
    out = list(generate(model, state, [0, 271], record=Generation(), decode=step, **options))
    assert out[1:] == [6, 7, 8]
    assert seen == out[:-1]
    assert state.position == 2


def test_what_excludes_a_graph_is_known_before_weights_are_read():
    config = read_config(DEMO, RunOptions())
    fused = CPU._replace(name="triton")
    check_graph(config, "cuda", fused)
    for device, ops, why in (("cpu", fused, "--graph: --device cpu"), ("cuda", CPU, "--graph: --ops cpu")):
        with pytest.raises(ConfigError, match=why):
            check_graph(config, device, ops)
    with pytest.raises(ConfigError, match="--graph: a llama model"):
        check_graph(LlamaConfig.from_json(LLAMA_3_2_1B, "config.json"), "cuda", fused)
