"""Pictures must be read exactly: one wrong cell and every demonstration on that map is wrong."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest

from environments.vsp.maps import random_map as draw_map
from environments.vsp.render import Renderer
from tests.tools.worlds import PICTURES, PUBLISHED, cells, centre, random_map, render
from tools.base import Picture, ToolCall
from tools.errors import ToolError, ToolErrorCode
from tools.executor import ToolExecutor
from tools.vision import read_grid
from tools.vsp import VSP_TOOLS, vsp_registry

STORED_MAP = (
    "FFHFFFFFH",
    "FSFFHFFFF",
    "FFFFFHFFF",
    "HFFFFFFFF",
    "FFFHFFFGF",
    "FFFFFFFFF",
    "FHFFFFHFF",
    "FFFFHFFFF",
    "HFFFFFFFH",
)


@pytest.fixture(scope="module")
def executor() -> ToolExecutor:
    return ToolExecutor(vsp_registry(), None, 5.0)


def assert_point_is_exact(executor: ToolExecutor, picture: Picture, rows: tuple[str, ...]) -> None:
    def point(target: str) -> object:
        return executor.run(ToolCall("POINT", {"target": target}), picture, VSP_TOOLS).payload["coordinates"]

    assert point("start") == centre(rows, cells(rows, "S")[0])
    assert point("goal") == centre(rows, cells(rows, "G")[0])
    assert point("holes") == [centre(rows, hole) for hole in cells(rows, "H")]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("size", range(3, 10))
def test_point_is_exact_on_renderings_of_every_size(executor: ToolExecutor, size: int, seed: int) -> None:
    rows = random_map(size, seed, hole_share=0.1 * (seed % 6))
    assert_point_is_exact(executor, render(rows), rows)


@pytest.mark.parametrize("cell_px", range(32, 68, 4))
def test_the_grid_is_exact_at_every_size_of_cell(cell_px: int) -> None:
    renderer, rng = Renderer(), random.Random(cell_px)
    for size in (4, 6, 8):
        for density in (0.1, 0.3):
            grid = draw_map(rng, size, density)
            read = read_grid(renderer.render(grid, cell_px).decode())
            assert (read.cell, tuple(read.rows)) == (cell_px, grid.rows)


@pytest.mark.parametrize("corner", range(4))
def test_point_is_exact_when_the_map_is_all_holes(executor: ToolExecutor, corner: int) -> None:
    rows = [["H"] * 9 for _ in range(9)]
    rows[8 * (corner // 2)][8 * (corner % 2)] = "S"
    rows[4][4] = "G"
    full = tuple("".join(row) for row in rows)
    assert_point_is_exact(executor, render(full), full)


def published_rows(text: str) -> tuple[str, ...]:
    size = re.search(r"(\d+)x\1 map", text)
    assert size is not None
    rows = [["F"] * int(size[1]) for _ in range(int(size[1]))]
    for line in text.splitlines()[1:]:
        letter = {"player": "S", "hole(s)": "H", "goal": "G"}[line.split()[1]]
        for row, col in re.findall(r"row (\d+), column (\d+)", line, re.IGNORECASE):
            rows[int(row) - 1][int(col) - 1] = letter
    return tuple("".join(row) for row in rows)


def test_point_is_exact_on_published_benchmark_pictures(executor: ToolExecutor) -> None:
    if not PUBLISHED.is_dir():
        pytest.skip(f"the published VSP sample is not at {PUBLISHED}")
    pictures = sorted(PUBLISHED.glob("*/maps/*/img/*.png"))
    assert len(pictures) == 27
    for path in pictures:
        text = (path.parents[1] / "pure_text" / f"{path.stem}.txt").read_text(encoding="utf-8")
        assert_point_is_exact(executor, Picture(path.read_bytes()), published_rows(text))


@pytest.mark.parametrize("look", ["elf", "robot"])
@pytest.mark.parametrize(
    ("scene", "player"),
    [
        ("start", (1, 1)),
        ("left", (1, 1)),
        ("up", (1, 1)),
        ("right", (1, 1)),
        ("moved", (5, 5)),
        ("on_goal", (4, 7)),
        ("in_hole", None),
    ],
)
def test_both_looks_of_gymnasium_are_read_in_every_scene(
    look: str, scene: str, player: tuple[int, int] | None
) -> None:
    # Rendered by gymnasium 1.3.0 (elf) and 1.4.0 (robot, without facings), of which only one is installed.
    if look == "robot" and scene in ("left", "up", "right"):
        scene = "start"
    grid = read_grid(Picture((PICTURES / f"{look}_{scene}.png").read_bytes()).decode())
    assert (grid.size, grid.cell, grid.start, grid.goal) == (9, 56, player, (4, 7))
    assert sorted(grid.holes) == cells(STORED_MAP, "H")


@pytest.mark.parametrize(
    "pixels",
    [
        np.zeros((256, 256, 3), np.uint8),
        np.full((256, 256, 3), (180, 200, 230), np.uint8),  # nothing but line colour
        np.full((1, 1, 3), 255, np.uint8),
        np.random.default_rng(0).integers(0, 256, (128, 192, 3), np.uint8),
        render(random_map(4, 0)).rgb[:, :128],  # not square
        render(random_map(4, 0)).rgb[10:, 10:],  # does not begin at a cell
    ],
    ids=["black", "line colour", "one pixel", "noise", "half a map", "shifted"],
)
def test_a_picture_without_a_square_grid_is_an_error_not_a_guess(pixels: np.ndarray) -> None:
    with pytest.raises(ToolError) as caught:
        read_grid(pixels)
    assert caught.value.code is ToolErrorCode.UNREADABLE_IMAGE
