"""tokenizer.json files that are damaged, hostile, or of a kind that is not read: one line that names file and field."""

import copy
import functools
import json
import os
import random
import subprocess
import sys

import pytest

from fathom.model.checkpoint import strict_json
from fathom.runtime.errors import PromptError
from fathom.runtime.options import DEMO
from fathom.runtime.text.segments import Text
from fathom.runtime.text.tokenizer import Tokenizer
from fathom.runtime.text.tokenizer_json import MAX_BYTES, library_errors
from tests.tokenizer_files import BYTE_LEVEL, METASPACE, VOCAB_SIZE, added, deepseek, llama_2, llama_3, mistral, write

TEXTS = ("the capital of France is Paris", "é\n🐋 12  x<s>", " ")


def refused(directory):
    """The one printable line with which the file is refused, without the file's name."""
    with pytest.raises(PromptError) as caught:
        Tokenizer(directory, VOCAB_SIZE)
    line, name = str(caught.value), f"{directory / 'tokenizer.json'}: "
    assert line.startswith(name)
    assert line.isprintable()
    assert len(line) < len(name) + 400
    return line.removeprefix(name)


# The file


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[]", "not a JSON object"),
        (b"[" * 10**5, "not JSON"),
        (b'{"decoder": {}, "added_tokens": [], "added_tokens": []}', "not JSON: duplicate key 'added_tokens'"),
        (b'{"model": 1e999}', "not JSON: the number 1e999"),
        (b'{"model": 1' + b"0" * 5000 + b"}", "not JSON"),
    ],
)
def test_what_is_no_json_object_is_refused(tmp_path, content, complaint):
    (tmp_path / "tokenizer.json").write_bytes(content)
    assert refused(tmp_path).startswith(complaint)


def test_a_value_nested_to_the_parsers_limit_is_refused(tmp_path, monkeypatch):
    for depth in range(20, 1100):
        (tmp_path / "tokenizer.json").write_text(f'{{"decoder": {"[" * depth}{"]" * depth}}}')
        assert refused(tmp_path).startswith(("decoder is [[[", "not JSON: JSON is nested too deeply"))
    deep = functools.reduce(lambda value, _: [value], range(100_000), None)  # a parser without such a limit
    monkeypatch.setattr(strict_json, "parse", lambda _: {"decoder": deep})
    assert refused(tmp_path) == "not JSON: JSON is nested too deeply"


def test_only_a_regular_file_of_bounded_size_is_read(tmp_path):
    path = tmp_path / "tokenizer.json"
    assert refused(tmp_path) == "No such file or directory"
    os.mkfifo(path)
    assert refused(tmp_path) == "not a regular file"
    path.unlink()
    path.mkdir()
    assert refused(tmp_path) == "not a regular file"
    path.rmdir()
    with path.open("wb") as file:
        file.truncate(3 << 30)  # sparse
    assert refused(tmp_path) == f"{3 << 30} bytes, more than the {MAX_BYTES} that are read of such a file"


# Fields


def changed(fields, place, value):
    """The fields with another value at a place, or nothing there."""
    fields = copy.deepcopy(fields)
    *path, last = place
    parent = fields
    for key in path:
        parent = parent[key]
    if value is ...:
        del parent[last]
    else:
        parent[last] = value
    return fields


MODEL = {  # field of the model -> what is refused in every form
    "type": ["WordPiece", "Unigram", None, ["BPE"]],
    "dropout": [0.1, 0.0, 1, True, "0.1"],
    "continuing_subword_prefix": ["##", "####", "é", 0],
    "end_of_word_suffix": ["</w>", False],
    "unk_token": ["absent", "", "\x1b[2J\n", 0, ["a"], {}],
    "fuse_unk": [1, "true"],
    "ignore_merges": [0, "no"],
    "vocab": [..., None, [], {}, {"a": True}, {"a": 1.0}, {"a": -1}, {"a": 2**31}, {"a": 10**400}, {"a": None}],
    "merges": [..., None, {}, "a b", [1], [["a"]], [["a", "b", "c"]], ["a"], ["a b c"], [["a", 1]], [["no", "such"]]],
    "cache_capacity": [10000],
}


