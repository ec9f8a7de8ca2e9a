"""What tools saw and drew, and the path of an answer, as marks on the question's picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from environments.base import Prompt
from models.trajectory import Step

Pixel = list[float]
_MOVES = {"L": (-1, 0), "R": (1, 0), "U": (0, -1), "D": (0, 1)}


def step_marks(step: Step, prompt: Prompt) -> list[dict[str, Any]]:
    """Marks `{"kind": point | path | box | stop, "at": pixels}` of one turn.

    Read from the names that parameters and results share: `coordinates`, `points`, `start` with
    `directions` or a found `path`, `box`, and `at`, where a path ends badly. A failed call leaves none.
    """
    if step.response is not None:
        return _answer_marks(prompt, step.response)
    if step.call is None or step.observation is None or not step.observation.ok:
        return []
    asked, seen = step.call.params, step.observation.payload
    marks = [{"kind": "point", "at": pixel} for pixel in _pixels(seen.get("coordinates"))]
    if points := _pixels(asked.get("points")):
        marks.append({"kind": "path", "at": points})
    moves = asked.get("directions") or seen.get("path")
    if isinstance(moves, str) and (start := _pixels(asked.get("start"))):
        marks.append({"kind": "path", "at": _walk(prompt, start[0], moves)})
    if isinstance(box := asked.get("box"), list) and len(box) == 4:
        marks.append({"kind": "box", "at": box})
    marks += [{"kind": "stop", "at": pixel} for pixel in _pixels(seen.get("at"))]
    return marks


def _answer_marks(prompt: Prompt, response: str) -> list[dict[str, Any]]:
    """The answered moves from the start of the map, which only reports know."""
    rows = prompt.hidden.get("map_rows")
    moves = response.strip()
    if not rows or not prompt.pictures or not moves or set(moves) - set(_MOVES):
        return []
    (row, column) = next((y, line.index("S")) for y, line in enumerate(rows) if "S" in line)
    cell = _cell(prompt)
    start = [(column + 0.5) * cell, (row + 0.5) * cell]
    return [{"kind": "path", "at": _walk(prompt, start, moves)}]


def _walk(prompt: Prompt, start: Pixel, moves: str) -> list[Pixel]:
    """The middles of the cells that `moves` lead through; a move off the edge stays in place."""
    size, cell = int(prompt.hidden.get("size", 1)), _cell(prompt)
    column, row = int(start[0] // cell), int(start[1] // cell)
    cells = [(column, row)]
    for move in moves:
        right, down = _MOVES.get(move, (0, 0))
        column, row = min(max(column + right, 0), size - 1), min(max(row + down, 0), size - 1)
        cells.append((column, row))
    return [[(x + 0.5) * cell, (y + 0.5) * cell] for x, y in cells]


def _cell(prompt: Prompt) -> int:
    """Pixels per cell; maps are square, and a rest that does not fill a cell is at the right and below."""
    return max(1, prompt.pictures[0].size[0] // int(prompt.hidden.get("size", 1))) if prompt.pictures else 1


def _pixels(value: Any) -> list[Pixel]:
    """A pixel or a list of pixels as a list; anything else has none."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        return []
    found = list(value) if isinstance(value[0], Sequence) else [list(value)]
    return [list(p) for p in found if len(p) == 2 and all(isinstance(n, int | float) for n in p)]
