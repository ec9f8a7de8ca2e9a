"""Stage evaluate: policies on held-out maps and on the published benchmark; also any one model by hand."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.cli import run_main
from tasks.params import Params, load_params

if TYPE_CHECKING:
    import pandas as pd

    from environments.base import Prompt
    from models.policy import Policy
    from models.trajectory import Trajectory
    from tasks.tracked_run import StageRun
    from tasks.workspace import ProgressLog

HELD_OUT, WITHOUT_ASTAR, BENCHMARK = "held_out", "held_out_without_astar", "benchmark"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tasks.evaluate",
        description="Without options: the pipeline's stage, which compares baseline, SFT and GRPO. "
        "With --benchmark or --json: measure one model and print its accuracies.",
        epilog="Example: python -m tasks.evaluate --benchmark vsp --json result.json",
    )
    parser.add_argument(
        "--benchmark", metavar="DIR", help="folder of the published VSP benchmark (holds maze/)"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="where to write the accuracies")
    parser.add_argument(
        "--model",
        metavar="PATH",
        help="folder or hub name of a policy; default: the champion in the registry",
    )
    arguments = parser.parse_args()
    if arguments.benchmark is None and arguments.json is None and arguments.model is None:
        run_evaluation(load_params())
    else:
        evaluate_model(load_params(), arguments.model, arguments.benchmark, arguments.json)


def evaluate_model(params: Params, model: str | None, benchmark: str | None, json_file: Path | None) -> None:
    """One model on the benchmark folder, or on the held-out items; prints and writes accuracies by task."""
    from environments.vsp.benchmark import load_benchmark
    from models.policy import load_policy
    from tasks.evaluation_report import accuracy_text, summarise
    from tasks.registry import champion_folder
    from tasks.schema import load_items
    from tasks.workspace import COLD_START, ProgressLog, use_threads
    from tools.vsp import VSP_TOOLS, vsp_registry

    use_threads(params)
    if benchmark is not None:
        suite, prompts = BENCHMARK, load_benchmark(benchmark, VSP_TOOLS)
    else:
        suite, prompts = HELD_OUT, load_items(COLD_START / "test_items.parquet")
    source = model if model is not None else champion_folder(params)
    policy = load_policy(source, params.policy, params.agent, vsp_registry())
    with ProgressLog("evaluate") as progress:
        episodes = run_episodes(policy, prompts, params, lambda done: progress.update(done, len(prompts)))
    items = item_rows(suite, "model", episodes)
    summary = summarise(items, params.evaluate.confidence, params.seed)[suite]["model"]
    result = {name: summary[name] for name in ("navigation", "verification", "overall")}
    for name, accuracy in result.items():
        print(f"{name:13} {accuracy_text(accuracy)}")
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=2) + "\n")


def run_evaluation(params: Params) -> None:
    """The stage: all policies on all suites, written to outputs/evaluation and to the stage's MLflow run."""
    from tasks.tracking import stage_run
    from tasks.workspace import use_threads

    use_threads(params)
    with stage_run("evaluate", params) as run:
        _evaluate(params, run)