@pytest.mark.parametrize("form", [deepseek, llama_2])
@pytest.mark.parametrize(("name", "value"), [(name, value) for name in MODEL for value in MODEL[name]])
def test_fields_of_the_model_are_understood_or_refused(tmp_path, form, name, value):
    assert refused(write(changed(form(), ["model", name], value), tmp_path)).startswith(("model.", "added_tokens["))


@pytest.mark.parametrize(
    ("form", "place", "value", "complaint"),
    [
        # Top level
        (deepseek, ["version"], "2.0", "version is '2.0'; supported: '1.0'"),
        (deepseek, ["note\x1b[2J"], 1, "note\\x1b[2J: unknown field"),
        (deepseek, ["model"], ..., "model: missing"),
        (deepseek, ["model"], [], "model is []; want an object"),
        (deepseek, ["decoder"], ..., "decoder: missing"),
        # What is done to text before it is cut
        (deepseek, ["normalizer"], {"type": "NFC"}, "normalizer is {'type': 'NFC'}; supported with a ByteLevel"),
        (deepseek, ["normalizer"], {"type": "Shout"}, "normalizer is {'type': 'Shout'}; supported with a ByteLevel"),
        (llama_2, ["normalizer"], {"type": "NFKC"}, "normalizer is [{'type': 'NFKC'}]; supported with this decoder"),
        (llama_2, ["normalizer"], None, "normalizer is []; supported with this decoder"),
        (
            llama_2,
            ["normalizer", "normalizers", 0, "prepend"],
            "_",
            "normalizer is [{'type': 'Prepend', 'prepend': '_'",
        ),
        (llama_2, ["normalizer", "normalizers"], "x", "normalizer.normalizers is 'x'; want a list"),
        (llama_2, ["pre_tokenizer"], METASPACE, "normalizer and pre_tokenizer: supported with this decoder: one of"),
        (mistral, ["pre_tokenizer", "split"], True, "pre_tokenizer.split is True; supported: False"),
        (mistral, ["pre_tokenizer", "replacement"], "_", "pre_tokenizer.replacement is '_'; supported: '\\u2581'"),
        (mistral, ["pre_tokenizer", "prepend_scheme"], "last", "pre_tokenizer.prepend_scheme is 'last'; supported:"),
        (mistral, ["pre_tokenizer", "prepend_scheme"], ..., "pre_tokenizer.prepend_scheme is None; supported:"),
        (mistral, ["pre_tokenizer", "str_rep"], "_", "pre_tokenizer.str_rep: unknown field"),
        (mistral, ["pre_tokenizer"], "Metaspace", "pre_tokenizer is 'Metaspace'; want an object"),
        (deepseek, ["pre_tokenizer"], None, "pre_tokenizer: missing; want one that ends in ByteLevel"),
        (deepseek, ["pre_tokenizer", "pretokenizers"], [BYTE_LEVEL] * 2, "pre_tokenizer[0].type is 'ByteLevel'"),
        (
            deepseek,
            ["pre_tokenizer", "pretokenizers", 3, "type"],
            "Whitespace",
            "pre_tokenizer[3].type is 'Whitespace'",
        ),
        (
            deepseek,
            ["pre_tokenizer", "pretokenizers", 3, "add_prefix_space"],
            True,
            "pre_tokenizer[3].add_prefix_space is True; supported: False",
        ),
        (deepseek, ["pre_tokenizer", "pretokenizers", 3, "pattern"], "x", "pre_tokenizer[3].pattern is 'x'"),
        (deepseek, ["pre_tokenizer", "pretokenizers", 0, "behavior"], "Lost", "pre_tokenizer[0].behavior is 'Lost'"),
        (
            deepseek,
            ["pre_tokenizer", "pretokenizers", 0, "pattern"],
            {"Regex": "\ud800"},
            "pre_tokenizer[0].pattern is",
        ),
        (deepseek, ["pre_tokenizer", "pretokenizers", 0, "pattern"], ..., "pre_tokenizer[0].pattern is None"),
        (deepseek, ["pre_tokenizer", "pretokenizers", 0, "pattern"], {"Regex": "(("}, "the tokenizers library says"),
        # Decoding
        (deepseek, ["decoder"], {"type": "WordPiece", "prefix": "##"}, "decoder is {'type': 'WordPiece'"),
        (deepseek, ["decoder", "trim"], True, "decoder.trim: unknown field"),
        (llama_2, ["decoder", "decoders", 3, "start"], 2, "decoder is {'type': 'Sequence'"),
        (llama_2, ["decoder", "decoders", 0, "content"], "_", "decoder is {'type': 'Sequence'"),
        (llama_2, ["decoder", "extra"], "_", "decoder.extra: unknown field"),
        # Fields that another form has
        (deepseek, ["model", "byte_fallback"], True, "model.byte_fallback is True; supported: False, None"),
        (llama_2, ["model", "byte_fallback"], False, "model.byte_fallback is False; supported: True"),
        (llama_2, ["model", "byte_fallback"], ..., "model.byte_fallback is None; supported: True"),
        # The vocabulary
        (llama_2, ["model", "vocab", "a\x00\n"], 5, "model.vocab: '<0x02>' and 'a\\x00\\n' share the id 5"),
        (llama_2, ["model", "vocab", "\ud800"], 999, "model.vocab: '\\ud800' holds half of a surrogate pair"),
        (llama_2, ["model", "vocab", "x" * 10**6], -1, f"model.vocab: the id of '{'x' * 120}'... (1000000 characters)"),
        (llama_2, ["model", "merges", 0], ["<", "\x1b\n"], "model.merges[0]: model.vocab lacks '\\x1b\\n'"),
        (llama_2, ["model", "merges", 0], ["好", "<"], "model.merges[0]: model.vocab lacks '\\u597d<'"),
        # Added tokens
        (deepseek, ["added_tokens"], ..., "added_tokens: missing"),
        (deepseek, ["added_tokens"], {}, "added_tokens is {}; want a list"),
        (deepseek, ["added_tokens", 1], "<s>", "added_tokens[1] is '<s>'; want an object"),
        (deepseek, ["added_tokens", 1, "content"], ..., "added_tokens[1].content: missing"),
        (deepseek, ["added_tokens", 1, "content"], "", "added_tokens[1].content is ''; want a text"),
        (deepseek, ["added_tokens", 1, "content"], 1, "added_tokens[1].content is 1; want a text"),
        (deepseek, ["added_tokens", 1, "content"], "\ud800", "added_tokens[1].content is '\\ud800'; want a text"),
        (deepseek, ["added_tokens", 1, "lstrip"], 0, "added_tokens[1].lstrip is 0; supported: True, False"),
        (deepseek, ["added_tokens", 1, "rstrip"], ..., "added_tokens[1].rstrip: missing"),
        (deepseek, ["added_tokens", 1, "hidden"], 0, "added_tokens[1].hidden: unknown field"),
        (deepseek, ["added_tokens", 1, "id"], "0", "added_tokens[1].id is '0'; want an integer"),
        (deepseek, ["added_tokens", 1, "id"], True, "added_tokens[1].id is True; want an integer"),
        (deepseek, ["added_tokens", 1, "id"], -1, "added_tokens[1].id is -1; want an integer"),
        (deepseek, ["added_tokens", 1, "id"], 2**40, "added_tokens[1].id is 1099511627776; want an integer"),
        (llama_2, ["added_tokens", 2], added(1, "<s>"), "added_tokens[2]: another added token is '<s>' too"),
        # The library numbers added tokens by itself and pays no heed to the file: where they differ, neither is right.
        (llama_2, ["added_tokens", 1, "id"], 2, "added_tokens[1]: '<s>' has id 2, but 1 by model.vocab"),
        (llama_3, ["added_tokens", 1, "id"], 1000, "added_tokens[1]: '<|end_of_text|>' has id 1000, but "),
        # What is put before a text
        (llama_2, ["post_processor", "single", 0, "SpecialToken", "id"], "<x>", "post_processor is not a template"),
        (llama_2, ["post_processor", "special_tokens", "<s>"], 1, "post_processor is not a template"),
        (llama_2, ["post_processor", "special_tokens", "<s>", "ids"], [2], "post_processor is not a template"),
        (llama_2, ["post_processor", "special_tokens", "<s>", "ids"], [1, 1], "post_processor is not a template"),
        (llama_2, ["post_processor", "special_tokens"], [], "post_processor is not a template"),
        (llama_2, ["post_processor", "double"], [], "post_processor is not a template"),
        (llama_2, ["post_processor"], "<s>", "post_processor is '<s>'; want an object"),
        (deepseek, ["post_processor", "cls"], 1, "post_processor.cls: unknown field"),
        (llama_3, ["post_processor", "processors", 0], 1, "post_processor is 1; want an object"),
    ],
)
def test_fields_are_understood_or_refused(tmp_path, form, place, value, complaint):
    assert refused(write(changed(form(), place, value), tmp_path)).startswith(complaint)


