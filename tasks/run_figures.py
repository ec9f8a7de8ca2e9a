"""Pictures of one run's curves, drawn from its metric history: learning, reward components, stop reasons."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch
from typing import TYPE_CHECKING

import numpy as np

from models.statistics import wilson_interval
from tasks.evaluation_report import PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from mlflow import MlflowClient

Curve = dict[int, float]
"""Value by step."""

# Panels of the learning curves: title, and the metrics in it. A panel without a curve is left out.
PANELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("loss", ("sft/loss", "sft/validation_loss")),
    ("success on validation questions", ("grpo/validation_*",)),
    ("success of fresh episodes", ("grpo/success_*",)),
    ("reward", ("reward/total",)),
    ("KL to the reference, nats", ("grpo/kl",)),
    ("entropy, nats", ("grpo/entropy",)),
    ("calls per episode", ("grpo/calls_per_episode",)),
    ("gradient norm", ("sft/grad_norm", "grpo/grad_norm")),
)
_VALIDATED = "grpo/validation_success"  # a share of grpo.validation_items answers, so it has an interval


def run_figures(client: MlflowClient, run_id: str) -> dict[str, Figure]:
    """Figures by name (`learning_curves`, `reward_components`, `stop_reasons`) of what the run has curves of."""
    run = client.get_run(run_id)
    names = sorted(run.data.metrics)
    wanted = [name for _, patterns in PANELS for name in matching(names, patterns)]
    wanted += matching(names, ["reward/*", "grpo/stop_*"])
    curves = {name: history(client, run_id, name) for name in dict.fromkeys(wanted)}
    curves = {name: curve for name, curve in curves.items() if len(curve) > 1}
    figures: dict[str, Figure] = {}
    panels = [(title, matching(curves, patterns)) for title, patterns in PANELS]
    if panels := [(title, found) for title, found in panels if found]:
        asked = int(run.data.params.get("grpo.validation_items", 0))
        figures["learning_curves"] = learning_figure(curves, panels, asked)
    if rewards := matching(curves, ["reward/*"]):
        figures["reward_components"] = reward_figure({name: curves[name] for name in rewards})
    if reasons := matching(curves, ["grpo/stop_*"]):
        figures["stop_reasons"] = stop_reason_area({name: curves[name] for name in reasons})
    return figures


def history(client: MlflowClient, run_id: str, name: str) -> Curve:
    """A metric by step, in order; of a step that stands twice, the later value."""
    points = sorted(client.get_metric_history(run_id, name), key=lambda point: (point.step, point.timestamp))
    return {point.step: point.value for point in points}


def matching(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """The names that fit a pattern such as `grpo/validation_*`, in the order of the patterns."""
    names = list(names)
    found = [name for pattern in patterns for name in names if fnmatch(name, pattern)]
    return list(dict.fromkeys(found))


def learning_figure(
    curves: Mapping[str, Curve], panels: Sequence[tuple[str, list[str]]], validation_items: int
) -> Figure:
    """A panel per title. The validation success has its 95 % Wilson interval over `validation_items` answers."""
    figure, axes = _grid(len(panels))
    for place, (title, names) in zip(axes, panels, strict=False):
        for index, name in enumerate(names):
            steps, values = _arrays(curves[name])
            colour = PALETTE[index % len(PALETTE)]
            place.plot(steps, values, color=colour, label=name.partition("/")[2], marker=_marker(steps))
            if name == _VALIDATED and validation_items > 0:
                right = [min(validation_items, round(value * validation_items)) for value in values]
                limits = np.array([wilson_interval(count, validation_items) for count in right])
                place.fill_between(steps, limits[:, 0], limits[:, 1], color=colour, alpha=0.2, linewidth=0)
        _finish(place, title, legend=len(names) > 1)
    return figure


def reward_figure(curves: Mapping[str, Curve]) -> Figure:
    """Mean of each component over steps, with the range from its smallest to its largest value."""
    means = [name for name in curves if not name.endswith(("_min", "_max"))]
    figure, axes = _grid(len(means))
    for place, name in zip(axes, means, strict=False):
        steps, values = _arrays(curves[name])
        place.plot(steps, values, color=PALETTE[0], marker=_marker(steps))
        low, high = curves.get(f"{name}_min"), curves.get(f"{name}_max")
        if low is not None and high is not None:
            shared = sorted(set(low) & set(high))
            place.fill_between(
                shared, [low[s] for s in shared], [high[s] for s in shared], color=PALETTE[0], alpha=0.12
            )
        _finish(place, name)
    return figure


def stop_reason_area(curves: Mapping[str, Curve]) -> Figure:
    """How episodes ended over steps: shares stacked to 100 %."""
    from matplotlib.figure import Figure

    steps = sorted(set.union(*(set(curve) for curve in curves.values())))
    shares = [[100 * curve.get(step, 0.0) for step in steps] for curve in curves.values()]
    labels = [name.partition("stop_")[2] for name in curves]
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    colours = [PALETTE[index % len(PALETTE)] for index in range(len(labels))]
    axes.stackplot(steps, shares, labels=labels, colors=colours, linewidth=0)
    axes.set(ylabel="episodes, %", ylim=(0, 100), xlim=(steps[0], steps[-1]))
    _finish(axes, "how fresh episodes ended")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _grid(count: int) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    columns = min(count, 3)
    rows = -(-count // columns)
    figure = Figure(figsize=(4.6 * columns, 3.2 * rows), layout="constrained")
    places = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for unused in places[count:]:
        unused.set_visible(False)
    return figure, places


def _finish(axes: Axes, title: str, legend: bool = False) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set(title=title, xlabel="step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    if legend:
        axes.legend(fontsize="small")


def _arrays(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    return np.array(list(curve)), np.array(list(curve.values()))


def _marker(steps: np.ndarray) -> str | None:
    return "o" if len(steps) < 20 else None
