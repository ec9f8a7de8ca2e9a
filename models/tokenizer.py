"""The tiny policy's tokenizer: byte-level BPE trained on the cold start, in the Qwen2.5-VL layout.

A number is cut into pairs of digits from its end, so that any number up to 9999 is copied in at most two tokens and all
are written with the same hundred and ten, also those that training never shows. A path is cut the same way wherever it
stands. The rest may merge across words, since the agent's texts are templates.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import chain

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from models.agent_format import TAGS

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD = (
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END, VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD)

# Tool names stay whole, numbers and paths are cut into pairs, all between is one chunk. Pairs halve a path and its
# repetitions: copying RRRRR move by move takes counting.
_DIGITS = "[0-9]{1,2}(?=(?:[0-9]{2})*(?![0-9]))"
_WHOLE = f"POINT|DRAW2DPATH|CROP|ASTAR|{_DIGITS}|[LRUD]{{1,2}}"
_SPLIT = f"{_WHOLE}|[^0-9LRUD]+?(?={_WHOLE}|$)"

_PAIRS = [f"{pair:02}" for pair in range(100)]
_MIN_FREQUENCY = 8  # in the texts, of a merge

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train on whole agent texts. Deterministic for the same texts in the same order."""
    texts = list(texts)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = [AddedToken(token, special=True) for token in SPECIAL_TOKENS]
    added += [AddedToken(tag, special=False, normalized=False) for tag in TAGS]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=added,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=_MIN_FREQUENCY,
        show_progress=False,
    )
    # The trainer does not cut at added tokens, the encoder does: cut here too, or merges would be learned across them.
    cut = re.compile("|".join(map(re.escape, (*TAGS, *SPECIAL_TOKENS))))
    pieces = (piece for text in texts for piece in cut.split(text) if piece)
    # Every pair becomes a token, as if each text had it, whichever the maps of these texts happen to show.
    pairs = (pair for pair in _PAIRS for _ in range(max(_MIN_FREQUENCY, len(texts))))
    tokenizer.train_from_iterator(chain(pieces, pairs), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=8192,
    )
