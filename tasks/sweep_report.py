"""What a sweep leaves behind: the best settings as a file, tables, and Optuna's plots."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.params import merge
from tasks.sweep_plan import Plan
from tasks.sweep_study import SweepStudy, TrialRow

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from optuna import Study

    from tasks.tracked_run import StageRun

PLOTTED = 6  # parameters in a slice or parallel-coordinate plot


def best_yaml(plan: Plan, best: TrialRow) -> str:
    """The best settings as a piece of params.yaml, with a comment that says where they come from."""
    from ruamel.yaml import YAML

    tree: dict[str, Any] = {}
    for name, value in best.settings.items():
        for part in reversed(name.split(".")):
            value = {part: value}
        tree = merge(tree, value)
    text = StringIO()
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.dump(tree, text)
    found = ", ".join(f"{name} {value:.3f}" for name, value in best.values.items())
    return f"# Trial {best.number} of sweep {plan.name}, profile {plan.params.profile}: {found}\n{text.getvalue()}"


def summary(plan: Plan, rows: Sequence[TrialRow], best: TrialRow, run: StageRun) -> dict[str, Any]:
    """What programs want to know of a sweep: `outputs/sweeps/<name>/summary.json`."""
    states = [row.state for row in rows]
    return {
        "sweep": plan.name,
        "profile": plan.params.profile,
        "trials": {state: states.count(state) for state in sorted(set(states))},
        "best": {"trial": best.number, "values": best.values, "settings": best.settings},
        "run_id": run.run_id,
        "experiment_id": run.experiment_id,
        "front": [row.number for row in pareto_front(rows)],
    }


def table_rows(rows: Sequence[TrialRow]) -> list[dict[str, Any]]:
    """One flat row per trial, complete ones first, the best of them on top."""
    order = {"complete": 0, "pruned": 1, "running": 2, "fail": 3}
    ranked = sorted(rows, key=lambda row: (order[row.state], -row.values.get("success", 0.0), row.number))
    return [
        {
            "trial": row.number,
            "state": row.state,
            **{name: round(value, 4) for name, value in row.values.items()},
            "seconds": None if row.seconds is None else round(row.seconds, 1),
            **row.settings,
            **({"error": row.error} if row.error else {}),
        }
        for row in ranked
    ]


def markdown(plan: Plan, rows: Sequence[TrialRow], best: TrialRow) -> str:
    """The description of the sweep's MLflow run: result, what to do next, and the best trials."""
    base = next((row for row in rows if row.number == 0 and row.values), None)
    lines = [f"**Sweep {plan.name}**: trial {best.number} is the best, {_values(best)}"]
    if base is not None and base.number != best.number:
        lines[0] += f"; params.yaml as it was (trial 0): {_values(base)}"
    lines += ["", "| parameter | params.yaml | best |", "|---|---|---|"]
    lines += [
        f"| `{name}` | {plan.base[name]} | {value} |"
        for name, value in best.settings.items()
        if value != plan.base[name]
    ]
    objectives = plan.params.sweep.objectives
    lines += [
        "",
        f"| trial | state | {' | '.join(objectives)} | seconds |",
        f"|{'---|' * (3 + len(objectives))}",
    ]
    for row in table_rows(rows)[:10]:
        cells = [row["trial"], row["state"], *(row.get(name, "–") for name in objectives), row["seconds"]]
        lines.append(f"| {' | '.join(str(cell) for cell in cells)} |")
    failed = [f"trial {row.number} failed: {row.error}" for row in rows if row.error]
    return "\n".join([*lines, "", *failed])


def pareto_front(rows: Sequence[TrialRow]) -> list[TrialRow]:
    """Complete trials that no other one beats in success and, where it counts, in calls."""
    complete = [row for row in rows if row.state == "complete"]

    def costs(row: TrialRow) -> tuple[float, float]:
        return (-row.values["success"], row.values.get("calls", 0.0))

    def beaten(row: TrialRow) -> bool:
        own = costs(row)
        return any(
            other != own and other[0] <= own[0] and other[1] <= own[1] for other in map(costs, complete)
        )

    return [row for row in complete if not beaten(row)]


def figures(study: SweepStudy) -> Iterator[tuple[str, Figure]]:
    """Optuna's plots with their names. One that its trials are too few or too alike for is left out."""
    import warnings

    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from optuna.visualization import matplotlib as plots

    names = study.plan.params.sweep.objectives
    drawn: list[tuple[str, Callable[..., Any], dict[str, Any]]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the matplotlib backend calls itself experimental, each time
        for index, objective in enumerate(names):
            suffix = "" if len(names) == 1 else f"_{objective}"
            target = {"target_name": objective} | ({} if len(names) == 1 else {"target": _nth(index)})
            few = {"params": _important(study, _nth(index)), **target}
            drawn += [
                (f"history{suffix}", plots.plot_optimization_history, target),
                (f"importance{suffix}", plots.plot_param_importances, target),
                (f"slice{suffix}", plots.plot_slice, few),
                (f"parallel_coordinate{suffix}", plots.plot_parallel_coordinate, few),
            ]
        if len(names) > 1:
            drawn.append(("pareto", plots.plot_pareto_front, {"target_names": list(names)}))
        else:
            drawn.append(("intermediate", plots.plot_intermediate_values, {}))
        for name, plot, arguments in drawn:
            figure = _drawn(plot, study.study, arguments)
            if figure is not None:
                yield name, figure
                plt.close(figure)


def _important(study: SweepStudy, target: Callable[[Any], float]) -> list[str]:
    """The parameters that mattered most: plots of all of them cannot be read."""
    from optuna.importance import get_param_importances

    try:
        ranked = list(get_param_importances(study.study, target=target))
    except (RuntimeError, ValueError):  # fewer than two results, or equal ones
        ranked = []
    return [*ranked, *(name for name in study.plan.space if name not in ranked)][:PLOTTED]


def _drawn(plot: Callable[..., Any], study: Study, arguments: Mapping[str, Any]) -> Figure | None:
    import matplotlib.pyplot as plt
    import numpy as np

    try:
        axes = plot(study, **arguments)
    except (RuntimeError, ValueError):
        plt.close("all")
        return None
    figure: Figure = np.ravel(axes)[0].figure
    if np.size(axes) == 1:
        figure.set_size_inches(12, 6)
        figure.tight_layout()
    return figure


def _nth(index: int) -> Callable[[Any], float]:
    return lambda trial: float(trial.values[index])


def _values(row: TrialRow) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in row.values.items())


def write_files(plan: Plan, rows: Sequence[TrialRow], best: TrialRow, found: Mapping[str, Any]) -> list[Path]:
    """best.yaml, summary.json (`found`) and trials.json in the sweep's folder."""
    texts = {
        "best.yaml": best_yaml(plan, best),
        "summary.json": json.dumps(found, indent=1),
        "trials.json": json.dumps(table_rows(rows), indent=1),
    }
    for name, text in texts.items():
        (plan.folder / name).write_text(text, encoding="utf-8")
    return [plan.folder / name for name in texts]
