"""Pictures that tools draw are encoded when somebody looks, once, and are the same however they were come by."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from tests.tools.worlds import render
from tools.base import Picture, ToolCall, encode_png
from tools.cache import ToolResultCache
from tools.executor import ToolExecutor
from tools.vsp import VSP_TOOLS, vsp_registry

MAP = render(("SFFF", "FFFF", "FHFF", "FFFG"))
DRAW = ToolCall("DRAW2DPATH", {"points": [[32, 32], [224, 32], [224, 224]]})
PIXELS = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)


def test_a_picture_is_made_when_it_is_looked_at_and_only_once() -> None:
    made: list[int] = []

    def make() -> bytes:
        made.append(1)
        return encode_png(PIXELS)

    picture = Picture(make)
    assert not made
    assert picture == Picture.from_rgb(PIXELS)
    assert hash(picture) == hash(Picture.from_rgb(PIXELS))
    assert picture.size == (4, 4)
    assert (picture.rgb == PIXELS).all()
    assert len(made) == 1
    assert picture.source == picture.png


def test_a_drawn_picture_nobody_looks_at_is_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoding took two thirds of a call whose picture never enters the context."""
    MAP.png  # noqa: B018 (made before encoding is forbidden)
    monkeypatch.setattr("tools.draw2dpath.encode_png", lambda rgb: pytest.fail("encoded"))
    observation = ToolExecutor(vsp_registry(), ToolResultCache(8), 5.0).run(DRAW, MAP, VSP_TOOLS)
    assert observation.payload["result"] == "path_safe"
    assert observation.picture is not None


def test_a_drawn_picture_is_the_same_from_the_cache_another_process_or_a_look_before() -> None:
    executor = ToolExecutor(vsp_registry(), ToolResultCache(8), 5.0)
    first = executor.run(DRAW, MAP, VSP_TOOLS).picture
    again = executor.run(DRAW, MAP, VSP_TOOLS)
    alone = ToolExecutor(vsp_registry(), None, 5.0).run(DRAW, MAP, VSP_TOOLS).picture
    assert again.cached
    assert first is not None
    assert first != MAP
    assert first == again.picture == alone == pickle.loads(pickle.dumps(first))