@pytest.mark.parametrize(
    ("field", "value"), [("truncation", {"max_length": 3}), ("padding", {"length": 99}), ("version", ...)]
)
def test_fields_that_shape_batches_change_no_prompt(tmp_path, field, value):
    plain = Tokenizer(write(llama_2(), tmp_path), VOCAB_SIZE).encode_text(TEXTS[0])
    assert Tokenizer(write(changed(llama_2(), [field], value), tmp_path), VOCAB_SIZE).encode_text(TEXTS[0]) == plain


def test_a_token_under_a_control_tokens_id_is_refused(tmp_path):
    """Ids with a gap: the library would number an added token as another token is."""
    fields = llama_3()
    fields["model"]["vocab"]["zz"] = len(fields["model"]["vocab"]) + 1
    for token in fields["added_tokens"]:
        token["id"] += 1
    assert refused(write(fields, tmp_path)).startswith(
        "added_tokens: '<|begin_of_text|>' and model.vocab disagree about"
    )


# The library


def test_only_what_the_library_raises_becomes_a_line(tmp_path):
    panic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})
    for error in (Exception("no\nway"), panic("no\nway")):
        with pytest.raises(PromptError, match=r"the tokenizers library says 'no\\nway'"), library_errors(tmp_path):
            raise error
    for error in (KeyboardInterrupt(), MemoryError(), SystemExit(2), TypeError("x")):
        with pytest.raises(type(error)), library_errors(tmp_path):
            raise error


