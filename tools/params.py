"""Parameter types that tools share: pixels, boxes, and models that know which pixels they name."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated

from pydantic import Field

from tools.base import ToolParams

# Far above any picture, so that an absurd number is refused before it is echoed or drawn.
MAX_COORDINATE = 10_000

Coordinate = Annotated[int, Field(ge=-MAX_COORDINATE, le=MAX_COORDINATE)]
PixelParam = Annotated[list[Coordinate], Field(min_length=2, max_length=2)]
BoxParam = Annotated[list[Coordinate], Field(min_length=4, max_length=4)]


class PixelParams(ToolParams):
    """Parameters that name places in the picture, which their types alone cannot tell to be inside."""

    @abstractmethod
    def pixels(self) -> list[tuple[int, int]]:
        """Every pixel (x, y) that must lie inside the picture for the call to make sense."""

    def inside(self, width: int, height: int) -> bool:
        """Whether all pixels lie in a picture of that size, in pixels."""
        return all(0 <= x < width and 0 <= y < height for x, y in self.pixels())
