"""Numbers and paths in the tiny tokenizer: pairs, whatever numbers the training texts happen to show."""

import re

import pytest
from transformers import PreTrainedTokenizerBase

from models.tokenizer import train_tokenizer

SHOWN = '{"at": [96, 32], "safe": [[32, 32], [160, 96]]} RRDDL 7 is short, x96 is a name'


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return train_tokenizer([SHOWN] * 20, 480)


def _tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[str]:
    return [tokenizer.decode([token]) for token in tokenizer.encode(text)]


@pytest.mark.parametrize(
    ("number", "pairs"),
    [
        ("7", ["7"]),
        ("96", ["96"]),
        ("160", ["1", "60"]),
        ("476", ["4", "76"]),
        ("308", ["3", "08"]),
        ("1600", ["16", "00"]),
        ("12345", ["1", "23", "45"]),
    ],
)
def test_a_number_is_cut_into_pairs_from_its_end_shown_or_not(
    tokenizer: PreTrainedTokenizerBase, number: str, pairs: list[str]
) -> None:
    """Numbers of 9×9 maps stand in no training text, and have to be copied all the same."""
    for text in (number, f"[{number}, ", f"x{number}", f"{number}."):
        tokens = [token for token in _tokens(tokenizer, text) if token.isdecimal()]
        assert tokens == pairs


def test_no_token_joins_a_number_and_its_neighbours(tokenizer: PreTrainedTokenizerBase) -> None:
    mixed = {token for token in tokenizer.get_vocab() if re.search("[0-9]", token)}
    assert {token for token in mixed if not token.isdecimal() or len(token) > 2} == set()


@pytest.mark.parametrize("text", [SHOWN, "[476, 32]", "96", "[160,96]", "-32.96", "007"])
def test_every_text_comes_back(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text
