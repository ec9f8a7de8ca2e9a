"""One GRPO run under changed settings, measured as it goes: the unit that the learning benchmarks compare.

Every arm starts from the SFT policy in outputs/sft (`dvc repro sft` makes it) and asks fresh training maps. Success is
that of sampled episodes (temperature 1, what GRPO improves) on validation maps that no training uses; at the start and
at the end the greedy policy is measured as well. A finished run is a file and is not made again.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.params import PROJECT_ROOT, Params, load_params, override

if TYPE_CHECKING:
    from environments.base import Prompt
    from environments.vsp.maps import GridMap
    from models.grpo import GRPOParts

RESULTS = PROJECT_ROOT / "outputs" / "benchmarks"
MODULE = "benchmarks.arms"
SAMPLED = 1.0  # temperature of an episode as training samples it


@dataclass(frozen=True)
class Arm:
    """Settings to compare: `changes` are dotted parameters over params.yaml."""

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Budget:
    """How long an arm runs and how it is measured."""

    steps: int
    eval_every: int
    items: int  # validation questions, spread over the sizes
    sizes: tuple[int, ...]
    stop_gain: float | None = None  # end when validation success is this much above the SFT policy's


def run_arms(
    benchmark: str, arms: Sequence[Arm], seeds: Sequence[int], budget: Budget, workers: int
) -> dict[str, list[dict[str, Any]]]:
    """The results of every arm and seed, run `workers` at a time in processes of their own, one CPU thread each."""
    folder = RESULTS / benchmark
    folder.mkdir(parents=True, exist_ok=True)
    # seeds outside, arms inside: an interrupted benchmark has compared all arms on the seeds it has
    jobs = [(arm, seed, folder / file_name(arm, seed)) for seed in seeds for arm in arms]

    def work(job: tuple[Arm, int, Path]) -> None:
        arm, seed, file = job
        if file.is_file():
            return
        request = {
            "changes": dict(arm.changes),
            "seed": seed,
            "budget": {**vars(budget), "sizes": list(budget.sizes)},
            "file": str(file),
            "starts": str(folder / "starts.json"),
        }
        began = time.monotonic()
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", MODULE]
        done = subprocess.run(
            command, input=json.dumps(request), text=True, env=env, capture_output=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{arm.name}, seed {seed}: {done.stderr.strip()[-800:]}")
        print(f"{benchmark}: {arm.name}, seed {seed}: {time.monotonic() - began:.0f} s", flush=True)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(work, jobs))
    return {
        arm.name: [json.loads((folder / file_name(arm, seed)).read_text()) for seed in seeds] for arm in arms
    }


def file_name(arm: Arm, seed: int) -> str:
    """Of an arm's result with one seed."""
    return re.sub(r"[^\w.]+", "-", f"{arm.name} {seed}") + ".json"


def run_arm(params: Params, budget: Budget, starts: Path | None = None) -> dict[str, Any]:
    """Train for the budget; the curve has a point per evaluation, the first before any update.

    `start` and `end` are the success of the SFT policy and of the policy that the run would export, on maps that
    took no part in choosing it. `starts`: a file that keeps what the SFT policy does, which is the same in every arm.
    """
    import tempfile

    import torch

    from models.checkpoint import Checkpoints
    from models.grpo import grpo_step
    from tasks.grpo import build_parts, guard, restore
    from tools.cache import ToolResultCache

    torch.set_num_threads(1)
    cache = ToolResultCache(params.rollout.cached_results)
    parts, state = build_parts(params, cache)
    questions, unseen = validation_maps(budget, "curve"), validation_maps(budget, "end")
    curve: list[dict[str, Any]] = []
    rollouts, tokens = 0, 0
    notes: list[str] = []
    began = time.monotonic()

    def measure(seen: Measured, metrics: dict[str, float]) -> float:
        metrics["grpo/validation_success"] = seen.success
        point: dict[str, Any] = {"step": state.step, "fresh_rollouts": rollouts, "fresh_tokens": tokens}
        point |= {"seconds": time.monotonic() - began, "success": seen.success, "calls": seen.calls}
        logging.getLogger(MODULE).warning("%s", point)
        curve.append(point | {k: metrics.get(f"grpo/{k}") for k in ("zero_variance_share", "kl", "solved")})
        return seen.success

    with tempfile.TemporaryDirectory() as folder:
        best = Checkpoints(Path(folder))
        start, greedy_start, first = _starts(parts, questions, unseen, starts)
        metrics: dict[str, float] = {}
        measure(first, metrics)
        guard(parts, state, metrics, best)
        reached = False
        while state.step < budget.steps and not reached:
            metrics, fresh = grpo_step(parts, state, params.grpo, params.reward, params.seed)
            rollouts += len(fresh)
            tokens += sum(t.sampled_tokens for t in fresh)
            if state.step % budget.eval_every == 0:
                success = measure(measure_on(parts, questions, SAMPLED), metrics)
                reached = budget.stop_gain is not None and success >= curve[0]["success"] + budget.stop_gain
            notes += filter(None, [guard(parts, state, metrics, best)])
        if params.grpo.guards.rollback:
            restore(parts, state, best)
        end, greedy_end = measure_on(parts, unseen, SAMPLED), measure_on(parts, unseen, 0.0)
    result = {"curve": curve, "start": vars(start), "end": vars(end), "rollbacks": notes}
    result |= {"greedy_start": vars(greedy_start), "greedy_end": vars(greedy_end)}
    return result | {"tool_calls": cache.stats()}