def _evaluate(params: Params, run: StageRun) -> None:
    import pandas as pd

    from tasks.engines import open_policy
    from tasks.episode_traces import log_traces
    from tasks.evaluation_report import compare, markdown_table, summarise
    from tasks.plots import write_accuracy_by_size, write_summary
    from tasks.workspace import OUTPUTS, ProgressLog, fresh_folder

    suites = load_suites(params)
    _log_datasets(run, suites, params)
    frames = []
    # What the report shows: the trained policies beside each other. The baseline is asked without tools.
    shown: dict[str, list[Trajectory]] = {"grpo": [], "sft": []}
    with ProgressLog("evaluate") as progress:
        total = sum(len(prompts) * (3 if suite != WITHOUT_ASTAR else 2) for suite, prompts in suites.items())
        done = 0
        for name in ("baseline", "sft", "grpo"):
            policy = open_policy(OUTPUTS / name, params)
            for suite, prompts in suites.items():
                if name == "baseline" and suite == WITHOUT_ASTAR:
                    continue  # it has no tools to take away
                asked = [replace(p, tools=()) for p in prompts] if name == "baseline" else prompts
                tell = partial(_tell, progress, done, total, f"{name} on {suite}")
                trajectories = run_episodes(policy, asked, params, tell)
                done += len(trajectories)
                frames.append(item_rows(suite, name, trajectories))
                run.count_tokens(sum(t.sampled_tokens for t in trajectories))
                run.log_summary({f"eval/{suite}/{name}/seconds_per_episode": _seconds(trajectories)})
                if name in shown:
                    shown[name] += trajectories
    items = pd.concat(frames, ignore_index=True)
    metrics = summarise(items, params.evaluate.confidence, params.seed)
    compared = compare(
        items[items.policy != "baseline"], "grpo", "sft", params.evaluate.confidence, params.seed
    )
    with fresh_folder(OUTPUTS / "evaluation") as folder:
        items.to_parquet(folder / "items.parquet", index=False)
        _write_json(metrics, folder / "metrics.json")
        write_summary(metrics, folder / "summary.json")
        write_accuracy_by_size(metrics[HELD_OUT], folder / "accuracy_by_size.csv")
        facts = {"grpo_against_sft": compared, "maps_shared_with_training": _training_overlap(suites)}
        _write_json(facts, folder / "comparison.json")
        _write_figures(metrics, folder / "figures")
        _write_report(shown, params, folder / "report.html")
    run.log_summary(_flat_accuracies(metrics))
    run.log_artifacts(OUTPUTS / "evaluation", "evaluation")
    run.log_text(markdown_table(metrics), "evaluation/table.md")
    log_traces(run, _sample(shown["grpo"], params.evaluate.traces), {"policy": "grpo"})


def _tell(progress: ProgressLog, before: int, total: int, note: str, finished: int) -> None:
    progress.update(before + finished, total, note)


