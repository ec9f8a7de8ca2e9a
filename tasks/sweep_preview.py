"""What a sweep would do, without doing it: `python -m tasks.sweep --dry-run`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import psutil

from tasks.estimate import duration, estimate, gigabytes
from tasks.sweep_plan import Plan

if TYPE_CHECKING:
    from tasks.sweep_study import TrialRow


def preview(plan: Plan) -> str:
    """Space, trials that remain, expected time and memory. Starts nothing and writes nothing."""
    return "\n".join(_lines(plan))


def _lines(plan: Plan) -> Iterator[str]:
    sweep = plan.params.sweep
    yield f"sweep {plan.name}, profile {plan.params.profile}, objectives: {', '.join(sweep.objectives)}"
    width = max(map(len, plan.space))
    for name, dimension in plan.space.items():
        yield f"  {name:<{width}}  {dimension.text()}  (now {plan.base[name]})"
    rows = _rows(plan)
    left = max(0, sweep.n_trials - sum(row.state in {"complete", "pruned", "fail"} for row in rows))
    yield f"trials: {left} of {sweep.n_trials} remain, {sweep.workers} at a time, {sweep.steps} updates each"
    cost = estimate("grpo", plan.trial_params(plan.base), plan.root)
    took = [row.seconds for row in rows if row.state == "complete" and row.seconds]
    seconds = sum(took) / len(took) if took else cost.seconds
    source = "as its trials took so far" if took else "as stage grpo took" if cost.recorded else "by formula"
    total = seconds * -(-left // sweep.workers)
    yield f"time: about {duration(total)} in all, {duration(seconds)} a trial ({source}), less what is pruned"
    need, have = sweep.workers * cost.memory_bytes, psutil.virtual_memory().total
    hint = "; lower sweep.workers" if need > have else ""
    yield f"memory: about {gigabytes(need)} of {gigabytes(have)}{hint}"
    if plan.policy_digest == "missing":
        yield "needs outputs/sft first: dvc repro sft"


def _rows(plan: Plan) -> list[TrialRow]:
    """Trials of this very sweep so far."""
    if not (plan.folder / "journal.log").is_file():
        return []
    from tasks.sweep_study import SweepStudy

    return SweepStudy(plan).rows()
