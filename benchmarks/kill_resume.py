"""Do killed stages end like uninterrupted ones? SIGKILL at random moments, five times in sft and five in grpo.

Two clones of this project with the same short settings: one runs each stage undisturbed, the other one is killed
again and again and started again. At the end their weights must be the same bytes.

    python -m benchmarks.kill_resume --kills 5
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ruamel.yaml import YAML

from tasks.env import offline_environment
from tasks.params import PROJECT_ROOT

SHORT = {
    "data": {"n_trajectories": 3000, "shards": 4, "test_items_per_size": 4},
    "sft": {"token_budget": 350_000, "checkpoint_every": 20, "eval_every": 1000},
    "grpo": {"steps": 8, "checkpoint_every": 1, "eval_every": 100, "validation_items": 8},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kill_resume",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kills", type=int, default=5, help="kills per stage (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default %(default)s)")
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory(prefix="toolplan-kill-") as folder:
        whole, cut = clone(Path(folder) / "whole"), clone(Path(folder) / "cut")
        for root in (whole, cut):
            run(root, "cold_start")
        results = {stage: compare(stage, whole, cut, arguments.kills, rng) for stage in ("sft", "grpo")}
    print(json.dumps(results, indent=2))
    if not all(result["same_weights"] for result in results.values()):
        sys.exit("a killed stage ended with other weights")


def clone(root: Path) -> Path:
    """A clone of the last commit with the short settings."""
    subprocess.run(["git", "clone", "-q", str(PROJECT_ROOT), str(root)], check=True)
    yaml, file = YAML(), root / "params.yaml"
    params = yaml.load(file)
    for block, values in SHORT.items():
        params[block].update(values)
    yaml.dump(params, file)
    return root


def start(root: Path, stage: str) -> subprocess.Popen[bytes]:
    """The stage's process, in a group of its own."""
    env = {**os.environ, **offline_environment()}
    log = (root / f"{stage}.log").open("ab")
    command = [sys.executable, "-m", f"tasks.{stage}"]
    return subprocess.Popen(command, cwd=root, env=env, stdout=log, stderr=log, start_new_session=True)


def run(root: Path, stage: str) -> float:
    """Run a stage to its end; its seconds. Raises CalledProcessError."""
    began = time.monotonic()
    process = start(root, stage)
    if process.wait() != 0:
        raise subprocess.CalledProcessError(process.returncode, f"tasks.{stage} in {root}")
    return time.monotonic() - began


def compare(stage: str, whole: Path, cut: Path, kills: int, rng: random.Random) -> dict[str, object]:
    """Weights of a stage that ran undisturbed against one killed `kills` times at random moments."""
    seconds = run(whole, stage)
    moments = []
    while len(moments) < kills:
        process = start(cut, stage)
        moment = rng.uniform(0.3, 0.9) * seconds
        try:
            code = process.wait(timeout=moment)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            moments.append(round(moment, 1))
        else:
            # finished before the kill: go on killing a fresh run of the same job
            if code != 0:
                raise subprocess.CalledProcessError(code, f"tasks.{stage} in {cut}") from None
            moments.append(None)
            (cut / "outputs" / stage / "model.safetensors").unlink()
    run(cut, stage)
    hashes = [digest(root / "outputs" / stage / "model.safetensors") for root in (whole, cut)]
    return {"seconds": round(seconds, 1), "killed_after": moments, "same_weights": hashes[0] == hashes[1]}


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


if __name__ == "__main__":
    main()
