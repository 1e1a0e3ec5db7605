"""`scripts.bench gpu` without a GPU: what is counted, what is right, and what is asked of a device in which order."""

import functools
import json
import operator

import pytest
import torch

from fathom.kernels.formats import rows
from fathom.kernels.ops import CPU, REFERENCE
from fathom.kernels.triton_ops import TRITON
from fathom.model.config import ModelConfig
from fathom.model.errors import CapacityError
from fathom.runtime.plan.gpus import GPUS
from fathom.scripts.bench import command, gpu, gpu_layers, gpu_read, turns
from fathom.scripts.bench import gpu_cases as cases
from fathom.scripts.bench.gpu_cases import FLASH, MODELS, PRO, ROOFS, Cost, Draw, Tolerance
from fathom.scripts.bench.turns import Rounds
from tests.by_hand import ROOT
from tests.grids import on_demand
from tests.kernels.compilation import WITH_KERNELS

H200 = ROOFS["H200"]
ON_CPU = torch.device("cpu")
CONFIGS = ROOT / "model" / "published"
N = 1 << 18  # entries of a CSA layer at 1M
EVERY = cases.cases(command.GPU_PARTS)
SMALL = FLASH._replace(
    name="small", hidden=256, heads=2, q_lora=128, o_groups=2, o_lora=128, index_topk=8, experts=8, intermediate=128,
)  # fmt: skip


def us(cost):
    return cost.floor_us(H200)


def test_costs_by_hand():
    q = 64 * (2 * 128 + 4)
    fp8, fp4 = (cases.scores_cost(form, N, 1, stored=False) for form in ("fp8", "fp4"))
    assert fp8.bytes == 132 * 262144 + q == 34_603_008 + 16_640
    assert us(fp8) == pytest.approx(8.05, abs=0.01)
    assert us(fp4) == pytest.approx(5.43, abs=0.01)  # 4.29 GFLOP in BF16 take longer than its bytes
    stored = cases.scores_cost("bf16", N, 3, stored=True)
    assert stored == Cost(256 * N + 3 * q + 4 * 3 * N, 2 * 3 * 64 * 128 * N)
    assert cases.weight_bytes("fp8", 256, 300) == 256 * 300 + 2 * 3
    assert cases.weight_bytes("fp4", 64, 96) == 64 * 96 // 2 + 64 * 3
    assert cases.linear_cost("bf16", 6, 5, 7, groups=2) == Cost(2 * 6 * 5 + 2 * 7 * (10 + 6), 2 * 7 * 6 * 5)
    bf16 = cases.attention_cost(64, 1, 512, 512, "bf16")
    assert bf16 == Cost(1024 * 512 + 2 * 512 * 128 + 2 * 2 * 64 * 512, 4 * 64 * 512 * 640)
    assert cases.hyper_costs(7168, 3)["expand"] == Cost(2 * 3 * 7168 * (4 + 1 + 4), 0)
    read = [
        round((cases.experts_cost(PRO, t).bytes - t * 7168 * 6) / (3 * 3072 * 7168 * 17 / 32)) for t in (1, 8, 8192)
    ]
    assert read == [6, 45, 384]  # 384 (1 - (63 / 64)^8) = 45.4
    whole = cases.experts_cost(PRO, 8)
    up, down = cases.halves_costs(PRO, 8, 8)
    matrices = whole.bytes - 8 * 7168 * 6
    assert 8 * (up.bytes + down.bytes) == matrices + 8 * 8 * (2 * (7168 + 6 * 384) + 2 * 6 * 3072 + 4 * 896)
    assert 8 * (up.flops + down.flops) == whole.flops
    assert Cost(43, 79).floor_us((43e-6, 79e-6 / 2)) == pytest.approx(2e12)  # the longer of the two
    assert Cost(int(4.3e6), int(790e6)).at(of_bytes=0.5) == Cost(0, int(790e6)).at(of_flops=0.5) == 2.0


def test_a_layer_of_v4_pro_takes_what_was_computed_by_hand():
    """Floors in us on an H200 of one token after 1M, to what the table of the design rounds away."""
    csa, hca = (cases.layer_costs(PRO, kind, (1 << 20) - 1, 1) for kind in ("CSA", "HCA"))
    wanted = {"query": 26.0, "KV": 0.9, "compressor": 6.8, "attention": 0.4, "output": 43.0, "experts": 49.0}
    wanted |= {"shared expert": 15.4, "index scores": 5.43}
    for name, floor in wanted.items():
        parts = [us(cost) for part, cost in csa.items() if part == name or part.startswith(f"{name}, ")]
        assert sum(parts) == pytest.approx(floor, abs=0.06), name
    assert us(hca["attention"]) == pytest.approx(2.8, abs=0.05)
    assert sum(map(us, csa.values())) == pytest.approx(154 + 1.3, abs=1)  # by hand index keys were multiplied in FP8
    assert sum(map(us, hca.values())) == pytest.approx(143, abs=1)


