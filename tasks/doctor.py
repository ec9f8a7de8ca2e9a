"""Is everything that the pipeline needs in place? One line per finding, with the remedy."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from tasks.cli import run_main
from tasks.health import locks, machine, stack, stores
from tasks.health.check import Check, Status, fail, ok
from tasks.params import PROJECT_ROOT, Params, ParamsError, load_params


def diagnose(root: Path, profile: str | None = None, fix: bool = False) -> Iterator[Check]:
    """All checks, in the order in which a run would meet them. Changes nothing unless `fix`."""
    params: Params | None = None
    try:
        params = load_params(root / "params.yaml", profile)
        yield ok("params", f"profile {params.profile}, seed {params.seed}")
    except ParamsError as error:
        yield fail("params", str(error).splitlines()[0], "see docs/reference/parameters.md")
    yield stack.check_python(root)
    yield stack.check_versions(root)
    yield machine.check_files(root)
    yield machine.check_git(root)
    yield locks.check_dvc_lock(root, fix)
    yield locks.check_pipeline_locks(root)
    yield locks.check_drafts(root, fix)
    if params is not None:
        yield stack.check_checkpoint(params)
        yield stack.check_engine(params)
        yield machine.check_disk(params, root)
        yield machine.check_memory(params, root)
        yield machine.check_gpu(params)
        store = stores.check_tracking(params, root)
        yield store
        if store.status is Status.OK:
            yield stores.check_orphans(params, root, fix)
    yield stores.check_prefect()
    yield stores.check_remote(root)


def report(checks: Iterator[Check], as_json: bool, say: Callable[[str], None]) -> int:
    """Say each finding, as it comes or as one JSON list. Returns the exit code: 1 if a check failed."""
    seen = []
    for check in checks:
        seen.append(check)
        if not as_json:
            say(check.line())
    if as_json:
        say(json.dumps([asdict(check) for check in seen], indent=1))
    failed = [check.name for check in seen if check.status is Status.FAIL]
    if not as_json:
        warned = sum(check.status is Status.WARN for check in seen)
        end = f"{len(failed)} failed: {', '.join(failed)}" if failed else "ready to run"
        say(f"\n{len(seen)} checks, {warned} warnings, {end}")
    return 1 if failed else 0


def main() -> int:
    """Command line of the doctor."""
    parser = argparse.ArgumentParser(
        prog="python -m tasks.doctor",
        description="Check versions, stores, locks, orphan runs, disk, memory, GPUs, files, git and parameters. Exits "
        "with 1 if a run would fail.",
        epilog="Example: python -m tasks.doctor --profile gpu",
    )
    parser.add_argument("--profile", help="check for this profile instead of that of params.yaml")
    parser.add_argument("--json", action="store_true", help="one JSON list instead of lines")
    parser.add_argument(
        "--fix",
        action="store_true",
        help="release stale locks, remove leftovers of killed stages, mark orphan MLflow runs KILLED",
    )
    arguments = parser.parse_args()
    return report(diagnose(PROJECT_ROOT, arguments.profile, arguments.fix), arguments.json, print)


if __name__ == "__main__":
    run_main(main)
