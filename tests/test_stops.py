"""Stop strings: the table against a plain search in the text, and the bytes of each kind of vocabulary."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxrl_lm.lab.tokenizer import lab_tokenizer
from jaxrl_lm.stops import stop_table, token_bytes

PIECES = ["a", "b", "c", "ab", "ba", "bb", "abc", "cab", "aba", "é", "a é", "<eos>"]
ALPHABET = "abcé"


def wrap(backend, **special):
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special)


def plain_tokenizer():
    """A vocabulary whose entries are the text itself."""
    backend = Tokenizer(models.WordLevel({piece: number for number, piece in enumerate(PIECES)}, unk_token="a"))
    return wrap(backend, eos_token="<eos>")


def byte_level_tokenizer():
    """GPT-2's scheme: 256 byte entries, a few merges, and added tokens special and not."""
    stand_ins = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("e", "n"), ("en", "d"), ("Ġ", "end"), ("Ã", "©")]
    vocab = {piece: number for number, piece in enumerate([*stand_ins, *("".join(pair) for pair in merges)])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("ñandú", normalized=False), AddedToken("</answer>", normalized=False)])
    return wrap(backend, eos_token="<|im_end|>")


def sentencepiece_tokenizer():
    """Llama 2's scheme: ▁ for a space, <0xNN> for bytes without an entry of their own."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "e", "n", "d", "en", "end", "▁end"]
    merges = [("e", "n"), ("en", "d"), ("▁", "end")]
    backend = Tokenizer(
        models.BPE(
            vocab={piece: number for number, piece in enumerate(pieces)},
            merges=merges,
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return wrap(backend, unk_token="<unk>", eos_token="</s>")


PLAIN, BYTE_LEVEL, SENTENCEPIECE = plain_tokenizer(), byte_level_tokenizer(), sentencepiece_tokenizer()


def first_stop(table, ids):
    """The number of tokens after which the table says that a stop was written; None: never."""
    state = 0
    for count, token in enumerate(ids, start=1):
        state = table[state, token]
        if state == len(table) - 1:
            return count
    return None


def plain_first_stop(pieces, stops):
    written = b""
    for count, piece in enumerate(pieces, start=1):
        written += piece
        if any(written.find(stop.encode()) >= 0 for stop in stops):
            return count
    return None


# --- the table --------------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    stops=st.lists(st.text(ALPHABET, min_size=1, max_size=5), min_size=1, max_size=4),
    ids=st.lists(st.integers(0, len(PIECES) - 1), max_size=14),
)
def test_the_table_finds_what_a_search_in_the_text_finds(stops, ids):
    table = stop_table(tuple(stops), PLAIN, len(PIECES))
    assert first_stop(table, ids) == plain_first_stop([PIECES[number].encode() for number in ids], stops)


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (("bb",), "a b a b b", 5),  # spans tokens
        (("bca",), "ab cab", 2),  # begins and ends in the middle of tokens
        (("ab",), "abc", 1),  # stands inside one token
        (("aabb", "ab"), "a ab", 2),  # the shorter one is the longer one's suffix's beginning
        (("abcab", "bc"), "ab c", 2),  # inside a longer one that never ends
        (("aab",), "a a a b", 4),  # a false start of the same letters
        (("é",), "a é", 2),  # more than one byte
        (("<eos>",), "a <eos>", 2),  # a special token by its name
        (("ca", "cc"), "a b c", None),
    ],
)
def test_known_texts(stops, text, expected):
    table = stop_table(stops, PLAIN, len(PIECES))
    assert first_stop(table, [PIECES.index(piece) for piece in text.split(" ")]) == expected


def test_once_found_always_found():
    table = stop_table(("ab",), PLAIN, len(PIECES))
    assert table.dtype == np.int32
    np.testing.assert_array_equal(table[-1], np.full(len(PIECES), len(table) - 1))
    assert table.shape == (4, len(PIECES))  # nothing, a, ab, found


def test_entries_beyond_the_tokenizer_write_nothing_and_missing_ones_are_left_out():
    larger = stop_table(("ab",), PLAIN, len(PIECES) + 4)
    np.testing.assert_array_equal(larger[:, len(PIECES) :], np.repeat(np.arange(4)[:, None], 4, axis=1))
    np.testing.assert_array_equal(larger[:, :5], stop_table(("ab",), PLAIN, 5))


def test_no_stop_strings_no_table_and_an_empty_one_is_refused():
    assert stop_table((), PLAIN, 5) is None
    with pytest.raises(ValueError, match="stop: an empty string would end every completion at once"):
        stop_table(("ab", ""), PLAIN, 5)


# --- bytes of real vocabularies ---------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=12))
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte-level", "sentencepiece"])
def test_the_bytes_of_an_encoding_are_those_of_its_text(tokenizer, text):
    pieces = token_bytes(tokenizer)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert b"".join(pieces[number] for number in ids) == text.encode()


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte-level", "sentencepiece"])
@pytest.mark.parametrize("spelling", ["merged", "one byte a token"])
def test_every_spelling_of_a_stop_string_ends(tokenizer, spelling):
    """The policy need not spell a text as the tokenizer would."""
    text = "ne end ée"
    pieces = token_bytes(tokenizer)
    if spelling == "merged":
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        single = {piece: number for number, piece in enumerate(pieces) if len(piece) == 1}
        ids = [single[bytes([byte])] for byte in text.encode()]
    assert b"".join(pieces[number] for number in ids) == text.encode()
    for stop in ("end", " end", "d é", "é"):
        table = stop_table((stop,), tokenizer, len(pieces))
        expected = plain_first_stop([pieces[number] for number in ids], [stop])
        assert expected is not None
        assert first_stop(table, ids) == expected


def test_special_and_added_tokens_stand_for_their_names():
    pieces = token_bytes(BYTE_LEVEL)
    for name in ("<|im_end|>", "ñandú", "</answer>"):
        assert pieces[BYTE_LEVEL.convert_tokens_to_ids(name)] == name.encode()
    assert token_bytes(SENTENCEPIECE)[1] == b"</s>"
    assert token_bytes(SENTENCEPIECE)[2 + 0x0A] == b"\n"


def test_an_id_without_an_entry_stands_for_nothing(tmp_path):
    backend = json.loads(PLAIN.backend_tokenizer.to_str())
    backend["model"]["vocab"]["late"] = 20
    (tmp_path / "tokenizer.json").write_text(json.dumps(backend))
    pieces = token_bytes(wrap(Tokenizer.from_file(str(tmp_path / "tokenizer.json"))))
    assert pieces[12:] == [b""] * 8 + [b"late"]


def test_the_labs_vocabulary_is_read_as_it_is_written():
    tokenizer = lab_tokenizer()
    pieces = token_bytes(tokenizer)
    ids = tokenizer("7+5=12;#12", add_special_tokens=False)["input_ids"]
    assert b"".join(pieces[number] for number in ids) == b"7+5=12;#12"
    assert first_stop(stop_table(("#1",), tokenizer, len(pieces)), ids) == 9
