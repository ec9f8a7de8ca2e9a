"""Numbers in the tiny tokenizer: one token each if training shows them, digits if not, and both ways to learn."""

import random

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from models.demonstrations import spell_a_number
from models.policy import Sequence
from models.tokenizer import digit_ids, train_tokenizer

SHOWN = '{"at": [96, 32], "safe": [[32, 32], [160, 96]]} RRDD 7 is short, x96 is a name'


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return train_tokenizer([SHOWN] * 20 + ["[608, 32] is rare"], 400)


def _tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[str]:
    return [tokenizer.decode([token]) for token in tokenizer.encode(text)]


def test_a_number_shown_often_is_one_token_and_any_other_is_digits(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    tokens = _tokens(tokenizer, "[160, 96], [476, 32], [608, 1600]")
    assert [token for token in tokens if token.isdecimal()] == [
        *("160", "96"),
        *("4", "7", "6", "32"),
        *("6", "0", "8", "1", "6", "0", "0"),
    ]


def test_numbers_are_cut_out_of_no_longer_word(tokenizer: PreTrainedTokenizerBase) -> None:
    """`32` in `320` would be a token that means nothing."""
    assert not {"32", "96", "160"} & set(_tokens(tokenizer, "320 x96 1960 a160b"))


@pytest.mark.parametrize("text", [SHOWN, "[476, 32]", "96", "[160,96]", "-32.96"])
def test_every_text_comes_back(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_spelled_number_is_the_same_text_in_other_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = np.array(tokenizer.encode(SHOWN), dtype=np.int32)
    mask = np.arange(len(ids)) >= 8
    digits = digit_ids(tokenizer)
    assert {tokenizer.decode([number]) for number in digits} == {"32", "96", "160"}
    for seed in range(8):
        spelled = spell_a_number(Sequence(ids, mask, ()), digits, random.Random(seed))
        assert tokenizer.decode(spelled.ids) == SHOWN
        assert len(digits.keys() & set(spelled.ids.tolist())) == 2, "one number at a time, everywhere"
        assert tokenizer.decode(spelled.ids[spelled.mask]) == tokenizer.decode(ids[mask])


def test_without_numbers_there_is_nothing_to_spell(tokenizer: PreTrainedTokenizerBase) -> None:
    sequence = Sequence(np.array(tokenizer.encode("RRDD"), dtype=np.int32), np.ones(2, dtype=bool), ())
    assert spell_a_number(sequence, digit_ids(tokenizer), random.Random(0)) is sequence
    assert spell_a_number(sequence, {}, random.Random(0)) is sequence