def test_a_panic_of_the_library_is_one_line(tmp_path, capfd):
    """A regex that gives up on a text. The library has said so on stderr itself by then."""
    fields = changed(deepseek(), ["pre_tokenizer", "pretokenizers", 0, "pattern"], {"Regex": "(a|aa)+$"})
    tokenizer = Tokenizer(write(fields, tmp_path), VOCAB_SIZE)
    assert tokenizer.decode(tokenizer.encode_text("aab")) == "aab"
    with pytest.raises(PromptError, match=r"tokenizer\.json: the tokenizers library says 'Onig: Regex search error"):
        tokenizer.encode_text("a" * 60 + "c")
    assert "panicked" in capfd.readouterr().err


def test_a_prefix_that_ends_the_process_never_reaches_the_library(tmp_path):
    """A prefix of one byte, and a merge whose second token begins with a longer character: it panics or aborts."""
    fields = deepseek()
    fields["model"] |= {"continuing_subword_prefix": "#", "merges": [["a", "Ġ"]]}
    fields["model"]["vocab"] |= {"aĠ": 999}
    path = write(fields, tmp_path) / "tokenizer.json"
    load = "import sys, tokenizers; tokenizers.Tokenizer.from_file(sys.argv[1])"
    died = subprocess.run([sys.executable, "-c", load, path], capture_output=True, check=False)
    assert died.returncode != 0, "else this shows nothing"
    assert b"panicked" in died.stderr
    assert refused(tmp_path) == "model.continuing_subword_prefix is '#'; supported: None, ''"


