"""Reader of the published VSP benchmark folder (UCSB-NLP-Chang/Visual-Spatial-Planning), tasks main and 4.

    maze/task-main/maps/level<size>/{img,pure_text}                       navigation
    maze/task4/maps/level_step<length>/{img,question,answer,pure_text}    verification

Text files hold the map and the answer: they go to `Prompt.hidden`, for grading only. The path of a
verification question is part of the question.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from environments.base import Prompt
from environments.vsp.maps import GridMap
from environments.vsp.prompts import BASE_TOOLS, navigation_prompt, verification_prompt
from tools.base import Picture
from tools.errors import ToolError


class BenchmarkError(Exception):
    """The benchmark folder cannot be read; the message is one line: what, where, how to fix."""


_SIZE = re.compile(r"(\d+)\s*x\s*(\d+)\s+map", re.IGNORECASE)
_CELL = re.compile(r"row\s+(\d+)\s*,\s*column\s+(\d+)", re.IGNORECASE)
_ANSWERS = {"Y": "Yes", "YES": "Yes", "N": "No", "NO": "No"}


def load_benchmark(folder: Path | str, tools: Sequence[str] = BASE_TOOLS) -> list[Prompt]:
    """All navigation items, then all verification items, each by level and number.

    `folder` holds `maze`, or is it. Raises BenchmarkError for a missing folder, a missing or broken picture,
    an unreadable text, or no items at all.
    """
    root = Path(folder)
    if not root.is_dir():
        raise BenchmarkError(f"benchmark folder {root} does not exist; give the folder that holds maze/")
    maze = root / "maze" if (root / "maze").is_dir() else root
    prompts = [
        _navigation(text, tools)
        for level in _levels(maze / "task-main" / "maps", "level")
        for text in _texts(level)
    ]
    prompts += [
        _verification(text, tools)
        for level in _levels(maze / "task4" / "maps", "level_step")
        for text in _texts(level)
    ]
    if not prompts:
        raise BenchmarkError(
            f"no items in {root}; expected maze/task-main/maps/level*/ and maze/task4/maps/level_step*/ in it"
        )
    return prompts


def parse_map(text: str) -> GridMap:
    """The map that a pure_text file describes in words. Raises ValueError."""
    size, lines = _SIZE.search(text), {}
    for line in text.splitlines():
        for name in ("player", "hole", "goal"):
            if line.lower().startswith(f"the {name}"):
                lines[name] = [(int(row) - 1, int(column) - 1) for row, column in _CELL.findall(line)]
    if (
        size is None
        or size[1] != size[2]
        or len(lines.get("player", [])) != 1
        or len(lines.get("goal", [])) != 1
    ):
        raise ValueError("expected a square size, one player and one goal")
    letters = [["F"] * int(size[1]) for _ in range(int(size[1]))]
    for letter, cells in (("H", lines.get("hole", [])), ("S", lines["player"]), ("G", lines["goal"])):
        for row, column in cells:
            if not (0 <= row < len(letters) and 0 <= column < len(letters)):
                raise ValueError(f"row {row + 1}, column {column + 1} is outside the {size[0]}")
            letters[row][column] = letter
    return GridMap(tuple("".join(row) for row in letters))


def _navigation(text: Path, tools: Sequence[str]) -> Prompt:
    grid = _map(text)
    try:
        return navigation_prompt(
            grid, _picture(text), tools, f"benchmark/{text.parent.parent.name}/{text.stem}"
        )
    except ValueError as error:
        raise BenchmarkError(f"{text}: {error}; restore the file from the published benchmark") from error


def _verification(text: Path, tools: Sequence[str]) -> Prompt:
    level = text.parent.parent
    path = _read(level / "question" / text.name).strip()
    said = _read(level / "answer" / text.name).strip().upper()
    if not path or set(path) - set("LRUD"):
        raise BenchmarkError(
            f"{level / 'question' / text.name}: expected moves such as RRD, got {path[:40]!r}"
        )
    if said not in _ANSWERS:
        raise BenchmarkError(f"{level / 'answer' / text.name}: expected Y or N, got {said[:40]!r}")
    prompt_id = f"benchmark/{level.name}/{text.stem}"
    return verification_prompt(_map(text), path, _picture(text), tools, prompt_id, answer=_ANSWERS[said])


def _levels(maps: Path, prefix: str) -> list[Path]:
    found = [p for p in maps.glob(f"{prefix}*") if p.is_dir() and p.name.removeprefix(prefix).isdigit()]
    return sorted(found, key=lambda p: int(p.name.removeprefix(prefix)))


def _texts(level: Path) -> list[Path]:
    """The pure_text files of a level, which number its items; a picture without text is an error, not an item
    less.
    """
    for part in ("img", "pure_text"):
        if not (level / part).is_dir():
            raise BenchmarkError(f"{level} has no {part} folder; restore it from the published benchmark")
    texts = {path.stem: path for path in (level / "pure_text").glob("*.txt")}
    orphans = sorted({path.stem for path in (level / "img").glob("*.png")} - set(texts))
    if orphans:
        raise BenchmarkError(
            f"{level / 'img' / orphans[0]}.png has no text in {level / 'pure_text'}; it can't be graded"
        )
    return [texts[stem] for stem in sorted(texts, key=lambda stem: (not stem.isdigit(), stem.zfill(9)))]


def _map(text: Path) -> GridMap:
    try:
        return parse_map(_read(text))
    except ValueError as error:
        raise BenchmarkError(f"{text} does not describe a map ({error}); restore it") from error


def _picture(text: Path) -> Picture:
    path = text.parent.parent / "img" / f"{text.stem}.png"
    if not path.is_file():
        raise BenchmarkError(f"missing picture {path}; restore it from the published benchmark")
    picture = Picture(path.read_bytes())
    try:
        _ = picture.rgb
    except ToolError as error:
        raise BenchmarkError(
            f"picture {path} cannot be decoded; restore it from the published benchmark"
        ) from error
    return picture


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchmarkError(f"cannot read {path} ({type(error).__name__}); restore it") from error
