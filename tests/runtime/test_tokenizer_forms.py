"""Every published form of tokenizer.json, against the library and against transformers: ids, text, control tokens."""

import itertools

import pytest
import tokenizers
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from fathom.runtime.errors import PromptError
from fathom.runtime.text.segments import Control, Text, merge, render
from fathom.runtime.text.tokenizer import StreamDecoder, Tokenizer
from tests.tokenizer_files import FORMS, METASPACE, PIECES_FORMS, VOCAB_SIZE, added, bare, llama_2, mistral, write

MARK = "▁"  # U+2581, a space in a vocabulary of pieces
NAMES = sorted({token["content"] for form in FORMS.values() for token in form()["added_tokens"]})
WORDS = ["the", " ", "  ", "capital", "Paris", "ian", "<", "s>", "0x0A", ">", "[INST", "é", "好", "🐋", "\n", "7", "12"]
PLAIN = (
    (st.text(st.characters(exclude_characters=MARK, exclude_categories=["Cs"])) | st.lists(st.sampled_from(WORDS)))
    .map("".join)
    .filter(lambda text: not any(name in text for name in NAMES))
)
SPELLINGS = st.lists(st.sampled_from([*(n for n in NAMES if MARK not in n), "<0x0A>", "<0xE2>", *WORDS])).map("".join)
# Exports can also mark the first word of every section, or none.
SCHEMES = {name: mistral() | {"pre_tokenizer": METASPACE | {"prepend_scheme": name}} for name in ("always", "never")}
FILES = {name: form() for name, form in FORMS.items()} | SCHEMES | {"bare": bare()}


@pytest.fixture(scope="module", params=FILES)
def directory(request, tmp_path_factory):
    return write(FILES[request.param], tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module", params=PIECES_FORMS)
def pieces(request, tmp_path_factory):
    return Tokenizer(write(PIECES_FORMS[request.param](), tmp_path_factory.mktemp("checkpoint")), VOCAB_SIZE)


@pytest.fixture(scope="module")
def library(directory):
    return tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))


@pytest.fixture(scope="module")
def theirs(directory):
    return PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))


@pytest.fixture(scope="module")
def tokenizer(directory):
    return Tokenizer(directory, VOCAB_SIZE)


@pytest.fixture(scope="module")
def controls(library):
    return [Control(token.content) for token in library.get_added_tokens_decoder().values()]


def spelled(tokenizer, ids):
    return b"".join(map(tokenizer.token_bytes, ids)).decode()


# Ids


@settings(deadline=None)
@given(text=PLAIN)
@example(text="the capital of Parisian cafés: 1234567\n\n  <0x0A>")
def test_a_raw_prompt_has_the_ids_of_the_library_and_of_transformers(tokenizer, library, theirs, text):
    ids = tokenizer.encode([*tokenizer.before_text(), Text(text)])
    assert ids == library.encode(text).ids
    assert ids == theirs(text)["input_ids"]


@settings(deadline=None)
@given(data=st.data())
def test_segments_have_the_ids_of_their_rendered_string(tokenizer, library, theirs, controls, data):
    """A text at the start, after a control token, between two: each gets the first word's mark where theirs gets it."""
    segments = merge(data.draw(st.lists(st.sampled_from(controls) | PLAIN.map(Text), max_size=6)))
    assume(not any(name in segment.text for name in NAMES for segment in segments if isinstance(segment, Text)))
    before = tokenizer.before_text()
    by_template = bool(before) and segments[: len(before)] == before  # then their template puts it, too
    rendered = render(segments[len(before) :] if by_template else segments)
    ids = tokenizer.encode(segments)
    assert ids == library.encode(rendered, add_special_tokens=by_template).ids
    assert ids == theirs(rendered, add_special_tokens=by_template)["input_ids"]


@pytest.mark.parametrize("around", ["{}", "a{}b", " {} ", "{0}{0}", "<{}>", "好{}\n"])
def test_no_control_token_is_found_in_text(tokenizer, library, controls, around):
    ids_of = {tokenizer.control_id(control.name) for control in controls}
    for control in controls:
        text = around.format(control.name)
        assert ids_of & set(library.encode(text, add_special_tokens=False).ids), "else this shows nothing"
        ids = tokenizer.encode_text(text)
        assert not ids_of & set(ids)
        assert spelled(tokenizer, ids) in (text, f" {text}")


@settings(deadline=None)
@given(data=st.data())
def test_segments_come_back_as_they_went(tokenizer, controls, data):
    """Whatever the texts spell, but for a space at a start that the form cannot tell from the first word's mark."""
    text = SPELLINGS.filter(lambda text: not text.startswith(" ")).map(Text)
    segments = merge(data.draw(st.lists(st.sampled_from(controls) | text, max_size=6)))
    assert tokenizer.decode_segments(tokenizer.encode(segments)) == segments


@settings(deadline=None)
@given(first=SPELLINGS, second=SPELLINGS)
def test_a_text_that_goes_on_is_taken_as_it_is(tokenizer, first, second):
    """As after --load-state: no mark of a first word between the text that was read and the text that comes."""
    ids = tokenizer.encode([*tokenizer.before_text(), Text(first)])
    more = tokenizer.encode([Text(second)], continued=True)
    assert spelled(tokenizer, more) == second
    assert spelled(tokenizer, ids + more) == spelled(tokenizer, ids) + second


# Text


