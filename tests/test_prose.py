"""Pages are written in the field's words and in whole sentences: what they must not say, and what to say instead."""

import argparse
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("audits", "kernels", "model", "probes", "runtime", "scripts", "tests")
AUDITS = sorted((ROOT / "audits").glob("*.md"))
GUIDES = [
    ROOT / "README.md",
    ROOT / "audits" / "README.md",
    *sorted(path for folder in FOLDERS[1:] for path in (ROOT / folder).rglob("*.md")),
]

WORDS = {  # in no page
    "as its numbers say": "detected from the values",
    "bound once": "used once",
    "drafting head": "draft head, MTP head",
    "each its own": "its own part",
    "held against": "compared with",
    "hold against": "compare with",
    "holds against": "compares with",
    "in silence": "without an error",
    "mended": "repaired, fixed",
    "mends": "repairs, fixes",
    "nobody": "no .., or the passive",
    "of theirs": "of the other's",
    "so many": "n, this number of",
    "somebody": "another runtime, a user",
    "take back": "remove",
    "taken back": "removed",
    "takes back": "removes",
    "tap": "hook, listener",
    "turned back": "rotated back",
    "turned by": "rotated by",
    "what is no": "what is not a",
    "whoever": "the user, a runtime",
}
TURNS = {  # in no page that says how something is used: a noun is left out
    "goes on": "continues",
    "is no": "is not a",
    "is what": "say it directly",
    "is told": "is reported, is printed",
    "of theirs": "of the other's",
    "of what": "of the ..",
    "that of": "the .. of",
    "those of": "the .. of",
}


def prose(path):
    """A page without what is quoted: code, output, and claims of others."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.sub("`[^`]*`|“[^”]*”", "", text)


def found(text, words):
    pattern = "|".join(re.escape(word).replace(r"\ ", r"\s+") for word in sorted(words, key=len, reverse=True))
    return sorted(
        {" ".join(hit.split()).lower() for hit in re.findall(rf"(?<![\w-])(?:{pattern})(?![\w-])", text, re.IGNORECASE)}
    )


@pytest.mark.parametrize("page", sorted({*GUIDES, *AUDITS}), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_page_speaks_in_riddles(page):
    words = WORDS | (TURNS if page in GUIDES else {})
    assert {word: words[word] for word in found(prose(page), words)} == {}


COMMANDS = sorted(path.stem for path in (ROOT / "scripts").glob("*.py") if "\ndef parser(" in path.read_text("utf-8"))


@pytest.mark.parametrize("command", COMMANDS)
def test_no_help_of_a_command_speaks_in_riddles(command):
    parsers = [importlib.import_module(f"fathom.scripts.{command}").parser()]
    for action in parsers[0]._actions:
        if isinstance(action, argparse._SubParsersAction):
            parsers += action.choices.values()
    assert found(" ".join(parser.format_help() for parser in parsers), WORDS) == []


def test_words_are_found_across_lines_and_not_in_code(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("Rows are taken\nback, so\n  many of them.\n\n```\nnobody\n```\n`somebody`, tap-dance, “whoever”\n")
    assert found(prose(page), WORDS) == ["so many", "taken back"]