def _write_json(content: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


def load_suites(params: Params) -> dict[str, list[Prompt]]:
    """The questions by suite. The benchmark's text files serve its grader only."""
    from environments.vsp.benchmark import load_benchmark
    from environments.vsp.prompts import BASE_TOOLS, Task
    from tasks.schema import load_items
    from tasks.workspace import COLD_START
    from tools.vsp import VSP_TOOLS

    held_out = [replace(p, tools=VSP_TOOLS) for p in load_items(COLD_START / "test_items.parquet")]
    if params.evaluate.items_per_size is not None:
        held_out = _first_per_size(held_out, params.evaluate.items_per_size)
    navigation = [replace(p, tools=BASE_TOOLS) for p in held_out if p.task == Task.NAVIGATION]
    suites = {HELD_OUT: held_out, WITHOUT_ASTAR: navigation}
    if params.evaluate.benchmark is not None:
        suites[BENCHMARK] = load_benchmark(params.evaluate.benchmark, VSP_TOOLS)
    return suites


def _first_per_size(prompts: list[Prompt], count: int) -> list[Prompt]:
    taken: dict[tuple[str, int], int] = {}
    chosen = []
    for prompt in prompts:
        key = (prompt.task, prompt.hidden["size"])
        taken[key] = taken.get(key, 0) + 1
        if taken[key] <= count:
            chosen.append(prompt)
    return chosen


def run_episodes(
    policy: Policy,
    prompts: Sequence[Prompt],
    params: Params,
    on_finished: Callable[[int], None] | None = None,
) -> list[Trajectory]:
    """One scored episode per prompt, in order. `on_finished` is told how many are done, after each one."""
    from environments.vsp.prompts import VSP
    from models.grpo import score
    from models.rollout import RolloutRequest
    from tasks.engines import rollout_engine
    from tools.cache import ToolResultCache

    engine = rollout_engine(policy, params, ToolResultCache(params.rollout.cached_results))
    requests = [RolloutRequest(prompt, 0, params.seed) for prompt in prompts]
    environment = VSP()
    trajectories = engine.sample(requests, params.evaluate.temperature, on_finished)
    return [score(trajectory, environment) for trajectory in trajectories]


def item_rows(suite: str, policy: str, trajectories: Sequence[Trajectory]) -> pd.DataFrame:
    """A row per episode, with the columns of `evaluation_report.ITEM_COLUMNS`."""
    import pandas as pd

    return pd.DataFrame(
        {
            "suite": suite,
            "policy": policy,
            "prompt_id": t.prompt.prompt_id,
            "task": str(t.prompt.task),
            "tools": ",".join(t.prompt.tools),
            "size": t.prompt.hidden["size"],
            "path_length": t.prompt.hidden["path_length"],
            "correct": t.components["accuracy"] > 0,
            "calls": t.calls,
            "stop_reason": str(t.stop_reason),
            "tokens": t.sampled_tokens,
        }
        for t in trajectories
    )


def _training_overlap(suites: dict[str, list[Prompt]]) -> dict[str, int]:
    """Questions of each suite on a map that the cold start also trains on (0 for held-out by construction)."""
    import pyarrow.parquet as pq

    from tasks.schema import trajectory_files
    from tasks.workspace import COLD_START

    trained: set[str] = set()
    for file in trajectory_files(COLD_START, "train"):
        trained.update(pq.read_table(file, columns=["map_hash"])["map_hash"].to_pylist())
    return {suite: sum(p.hidden["map_hash"] in trained for p in prompts) for suite, prompts in suites.items()}


def _seconds(trajectories: Sequence[Trajectory]) -> float:
    return sum(t.seconds for t in trajectories) / len(trajectories)


def _flat_accuracies(metrics: dict[str, Any]) -> dict[str, float]:
    flat = {}
    for suite, policies in metrics.items():
        for policy, summary in policies.items():
            for task in ("navigation", "verification", "overall"):
                if summary[task]["accuracy"] is not None:
                    flat[f"eval/{suite}/{policy}/{task}"] = summary[task]["accuracy"]
            interval = next(value for key, value in summary["overall"].items() if key.startswith("ci"))
            if interval is not None:
                flat[f"eval/{suite}/{policy}/overall_low"] = interval[0]
                flat[f"eval/{suite}/{policy}/overall_high"] = interval[1]
            flat[f"eval/{suite}/{policy}/calls_per_episode"] = summary["calls_per_episode"]["mean"]
    return flat


def _write_figures(metrics: dict[str, Any], folder: Path) -> None:
    from tasks.evaluation_report import accuracy_figure, save_figure, stop_reason_figure

    for suite in metrics:
        for breakdown in ("size", "path_length"):
            save_figure(accuracy_figure(metrics, suite, breakdown), folder / f"{suite}_by_{breakdown}.png")
        save_figure(stop_reason_figure(metrics, suite), folder / f"{suite}_stop_reasons.png")


def _sample(trajectories: Sequence[Trajectory], count: int) -> list[Trajectory]:
    """About `count` episodes, failures first, then spread evenly: what a reader wants to see."""
    passed = [t for t in trajectories if t.components["accuracy"] > 0]
    failed = [t for t in trajectories if t.components["accuracy"] == 0]
    failed = failed[: max(count // 2, count - len(passed))]
    wanted = count - len(failed)
    return failed + passed[:: max(1, len(passed) // max(1, wanted))][:wanted]


def _write_report(shown: dict[str, list[Trajectory]], params: Params, path: Path) -> None:
    from tasks.rollout_report import write_report

    episodes = _sample(shown["grpo"], params.evaluate.report_episodes)
    write_report(episodes, params.reward, path, "grpo", {"sft": shown["sft"]})


def _log_datasets(run: StageRun, suites: dict[str, list[Prompt]], params: Params) -> None:
    """Link what was asked. A suite's hash is that of its questions, maps and offered tools."""
    sources = {BENCHMARK: params.evaluate.benchmark or ""}
    for suite, prompts in suites.items():
        asked = [(p.prompt_id, p.question, p.hidden["map_hash"], p.tools) for p in prompts]
        digest = hashlib.sha256(json.dumps(asked).encode()).hexdigest()
        source = sources.get(suite, "data/cold_start/test_items.parquet")
        run.log_dataset(suite, source, digest, "evaluation", len(prompts))


if __name__ == "__main__":
    from environments.vsp.benchmark import BenchmarkError

    run_main(main, BenchmarkError, ValueError)
