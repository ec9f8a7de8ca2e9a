"""Stage evaluate: policies on held-out maps and on the published benchmark; also any one model by hand."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.cli import run_main
from tasks.params import Params, load_params

if TYPE_CHECKING:
    import pandas as pd

    from environments.base import Prompt
    from models.policy import Policy
    from models.trajectory import Trajectory
    from tasks.tracking import StageRun

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
    from tasks.promote import champion_folder
    from tasks.schema import load_items
    from tasks.workspace import COLD_START, use_threads
    from tools.vsp import VSP_TOOLS, vsp_registry

    use_threads(params)
    if benchmark is not None:
        suite, prompts = BENCHMARK, load_benchmark(benchmark, VSP_TOOLS)
    else:
        suite, prompts = HELD_OUT, load_items(COLD_START / "test_items.parquet")
    source = model if model is not None else champion_folder(params)
    policy = load_policy(source, params.policy, params.agent, vsp_registry())
    items = item_rows(suite, "model", run_episodes(policy, prompts, params))
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
    from tasks.evaluation_report import compare, markdown_table, summarise
    from tasks.workspace import OUTPUTS, ProgressLog, fresh_folder

    suites = load_suites(params)
    frames, shown = [], []
    with ProgressLog("evaluate") as progress:
        total = sum(len(prompts) * (3 if suite != WITHOUT_ASTAR else 2) for suite, prompts in suites.items())
        done = 0
        for name in ("baseline", "sft", "grpo"):
            policy = open_policy(OUTPUTS / name, params)
            for suite, prompts in suites.items():
                if name == "baseline" and suite == WITHOUT_ASTAR:
                    continue  # it has no tools to take away
                asked = [replace(p, tools=()) for p in prompts] if name == "baseline" else prompts
                trajectories = run_episodes(policy, asked, params)
                done += len(trajectories)
                progress.update(done, total, f"{name} on {suite}")
                frames.append(item_rows(suite, name, trajectories))
                run.log_summary({f"eval/{suite}/{name}/seconds_per_episode": _seconds(trajectories)})
                if name == "grpo":
                    shown += trajectories
    items = pd.concat(frames, ignore_index=True)
    metrics = summarise(items, params.evaluate.confidence, params.seed)
    compared = compare(
        items[items.policy != "baseline"], "grpo", "sft", params.evaluate.confidence, params.seed
    )
    with fresh_folder(OUTPUTS / "evaluation") as folder:
        items.to_parquet(folder / "items.parquet", index=False)
        _write_json(metrics, folder / "metrics.json")
        facts = {"grpo_against_sft": compared, "maps_shared_with_training": _training_overlap(suites)}
        _write_json(facts, folder / "comparison.json")
        _write_figures(metrics, folder / "figures")
        _write_report(shown, params, folder / "report.html")
    run.log_summary(_flat_accuracies(metrics))
    run.log_artifacts(OUTPUTS / "evaluation", "evaluation")
    run.log_text(markdown_table(metrics), "evaluation/table.md")
    _log_traces(run, shown, params)


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


def run_episodes(policy: Policy, prompts: Sequence[Prompt], params: Params) -> list[Trajectory]:
    """One scored episode per prompt, in order."""
    from environments.vsp.prompts import VSP
    from models.grpo import score
    from models.rollout import RolloutRequest
    from tasks.engines import rollout_engine
    from tools.cache import ToolResultCache

    engine = rollout_engine(policy, params, ToolResultCache(params.rollout.cached_results))
    requests = [RolloutRequest(prompt, 0, params.seed) for prompt in prompts]
    environment = VSP()
    return [score(t, environment.grade) for t in engine.sample(requests, params.evaluate.temperature)]


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


def _write_report(trajectories: Sequence[Trajectory], params: Params, path: Path) -> None:
    from tasks.rollout_report import write_report

    write_report(_sample(trajectories, params.evaluate.report_episodes), params.reward, path)


def _log_traces(run: StageRun, trajectories: Sequence[Trajectory], params: Params) -> None:
    from tasks.tracking import TraceStep

    for trajectory in _sample(trajectories, params.evaluate.traces):
        steps = []
        for step in trajectory.steps:
            said = {"think": step.think, "call": step.call.to_json() if step.call else None}
            said["response"] = step.response
            steps.append(TraceStep("turn", "LLM", {}, said, step.started, step.written))
            if step.call is not None and step.observation is not None:
                seen = step.observation
                facts = {"cached": seen.cached, "call_level": step.call_level}
                steps.append(
                    TraceStep(
                        step.call.name[:64],
                        "TOOL",
                        step.call.params,
                        seen.payload,
                        step.written,
                        step.ended,
                        not seen.ok,
                        facts,
                    )
                )
        run.log_trace(
            f"{trajectory.prompt.task}",
            {"question": trajectory.prompt.question, "tools": list(trajectory.prompt.tools)},
            {"response": trajectory.response, "stop_reason": str(trajectory.stop_reason)},
            steps,
            {"correct": str(trajectory.components["accuracy"] > 0).lower()},
        )


if __name__ == "__main__":
    from environments.vsp.benchmark import BenchmarkError

    run_main(main, BenchmarkError, ValueError)
