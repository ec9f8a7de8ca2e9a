"""Episodes as one HTML page that needs nothing else: pictures inside, no network, no storage.

It opens from disk and in MLflow's artifact viewer, whose sandboxed frame allows scripts only. The page
depends on the episodes alone (no times), so that DVC sees the same bytes for the same episodes.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from models.config import RewardConfig
from models.rewards import total
from models.trajectory import Step, Trajectory
from tools.base import Picture

TEMPLATE = Path(__file__).parent / "templates" / "rollout_report.html"
DATA_MARK = "/*EPISODES*/"
# MLflow shows a page of 10 MB with difficulty; 200 episodes have about 1 MB of text.
PICTURE_BUDGET = 8_000_000  # characters of all pictures together
SMALL_PICTURE = 8_000  # bytes; larger ones are encoded again
PALETTE_COLOURS = 256
THUMBNAIL_SIDE, THUMBNAIL_QUALITY = 320, 75


def write_report(trajectories: Sequence[Trajectory], reward: RewardConfig, path: Path) -> None:
    """Write `report_html` to `path`, whose folder is made if absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(report_html(trajectories, reward), encoding="utf-8")


def report_html(trajectories: Sequence[Trajectory], reward: RewardConfig) -> str:
    """The page: for each episode its picture, question, turns, calls, observations, and reward by component.

    The scalar reward is made from the components with the weights of `reward`. Where pictures would exceed
    PICTURE_BUDGET, the last ones are left out, and the page says how many.
    """
    pictures = _Pictures()
    # Prompts' pictures first: if some have to be left out, then those of observations.
    shown = [[pictures.add(picture) for picture in t.prompt.pictures] for t in trajectories]
    episodes = [
        _episode(trajectory, reward, ids, pictures)
        for trajectory, ids in zip(trajectories, shown, strict=True)
    ]
    data = {"episodes": episodes, "pictures": pictures.embedded, "left_out": pictures.left_out}
    # Inside a script element "<" could end it or begin a comment, whatever an agent wrote.
    text = json.dumps(data, ensure_ascii=True, sort_keys=True, separators=(",", ":")).replace("<", "\\u003c")
    return TEMPLATE.read_text(encoding="utf-8").replace(DATA_MARK, text)


def _episode(
    trajectory: Trajectory, reward: RewardConfig, picture_ids: list[str | None], pictures: _Pictures
) -> dict[str, Any]:
    prompt = trajectory.prompt
    width, height = prompt.pictures[0].size if prompt.pictures else (0, 0)
    return {
        "id": prompt.prompt_id,
        "sample": trajectory.sample,
        "task": str(prompt.task),
        "question": prompt.question,
        "tools": list(prompt.tools),
        "facts": {
            name: str(prompt.hidden[name])
            for name in ("size", "path_length", "answer")
            if prompt.hidden.get(name) not in (None, "")
        },
        "pictures": [picture for picture in picture_ids if picture is not None],
        "width": width,
        "height": height,
        "steps": [_step(step, pictures) for step in trajectory.steps],
        "stop_reason": str(trajectory.stop_reason),
        "response": trajectory.response,
        "correct": trajectory.components["accuracy"] > 0,
        "reward": total(trajectory.components, reward),
        "components": trajectory.components,
        "tokens": trajectory.sampled_tokens,
        "policy_version": trajectory.policy_version,
    }


def _step(step: Step, pictures: _Pictures) -> dict[str, Any]:
    seen = step.observation
    return {
        "think": step.think,
        "tool": step.call.name if step.call else None,
        "call": step.call.to_json() if step.call else None,
        "level": step.call_level,
        "observation": seen.to_json() if seen else None,
        "coordinates": seen.payload.get("coordinates") if seen and seen.ok else None,
        "failed": seen is not None and not seen.ok,
        "picture": pictures.add(seen.picture) if seen and seen.picture else None,
        "response": step.response,
        "well_formed": step.well_formed,
    }


class _Pictures:
    """Data URIs by content hash, each picture once, within the budget."""

    def __init__(self) -> None:
        self.embedded: dict[str, str] = {}
        self.left_out = 0
        self._used = 0

    def add(self, picture: Picture) -> str | None:
        """The key of the picture, or None if there is no room for it."""
        key = picture.sha256[:16]
        if key in self.embedded:
            return key
        uri = _data_uri(picture)
        if self._used + len(uri) > PICTURE_BUDGET:
            self.left_out += 1
            return None
        self._used += len(uri)
        self.embedded[key] = uri
        return key


def _data_uri(picture: Picture) -> str:
    if len(picture.png) <= SMALL_PICTURE:
        return _uri("png", picture.png)
    image = Image.fromarray(picture.decode())
    encoded = io.BytesIO()
    if image.getcolors(PALETTE_COLOURS) is not None:  # drawn, not photographed: a palette loses nothing
        image.quantize(PALETTE_COLOURS, dither=Image.Dither.NONE).save(encoded, "PNG")
        return _uri("png", encoded.getvalue())
    image.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    image.save(encoded, "WEBP", quality=THUMBNAIL_QUALITY)
    return _uri("webp", encoded.getvalue())


def _uri(kind: str, content: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
