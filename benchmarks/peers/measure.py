"""What the comparisons share: parameters, alternating repeats, medians, the result file and its table row."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.params import Params, load_params, override
from tasks.workspace import OUTPUTS

RESULTS = OUTPUTS / "benchmarks"


def parser(name: str, doc: str, example: str = "", repeats: bool = True) -> argparse.ArgumentParser:
    """A parser with what the comparisons share; with --repeats for those that time something."""
    made = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=doc,
        epilog=f"Example: python -m benchmarks.{name}{example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if repeats:
        made.add_argument("--repeats", type=int, default=3, help="measured repeats of each side (default: 3)")
    return made


def single_thread(changes: Mapping[str, Any] | None = None) -> Params:
    """The project's parameters with `changes` (dotted keys); torch gets one thread in this process.

    Both sides of a comparison run in this process, so that both have the same one thread.
    """
    import torch

    torch.set_num_threads(1)
    return override(load_params(), {"threads": 1, **(changes or {})})


def alternate(sides: Mapping[str, Callable[[int], Any]], repeats: int) -> dict[str, list[Any]]:
    """Run every side once to warm up, then A, B, A, B, …; what each returned, warm-up left out.

    A side gets the number of the round, 0 in the warm-up, so that both can work on the same input.
    """
    results: dict[str, list[Any]] = {name: [] for name in sides}
    for number in range(repeats + 1):
        for name, run in sides.items():
            began = time.monotonic()
            outcome = run(number)
            print(f"round {number}: {name:12} {time.monotonic() - began:7.2f} s", flush=True)
            if number > 0:
                results[name].append(outcome)
    return results


@dataclass
class Clock:
    """Seconds spent inside `with clock.running():`, summed."""

    seconds: float = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - began


def ratio(slow: list[float], fast: list[float]) -> dict[str, float]:
    """Median over the rounds of slow / fast, each round's two sides against each other, with the extremes."""
    each = [a / b for a, b in zip(slow, fast, strict=True)]
    return {"median": statistics.median(each), "min": min(each), "max": max(each)}


def report(
    name: str,
    what: str,
    against: str,
    measured: str,
    target: str,
    facts: Mapping[str, Any],
    variant: str = "",
) -> Path:
    """Write `outputs/benchmarks/<name>.json` and print the row for docs/results.md.

    `variant` tells results of one command with other options apart; it is a part of the file's name.
    """
    RESULTS.mkdir(parents=True, exist_ok=True)
    file = RESULTS / f"{name}{'-' if variant else ''}{variant}.json"
    file.write_text(json.dumps({"threads": 1, **facts}, indent=1, default=float) + "\n")
    print(f"| {what} | {against} | {measured} | {target} | `python -m benchmarks.{name}` |", flush=True)
    return file
