"""Ids that spell alike for V4.1's n-gram tables: normalised as the library does that DeepSeek's code calls."""

import unicodedata

import pytest

from fathom.runtime.text.alike import normalised

PRIVATE = "\ue000"  # stands for a single space while ends are stripped


def test_every_character_of_an_old_unicode_is_normalised_as_there():
    """Newer ones are left out: the library's tables and Python's are of different versions of Unicode."""
    of = pytest.importorskip("tokenizers").normalizers
    regex = pytest.importorskip("tokenizers").Regex
    steps = [of.NFKC(), of.NFD(), of.StripAccents(), of.Lowercase(), of.Replace(regex(r"[ \t\r\n]+"), " ")]
    library = of.Sequence([*steps, of.Replace(regex("^ $"), PRIVATE), of.Strip(), of.Replace(PRIVATE, " ")])
    known = [chr(c) for c in range(0x110000) if unicodedata.ucd_3_2_0.category(chr(c)) not in ("Cn", "Cs", "Co")]
    assert len(known) > 95_000
    unlike = [text for one in known for text in (one, f"a{one} B") if library.normalize_str(text) != normalised(text)]
    assert unlike == []
