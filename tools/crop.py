"""CROP: a part of the picture."""

from __future__ import annotations

from pydantic import model_validator
from pydantic_core import PydanticCustomError

from tools.base import Picture, Purity, Tool, ToolOutput
from tools.errors import ToolError, ToolErrorCode
from tools.params import BoxParam, PixelParams

# Qwen2-VL's image processor refuses pictures with one side 200 times the other.
_SMALLEST_SIDE = 16


class CropParams(PixelParams):
    box: BoxParam

    @model_validator(mode="after")
    def _large_enough(self) -> CropParams:
        x1, y1, x2, y2 = self.box
        if min(x2 - x1, y2 - y1) < _SMALLEST_SIDE:
            raise PydanticCustomError("box", "box must be [x1, y1, x2, y2], at least 16 pixels wide and high")
        return self

    def pixels(self) -> list[tuple[int, int]]:
        x1, y1, x2, y2 = self.box
        return [(x1, y1), (x2 - 1, y2 - 1)]  # the right and lower edges are not part of the box


def crop_tool() -> Tool:
    """CROP(box) -> {"size": [width, height]} and the part of the picture with x1 <= x < x2, y1 <= y < y2."""
    return Tool(
        name="CROP",
        version="1",
        description="Cuts the box [x1, y1, x2, y2], in pixels, out of the picture and shows it.",
        params_model=CropParams,
        purity=Purity.PURE,
        error_codes=(ToolErrorCode.OUT_OF_BOUNDS, ToolErrorCode.UNREADABLE_IMAGE),
        run=_run,
    )


def _run(picture: Picture, params: CropParams) -> ToolOutput:
    pixels = picture.decode()
    height, width = pixels.shape[:2]
    x1, y1, x2, y2 = params.box
    if not params.inside(width, height):
        raise ToolError(ToolErrorCode.OUT_OF_BOUNDS, f"the picture is {width} by {height} pixels")
    return ToolOutput({"size": [x2 - x1, y2 - y1]}, Picture.from_rgb(pixels[y1:y2, x1:x2]))
