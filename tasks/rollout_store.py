"""Cached rollouts as files: what one run sampled, for another to begin with (S2 §5.3, offline prefill)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

    from models.replay import ReplayBuffer, ReplayGroup
    from models.trajectory import Trajectory

ROLLOUTS, PICTURES = "rollouts.parquet", "pictures.parquet"


def save_rollouts(folder: Path, replay: ReplayBuffer) -> None:
    """Write the buffer's groups to `folder`: a row per trajectory, each picture once."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [_row(group, t) for group in replay.groups for t in group.trajectories]
    pictures = {
        p.sha256: p.png
        for group in replay.groups
        for t in group.trajectories
        for p in (*t.pictures, *t.prompt.pictures)
    }
    pq.write_table(pa.Table.from_pylist(rows, _schema()), folder / ROLLOUTS, compression="zstd")
    schema = pa.schema([("sha256", pa.string()), ("png", pa.binary())])
    table = [{"sha256": key, "png": png} for key, png in sorted(pictures.items())]
    pq.write_table(pa.Table.from_pylist(table, schema), folder / PICTURES)


def load_rollouts(folder: Path) -> list[ReplayGroup]:
    """The groups in `folder`, as if sampled before version 0, the latest one version before.

    Raises FileNotFoundError.
    """
    import pyarrow.parquet as pq

    from models.replay import ReplayGroup
    from tools.base import Picture

    if not (folder / ROLLOUTS).is_file():
        raise FileNotFoundError(f"{folder} holds no {ROLLOUTS}; stage grpo writes it to outputs/rollouts")
    pictures = {row["sha256"]: Picture(row["png"]) for row in pq.read_table(folder / PICTURES).to_pylist()}
    rows = pq.read_table(folder / ROLLOUTS).to_pylist()
    latest = max((row["version"] for row in rows), default=0)
    groups: dict[str, list[Trajectory]] = {}
    priorities: dict[str, float] = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(_trajectory(row, pictures, row["version"] - latest - 1))
        priorities[row["group"]] = row["priority"]
    return [ReplayGroup(key, own, priorities[key]) for key, own in groups.items()]


def _schema() -> pa.Schema:
    import pyarrow as pa

    texts = ("group", "prompt_id", "environment", "task", "question", "hidden", "stop_reason", "components")
    return pa.schema(
        [
            *((name, pa.string()) for name in texts),
            ("priority", pa.float64()),
            ("tools", pa.list_(pa.string())),
            ("prompt_pictures", pa.list_(pa.string())),
            ("pictures", pa.list_(pa.string())),
            ("sample", pa.int32()),
            ("ids", pa.list_(pa.int32())),
            ("mask", pa.list_(pa.bool_())),
            ("logprobs", pa.list_(pa.float32())),
            ("version", pa.int32()),
            ("temperature", pa.float64()),
            ("seed", pa.int64()),
            ("potentials", pa.list_(pa.float64())),
            ("joined_from", pa.int32()),
        ]
    )


def _row(group: ReplayGroup, trajectory: Trajectory) -> dict[str, Any]:
    prompt = trajectory.prompt
    return {
        "group": group.key,
        "priority": group.priority,
        "prompt_id": prompt.prompt_id,
        "environment": prompt.environment,
        "task": str(prompt.task),
        "question": prompt.question,
        "hidden": json.dumps(prompt.hidden, sort_keys=True),
        "tools": list(prompt.tools),
        "prompt_pictures": [picture.sha256 for picture in prompt.pictures],
        "pictures": [picture.sha256 for picture in trajectory.pictures],
        "sample": trajectory.sample,
        "ids": trajectory.ids,
        "mask": trajectory.mask,
        "logprobs": trajectory.logprobs,
        "stop_reason": str(trajectory.stop_reason),
        "version": trajectory.policy_version,
        "temperature": trajectory.temperature,
        "seed": trajectory.seed,
        "components": json.dumps(trajectory.components, sort_keys=True),
        "potentials": list(trajectory.potentials),
        "joined_from": trajectory.joined_from,
    }


def _trajectory(row: dict[str, Any], pictures: dict[str, Any], version: int) -> Trajectory:
    import numpy as np

    from environments.base import Prompt
    from models.trajectory import StopReason, Trajectory

    prompt = Prompt(
        row["prompt_id"],
        row["environment"],
        row["task"],
        row["question"],
        tuple(pictures[key] for key in row["prompt_pictures"]),
        tuple(row["tools"]),
        json.loads(row["hidden"]),
    )
    return Trajectory(
        prompt=prompt,
        sample=row["sample"],
        ids=np.array(row["ids"], dtype=np.int32),
        mask=np.array(row["mask"], dtype=bool),
        logprobs=np.array(row["logprobs"], dtype=np.float32),
        pictures=tuple(pictures[key] for key in row["pictures"]),
        steps=(),
        stop_reason=StopReason(row["stop_reason"]),
        policy_version=version,
        temperature=row["temperature"],
        seed=row["seed"],
        seconds=0.0,
        components=json.loads(row["components"]),
        potentials=tuple(row["potentials"]),
        joined_from=row["joined_from"],
    )
