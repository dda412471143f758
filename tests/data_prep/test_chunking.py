"""Cutting documents with a byte-level tokenizer whose tokens are single bytes unless a merge was learnt."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from turngrpo.data_prep.chunking import chunk_document, cut_positions, token_offsets


def byte_level(trim_offsets=False, normalizer=None):
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    if normalizer is not None:
        model.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|im_end|>", "<|endoftext|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=290, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator(["the cat sat on the mat . def the(cat): return the\n"] * 20, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<|im_end|>", pad_token="<|endoftext|>")


TOKENIZER = byte_level()
TRIMMING = byte_level(trim_offsets=True)
COMPOSING = byte_level(normalizer=normalizers.NFC())


def texts(document, size, tokenizer=TOKENIZER, spans=()):
    return [chunk["text"] for chunk in chunk_document(document, spans, tokenizer, size)]


def labels(document, size, spans):
    return [chunk["evidence"] for chunk in chunk_document(document, spans, TOKENIZER, size)]


def test_single_byte_tokens_are_cut_where_expected():
    assert texts("xyzxyzx", 3) == ["xyz", "xyz", "x"]
    assert texts("xyzxyz", 3) == ["xyz", "xyz"]  # no empty last chunk
    assert texts("xyz", 50) == ["xyz"]


def test_no_cut_inside_a_character():
    # the emoji has 4 byte tokens: with 3 a chunk, it is a chunk of its own; a byte cut would give three pieces of it
    assert texts("xy\U0001f600z", 3) == ["xy", "\U0001f600", "z"]
    assert texts("xy\U0001f600z", 5) == ["xy", "\U0001f600z"]  # 2 + 4 tokens do not fit into 5: the cut moves back
    assert texts("中中中", 4) == ["中", "中", "中"]
    assert texts("中中中", 1) == ["中", "中", "中"]


def test_special_tokens_in_a_document_are_ordinary_text():
    assert TOKENIZER("<|im_end|>", add_special_tokens=False)["input_ids"] == [0]
    assert texts("<|im_end|>", 4) == ["<|im", "_end", "|>"]  # one chunk if the text were parsed as a control token
    assert TOKENIZER("<|im_end|>", add_special_tokens=False)["input_ids"] == [0]  # the tokenizer is left as it was


def test_white_space_that_trimmed_offsets_leave_out_goes_to_the_next_chunk():
    assert TRIMMING("x the", return_offsets_mapping=True)["offset_mapping"] == [(0, 1), (2, 5)]
    assert texts("x the the", 1, TRIMMING) == ["x", " the", " the"]


def test_a_span_labels_each_chunk_it_touches_and_no_other():
    document = "xyzxyzxyz"  # chunks [0, 3), [3, 6), [6, 9)
    assert labels(document, 3, []) == [False, False, False]
    assert labels(document, 3, [[0, 3]]) == [True, False, False]  # a closed end would also label the second
    assert labels(document, 3, [[3, 6]]) == [False, True, False]
    assert labels(document, 3, [[2, 4]]) == [True, True, False]
    assert labels(document, 3, [[0, 1], [8, 9]]) == [True, False, True]
    assert labels(document, 3, [[1, 9]]) == [True, True, True]
    assert labels(document, 3, [[5, 6], [5, 7]]) == [False, True, True]  # overlapping spans


def test_cut_positions_from_offsets_alone():
    assert cut_positions([(0, 2), (2, 3), (3, 7), (7, 8)], 8, 2) == [0, 3, 8]
    assert cut_positions([], 3, 2) == [0, 3]  # a document of characters that the tokenizer drops
    # the token [1, 4) ends in the character in which [3, 5) begins: the only cuts are at 1 and at 5
    assert cut_positions([(0, 1), (1, 4), (3, 5), (5, 6)], 6, 2) == [0, 1, 5, 6]


class SlowTokenizer:
    is_fast = False


def test_what_cannot_be_cut_is_refused():
    with pytest.raises(ValueError, match="SlowTokenizer without character offsets.*fast tokenizer"):
        chunk_document("text", [], SlowTokenizer(), 4)
    for size in (0, -1, True, 2.0, None):
        with pytest.raises(ValueError, match="chunk_size is .*: expected a positive number of tokens"):
            chunk_document("text", [], TOKENIZER, size)
    with pytest.raises(ValueError, match="document is empty"):
        chunk_document("", [], TOKENIZER, 4)


ALPHABET = st.sampled_from("abtheé中\u0301\U0001f600\n\r\t .<|>\u2028\x00") | st.sampled_from(
    ["<|im_end|>", " the", "\r\n"]
)


@settings(max_examples=150, deadline=None)
@given(
    document=st.lists(ALPHABET, min_size=1, max_size=60).map("".join),
    size=st.integers(1, 12),
    tokenizer=st.sampled_from([TOKENIZER, TRIMMING, COMPOSING]),
    data=st.data(),
)
def test_texts_add_up_to_the_document_and_labels_to_the_spans(document, size, tokenizer, data):
    start = data.draw(st.integers(0, len(document) - 1))
    end = data.draw(st.integers(start + 1, len(document)))
    chunks = chunk_document(document, [[start, end]], tokenizer, size)
    assert "".join(chunk["text"] for chunk in chunks) == document
    assert all(chunk["text"] for chunk in chunks)
    labelled = [chunk["evidence"] for character in chunks for chunk in [character] * len(character["text"])]
    touched = {index for index in range(len(document)) if start <= index < end}
    assert touched <= {index for index, evidence in enumerate(labelled) if evidence}
    bounds = [0]
    for chunk in chunks:
        bounds.append(bounds[-1] + len(chunk["text"]))
    for chunk, (first, last) in zip(chunks, pairwise(bounds), strict=True):
        assert chunk["evidence"] == any(index in touched for index in range(first, last))
        starts = [start for start, _ in token_offsets(document, tokenizer) if first <= start < last]
        assert len(starts) <= size or len(set(starts)) == 1  # those of one character are never parted


@pytest.mark.parametrize(
    ("document", "expected"), [("  ", [" ", " "]), ("a <|", ["a ", "<|"]), ("ab  ", ["ab", "  "])]
)
def test_tokens_of_trimmed_white_space_are_cut_as_its_characters(document, expected):
    """A tokenizer that trims gives them no width: the last of a document would be a chunk without text."""
    assert texts(document, len(document) // 2, TRIMMING) == expected
