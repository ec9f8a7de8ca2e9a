"""One MLflow run, written through its id: metrics, artifacts, data sets and traces.

MLflow's fluent functions keep the active run per thread and create runs when there is none, so none is used.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.metric_log import MetricBuffer, Point, metric_name
from tasks.params import Params
from tasks.tracking_store import first_line
from tasks.usage import GROUP as MACHINE
from tasks.usage import Usage

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from mlflow import MlflowClient
    from mlflow.entities import Run

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TraceStep:
    """One span of a trace: a tool call or a piece of the agent's turn. Times are Unix time in seconds."""

    name: str
    kind: str
    inputs: Any
    outputs: Any
    started: float
    ended: float
    failed: bool = False
    attributes: dict[str, Any] = field(default_factory=dict)


class StageRun:
    """One open MLflow run. All methods may be called from any thread."""

    def __init__(self, client: MlflowClient, run: Run, params: Params, uri: str) -> None:
        self.run_id: str = run.info.run_id
        self.experiment_id: str = run.info.experiment_id
        self._client = client
        self._uri = uri
        history = {
            name: [point.step for point in client.get_metric_history(self.run_id, name)]
            for name in run.data.metrics
            if not name.startswith(MACHINE)
        }
        longest = params.tracking.max_points_per_metric
        self._buffer = MetricBuffer(self._send, history, longest)
        # Apart, since the machine's samples are counted on their own, not by training steps.
        self._machine = MetricBuffer(self._send, {}, longest)
        samples = [m.step for m in run.data._metric_objs if m.key.startswith(MACHINE)]
        self.next_sample = max(samples, default=0) + 1
        self.gpus = 0
        self.usage = Usage(
            {name: value for name, value in run.data.metrics.items() if name.startswith(MACHINE)}
        )
        self._has_traces = False
        self._one_trace = threading.Lock()

    def expect_steps(self, total: int) -> None:
        """Say how many steps the curves will have, so that long ones are thinned evenly."""
        self._buffer.expect_steps(total)

    def log_metrics(self, values: Mapping[str, float], step: int) -> None:
        """Buffer one value per metric. Groups are the part before the slash: `sft/loss`, `reward/total`."""
        self.usage.watch(values)
        self._buffer.add(values, step)

    def log_summary(self, values: Mapping[str, float]) -> None:
        """Final numbers, which have no step (stored at step 0)."""
        self._buffer.add(values, 0)

    def history(self, name: str) -> dict[int, float]:
        """A metric's values by step, those of earlier attempts included; of a step given twice, the later."""
        self._buffer.flush()
        points = self._client.get_metric_history(self.run_id, metric_name(name))
        points.sort(key=lambda point: (point.step, point.timestamp))
        return {point.step: point.value for point in points}

    def log_machine(self, values: Mapping[str, float], sample: int) -> None:
        """Buffer a sample of the machine's load; `sample` counts on from earlier attempts."""
        self._machine.add(values, sample)

    def count_tokens(self, count: float) -> None:
        """Add tokens that the agent wrote, for tokens per second. Training steps are counted by themselves."""
        self.usage.count_tokens(count)

    def log_artifact(self, path: Path | str, folder: str | None = None) -> None:
        """Store one file under `folder` of the run."""
        self._client.log_artifact(self.run_id, str(path), folder)

    def log_artifacts(self, directory: Path | str, folder: str | None = None) -> None:
        """Store all files of a directory."""
        self._client.log_artifacts(self.run_id, str(directory), folder)

    def log_text(self, text: str, artifact: str) -> None:
        """Store a text as file `artifact`, e.g. `report/summary.md`."""
        self._client.log_text(self.run_id, text, artifact)

    def log_figure(self, figure: Figure, artifact: str) -> None:
        """Store a matplotlib figure as picture `artifact`, e.g. `plots/accuracy.png`."""
        self._client.log_figure(self.run_id, figure, artifact)

    def log_dataset(self, name: str, path: Path | str, digest: str, context: str, rows: int) -> None:
        """Link a data set: `digest` is its hash (36 characters are kept), `context` e.g. "training"."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        dataset = Dataset(
            name=name,
            digest=digest[:36],
            source_type="local",
            source=json.dumps({"uri": str(path)}),
            profile=json.dumps({"num_rows": rows}),
        )
        tags = [InputTag("mlflow.data.context", context), InputTag("digest", digest)]
        self._client.log_inputs(self.run_id, [DatasetInput(dataset, tags)])

    def log_trace(
        self,
        name: str,
        inputs: Any,
        outputs: Any,
        steps: Sequence[TraceStep],
        tags: Mapping[str, str] | None = None,
    ) -> str:
        """Store a finished episode as a trace of this run, one span per step. Returns the trace id.

        MLflow stores about eight traces a second: log a sample, after the fact. Written by one thread at a
        time, from recorded times: traces opened in rollout threads attach to the wrong run (mlflow#15511).
        """
        import mlflow

        with self._one_trace:
            if mlflow.get_tracking_uri() != self._uri:
                # the exporter has no other way to know; setting it again drops traces that are on their way
                _export_traces_to(self._uri)
            start = min((step.started for step in steps), default=time.time())
            end = max((step.ended for step in steps), default=start)
            root = self._client.start_trace(
                name,
                span_type="AGENT",
                inputs=inputs,
                tags=dict(tags or {}),
                experiment_id=self.experiment_id,
                start_time_ns=int(start * 1e9),
                run_id=self.run_id,
            )
            for step in steps:
                span = self._client.start_span(
                    step.name,
                    trace_id=root.trace_id,
                    parent_id=root.span_id,
                    span_type=step.kind,
                    inputs=step.inputs,
                    attributes=step.attributes,
                    start_time_ns=int(step.started * 1e9),
                )
                self._client.end_span(
                    root.trace_id,
                    span.span_id,
                    outputs=step.outputs,
                    status="ERROR" if step.failed else "OK",
                    end_time_ns=int(step.ended * 1e9),
                )
            self._client.end_trace(root.trace_id, outputs=outputs, end_time_ns=int(end * 1e9))
            self._has_traces = True
            return root.trace_id

    def set_tags(self, tags: Mapping[str, Any]) -> None:
        """Set tags; values become text."""
        for name, value in tags.items():
            self._client.set_tag(self.run_id, metric_name(name), str(value))

    def close(self, status: str) -> None:
        """Send everything and give the run its final status."""
        nonfinite = self._buffer.nonfinite
        if nonfinite:
            self.set_tags({"nonfinite": json.dumps(nonfinite, sort_keys=True)})
        self._buffer.close()
        self._machine.close()
        self._send_totals()
        if self._has_traces:
            import mlflow

            mlflow.flush_trace_async_logging()
        self._client.set_terminated(self.run_id, status)

    def flush_if_due(self) -> None:
        """Send metrics that have waited for some seconds; the background thread calls this."""
        self._buffer.flush_if_due()
        self._machine.flush_if_due()

    def totals_of(self, run_id: str) -> dict[str, float]:
        """Time and cost (`sys/…`) of another run of this store; empty if it is gone."""
        from mlflow.exceptions import MlflowException

        try:
            metrics = self._client.get_run(run_id).data.metrics
        except MlflowException:
            return {}
        return {name: value for name, value in metrics.items() if name.startswith(MACHINE)}

    def draw(self) -> None:
        """Curves of this run as pictures under `plots/`. An extra: no error here fails a stage that is done."""
        from tasks.run_figures import run_figures

        self._buffer.flush()
        try:
            for name, figure in run_figures(self._client, self.run_id).items():
                self.log_figure(figure, f"plots/{name}.png")
        except Exception as error:
            log.warning("no plots: %s", first_line(error))
            self.set_tags({"plots.error": f"{type(error).__name__}: {first_line(error)}"})

    def _send_totals(self) -> None:
        """Time and cost so far, at step 0; those of a later attempt replace them as the latest value."""
        now_ms = int(time.time() * 1000)
        self._send([Point(name, value, 0, now_ms) for name, value in self.usage.totals(self.gpus).items()])

    def _send(self, points: list[Point]) -> None:
        from mlflow.entities import Metric

        metrics = [Metric(point.name, point.value, point.time_ms, point.step) for point in points]
        self._client.log_batch(self.run_id, metrics=metrics)


def _export_traces_to(uri: str) -> None:
    """`mlflow.set_tracking_uri` without its side effect: it also writes MLFLOW_TRACKING_URI, which would win over
    the parameters of everything that this process opens afterwards."""
    import mlflow

    before = os.environ.get("MLFLOW_TRACKING_URI")
    mlflow.set_tracking_uri(uri)
    if before is None:
        os.environ.pop("MLFLOW_TRACKING_URI", None)
    else:
        os.environ["MLFLOW_TRACKING_URI"] = before
