"""Curves of several runs beside each other: the mean over seeds with a bootstrap interval, as pictures and a page."""

from __future__ import annotations

import argparse
import base64
import html
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

import numpy as np

from tasks.cli import run_main
from tasks.params import PROJECT_ROOT, load_params
from tasks.tracking_store import TrackingError

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from mlflow import MlflowClient
    from mlflow.entities import Run

    from tasks.run_figures import Curve

DEFAULT_METRICS = (
    *("grpo/validation_success", "reward/total", "grpo/success_*", "grpo/calls_per_episode"),
    *("grpo/kl", "grpo/entropy", "sft/loss", "sft/validation_loss"),
)
# What may differ between runs of one setting.
_SEED, _NO_SETTING = "seed", "tracking."


class CurvesError(TrackingError):
    """The runs cannot be drawn together; one line with what to do."""


@dataclass(frozen=True)
class Band:
    """One setting's curve: at each step that all its runs have, their mean and its interval (equal to the mean
    where there is one run). Arrays of shape (steps,)."""

    label: str
    runs: int
    steps: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def band(label: str, curves: Sequence[Curve], confidence: float, seed: int) -> Band:
    """Mean over runs with a bootstrap interval over runs, at the steps that all have. Pure."""
    from models.statistics import bootstrap_mean_interval

    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    values = np.array([[curve[step] for step in steps] for curve in curves]).reshape(len(curves), len(steps))
    mean = values.mean(axis=0)
    if len(curves) == 1:
        return Band(label, 1, np.array(steps), mean, mean, mean)
    limits = [bootstrap_mean_interval(values[:, i], confidence, seed) for i in range(len(steps))]
    low, high = np.array(limits).reshape(len(steps), 2).T
    return Band(label, len(curves), np.array(steps), mean, low, high)


