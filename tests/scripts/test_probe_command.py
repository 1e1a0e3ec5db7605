import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from fathom.model.errors import CheckpointError
from fathom.model.ranks.ranks import Group
from fathom.probes import catalogue, faults, kv_variants, needle
from fathom.probes.catalogue import EXPERIMENTS, FULL
from fathom.probes.fault import Fault
from fathom.probes.faults import FAULTS
from fathom.probes.finding import broken as broken_finding
from fathom.probes.probe import attempt, silent
from fathom.probes.subject import Subject
from fathom.runtime.options import DEMO
from fathom.scripts import paths, probe
from fathom.scripts.cli import run
from tests.fake_probes import FAILING, FAKES, HOLLOW, PASSING, UNJUDGED
from tests.llama_model import oracle
from tests.make_checkpoint import tiny_config, write_checkpoint

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = probe.AUDITS  # before the tests put their own in place
FAULT = Fault("nothing-wrong", "Nothing is changed.", "the tests")
HOPELESS = Fault("hopeless", "Nothing.", "the tests", inapplicable=lambda config: f"{config.vocab_size} tokens")


@pytest.fixture(autouse=True)
def audits(monkeypatch, tmp_path):
    """Fake probes and faults, and a folder of this test in the place of the repository's audits."""
    monkeypatch.setattr(catalogue, "FULL", FAKES)
    monkeypatch.setattr(catalogue, "QUICK", tuple(replace(probe, summary="Quick.") for probe in FAKES))
    monkeypatch.setattr(faults, "FAULTS", {fault.name: fault for fault in (FAULT, HOPELESS)})
    monkeypatch.setattr(probe, "AUDITS", tmp_path / "audits")
    return tmp_path / "audits"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(directory, tiny_config(), seed=0)
    return directory


def main(*argv):
    return probe.main([str(arg) for arg in argv])


