"""The promoted model's accuracy on held-out maps and on a benchmark folder, for several seeds of the pipeline.

One clone of this project per seed, each with the shipped parameters, `dvc repro` without Prefect.

    python -m benchmarks.seeds --seeds 0 1 2 --benchmark ../shared/vsp_sample
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tasks.env import offline_environment
from tasks.params import PROJECT_ROOT


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.seeds",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument("--benchmark", type=Path, help="folder of the published VSP benchmark")
    arguments = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory(prefix="toolplan-seeds-") as folder:
        for seed in arguments.seeds:
            results[seed] = run_seed(Path(folder) / str(seed), seed, arguments.benchmark)
            print(json.dumps({seed: results[seed]}), flush=True)


def run_seed(root: Path, seed: int, benchmark: Path | None) -> dict[str, object]:
    """Accuracies and seconds of one run of the whole pipeline."""
    subprocess.run(["git", "clone", "-q", str(PROJECT_ROOT), str(root)], check=True)
    file = root / "params.yaml"
    file.write_text(file.read_text().replace("\nseed: 0 ", f"\nseed: {seed} ", 1))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, **offline_environment(), "PATH": path}
    began = time.monotonic()
    subprocess.run(["dvc", "repro", "-q"], cwd=root, env=env, check=True)
    seconds = time.monotonic() - began
    metrics = json.loads((root / "outputs" / "evaluation" / "metrics.json").read_text())
    result: dict[str, object] = {
        "seconds": round(seconds),
        **{
            suite: {
                policy: {task: summary[task] for task in ("navigation", "verification", "overall")}
                for policy, summary in policies.items()
            }
            for suite, policies in metrics.items()
        },
    }
    if benchmark is not None:
        target = root / "benchmark.json"
        command = [sys.executable, "-m", "tasks.evaluate", "--benchmark", str(benchmark.resolve())]
        subprocess.run([*command, "--json", str(target)], cwd=root, env=env, check=True)
        result["benchmark"] = json.loads(target.read_text())
    return result


if __name__ == "__main__":
    main()