def _starts(
    parts: GRPOParts, questions: list[Prompt], unseen: list[Prompt], file: Path | None
) -> list[Measured]:
    """The SFT policy on the unseen questions, sampled and greedy, and sampled on those of the curve."""
    if file is not None and file.is_file():
        return [Measured(**each) for each in json.loads(file.read_text())]
    asked = ((unseen, SAMPLED), (unseen, 0.0), (questions, SAMPLED))
    measured = [measure_on(parts, maps, temperature) for maps, temperature in asked]
    if file is not None:
        _write(file, [vars(each) for each in measured])
    return measured


def _write(file: Path, content: Any) -> None:
    """A file that is whole or not there, also if two arms write it at once."""
    draft = file.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(content, indent=1))
    draft.replace(file)


def validation_maps(budget: Budget, name: str) -> list[Prompt]:
    """Navigation without ASTAR on maps of the validation split."""
    from environments.vsp.maps import Split
    from environments.vsp.prompts import BASE_TOOLS, VSP, Task

    environment, rng = VSP(), random.Random(f"benchmark {name}")
    return [
        environment.sample(
            rng,
            Task.NAVIGATION,
            budget.sizes[index % len(budget.sizes)],
            f"{name}-{index}",
            split=Split.VALIDATION,
            tools=BASE_TOOLS,
        )
        for index in range(budget.items)
    ]


@dataclass(frozen=True)
class Measured:
    """Success, calls per episode, and solved and asked by the fewest bends of any safe path."""

    success: float
    calls: float
    by_bends: dict[str, list[int]]


def measure_on(parts: GRPOParts, questions: list[Prompt], temperature: float) -> Measured:
    """Ask every question once, always with the same random numbers.

    The bends tell how far a policy is that only draws simple paths.
    """
    from environments.vsp.prompts import map_of
    from models.rollout import RolloutRequest

    requests = [RolloutRequest(prompt, 0, number) for number, prompt in enumerate(questions)]
    episodes = parts.rollouts.sample(requests, temperature)
    counts: dict[str, list[int]] = {}
    for episode in episodes:
        won = episode.response is not None and parts.environment.grade(episode.prompt, episode.response)
        entry = counts.setdefault(str(fewest_bends(map_of(episode.prompt))), [0, 0])
        entry[0] += won
        entry[1] += 1
    solved = sum(won for won, _ in counts.values())
    calls = sum(t.calls for t in episodes) / len(episodes)
    return Measured(solved / len(episodes), calls, dict(sorted(counts.items())))


def fewest_bends(grid: GridMap) -> int:
    """Of any safe path from the start to the goal: breadth-first over (cell, direction), straight on is free."""
    best = {(grid.start, move): 0 for move in "LRUD"}
    queue = deque((0, grid.start, move) for move in "LRUD")
    while queue:
        bends, cell, move = queue.popleft()
        if cell == grid.goal:
            return bends
        if bends > best[cell, move]:
            continue
        for turn in "LRUD":
            following, count = grid.step(cell, turn), bends + (turn != move)
            if following in grid.hole_set or count >= best.get((following, turn), count + 1):
                continue
            best[following, turn] = count
            (queue.appendleft if turn == move else queue.append)((count, following, turn))
    raise ValueError("the map has no safe path")


def main() -> None:
    """Run the arm that stands on standard input; `run_arms` starts it."""
    request = json.loads(sys.stdin.read())
    budget = Budget(**{**request["budget"], "sizes": tuple(request["budget"]["sizes"])})
    changes = {"seed": request["seed"], "grpo.steps": budget.steps, **request["changes"]}
    result = run_arm(override(load_params(), changes), budget, Path(request["starts"]))
    _write(Path(request["file"]), {"changes": changes, "budget": request["budget"], **result})


if __name__ == "__main__":
    main()