def test_tolerances_bite():
    one = torch.tensor([1.0, -2.0])
    assert Tolerance().error(one, one) == 0
    assert Tolerance().error(one, one + 1e-6) == float("inf")
    assert Tolerance(of_each=0.01).error(one * 1.02, one) == pytest.approx(2, rel=1e-4)
    assert Tolerance(of_rms=0.1).error(one + torch.tensor([0.0, 0.1]), one) == pytest.approx(0.1 / 2.5**0.5 / 0.1)
    assert Tolerance(differing=0.25).error(torch.tensor([1.0, 5.0]), torch.ones(2)) == 2
    assert Tolerance(of_each=9).error(torch.tensor([1.0, float("nan")]), one) == float("inf")
    assert Tolerance(of_each=9).error(torch.ones(3), one) == float("inf")


def test_a_selection_is_judged_by_its_scores():
    scores = torch.tensor([[5.0, 1.0, 4.0, 3.999, 9.0]])

    def off(picked, first=15):  # four entries of four tokens are seen
        return cases.picked_off(scores, torch.tensor([picked], dtype=torch.int32), first, 4)

    assert off([0, 2]) == 0
    assert off([0, 3]) == pytest.approx(0.001 / 5 * 2**12, rel=1e-3)  # as good as equal
    assert off([0, 1]) > 1
    for wrong in ([2, 0], [0, 0], [0, 4], [0, -1]):
        assert off(wrong) == float("inf"), wrong
    assert off([0, 1, -1], first=7) == 0
    assert off([0, 1, 2], first=7) == float("inf")


