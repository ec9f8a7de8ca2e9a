"""Grading answers: by rules that give nothing for empty, degenerate or several answers at once.

Answers that only look right are how policies farm rewards (Liuziyu77/Visual-RFT#176: an empty answer graded
1.0; huggingface/open-r1#418: several answers in one completion).
"""

from __future__ import annotations

import re

from environments.vsp.maps import GridMap
from environments.vsp.world import solves

_BOX = re.compile(r"\\boxed\s*\{([^{}]*)\}")
# Single letters with separators, or letters without any: "RRD RDR" is two answers, not one of six moves.
_MOVES = re.compile(r"(?<![A-Za-z])(?:[LRUD](?:[\s,;>\-→]+[LRUD])+|[LRUD]+)(?![A-Za-z])")
_YES_NO = re.compile(r"(?<![A-Za-z])(yes|no|y|n)(?![A-Za-z])", re.IGNORECASE)


def parse_moves(response: str) -> str | None:
    """The one run of moves in a response ("RRD", "R, R, D", "\\boxed{R,R,D}"), or None if there is none or
    several.
    """
    text = _answer_text(response)
    runs = _MOVES.findall(text) if text is not None else []
    return re.sub(r"[^LRUD]", "", runs[0]) if len(runs) == 1 else None


def parse_yes_no(response: str) -> bool | None:
    """True for the one yes (or Y) in a response, False for the one no (or N), None if there is none or
    several.
    """
    text = _answer_text(response)
    words = _YES_NO.findall(text) if text is not None else []
    return words[0].lower().startswith("y") if len(words) == 1 else None


def grade_navigation(grid: GridMap, response: str) -> bool:
    """Whether the answered moves reach the goal with no hole before it; later moves do not matter.

    More moves than the map has cells are no plan but a search in the answer, and wrong.
    """
    moves = parse_moves(response)
    return moves is not None and len(moves) <= grid.size**2 and solves(grid, moves)


def grade_verification(answer: str, response: str) -> bool:
    """Whether the response says what `answer` ("Yes" or "No") says."""
    said = parse_yes_no(response)
    return said is not None and said == parse_yes_no(answer)


def _answer_text(response: str) -> str | None:
    """What is inside the only box, else the whole response; None for several boxes."""
    boxes = _BOX.findall(response)
    if not boxes:
        return response
    return boxes[0] if len(boxes) == 1 else None