def refused(capsys, *argv):
    assert run(lambda: main(*argv)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1, err
    return err.strip()


def foot(path):
    return dict(line.split(": ", 1) for line in path.read_text().split("```yaml\n")[1].splitlines()[:-1])


@pytest.mark.parametrize("fake", FAKES, ids=lambda fake: fake.name)
def test_the_exit_status_says_whether_all_passed(fake, capsys):
    assert main(fake.name) == (0 if fake is PASSING else 1)
    out, _ = capsys.readouterr()
    verdict = "pass" if fake is PASSING else "vacuous" if "hollow" in fake.name else "fail"
    assert out.startswith(f"{verdict:8} {fake.name} ")


def test_all_runs_each_probe_once_in_order(capsys):
    assert main("failing", "all", "passing") == 1
    out, err = capsys.readouterr()
    lines = out.splitlines()
    names = [line.split()[1] for line in lines if line.split()[0] in ("pass", "fail", "vacuous")]
    assert names == [probe.name for probe in FAKES]
    assert lines[-1].startswith("1 of 6 probes passed in ")
    told = [line.strip() for line in lines if line.startswith("    ") and line[4:].startswith(("fail", "vacuous"))]
    again = [line.partition(": ")[2] for line in lines[-len(told) - 2 : -2]]
    assert told == again, "what failed stands at the end once more"
    assert lines[-2].startswith("unjudged: Fail: nothing was judged")
    assert len(err.splitlines()) == 6, "a line for each page"


def test_all_leaves_out_what_does_not_apply_and_says_so(capsys, monkeypatch):
    inapplicable = replace(FAILING, lacks="the model has no such layer")
    monkeypatch.setattr(catalogue, "FULL", (PASSING, inapplicable))
    assert main("all") == 0
    out, _ = capsys.readouterr()
    assert out.splitlines()[0].split(maxsplit=3) == ["left", "out", "failing", "the model has no such layer"]
    assert len(out.splitlines()) == 2
    assert main("failing") == 1, "asked for by name, it has shown nothing"
    assert "vacuous" in capsys.readouterr().out


def test_a_probe_that_breaks_down_is_a_row_that_fails_and_the_others_go_on(capsys, monkeypatch, audits):
    broken = replace(FAILING, name="broken", breaks=RuntimeError("no [/x] in\n\x1b[31m /a/home/file.py"))
    monkeypatch.setattr(
        catalogue, "FULL", (broken, replace(broken, name="named", breaks=CheckpointError("a")), PASSING)
    )
    assert main("all") == 1
    lines = capsys.readouterr().out.splitlines()
    cause = r"error: RuntimeError: no [/x] in; \x1b[31m file.py"
    assert lines[0].startswith("error    broken ")
    assert lines[1] == f"    {cause}"
    assert re.fullmatch(r" +where: tests/fake_probes\.py:\d+", lines[2])
    assert lines[3].startswith("error    named ")
    assert lines[6].startswith("pass     passing ")
    assert lines[7:9] == [f"broken: {cause}", "named: error: CheckpointError: a"]
    assert lines[9].endswith("; not: broken (error), named (error)")
    page = (audits / "broken.md").read_text()
    assert foot(audits / "broken.md")["verdict"] == '"error"'
    assert "**Error: the probe broke down" in page
    assert json.loads((audits / "broken.json").read_text())["findings"][0]["verdict"] == "error"


def test_needs_that_break_down_are_a_row_too(capsys, monkeypatch):
    broken = replace(PASSING, name="broken", lacks=ValueError("no such field"))
    monkeypatch.setattr(type(broken), "needs", lambda self, _: _raised(self.lacks) if self.lacks else None)
    monkeypatch.setattr(catalogue, "FULL", (broken, PASSING))
    assert main("all") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "    error: ValueError: no such field"
    assert lines[3].startswith("pass     passing ")


def _raised(error):
    raise error


def test_a_probe_that_breaks_down_on_several_ranks_ends_the_run():
    broken = replace(PASSING, breaks=ValueError("one rank alone"))
    with pytest.raises(ValueError, match="one rank alone"):
        attempt(broken, Subject(group=Group(0, 2, None)), silent)


def test_a_checkpoint_that_cannot_be_loaded_ends_the_command(tmp_path, capsys, monkeypatch):
    write_checkpoint(tmp_path, tiny_config(), seed=0)
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    monkeypatch.setattr("fathom.probes.probe.attempt", lambda *_: pytest.fail("work was done"))
    assert "model-00001-of-00002.safetensors" in refused(capsys, "all", "--model", tmp_path)


def test_probes_of_fathom_itself_run_on_another_model_only_where_they_are_named(capsys, monkeypatch, checkpoint):
    of_fathom = replace(PASSING, name="of-fathom", of_fathom=True)
    monkeypatch.setattr(catalogue, "FULL", (PASSING, of_fathom))
    assert main("all", "--model", checkpoint) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("left out of-fathom ")
    assert len(lines) == 1
    for names, count in ((("all", "of-fathom"), 3), (("of-fathom",), 1)):
        assert main(*names, "--model", checkpoint) == 0
        assert len(capsys.readouterr().out.splitlines()) == count
    assert main("all") == 0, "the demo"
    assert "left out" not in capsys.readouterr().out


def test_what_is_piped_is_neither_cut_nor_wrapped(capsys, monkeypatch):
    long = replace(FAILING, summary="word " * 100, findings=(broken_finding("tensor " * 50, "why " * 30),))
    monkeypatch.setattr(catalogue, "FULL", (long, PASSING))
    assert main("all") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("word " * 99 + "word")
    assert lines[1] == "    fail: " + "tensor " * 50
    assert len(lines) == 6


def test_the_console_says_that_a_fault_is_in_place(capsys):
    assert main("passing", "--inject", FAULT.name) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"with a fault in place, {FAULT.name}: {FAULT.what}"


def test_a_tokenizer_beyond_the_vocabulary_is_refused(tmp_path, capsys):
    write_checkpoint(tmp_path, tiny_config(vocab_size=300), seed=0)
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    (tmp_path / "text").write_text("The capital of France is Paris.")
    line = refused(capsys, "passing", "--model", tmp_path, "--prompt-file", tmp_path / "text")
    assert line == "token id 301: the model's vocabulary has ids 0 to 299"
    assert not Subject(directory=tmp_path).speaks_demo_language


def test_a_tokenizer_of_another_size_is_not_read_to_see_that_it_is_not_the_demos(tmp_path):
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(1 << 42)  # sparse: read whole, it would end in a MemoryError
    assert not Subject(directory=tmp_path).speaks_demo_language
    assert Subject().speaks_demo_language


def test_named_probes_run_in_the_order_given_and_once(capsys):
    assert main("unjudged", "passing", "unjudged") == 1
    out, _ = capsys.readouterr()
    assert [line.split()[1] for line in out.splitlines() if line[8] == " "] == [UNJUDGED.name, PASSING.name]


def test_a_plain_run_of_the_demo_writes_the_audits(audits, capsys):
    assert main("passing") == 0
    assert sorted(path.name for path in audits.iterdir()) == ["passing.json", "passing.md"]
    assert capsys.readouterr().err == f"wrote {audits}/passing.md\n"
    assert foot(audits / "passing.md")["command"] == '"python -m scripts.probe passing"'
    assert "What surprised us" in (audits / "passing.md").read_text()


@pytest.mark.parametrize(
    "flags",
    [
        ("--quick",),
        ("--inject", "nothing-wrong"),
        ("--seed", "1"),
        ("--numerics", "plain"),
        ("--dtype", "fp32"),
        ("--prefill-chunk", "64"),
        ("--prompt-file", "README.md"),
        ("--model", "CHECKPOINT"),
    ],
    ids=lambda flags: flags[0],
)
def test_any_other_run_writes_no_page_unless_told_where(flags, audits, checkpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    flags = [checkpoint if flag == "CHECKPOINT" else flag for flag in flags]
    assert main("passing", *flags) == 0
    assert capsys.readouterr().err == "no page written: --out FOLDER writes pages for this run\n"
    assert not audits.exists()
    assert main("passing", *flags, "--out", tmp_path / "new" / "pages") == 0
    page = tmp_path / "new" / "pages" / "passing.md"
    assert capsys.readouterr().err == f"wrote {page}\n"
    assert not audits.exists()
    shown = [checkpoint.name if flag == checkpoint else str(flag) for flag in flags]
    told = foot(page)["command"].strip('"').removeprefix("python -m scripts.probe passing ")
    assert sorted(told.split()) == sorted(["--out", "pages", *shown])
    assert str(tmp_path) not in page.read_text() + (tmp_path / "new" / "pages" / "passing.json").read_text()


def test_the_command_writes_to_the_repository_and_injects_the_faults_that_ship():
    assert SHIPPED == ROOT / "audits"
    fresh = [sys.executable, "-m", "scripts.probe"]
    listed = subprocess.run([*fresh, "--list"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name, fault in FAULTS.items():
        assert f"  {name}: {fault.what}\n" in listed
    wrong = subprocess.run([*fresh, "nonsense"], cwd=ROOT, check=False, capture_output=True, text=True)
    assert (wrong.returncode, wrong.stdout, wrong.stderr) == (2, "", "no probe 'nonsense'; --list names them\n")


def test_the_demo_by_another_path_is_the_demo(audits, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main("passing", "--model", DEMO.relative_to(ROOT)) == 0
    assert foot(audits / "passing.md")["command"] == '"python -m scripts.probe passing"'


def test_the_command_gives_paths_as_given_but_absolute_ones_shortened(checkpoint, tmp_path, monkeypatch):
    def told(*argv):
        args = probe.parser().parse_args([str(arg) for arg in argv])
        return probe.command(args, "recall")

    monkeypatch.chdir(tmp_path)
    assert told("all") == "python -m scripts.probe recall"
    assert told("recall", "--model", "../flash", "--out", "./pages") == (
        "python -m scripts.probe recall --model ../flash --out pages"
    )
    assert told("recall", "--model", checkpoint, "--prompt-file", tmp_path / "my prompt.txt") == (
        f"python -m scripts.probe recall --model {checkpoint.name} --prompt-file 'my prompt.txt'"
    )
    flags = ("--inject", "x", "--seed", "3", "--numerics", "plain", "--dtype", "fp32", "--prefill-chunk", "7")
    assert told("recall", "--quick", *flags) == f"python -m scripts.probe recall --quick {' '.join(flags)}"


def test_quick_runs_the_quick_settings(capsys):
    main("passing", "--quick")
    assert capsys.readouterr().out.endswith(" s  Quick.\n")


def test_the_seed_and_the_fault_and_the_prompt_reach_the_subject(tmp_path):
    (tmp_path / "prompt.txt").write_bytes(b"The capital of\r\nFrance")
    flags = ("--seed", "5", "--inject", "nothing-wrong", "--prompt-file", str(tmp_path / "prompt.txt"))
    subject = probe.subject_of(probe.parser().parse_args(["x", *flags, "--numerics", "plain"]))
    assert (subject.seed, subject.fault, subject.options.numerics) == (5, FAULT, "plain")
    assert subject.prompt == "The capital of\r\nFrance"


def test_the_list_names_probes_and_faults(capsys, audits):
    assert main("--list") == 0
    out, err = capsys.readouterr()
    assert out.startswith("probes:\n  passing: Does passing hold?\n")
    assert "faults, for --inject:\n  nothing-wrong: Nothing is changed.\n  hopeless: Nothing.\n" in out
    assert err == ""
    assert not audits.exists()


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ((), "which probe? Name some, or all; --list names them"),
        (("pasing",), "no probe 'pasing'; did you mean passing?"),
        (("all", "pasing"), "no probe 'pasing'; did you mean passing?"),
        (("zzz\n",), r"no probe 'zzz\n'; --list names them"),
        (("passing", "--inject", "nothing-worng"), "no fault 'nothing-worng'; did you mean nothing-wrong?"),
        (("passing", "--inject", "hopeless"), "--inject hopeless: 768 tokens"),
        (("passing", "--seed", "-1"), "--seed -1: want 0 to 2^63 - 1"),
        (("--list", "passing"), "--list: takes no names, it runs nothing"),
    ],
)
def test_what_is_asked_for_wrongly_is_refused_in_one_line(argv, line, capsys, audits):
    vocab = probe.subject_of(probe.parser().parse_args(["x"])).config.vocab_size
    assert refused(capsys, *argv) == line.replace("768", str(vocab))
    assert not audits.exists()


def test_bad_files_are_refused_before_any_work(tmp_path, capsys, monkeypatch, checkpoint):
    monkeypatch.setattr("fathom.probes.probe.attempt", lambda *_: pytest.fail("work was done"))
    assert "config.json" in refused(capsys, "passing", "--inject", "nothing-wrong", "--model", tmp_path)
    lost = tmp_path / "lost.txt"
    assert refused(capsys, "passing", "--prompt-file", lost) == f"{lost}: No such file or directory"
    lost.write_bytes(b"")
    assert "the text is empty" in refused(capsys, "passing", "--prompt-file", lost)
    lost.write_bytes(b"caf\xe9")
    assert refused(capsys, "passing", "--prompt-file", lost) == f"{lost}: byte 3 is no UTF-8"
    lost.write_bytes(b"text")
    assert "tokenizer.json" in refused(capsys, "passing", "--prompt-file", lost, "--model", checkpoint)
    assert refused(capsys, "passing", "--out", lost) == f"{lost}: not a folder"
    nowhere = lost / "pages"
    assert refused(capsys, "passing", "--out", nowhere).startswith(f"{nowhere}: Not a directory")


def test_a_folder_that_cannot_be_written_is_refused_before_any_work(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("fathom.probes.probe.attempt", lambda *_: pytest.fail("work was done"))

    def full(**_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(paths.tempfile, "TemporaryFile", full)
    line = refused(capsys, "passing", "--out", tmp_path)
    assert line == f"{tmp_path}: cannot be written there (Read-only file system)"


def test_pages_of_finished_probes_stay_when_a_later_one_breaks(audits, monkeypatch):
    genuine = attempt

    def breaks(probe, subject, progress):
        if probe.name == HOLLOW.name:
            raise KeyboardInterrupt
        return genuine(probe, subject, progress)

    monkeypatch.setattr("fathom.probes.probe.attempt", breaks)
    assert run(lambda: main("all")) == 130
    assert sorted(path.name for path in audits.glob("*.md")) == ["failing.md", "passing.md"]


def test_a_terminal_gets_tables(capsys, monkeypatch):
    monkeypatch.setattr(probe, "Console", lambda **flags: Console(**flags, force_terminal=True, width=100))
    assert main("passing", "tripping", "--quick") == 1
    out, err = capsys.readouterr()
    assert out.count("┏") == 3, "a table for each probe and one for all"
    assert "1 of 2 probes passed" in out
    assert "2/2 tripping" in err
    assert main("all") == 1
    out = capsys.readouterr().out
    assert out.count("┏") == 1, "a line for each probe and a table for all"
    assert len(out.splitlines()[0]) <= 100
    assert out.count("fail: layer 2, recall, worst row: 0.42, want >= 0.99") == 2, "once more behind the table"
    assert out.rindex("fail: layer 2") > out.index("┏")
    assert main("--list") == 0
    assert capsys.readouterr().out.count("┏") == 3, "probes, experiments, faults"


# --- knobs, and experiments


def test_a_knob_is_set_by_its_name():
    knobs = ["lengths=2,8", "needles=3", "codes=[64,1,2],[128,2,2]"]
    assert probe.with_knobs(needle.FULL, knobs) == replace(
        needle.FULL, lengths=(2, 8), needles=3, codes=((64, 1, 2), (128, 2, 2))
    )
    assert probe.with_knobs(kv_variants.FULL, ["llama=a,b=c"]) == replace(kv_variants.FULL, llama="a,b=c")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("needle", "--set", "depth=3"), "--set depth=3: needle has the knobs codes, words, lengths,"),
        (("needle", "--set", "needles=many"), "--set needles=many: want a value as 8"),
        (("needle", "--set", "needles=3,4"), "--set needles=3,4: want a value as 8"),
        (("needle", "--set", "lengths=2.5"), "--set lengths=2.5: want a value as 2, 4"),
        (("needle", "--set", "lengths=abc"), "--set lengths=abc: want a value as 2, 4"),
        (("needle", "--set", "codes=1,2"), "--set codes=1,2: want a value as"),
        (("needle", "--set", "needles"), "--set needles: needle has the knobs"),
        (("all", "needle", "--set", "needles=3"), "--set needles=3: name the one probe whose knob it is"),
        (("long-context", "--model", "nowhere"), "nowhere/config.json: No such file or directory"),
    ],
)
def test_a_knob_that_cannot_be_set_is_refused(flags, says, capsys, monkeypatch):
    monkeypatch.setattr(catalogue, "FULL", (needle.FULL,))
    assert says in refused(capsys, *flags)


def test_an_experiment_is_run_by_its_name_alone(capsys, monkeypatch):
    monkeypatch.setattr(catalogue, "EXPERIMENTS", (replace(PASSING, name="long"),))
    monkeypatch.setattr(catalogue, "FULL", (PASSING,))
    assert main("all") == 0
    assert "long" not in capsys.readouterr().out
    assert main("all", "long") == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()[:2]] == ["passing", "long"]
    assert all(probe.by_name for probe in EXPERIMENTS)
    assert not any(probe.by_name for probe in FULL)


def test_probes_of_v4_refuse_a_llama(tmp_path, capsys):
    oracle(vocab_size=264).save_pretrained(tmp_path)
    capsys.readouterr()
    said = refused(capsys, "passing", "--model", tmp_path, "--numerics", "plain")
    assert "model_type" in said