def test_a_rotated_norm_may_be_a_step_off_before_its_pairs_nearly_cancel():
    """A norm's factor that is one ulp of fp32 off is right, by however much numbers that cancel move; no fault is."""
    g = torch.Generator().manual_seed(0)
    x, cos, sin = torch.randn(256, 128, 512, generator=g).bfloat16(), *torch.rand(2, 256, 32, generator=g)
    given = x, None, 1e-6, cos, sin, 0
    normed = x.float() * torch.nextafter((x.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt(), torch.ones(1))
    ours = REFERENCE.rotate(normed.bfloat16(), cos, sin)

    def off(ours):
        return cases._norm_rotate_off(ours, [], list(given))

    assert cases.STEP.error(ours, REFERENCE.norm_rotate(*given)) > 10
    assert 0.3 < off(ours) <= 1
    assert off(REFERENCE.rotate(normed.bfloat16(), cos, -sin)) > 10
    assert off(REFERENCE.rotate(normed.bfloat16(), cos.roll(1, 0), sin.roll(1, 0))) > 10
    assert off(ours * 1.03) > 1
    assert off(ours.where(ours < 4, torch.nan)) == float("inf")


def test_parts_are_the_files_of_kernels():
    parts = {case.part for case in EVERY}
    assert parts == WITH_KERNELS - {"shard_middle", "exchange"}  # a part of shard; what one rank has no use for
    assert parts | {gpu.LAYERS, gpu.WHOLE} == set(command.GPU_PARTS)
    assert tuple(shape.name for shape in MODELS) == command.GPU_MODELS
    assert len({(case.part, case.label) for case in EVERY}) == len(EVERY)
    assert {case.part for case in EVERY if case.compiled} == parts
    assert all(case.cost.bytes > 0 for case in EVERY)


@pytest.mark.parametrize("shape", MODELS, ids=lambda shape: shape.name)
def test_shapes_are_the_published_ones(shape):
    path = CONFIGS / f"Deep{'Seek'}-{shape.name}.json"
    published, ours = json.loads(path.read_text("utf-8")), gpu_layers.config_json(shape)
    layers = {"compress_ratios", "num_hash_layers", "num_hidden_layers", "num_nextn_predict_layers"}
    assert {name for name in ours if published[name] != ours[name]} <= layers
    assert [kind.name for kind in ModelConfig.from_json(ours, "x").layer_kinds] == ["CSA", "HCA"]


def test_every_case_makes_its_inputs():
    """At their real sizes, which are allocated and not drawn: the pages of most are never there."""
    for case in EVERY:
        given = case.given(Draw(ON_CPU, 0, values=False))
        assert len(given) == len(case.inputs)
        assert any(isinstance(part, torch.Tensor | tuple) for part in given), case.label


def test_drawn_weights_and_rows_are_of_unit_size():
    draw = Draw(ON_CPU, 0)
    x = draw.normal(64, 512)
    for form in ("bf16", "fp8", "fp4"):
        y = CPU.linear(x, draw.weight(form, 256, 512)).float()
        assert 0.5 < y.square().mean().sqrt() < 2, form
    stored = [("fp8", 512), ("codes", 512), ("fp8", 128), ("fp4", 128)]
    for held in (draw.rows(form, 64, width) for form, width in stored):
        assert 0.5 < rows.read(held, 0, 64).square().mean().sqrt() < 2, type(held)
    assert all(len(set(row)) == 6 for row in draw.experts_of(50, 6, 8).tolist())
    chosen = draw.chosen(9, 5, 64)
    assert chosen.max() < 64
    tokens = draw.tokens(2000, 1000)
    assert tokens.max() < 1000
    assert len(set(tokens.tolist())) > 800, "of all, 865 are drawn"
    assert (chosen[:, 1:] > chosen[:, :-1]).all()


CHEAP = [case for case in EVERY if case.compiled and case.part in {"norm", "quantise", "swiglu", "streams", "banks"}]


@pytest.mark.parametrize("case", CHEAP, ids=lambda case: f"{case.part}, {case.label}")
def test_cases_are_right_in_the_interpreter(case):
    """The cheapest ones as they would be checked on a device: inputs, op, oracle and tolerance fit together."""
    assert case.off(*case.build(Draw(ON_CPU, 0))(), Draw(ON_CPU, 0)) <= 1


ONE_TOKEN = [
    case for case in EVERY
    if case.part in {"compress", "indexer", "attention", "linear", "hyper"} and isinstance(case.op, str)
    and (case.compiled or ("1 tokens at 4K" in case.label and case.op == "attend"))
]  # fmt: skip


@pytest.mark.parametrize("case", ONE_TOKEN, ids=lambda case: f"{case.part}, {case.label}")
def test_cases_hold_the_ops_of_the_cpu_to_be_right_and_a_wrong_one_to_be_wrong(case):
    for scale, right in ((1.0, True), (-1.0, False)):
        given = case.given(Draw(ON_CPU, 0))
        given = [
            int(part) if getattr(part, "ndim", 1) == 0 else part for part in given
        ]  # the CPU's have it on the host
        given[0] *= scale
        off = case.off(getattr(CPU, case.op)(*given, **case.options), given, Draw(ON_CPU, 0))
        assert (off <= 1) == right


class FakeDevice:
    """Runs everything on the CPU; the k-th repetition takes k us for each call."""

    device, name = ON_CPU, "NVIDIA H200"

    def __init__(self):
        self.calls, self.times, self.only_read = [], 0, None

    def captured(self, calls):
        self.calls = calls
        return lambda: [run() for run in calls], "" if len(calls) > 1 else "of its own will"

    def captured_step(self, model, state):
        return lambda token: model.logits(model(torch.tensor([token]), state))

    def reading(self, nbytes, copies):
        self.read, self.only_read = (nbytes, copies), lambda: None
        return self.only_read

    def us(self, work):
        if work is self.only_read:
            return 0.5 * len(self.calls)
        self.times += 1
        work()
        return float(self.times * len(self.calls))

    wall_us = us


@pytest.mark.parametrize(("nbytes", "copies"), [(4_300_000, 8), (50_000_000, 2), (10**9, 1)])
def test_a_case_is_checked_then_timed_on_inputs_of_its_own(nbytes, copies):
    def double(wrong):
        given = (lambda draw: draw.normal(4, dtype=torch.float32),)
        return cases.Case(
            "norm", "double", Cost(nbytes, 8), (lambda x: x * wrong, lambda x: x + x), given, Tolerance(), us=2.5
        )

    device = FakeDevice()
    row = turns.run(gpu.timed(double(2), device, Rounds.exactly(3)))
    assert len({run()[1][0].sum() for run in device.calls}) == len(device.calls) == copies
    assert device.read == (nbytes, copies)
    assert turns.values(row, gpu.READING, "us") == [0.5] * 3
    assert row["case"] == ("double" if copies > 1 else "double, launched: of its own will")
    assert turns.values(row, "floor", "us") == pytest.approx([1e6 * nbytes / 4.3e12] * 3)
    assert [target.reached for target in turns.asked([row])] == [False]  # 3 us, 2.5 asked for
    wrong = turns.run(gpu.timed(double(3), device, Rounds.exactly(3)))
    assert turns.differs(wrong)
    assert wrong["rounds"] == []
    device.name = "NVIDIA GeForce RTX 4090"
    assert list(gpu.timed(double(2), device, Rounds.exactly(1)).sides) == ["triton", gpu.READING]


@pytest.mark.parametrize("ops", [REFERENCE, *on_demand((TRITON,))], ids=lambda ops: ops.name)
def test_layers_run_after_every_context_from_the_same_cache(ops):
    contexts = {"short": 130, "long": 259}  # with an HCA entry and with two
    rows_of = [turns.run(case) for case in gpu_layers.layers(SMALL, FakeDevice(), ops, Rounds.exactly(2), contexts, 6)]
    assert [row["case"] for row in rows_of] == [
        f"small, {kind}, {tokens} tokens at {context}" + (", launched: of its own will" if tokens == 1 else "")
        for kind in ("CSA", "HCA") for context in contexts for tokens in (1, 6)
    ]  # fmt: skip
    assert all(len(turns.values(row, "triton", "us")) == 2 for row in rows_of)
    floor = sum(map(us, cases.layer_costs(SMALL, "CSA", 130, 1).values()))
    assert turns.values(rows_of[0], "floor", "us") == pytest.approx([floor] * 2)


def test_a_layer_runs_by_the_kernels_too():
    row = turns.run(next(gpu_layers.layers(SMALL, FakeDevice(), TRITON, Rounds.exactly(1), {"short": 130}, 6)))
    assert row["case"] == "small, CSA, 1 tokens at short, launched: of its own will"
    assert len(turns.values(row, "triton", "us")) == 1


@pytest.mark.parametrize("nbytes", [1, 4096, 3 * 4096 + 4])
def test_a_launch_that_only_reads_reads_every_number_once(nbytes):
    size = gpu_read.room(nbytes)
    assert nbytes <= 4 * size < nbytes + 4096
    data = torch.randint(-(1 << 31), (1 << 31) - 1, (size,), generator=torch.Generator().manual_seed(nbytes)).int()
    parts = gpu_read.read(data).tolist()
    assert parts == [functools.reduce(operator.xor, block.tolist()) for block in data.split(1024)]


def test_a_whole_model_runs_its_prompt_and_then_its_tokens():
    device, sizes = FakeDevice(), gpu_layers.Sizes(after=9, chunk=6, vocabulary=256)
    rows_of = [turns.run(case) for case in gpu_layers.whole(device, CPU, Rounds.exactly(1), 4, SMALL, sizes)]
    assert [row["case"] for row in rows_of] == [
        "small, 4 layers, 6 tokens after 9",
        "small, 4 layers, 1 token, eager after 21",  # a call that is not counted, and one that is
        "small, 4 layers, 1 token, captured after 23",
    ]
    assert all(len(turns.values(row, "triton", "us")) == 1 for row in rows_of)
    kinds = ["SWA", "SWA", "CSA", "HCA"]
    floors = [sum(map(us, cases.layer_costs(SMALL, kind, 21, 1).values())) for kind in kinds]
    head = us(cases.linear_cost("bf16", 256, SMALL.hidden, 1))
    assert turns.values(rows_of[1], "floor", "us") == pytest.approx([head + sum(floors)])


def test_as_many_layers_as_the_plan_has_room_for():
    h200, h100 = (int(GPUS[name].gib * 2**30) for name in ("h200", "h100"))
    found = [gpu_layers.fitting(FLASH, memory, 12800, 4096) for memory in (h200, h100, 1 << 40)]
    assert 36 <= found[0] < 43  # 36 layers and their graph took 132.4 GB of an H200 on the first run
    assert 19 <= found[1] < found[0]
    assert found[2] == 43
    with pytest.raises(CapacityError, match="not one layer of V4-Flash fits"):
        gpu_layers.fitting(FLASH, 1 << 30, 12800, 4096)


def test_the_page_without_a_device(monkeypatch, tmp_path):
    def call(function, parts, environment):
        assert function is gpu.compiled
        assert parts == ["topk", "indexer", "layers"]
        assert environment["TRITON_INTERPRET"] is None
        found = {"part": "topk", "case": "a", "kernel": "_whole", "cubin": 9, "stack": 0}
        taken = ((90, 100, 40), (90, 300, 32), (100, 200, 64))
        kernels = [found | {"capability": c, "shared": s, "registers": r} for c, s, r in taken]
        large = {"part": "p", "kernel": "k", "capability": 90, "shared": 1 << 20, "registers": 255, "stack": 8}
        return [*kernels, large]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu, "call", call)
    assert command.main(["gpu", "--only", "topk", "indexer", "layers", "--out", str(tmp_path)]) == 0
    page = (tmp_path / "gpu-kernels.md").read_text("utf-8")
    assert page.split("\n\n")[1].startswith(
        "**Of this code NOTHING was measured on a GPU: the machine that wrote this page has"
    )
    assert "| topk: `_whole` | 40 | 0 | 300 | 64 | 0 | 200 |" in page
    assert "| p: `k` | 255 | 8 | 1048576 | NOT compiled | NOT compiled | NOT compiled |" in page
    assert "2 kernels do NOT all fit" in page
    assert "1 kernels have one (`k`)" in page
    assert "| indexer | scores, fp8 keys, one token at 1M | 35.67 | 4.29 | 8.29 | 10.6 | 4.46 | 20 |" in page
    assert "| whole layers | V4-Pro, CSA, 1 tokens at 1M | 658.5 |" in page
