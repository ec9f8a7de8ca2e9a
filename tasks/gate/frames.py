"""From the files of a data set to flat frames: a row per file, share, trajectory, turn, held-out item.

Trajectories from elsewhere are a frame of their own, which is there only if they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from environments.vsp.config import ColdStartConfig
from environments.vsp.expert import WRONG_PATHS, Kind
from environments.vsp.maps import Split
from environments.vsp.prompts import Task
from tasks.gate.facts import PictureReader, TurnReader, question_facts, trajectory_facts, true_map
from tasks.gate.files import MANIFEST, file_rows, iter_rows, read_manifest, read_table
from tasks.ingested import is_ingested
from tasks.schema import ITEMS, TRAJECTORIES
from tools.registry import ToolRegistry

ITEM_FILES = {"validation_items.parquet": Split.VALIDATION, "test_items.parquet": Split.TEST}
# A share of n rows that are drawn one by one strays by its standard deviation; four of them are no fault.
SAMPLING_DEVIATIONS = 4

Facts = dict[str, Any]
TokenLengths = Callable[[Sequence[Mapping[str, Any]]], list[int]]
"""Tokens of each trajectory; a row has the columns of TRAJECTORIES, and `image` is its PNG or None."""


def build_frames(
    folder: Path,
    config: ColdStartConfig,
    share_tolerance: float,
    registry: ToolRegistry,
    read_picture: PictureReader,
    token_lengths: TokenLengths,
) -> dict[str, pd.DataFrame]:
    """Read every file that the manifest lists or the folder holds into frames by name.

    In each, column `file` names the file that a row is from.

    Raises FileNotFoundError if there is no such folder; anything wrong inside it is a fact in some frame.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}: make the data first with `python -m tasks.cold_start`")
    listed, manifest_problem = read_manifest(folder)
    manifest = file_rows(folder / MANIFEST, {}, None, manifest_problem) | {"is_listed": True}
    found = {path.name for path in folder.glob("*.parquet")}
    builder = _Builder(config, registry, read_picture, token_lengths)
    files = [manifest]
    # Held-out files first: training rows are compared with their maps.
    for name in sorted(found | set(listed) | set(ITEM_FILES), key=lambda n: (_group(n) == Split.TRAIN, n)):
        table, problem = read_table(folder / name, ITEMS if name in ITEM_FILES else TRAJECTORIES)
        files.append(file_rows(folder / name, listed, table, problem))
        if table is not None:
            builder.add(name, table)
    trajectories = _frame(builder.trajectories, _columns(TRAJECTORIES, builder.trajectory))
    items = _frame(builder.items, _columns(ITEMS, builder.item))
    ingested = _frame(builder.ingested, list(trajectories))
    no_turn = builder.turn("", {"trajectory_id": None, "tools": None}, 0, None)
    return {
        "files": _frame(files, list(manifest)),
        "shares": pd.DataFrame(_shares(trajectories, items, config, share_tolerance)),
        "trajectories": trajectories,
        **({"ingested": ingested} if len(ingested) else {}),
        "turns": _frame(builder.turns, list(no_turn)),
        "items": items,
    }


class _Builder:
    """Collects the facts of row after row, and which maps belong to which group of files."""

    def __init__(
        self,
        config: ColdStartConfig,
        registry: ToolRegistry,
        read_picture: PictureReader,
        token_lengths: TokenLengths,
    ) -> None:
        self._other_cells_px = config.shown_cells_px
        self.trajectories: list[Facts] = []
        self.ingested: list[Facts] = []  # trajectories from elsewhere, which the settings ask no shares of
        self.turns: list[Facts] = []
        self.items: list[Facts] = []
        self._registry = registry
        self._token_lengths = token_lengths
        self._read_picture = read_picture
        self._read_turn = TurnReader(registry, read_picture)
        self._maps: dict[str, set[str]] = {}  # of each group of held-out files

    def add(self, name: str, table: pa.Table) -> None:
        rows = [row | {"image": image} for row, image in iter_rows(table)]
        if name in ITEM_FILES:
            self.items += [self.item(name, row) for row in rows]
        else:
            lengths = self._token_lengths(rows)
            facts = self.ingested if is_ingested(name) else self.trajectories
            facts += [self.trajectory(name, row, tokens) for row, tokens in zip(rows, lengths, strict=True)]
            self.turns += [
                self.turn(name, row, position, turn)
                for row in rows
                for position, turn in enumerate(row["turns"] or (), start=1)
            ]
        group = _group(name)
        if group != Split.TRAIN:
            maps = (true_map(row) for row in rows)
            self._maps.setdefault(group, set()).update(grid.sha256 for grid in maps if grid is not None)

    def item(self, name: str, row: Facts) -> Facts:
        split = ITEM_FILES.get(name, Split.TEST)
        return {"file": name, "prompt_id": row["prompt_id"]} | self._question(name, row, split, ())

    def trajectory(self, name: str, row: Facts, tokens: int = 0) -> Facts:
        split = _group(name)
        return (
            {"file": name, "split_is_right": row["split"] == split}
            | trajectory_facts(row, tokens)
            | self._question(name, row, split, self._other_cells_px)
        )

    def _question(self, name: str, row: Facts, split: str, other_cells_px: Sequence[int]) -> Facts:
        picture = self._read_picture(row["image"])
        facts = question_facts(row, picture, self._registry, split, other_cells_px)
        grid = true_map(row)
        others = (group for group, maps in self._maps.items() if group != _group(name) and grid)
        leak = next((group for group in others if grid and grid.sha256 in self._maps[group]), "")
        return facts | {"also_in": leak, "map_is_in_no_other_group": not leak}

    def turn(self, name: str, row: Facts, position: int, turn: Facts | None) -> Facts:
        facts = {"file": name, "trajectory_id": row["trajectory_id"], "turn": position}
        return facts | self._read_turn(turn, row["tools"])


