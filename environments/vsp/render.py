"""Pictures of maps: gymnasium's own FrozenLake-v1 rendering, as PNG."""

from __future__ import annotations

import io
import os
import random
from collections.abc import Sequence

import numpy as np
from PIL import Image

from environments.vsp.maps import GridMap
from tools.base import Picture

PNG_COMPRESSION = 6


def draw_cell_px(rng: random.Random, share: float, sides: Sequence[int]) -> int | None:
    """The side of a map's cells: one of `sides` for a `share` of the maps, else None, as gymnasium draws it."""
    return rng.choice(sides) if rng.random() < share else None


class Renderer:
    """Draws maps with `FrozenLakeEnv.render()`; one per process, not shared between threads.

    Cells are 64 px up to 8×8; gymnasium caps the window at 512 px, so they are 56 px at 9×9. Asked for another size,
    gymnasium draws in a window of that size. gymnasium 1.4
    drew FrozenLake anew; the published VSP pictures are those of earlier versions, hence the project requires
    <1.4.

    The same map gives the same bytes. The PNG is lossless with a palette (the sprites have about 40 colours),
    a third of the size of an RGB one. gymnasium draws each cell by its letter and place alone, so that a cell
    drawn once by it is kept and put into later pictures: several times faster, and the same pixels.
    """

    def __init__(self) -> None:
        self._sheets: dict[tuple[int, int | None], _Sheet] = {}

    def render(self, grid: GridMap, cell_px: int | None = None) -> Picture:
        """The picture before the first move: the player stands on the start. `cell_px`: side of a cell, None as
        gymnasium chooses it.
        """
        look = grid.size, cell_px
        if look not in self._sheets:
            self._sheets[look] = _Sheet(*look)
        return Picture(self._sheets[look].png(grid))


class _Sheet:
    """gymnasium's environment of one map size, the palette of all that it draws, and the cells drawn so
    far.
    """

    def __init__(self, size: int, cell_px: int | None) -> None:
        # pygame must open neither a window nor a sound card; it reads these when it starts, inside gymnasium
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
        os.environ.setdefault("SDL_AUDIODRIVER", "dummy")
        # SDL takes SIGTERM for a click on the window's close button: a process that draws would not end on it
        os.environ.setdefault("SDL_NO_SIGNAL_HANDLERS", "1")
        os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
        from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv

        middle = size - 2
        frozen = GridMap(("S" + "F" * (size - 1), *["F" * size] * middle, "F" * (size - 1) + "G"))
        holes = GridMap(tuple(row.replace("F", "H") for row in frozen.rows))
        self._env = FrozenLakeEnv(desc=list(frozen.rows), render_mode="rgb_array", is_slippery=False)
        if cell_px is not None:
            self._env.window_size, self._env.cell_size = (cell_px * size,) * 2, (cell_px,) * 2
        self._env.reset(seed=0)
        self._cell = int(self._env.cell_size[0])
        self._cells: dict[tuple[int, int, str], np.ndarray] = {}  # palette indices, uint8 of (cell, cell)
        self._colours = np.unique(np.concatenate([self._draw(grid).ravel() for grid in (frozen, holes)]))
        self._palette = [
            level for code in self._colours.tolist() for level in (code >> 16, code >> 8 & 255, code & 255)
        ]
        self._blank = self._indices(self._draw(frozen))  # with the rim of 8 px that 9×9 maps leave black

    def png(self, grid: GridMap) -> bytes:
        places = [
            (row, column, letter) for row, line in enumerate(grid.rows) for column, letter in enumerate(line)
        ]
        if not self._cells.keys() >= set(places):
            indices = self._indices(self._draw(grid))
            # copies: a view would keep the whole picture alive that it was cut from
            self._cells.update({place: indices[self._slices(place)].copy() for place in places})
        picture = self._blank.copy()
        for place in places:
            picture[self._slices(place)] = self._cells[place]
        image = Image.fromarray(picture)
        image.putpalette(self._palette)
        buffer = io.BytesIO()
        image.save(buffer, "PNG", compress_level=PNG_COMPRESSION)
        return buffer.getvalue()

    def _draw(self, grid: GridMap) -> np.ndarray:
        """gymnasium's picture as 24-bit colour codes, shape (height, width)."""
        self._env.desc = np.asarray(grid.rows, dtype="c")  # type: ignore[assignment]  # annotated as its argument
        self._env.s = grid.start[0] * grid.size + grid.start[1]
        self._env.lastaction = None
        red, green, blue = np.moveaxis(np.asarray(self._env.render()).astype(np.uint32), 2, 0)
        return red << 16 | green << 8 | blue

    def _indices(self, codes: np.ndarray) -> np.ndarray:
        indices = np.searchsorted(self._colours, codes).clip(max=len(self._colours) - 1)
        if not np.array_equal(self._colours[indices], codes):
            raise RuntimeError("gymnasium drew a colour that is in none of its sprites")
        return indices.astype(np.uint8)

    def _slices(self, place: tuple[int, int, str]) -> tuple[slice, slice]:
        top, left = place[0] * self._cell, place[1] * self._cell
        return slice(top, top + self._cell), slice(left, left + self._cell)
