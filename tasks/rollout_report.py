"""Episodes as one HTML page that needs nothing else: pictures inside, no network, no storage.

It opens from disk and in MLflow's artifact viewer, whose sandboxed frame allows scripts only. The page
depends on the episodes alone (no times), so that DVC sees the same bytes for the same episodes.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from environments.base import Prompt
from models.config import RewardConfig
from models.rewards import total
from models.trajectory import Step, Trajectory
from tasks.report_marks import step_marks
from tools.base import Picture

TEMPLATES = Path(__file__).parent / "templates"
# MLflow shows a page of 10 MB with difficulty; 400 episodes have about 2 MB of text.
PICTURE_BUDGET = 7_000_000  # characters of all pictures together
SMALL_PICTURE = 8_000  # bytes; larger ones are encoded again
PALETTE_COLOURS = 256
THUMBNAIL_SIDE, THUMBNAIL_QUALITY = 320, 75


def write_report(
    trajectories: Sequence[Trajectory],
    reward: RewardConfig,
    path: Path,
    name: str = "policy",
    others: Mapping[str, Sequence[Trajectory]] | None = None,
) -> None:
    """Write `report_html` to `path`, whose folder is made if absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(report_html(trajectories, reward, name, others), encoding="utf-8")


def report_html(
    trajectories: Sequence[Trajectory],
    reward: RewardConfig,
    name: str = "policy",
    others: Mapping[str, Sequence[Trajectory]] | None = None,
) -> str:
    """The page: for each episode its picture, question, turns, calls, observations, and reward by component.

    `name` is the policy of `trajectories`. `others` are policies to stand beside it: of each one, the
    episodes with the same question, tools and sample. The scalar reward is made from the components with
    the weights of `reward`. Where pictures would exceed PICTURE_BUDGET, the last ones are left out, and the
    page says how many.
    """
    pictures = _Pictures()
    # Prompts' pictures first: if some have to be left out, then those of observations.
    for trajectory in trajectories:
        for picture in trajectory.prompt.pictures:
            pictures.add(picture)
    sides = [{item_key(t): t for t in episodes} for episodes in (others or {}).values()]
    items = []
    for trajectory in trajectories:
        beside = [side.get(item_key(trajectory)) for side in sides]
        episodes = [each and _episode(each, reward, pictures) for each in (trajectory, *beside)]
        items.append({"key": trajectory.prompt.prompt_id, "episodes": episodes})
    data = {
        "policies": [name, *(others or {})],
        "items": items,
        "pictures": pictures.embedded,
        "left_out": pictures.left_out,
    }
    # Inside a script element "<" could end it or begin a comment, whatever an agent wrote.
    text = json.dumps(data, ensure_ascii=True, sort_keys=True, separators=(",", ":")).replace("<", "\\u003c")
    page = _template("html")
    for mark, content in (
        ("/*STYLE*/", _template("css")),
        ("/*SCRIPT*/", _template("js")),
        ("/*EPISODES*/", text),
    ):
        page = page.replace(mark, content)
    return page


def item_key(trajectory: Trajectory) -> tuple[str, tuple[str, ...], int]:
    """What two policies' episodes must share to stand side by side."""
    return trajectory.prompt.prompt_id, trajectory.prompt.tools, trajectory.sample


def _template(kind: str) -> str:
    return (TEMPLATES / f"rollout_report.{kind}").read_text(encoding="utf-8")


def _episode(trajectory: Trajectory, reward: RewardConfig, pictures: _Pictures) -> dict[str, Any]:
    prompt = trajectory.prompt
    width, height = prompt.pictures[0].size if prompt.pictures else (0, 0)
    shown = [pictures.add(picture) for picture in prompt.pictures]
    return {
        "id": prompt.prompt_id,
        "sample": trajectory.sample,
        "environment": prompt.environment,
        "task": str(prompt.task),
        "question": prompt.question,
        "tools": list(prompt.tools),
        "facts": {
            name: str(prompt.hidden[name])
            for name in ("size", "path_length", "answer")
            if prompt.hidden.get(name) not in (None, "")
        },
        "pictures": [picture for picture in shown if picture is not None],
        "width": width,
        "height": height,
        "steps": [_step(step, prompt, pictures) for step in trajectory.steps],
        "stop_reason": str(trajectory.stop_reason),
        "response": trajectory.response,
        "correct": trajectory.components["accuracy"] > 0,
        "reward": total(trajectory.components, reward),
        "components": trajectory.components,
        "tokens": trajectory.sampled_tokens,
        "context_tokens": len(trajectory.ids),
        "policy_version": trajectory.policy_version,
    }


def _step(step: Step, prompt: Prompt, pictures: _Pictures) -> dict[str, Any]:
    seen = step.observation
    return {
        "think": step.think,
        "tool": step.call.name if step.call else None,
        "call": step.call.to_json() if step.call else None,
        "level": step.call_level,
        "observation": seen.to_json() if seen else None,
        "marks": step_marks(step, prompt),
        "failed": seen is not None and not seen.ok,
        "picture": pictures.add(seen.picture) if seen and seen.picture else None,
        "response": step.response,
        "well_formed": step.well_formed,
    }


class _Pictures:
    """Data URIs by content hash, each picture once, within the budget."""

    def __init__(self) -> None:
        self.embedded: dict[str, str] = {}
        self._left_out: set[str] = set()
        self._used = 0

    @property
    def left_out(self) -> int:
        """How many different pictures had no room."""
        return len(self._left_out)

    def add(self, picture: Picture) -> str | None:
        """The key of the picture, or None if there is no room for it."""
        key = picture.sha256[:16]
        if key in self.embedded:
            return key
        uri = _data_uri(picture)
        if self._used + len(uri) > PICTURE_BUDGET:
            self._left_out.add(key)
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
