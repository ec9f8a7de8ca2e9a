"""Lengths of trajectories in tokens, as training will see them, without building the training sequences.

Equal to `len(models.demonstrations.encode_demonstration(...).ids)`, which a test holds it to. Pieces of
text repeat from row to row, and a batch of them costs a tenth of one call each, so 33,000 trajectories take
seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from models.agent_format import (
    CALL_CLOSE,
    CALL_OPEN,
    OBS_CLOSE,
    OBS_OPEN,
    THINK_CLOSE,
    THINK_OPEN,
    write_response,
)
from models.encoding import Encoder, system_text
from models.tokenizer import IM_END, IM_START
from tasks.gate.facts import PictureReader
from tools.base import Picture

Row = Mapping[str, Any]


class TokenCounter:
    """Counts the tokens of rows; nulls and unreadable pictures count as nothing."""

    def __init__(self, encoder: Encoder, read_picture: PictureReader) -> None:
        self._encoder = encoder
        self._read_picture = read_picture
        self._text_tokens: dict[str, int] = {}
        self._system_texts: dict[tuple[str, ...], str] = {}
        self._picture_tokens: dict[tuple[int, int], int] = {}

    def token_lengths(self, rows: Sequence[Row]) -> list[int]:
        """Tokens of each row, which has the columns of tasks.schema.TRAJECTORIES."""
        pieces = [list(self._pieces(row)) for row in rows]
        texts = dict.fromkeys(text for of_row in pieces for text in of_row)
        new = [text for text in texts if text not in self._text_tokens]
        if new:
            encoded = self._encoder.tokenizer(new, add_special_tokens=False)["input_ids"]
            self._text_tokens.update((text, len(ids)) for text, ids in zip(new, encoded, strict=True))
        return [
            sum(self._text_tokens[text] for text in of_row) + sum(map(self._picture, self._pictures(row)))
            for row, of_row in zip(rows, pieces, strict=True)
        ]

    def _pieces(self, row: Row) -> Iterator[str]:
        """The texts that models.encoding.Encoder encodes one by one."""
        known = set(self._encoder.registry.names)
        tools = tuple(tool for tool in row["tools"] or () if tool in known)
        yield f"{IM_START}system\n{self._system_text(tools)}{IM_END}\n{IM_START}user\n"
        yield f"{row['question'] or ''}{IM_END}\n{IM_START}assistant\n"
        for turn in row["turns"] or ():
            if turn is None:
                continue
            think = turn["think"] or ""
            if turn["call_name"] is None:
                yield write_response(think, turn["response"] or "")
                yield IM_END
                continue
            # As ToolCall.to_json writes it; the stored parameters are JSON in the same style already.
            call = f'{{"name": "{turn["call_name"]}", "params": {turn["call_params"] or ""}}}'
            yield f"{THINK_OPEN}{think}{THINK_CLOSE}{CALL_OPEN}{call}{CALL_CLOSE}"
            observation = (turn["observation"] or "").replace("<", "\\u003c")
            if self._shows_picture(turn):
                yield f"{OBS_OPEN}{observation}"
                yield OBS_CLOSE
            else:
                yield f"{OBS_OPEN}{observation}{OBS_CLOSE}"

    def _system_text(self, tools: tuple[str, ...]) -> str:
        if tools not in self._system_texts:
            encoder = self._encoder
            self._system_texts[tools] = system_text(encoder.registry, encoder.agent, tools)
        return self._system_texts[tools]

    def _pictures(self, row: Row) -> Iterator[bytes | None]:
        yield row["image"]
        for turn in row["turns"] or ():
            if turn is not None and self._shows_picture(turn):
                yield turn["observation_image"]

    def _shows_picture(self, turn: Row) -> bool:
        shown = turn["call_name"] in self._encoder.agent.observation_pictures
        return shown and turn["observation_image"] is not None

    def _picture(self, png: bytes | None) -> int:
        facts = self._read_picture(png)
        if not facts.decodes:
            return 0
        size = (facts.height, facts.width)
        if size not in self._picture_tokens:
            blank = Picture.from_rgb(np.zeros((*size, 3), dtype=np.uint8))
            self._picture_tokens[size] = len(self._encoder.picture_ids(blank))
        return self._picture_tokens[size]
