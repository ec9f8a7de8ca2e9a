"""How good is the champion on maps that nobody has seen: new held-out maps for every day.

The test set is asked again and again, and settings get chosen by it. Here the maps come from the date, are of
the test split by their hash (so never trained on), and are none of the stored test items.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.cli import run_main
from tasks.params import PROJECT_ROOT, Params, load_params, override
from tasks.registry import CHAMPION, champion_folder, version_of

if TYPE_CHECKING:
    from environments.base import Prompt

SUITE = "fresh"


@dataclass(frozen=True)
class FreshResult:
    """Accuracies by task (`evaluation_report.summarise`), and where they are recorded."""

    day: date
    accuracies: dict[str, dict[str, Any]]
    experiment_id: str
    run_id: str


def fresh_prompts(
    params: Params, day: date, per_size: int, known: frozenset[str] = frozenset()
) -> list[Prompt]:
    """`per_size` questions of each task at each test size, the same ones for the same day.

    Args:
        params: sizes, hole density and path lengths are those of the data.
        day: decides the maps.
        per_size: number of questions.
        known: hashes of maps to leave out.
    """
    from environments.vsp.maps import Split
    from environments.vsp.prompts import VSP, Task
    from tools.vsp import VSP_TOOLS

    environment, rng = VSP(), random.Random(f"fresh {day.isoformat()}")
    prompts: list[Prompt] = []
    for size in params.data.test_sizes:
        for task in Task:
            left = per_size
            while left:
                prompt = environment.sample(
                    rng,
                    task,
                    size,
                    f"fresh-{day:%Y%m%d}-{len(prompts):05d}",
                    split=Split.TEST,
                    hole_density=params.data.hole_density,
                    path_lengths=params.data.path_lengths,
                    tools=VSP_TOOLS,
                )
                if prompt.hidden["map_hash"] not in known:
                    prompts.append(prompt)
                    left -= 1
    return prompts


def known_maps(root: Path = PROJECT_ROOT) -> frozenset[str]:
    """Hashes of the stored test items' maps; none where the data are not here."""
    import pyarrow.parquet as pq

    file = root / "data" / "cold_start" / "test_items.parquet"
    if not file.is_file():
        return frozenset()
    return frozenset(pq.read_table(file, columns=["map_hash"])["map_hash"].to_pylist())


def evaluate_champion(params: Params, day: date, per_size: int, root: Path = PROJECT_ROOT) -> FreshResult:
    """Ask the registry's champion the day's questions; recorded as MLflow run `fresh_evaluation`.

    Raises:
        RegistryError: the registry has no champion.
    """
    from models.policy import load_policy
    from tasks.evaluate import item_rows, run_episodes
    from tasks.evaluation_report import summarise
    from tasks.tracking import stage_run
    from tasks.tracking_store import open_store, resolve_store
    from tasks.workspace import use_threads
    from tools.vsp import vsp_registry

    use_threads(params)
    # The date as seed: an attempt of today never goes on in yesterday's run.
    params = override(params, {"seed": int(f"{day:%Y%m%d}")})
    folder = champion_folder(params, root)
    client, _ = open_store(resolve_store(params.tracking, root))
    version = version_of(client, params.promote.model_name, CHAMPION)
    with stage_run("fresh_evaluation", params, root) as run:
        run.set_tags(
            {"fresh.day": day.isoformat(), "model.version": "gone" if version is None else version.version}
        )
        policy = load_policy(folder, params.policy, params.agent, vsp_registry())
        prompts = fresh_prompts(params, day, per_size, known_maps(root))
        items = item_rows(SUITE, CHAMPION, run_episodes(policy, prompts, params))
        summary = summarise(items, params.evaluate.confidence, params.seed)[SUITE][CHAMPION]
        accuracies = {task: summary[task] for task in ("navigation", "verification", "overall")}
        for task, accuracy in accuracies.items():
            run.log_summary({f"eval/{SUITE}/{CHAMPION}/{task}": accuracy["accuracy"]})
        run.log_text(json.dumps(summary, indent=1), "evaluation/fresh.json")
        return FreshResult(day, accuracies, run.experiment_id, run.run_id)


def today() -> date:
    """In UTC, as the schedule."""
    return datetime.now(UTC).date()


def table(result: FreshResult) -> Sequence[dict[str, Any]]:
    """A row per task, for a table."""
    from tasks.evaluation_report import accuracy_text

    return [
        {"day": result.day.isoformat(), "task": task, "accuracy": accuracy_text(accuracy)}
        for task, accuracy in result.accuracies.items()
    ]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tasks.fresh_evaluation",
        description="Measure the champion on held-out maps that are drawn anew for every day.",
        epilog="Example: python -m tasks.fresh_evaluation --day 2026-01-31 --per-size 10",
    )
    parser.add_argument("--day", type=date.fromisoformat, default=today(), help="decides the maps (today)")
    parser.add_argument("--per-size", type=int, default=20, help="questions per task and map size (20)")
    arguments = parser.parse_args()
    result = evaluate_champion(load_params(), arguments.day, arguments.per_size)
    for row in table(result):
        print(f"{row['task']:13} {row['accuracy']}")


if __name__ == "__main__":
    run_main(main)