# Damage at random


FILES = [json.loads((DEMO / "tokenizer.json").read_text()), *(form() for form in (deepseek, llama_3, llama_2, mistral))]
VALUES = (
    *(..., None, True, False, 0, 1, -1, 3, 2**31, 2**32, 2**64, 0.5, 1e300, "", "a", "<s>", "▁", " ", "é", "\ud800"),
    *("\x00", "a\nb", "\x1b[31m", "x" * 5000, "Sequence", "ByteLevel", "BPE", "Split", "Replace", "Metaspace", "first"),
    *([], {}, [[]], [None], ["a", "b"], [["a", "b"]], {"type": "Sequence"}, {"type": "ByteLevel"}, {"": ""}),
    *({"type": "Split", "pattern": {"Regex": ".*?"}, "behavior": "Removed", "invert": True}, {"String": ""}),
)


def places(value, path=()):
    """Every place inside a value; of long lists and tables only a few, or the vocabulary would take all damage."""
    if isinstance(value, (dict, list)):
        keys = list(value) if isinstance(value, dict) else range(len(value))
        for key in keys if len(keys) < 40 else (*keys[:4], *keys[-4:]):
            yield (*path, key)
            yield from places(value[key], (*path, key))


def damaged(choose):
    """One of the files with one or two places changed: deleted, of another type, moved from elsewhere, or renamed."""
    fields = copy.deepcopy(choose.choice(FILES))
    for _ in range(choose.randint(1, 2)):
        every = list(places(fields))
        *path, last = choose.choice(every)
        parent = fields
        for key in path:
            parent = parent[key]
        value = choose.choice(VALUES)
        if choose.random() < 0.2:  # something from elsewhere in the file
            value = fields
            for key in choose.choice(every):
                value = value[key]
        value = copy.deepcopy(value)
        if value is ...:
            del parent[last]
        elif isinstance(parent, dict) and choose.random() < 0.1:
            parent[choose.choice([v for v in VALUES if isinstance(v, str)])] = parent.pop(last)
        else:
            parent[last] = value
    return fields


def check_damaged(tmp_path, seed):
    """How many texts a damaged file spells; each of the others it refuses in one line, or all of them at once."""
    write(damaged(random.Random(seed)), tmp_path)
    spelled, line = 0, ""
    try:
        tokenizer = Tokenizer(tmp_path, 2**32)
        before = tokenizer.before_text()
        for text in TEXTS:
            ids = tokenizer.encode([*before, Text(text)])[len(before) :]
            assert b"".join(map(tokenizer.token_bytes, ids)).decode() in (text, f" {text}"), seed
            spelled += 1
    except PromptError as error:
        line = str(error)
    assert not line or (line.isprintable() and len(line) < 800), seed
    return spelled


def test_random_damage_is_refused_or_harmless(tmp_path):
    spelled = [check_damaged(tmp_path, seed) for seed in range(400)]
    assert spelled.count(0) > 100, "damage that is seen"
    assert spelled.count(len(TEXTS)) > 10, "and some that does no harm"


@pytest.mark.slow
def test_much_random_damage_is_refused_or_harmless(tmp_path):
    for seed in range(400, 8000):
        check_damaged(tmp_path, seed)