def _group(name: str) -> str:
    """Files between which no map may be shared: train and validation shards, and each file of items."""
    return name.removesuffix(".parquet").partition("-")[0]


def _frame(rows: list[Facts], columns: list[str]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=columns)


def _columns(schema: pa.Schema, facts_of: Callable[[str, Facts], Facts]) -> list[str]:
    """The columns of a frame, which it has even without rows."""
    return list(facts_of("", dict.fromkeys(schema.names)))


def _shares(
    trajectories: pd.DataFrame, items: pd.DataFrame, config: ColdStartConfig, tolerance: float
) -> list[Facts]:
    """Counts and shares that the settings ask for: `{measure, observed, low, high, is_within, limits}`."""
    train = trajectories[trajectories["split"] == Split.TRAIN]
    offers_astar = train["tools"].fillna("").str.split(",").map(lambda tools: "ASTAR" in tools).astype(bool)
    without_astar = train[(train["task"] == Task.NAVIGATION) & ~offers_astar]
    without_wrong_paths = without_astar[~without_astar["kind"].isin(WRONG_PATHS)]
    verification = train[train["task"] == Task.VERIFICATION]
    counts = {
        "training trajectories": (len(train), config.n_trajectories),
        "validation trajectories": (
            int((trajectories["split"] == Split.VALIDATION).sum()),
            config.validation_trajectories,
        ),
        "validation items": (
            int((items["file"] == "validation_items.parquet").sum()),
            config.validation_items,
        ),
        "test items": (
            int((items["file"] == "test_items.parquet").sum()),
            2 * config.test_items_per_size * len(config.test_sizes),
        ),
    }
    shares: dict[str, tuple[pd.Series, float]] = {
        "navigation, of all": (train["task"] == Task.NAVIGATION, config.navigation_share),
        "tool failures, of all": (train["kind"] == Kind.TOOL_FAILURE, config.tool_failure_share),
        "maps with cells of another size, of all": (train["image_has_other_cells"], config.other_cells_share),
        "ASTAR offered, of all": (offers_astar, config.astar_share),
        "holes pointed at, of navigation without ASTAR and wrong paths": (
            without_wrong_paths["points_at_holes"],
            config.holes_share,
        ),
        "one wrong path, of navigation without ASTAR": (
            without_astar["kind"] == Kind.REFLECTION_1,
            config.reflection_1_share,
        ),
        "two wrong paths or more, of navigation without ASTAR": (
            without_astar["kind"] == Kind.REFLECTION_2,
            config.reflection_2_share,
        ),
        "answer Yes, of verification": (verification["answer"] == "Yes", 0.5),
    }
    rows = [_within(measure, observed, wanted, wanted) for measure, (observed, wanted) in counts.items()]
    for measure, (flags, wanted) in shares.items():
        if len(flags):
            slack = tolerance + SAMPLING_DEVIATIONS * math.sqrt(wanted * (1 - wanted) / len(flags))
            rows.append(_within(measure, float(flags.mean()), wanted - slack, wanted + slack))
    return rows


def _within(measure: str, observed: float, low: float, high: float) -> Facts:
    limits = f"{observed:g}, wanted {low:g}" + ("" if low == high else f" to {high:g}")
    return {
        "file": "",
        "measure": measure,
        "observed": float(observed),
        "low": float(low),
        "high": float(high),
        "is_within": low <= observed <= high,
        "limits": limits,
    }
