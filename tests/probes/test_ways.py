"""The ways that ops have for calls of some sizes: what the probes construct reaches each of them.

An op of the backend cpu may do otherwise with few tokens than with many, and a probe that constructs calls of one size
sees one of its ways. So each statement of each op has to run in these calls, but those that are named here with why.
What is compiled is not looked into.
"""

import ast
import inspect
import sys
from pathlib import Path

import pytest
import torch

from fathom.kernels import attention, experts, indexer
from fathom.kernels.indexer.bound import native
from fathom.kernels.lanes import PAIRS
from fathom.kernels.ops import CPU, backend
from fathom.probes import bits, ops
from fathom.probes.probe import silent
from fathom.probes.recall import constructed_attention, constructed_candidates, constructed_selections
from fathom.probes.subject import Subject

KERNELS = Path(inspect.getfile(attention)).parents[1]
ELSEWHERE = {"attend_grouped", "attend_banks", "attend_codes"}  # of Llama and of variants
COMPILED = {"loop", "compiled", "overload", "intrinsic"}
PLANS = {"_merging", "_bounding", "scored", "columns"}  # parts of scratch sizes, which no call asks for
OF_RANKS = {"pack_fp8", "unpack_fp8"}  # what one rank alone never does: `tests/kernels/test_quantise.py`
# Statements that no size of a call leads to, by how they begin, and why.
UNREACHED = {
    "if bias is not None: logits += bias": "variants alone have biases",
    "return slots.bias[index]": "variants alone have biases",
    "there = Softmax(state.peak.clone()": "codes and bases are of variants",
    "_attend_entries(there, inside": "codes and bases are of variants",
    "del inside": "codes and bases are of variants",
    "shrink = torch.exp(state.peak": "codes and bases are of variants",
    "state.values[0].mul_(shrink": "codes and bases are of variants",
    "state.peak.copy_(there.peak)": "codes and bases are of variants",
    "if most == 0: return": "no entry is visible",
    "if most <= width: best = torch.arange(width": "no more entries than are selected: nothing is scored",
    "if some.numel(): found[some] = _best(q[some]": "scores that are all nearly the same",
    "if count < 2 * k: return torch.full": "fewer entries than its first look is of",
    "if not chosen: return torch.zeros": "no expert at all",
    "if not summed: return of_pairs(": "experts of one rank among several",
    "if any((pieces_of(x, matrix)": "experts of which bfloat16 holds some and not others",
    "if watched(): note_read": "the probe `load` watches what is read",
    "else of isinstance(stacked, Apart): addresses": "matrices that are stacked, as on a GPU",
    "if not PAIRS or x.dtype != torch.bfloat16: return": "fp32, or a processor that does not multiply bfloat16",
    "if not held_in_bfloat16(weight): return": "numbers that bfloat16 does not hold",
    "return _transformed(x, 0": "a part of another op, which runs as one",
    "return _simulated(x, group, E2M1)": "a part of another op, which runs as one",
}
BOUNDED = {"_best_bounded", "_reached", "_pieces", "_visible", "_scores_of", "_grouped"}  # where int8 is native
IN_PAIRS = ("return NARROW",)  # where the processor multiplies bfloat16


def constructed(subject):
    list(constructed_selections(subject.model, 0))
    constructed_attention(subject.model, 0)
    constructed_candidates(subject.model, 0)


def few(subject):
    bits.QUICK.few(subject, silent)


def few_and_edges(subject):
    few(subject)
    ops.QUICK.measure(subject, silent)


def folders():
    """Folders of the ops of V4 that have an implementation of their own for a CPU."""
    own = {op: made for op, made in CPU._asdict().items() if op not in {"name", *ELSEWHERE} and backend(made) == "cpu"}
    return {(made if inspect.isfunction(made) else type(made)).__module__.split(".")[-2] for made in own.values()}


def statements(path):
    """Function, first and last line, and text of all simple statements in plain Python, behind what they hang on."""
    text = path.read_text(encoding="utf-8")

    def within(body, name, hangs_on=""):
        for node in body:
            if isinstance(node, ast.FunctionDef):
                decorated = {ast.unparse(one).partition("(")[0].rpartition(".")[2] for one in node.decorator_list}
                if not (decorated & COMPILED or node.name.endswith("_scratch") or node.name in PLANS | OF_RANKS):
                    yield from within(node.body, node.name)
            elif isinstance(node, ast.If):
                condition = ast.unparse(node.test)
                yield from within(node.body, name, f"if {condition}: ")
                yield from within(node.orelse, name, f"else of {condition}: ")
            elif isinstance(node, ast.For | ast.While | ast.With):
                yield from within(node.body, name, hangs_on)
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                continue
            elif name and not isinstance(node, ast.Assert):
                assert not hasattr(node, "body"), f"{path.name}: {name}: a {type(node).__name__} is not looked into"
                yield name, node.lineno, node.end_lineno, hangs_on + ast.get_source_segment(text, node)

    yield from within(ast.parse(text).body, "")


def unreached(run, of):
    """Statements of the ops of these folders that do not run, in words."""
    files = {str(path): set() for folder in of for path in (KERNELS / folder).glob("cpu*.py")}

    def trace(frame, event, argument):
        del event, argument
        ran = files.get(frame.f_code.co_filename)
        if ran is None:
            return None

        def line(frame, event, argument):
            del event, argument
            ran.add(frame.f_lineno)
            return line

        return line

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run(Subject())
    finally:
        sys.settrace(before)
    return [
        f"{Path(file).parent.name}: {name}: {text.splitlines()[0]}"
        for file, ran in files.items()
        for name, low, high, text in statements(Path(file))
        if not ran & set(range(low, high + 1))
        and not text.startswith(tuple(UNREACHED))
        and (name not in BOUNDED or native(torch.device("cpu")))
        and (PAIRS or not text.startswith(IN_PAIRS))
    ]


SCORED = {"attention", "indexer"}  # whose calls are constructed: the demo selects few of few entries


def test_every_way_to_attend_and_to_select_is_in_what_is_constructed():
    assert unreached(constructed, SCORED) == []


def test_every_way_of_the_other_ops_is_in_calls_of_few_tokens_and_of_many():
    assert folders() >= {"linear", "experts", "hyper", "norm", "compress", "gate", "swiglu", "quantise", "rope"}
    assert unreached(few_and_edges, folders() - SCORED) == []


@pytest.mark.parametrize(
    ("module", "run", "tokens", "lost"),
    [
        (attention.cpu, constructed, 40, "attention: _attend_gathered"),
        (attention.cpu, constructed, 0, "attention: attend: if t <= FEW and dense_up_to == DENSE_UP_TO"),
        (indexer.cpu, constructed, 40, "indexer: _best: "),
        (indexer.cpu, constructed, 0, "indexer: select: if t <= FEW"),
        (experts.cpu, few, 200, "experts: experts: if t > FEW"),
        (experts.cpu, few, 0, "experts: experts: _experts"),
    ],
)
def test_a_threshold_that_puts_a_way_out_of_reach_is_seen(module, run, tokens, lost, monkeypatch):
    monkeypatch.setattr(module, "FEW", tokens)
    assert any(statement.startswith(lost) for statement in unreached(run, {lost.partition(":")[0]}))


def test_no_statement_is_excused_that_is_not_there():
    texts = [text for folder in folders() for path in (KERNELS / folder).glob("cpu*.py")
             for _, _, _, text in statements(path)]  # fmt: skip
    assert [begin for begin in UNREACHED if not any(text.startswith(begin) for text in texts)] == []