def settings(params: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """For each run what makes its setting differ from the others', e.g. `grpo.lr=0.0002`; the seed is none.

    Runs with the same text are repetitions of one setting.
    """
    keys = {key for values in params.values() for key in values}
    keys = {key for key in keys if key != _SEED and not key.startswith(_NO_SETTING)}
    differing = sorted(key for key in keys if len({values.get(key) for values in params.values()}) > 1)
    return {
        run: ", ".join(f"{key}={values.get(key, '–')}" for key in differing) or "all runs"
        for run, values in params.items()
    }


def find_runs(client: MlflowClient, ids: Sequence[str], stage: str) -> list[Run]:
    """The runs with these ids. A pipeline run stands for the run that made its `stage`.

    Raises:
        CurvesError: there is no such run, or the pipeline run did not come to that stage.
    """
    from mlflow.exceptions import MlflowException

    found: dict[str, Run] = {}
    for run_id in ids:
        try:
            run = client.get_run(run_id)
            if "dvc.stage" not in run.data.tags and (made := run.data.tags.get(f"stage.{stage}.run_id")):
                run = client.get_run(made)
        except MlflowException as error:
            raise CurvesError(
                f"no MLflow run {run_id}: copy the id from the run's page, or from `mlflow runs search`"
            ) from error
        found[run.info.run_id] = run
    return list(found.values())


def bands(
    client: MlflowClient, runs: Sequence[Run], patterns: Sequence[str], confidence: float, seed: int
) -> dict[str, list[Band]]:
    """For each metric that the patterns name, a band per setting whose runs have at least two common steps.

    Raises:
        CurvesError: no metric of these names has a curve.
    """
    from tasks.run_figures import history, matching

    labels = settings({run.info.run_id: run.data.params for run in runs})
    names = sorted({name for run in runs for name in run.data.metrics})
    drawn: dict[str, list[Band]] = {}
    for name in matching(names, patterns):
        curves: dict[str, list[Curve]] = {}
        for run in runs:
            if name in run.data.metrics:
                label = labels[run.info.run_id]
                curves.setdefault(label, []).append(history(client, run.info.run_id, name))
        made = [band(label, several, confidence, seed) for label, several in curves.items()]
        if made := [each for each in made if len(each.steps) > 1]:
            drawn[name] = made
    if not drawn:
        raise CurvesError(
            f"these runs have no curve named {' or '.join(patterns)}; see docs/reference/metrics.md"
        )
    return drawn


def figure_of(name: str, drawn: Sequence[Band], confidence: float) -> Figure:
    """One metric: a line per setting with its interval."""
    from matplotlib.figure import Figure

    from tasks.evaluation_report import PALETTE

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for index, each in enumerate(drawn):
        colour = PALETTE[index % len(PALETTE)]
        label = f"{each.label} ({each.runs} run{'s' if each.runs > 1 else ''})"
        axes.plot(each.steps, each.mean, color=colour, label=label)
        if each.runs > 1:
            axes.fill_between(each.steps, each.low, each.high, color=colour, alpha=0.2, linewidth=0)
    shown = f", mean and {100 * confidence:g} % bootstrap interval over runs"
    axes.set(xlabel="step", ylabel=name, title=name + (shown if any(b.runs > 1 for b in drawn) else ""))
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def write_curves(drawn: Mapping[str, Sequence[Band]], confidence: float, folder: Path) -> list[Path]:
    """A PNG per metric and `index.html`, which holds them all with their numbers. Returns the files."""
    from tasks.evaluation_report import save_figure

    folder.mkdir(parents=True, exist_ok=True)
    files, sections = [], []
    for name, made in drawn.items():
        file = folder / f"{name.replace('/', '_')}.png"
        save_figure(figure_of(name, made, confidence), file)
        files.append(file)
        sections.append(_section(name, made, file.read_bytes()))
    page = folder / "index.html"
    page.write_text(_PAGE.substitute(sections="\n".join(sections)), encoding="utf-8")
    return [*files, page]


def _section(name: str, made: Sequence[Band], png: bytes) -> str:
    text = io.StringIO()
    title = html.escape(name)
    text.write(f'<h2>{title}</h2>\n<img alt="curves of {title}, numbers below" ')
    text.write(f'src="data:image/png;base64,{base64.b64encode(png).decode()}">\n')
    for each in made:
        text.write(f"<details><summary>{html.escape(each.label)}, {each.runs} runs</summary><table>\n")
        text.write("<tr><th>step</th><th>mean</th><th>low</th><th>high</th></tr>\n")
        for step, mean, low, high in zip(each.steps, each.mean, each.low, each.high, strict=True):
            text.write(f"<tr><td>{step}</td><td>{mean:.5g}</td><td>{low:.5g}</td><td>{high:.5g}</td></tr>\n")
        text.write("</table></details>\n")
    return text.getvalue()


# Like all our pages: one file, so that it also opens in MLflow's sandboxed frame.
_PAGE = Template("""\
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Curves</title>
<style>
:root { color-scheme: light dark; }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 60rem; margin: 1rem auto; padding: 0 1rem; }
img { max-width: 100%; background: #fff; border-radius: .3rem; }
td, th { text-align: right; padding: 0 .8rem 0 0; font-variant-numeric: tabular-nums; }
</style></head><body><h1>Curves</h1>
$sections
</body></html>
""")


def main() -> None:
    """Command line."""
    from tasks.tracking_store import open_store, resolve_store

    parser = argparse.ArgumentParser(
        prog="python -m tasks.curves",
        description="Draw metrics of several runs together. Runs that differ in nothing but the seed become one "
        "curve with an interval; other differences become the names of the curves.",
        epilog="Example: python -m tasks.curves 68a3297f035147bdb1871f77d95a270f --metric 'grpo/validation_*'",
    )
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="MLflow run id, of a stage or of a whole pipeline"
    )
    parser.add_argument(
        "--metric",
        action="append",
        metavar="NAME",
        help="metric to draw, * stands for anything; may be given again (the most telling ones)",
    )
    parser.add_argument("--stage", default="grpo", help="which stage a pipeline run stands for (grpo)")
    parser.add_argument(
        "--out", type=Path, default=PROJECT_ROOT / "outputs" / "curves", help="folder (outputs/curves)"
    )
    parser.add_argument(
        "--log-to", metavar="RUN", help="also store the files as artifacts of this MLflow run"
    )
    arguments = parser.parse_args()
    params = load_params()
    client, _ = open_store(resolve_store(params.tracking))
    found = find_runs(client, arguments.runs, arguments.stage)
    confidence = params.evaluate.confidence
    drawn = bands(client, found, arguments.metric or DEFAULT_METRICS, confidence, params.seed)
    files = write_curves(drawn, confidence, arguments.out)
    if arguments.log_to is not None:
        (target,) = find_runs(client, [arguments.log_to], "")
        for file in files:
            client.log_artifact(target.info.run_id, str(file), "curves")
    print(f"{len(drawn)} metrics of {len(found)} runs: {files[-1]}")


if __name__ == "__main__":
    run_main(main, CurvesError)