@settings(deadline=None)
@given(data=st.data())
def test_ids_are_decoded_as_the_library_decodes_them(tokenizer, library, data):
    """Any ids whose bytes are UTF-8; where they are not, the library makes every byte of a broken run one U+FFFD."""
    ids = data.draw(
        PLAIN.map(lambda text: library.encode(text).ids)
        | st.lists(st.integers(0, library.get_vocab_size() - 1), max_size=24)
    )
    text = tokenizer.decode(ids)
    if "\ufffd" in text:
        return
    wanted = library.decode(ids, skip_special_tokens=False)
    assert text == wanted or (MARK in text and text.replace(MARK, " ") == wanted)  # in the name of a control token


@settings(deadline=None)
@given(data=st.data())
def test_a_stream_is_the_text_with_the_space_that_it_begins_with(tokenizer, library, data):
    ids = data.draw(st.lists(st.integers(0, library.get_vocab_size() - 1), max_size=24))
    stream = StreamDecoder(tokenizer)
    text = "".join([*map(stream.push, ids), stream.finish()])
    assert text == b"".join(map(tokenizer.token_bytes, ids)).decode(errors="replace")
    assert tokenizer.decode(ids) in (text, text.removeprefix(" "))


def test_every_id_has_a_name_and_no_other(tokenizer, library):
    assert {id_ for id_ in range(VOCAB_SIZE) if tokenizer.names(id_)} == set(library.get_vocab().values())


# Pieces


def test_bytes_come_out_as_whole_characters(pieces):
    ids = pieces.encode([Text("🐋é")], continued=True)
    assert [pieces.token_bytes(id_) for id_ in ids] == [bytes([byte]) for byte in "🐋é".encode()]
    stream = StreamDecoder(pieces)
    assert [stream.push(id_) for id_ in ids] == ["", "", "", "🐋", "", "é"]


def test_the_space_of_a_continuation_is_kept_and_of_a_whole_sequence_is_not(pieces):
    (paris,) = pieces.encode([Text(" Paris")], continued=True)
    assert StreamDecoder(pieces).push(paris) == " Paris"
    assert pieces.decode([paris]) == "Paris"
    assert pieces.encode_text("Paris") == [paris]


def test_a_spelled_byte_token_is_text(pieces, tmp_path):
    """Also where merges lead to it, which a conversion that takes all pieces alike can leave in the file."""
    fields = llama_2()
    vocab, merges = fields["model"]["vocab"], fields["model"]["merges"]
    starts = ["<0x0A>"[:length] for length in range(1, 7)]
    for token in ("0", *starts):
        vocab.setdefault(token, len(vocab))
    merges += [[start, longer[-1]] for start, longer in itertools.pairwise(starts)]
    led = write(fields, tmp_path)
    library = tokenizers.Tokenizer.from_file(str(led / "tokenizer.json"))
    assert library.token_to_id("<0x0A>") in library.encode("a<0x0A>").ids, "else this shows nothing"
    for tokenizer in (pieces, Tokenizer(led, VOCAB_SIZE)):
        assert spelled(tokenizer, tokenizer.encode_text("a<0x0A>")) == " a<0x0A>"
        assert tokenizer.token_bytes(tokenizer.encode_text("a\n")[-1]) == b"\n"


def test_the_character_that_stands_for_a_space_is_refused(pieces):
    for text in (MARK, f"a{MARK}b", f" {MARK}"):
        with pytest.raises(PromptError, match=r"tokenizer\.json: cannot spell the prompt without loss"):
            pieces.encode_text(text)


def test_a_character_without_its_byte_tokens_is_refused(tmp_path):
    fields = llama_2()
    fields["model"]["vocab"]["other"] = fields["model"]["vocab"].pop("<0xF0>")
    tokenizer = Tokenizer(write(fields, tmp_path), VOCAB_SIZE)
    assert tokenizer.decode(tokenizer.encode_text("é")) == "é"
    with pytest.raises(PromptError, match="cannot spell the prompt without loss"):
        tokenizer.encode_text("🐋")


# Flags of added tokens


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
def test_a_token_that_would_change_the_text_beside_it_is_not_put(tmp_path, flag):
    fields = mistral()
    fields["added_tokens"][3][flag] = True
    directory = write(fields, tmp_path)
    tokenizer = Tokenizer(directory, VOCAB_SIZE)
    library = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    segments = [Text("a "), Control("[INST]"), Text(" b")] if flag != "single_word" else [Text("a"), Control("[INST]")]
    fields["added_tokens"][3][flag] = False
    plain = Tokenizer(write(fields, tmp_path), VOCAB_SIZE)
    assert library.encode(render(segments), add_special_tokens=False).ids != plain.encode(segments), "else harmless"
    with pytest.raises(PromptError, match=rf"tokenizer\.json: the token '\[INST\]' has {flag}, which changes text"):
        tokenizer.encode(segments)
    assert tokenizer.encode([Text("a [INST] b")]) == plain.encode([Text("a [INST] b")]), "as text it is no matter"


@pytest.mark.parametrize("form", PIECES_FORMS.values())
def test_a_normalised_bos_changes_no_raw_prompt(tmp_path, form):
    """As Llama 1 has it: the token is looked for in the normalised text, and the template puts it all the same."""
    fields = form()
    fields["added_tokens"][1] = added(1, "<s>", normalized=True)
    directory = write(fields, tmp_path)
    tokenizer = Tokenizer(directory, VOCAB_SIZE)
    library = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert tokenizer.encode([*tokenizer.before_text(), Text("the capital")]) == library.encode("the capital").ids
