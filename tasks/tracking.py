"""MLflow runs of the pipeline: one parent per pipeline run, one child per stage, no global state.

Everything goes through `MlflowClient` and a run id. MLflow's fluent functions keep the active run per
thread, create runs when there is none, and close a parent that a child re-opened (mlflow/mlflow#13874).
MLflow is imported inside functions: it takes three seconds, and `--help` should not.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from tasks.dvc_graph import fingerprint, stage_inputs
from tasks.estimate import write_cost
from tasks.metric_log import MetricBuffer, Point, metric_name
from tasks.params import PROJECT_ROOT, Params, TrackingConfig, flatten, load_params, read_yaml
from tasks.provenance import dvc_process, owner_is_dead, run_tags
from tasks.usage import GROUP as MACHINE
from tasks.usage import Usage, gpu_count, peak_memory_mb, start_monitor

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from mlflow import MlflowClient
    from mlflow.entities import Run

log = logging.getLogger(__name__)

PARENT_RUN_VARIABLE = "TOOLPLAN_PARENT_RUN_ID"
_PARENT_TAG = "mlflow.parentRunId"
_UNFINISHED = ("RUNNING", "KILLED", "FAILED")


class TrackingError(Exception):
    """The tracking store cannot be used; the message is one line with the remedy."""


class Terminated(SystemExit):
    """Raised in the main thread on SIGTERM, so that runs close as KILLED and files are left whole."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


@dataclass(frozen=True)
class Store:
    """A resolved tracking store. `artifact_root` is None where the server decides."""

    uri: str
    artifact_root: str | None
    database: Path | None
    experiment: str


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


# --------------------------------------------------------------------------------------------- store


def resolve_store(config: TrackingConfig, root: Path = PROJECT_ROOT) -> Store:
    """Where runs go: MLFLOW_TRACKING_URI, else params, else `mlflow.db` in the project.

    Relative sqlite paths and artifact roots are meant from the project, never from the current folder
    (mlflow/mlflow#7670).

    Raises:
        TrackingError: the address is a folder (MLflow's file store, which it no longer maintains).
    """
    uri = os.environ.get("MLFLOW_TRACKING_URI") or config.tracking_uri or f"sqlite:///{root / 'mlflow.db'}"
    scheme = uri.split(":", 1)[0] if "://" in uri or uri.startswith("file:") else ""
    if scheme in {"", "file"} and uri != "databricks":
        raise TrackingError(
            f"tracking store {uri!r} is a folder, which MLflow no longer maintains: "
            "unset MLFLOW_TRACKING_URI, or set it to sqlite:///mlflow.db or to a server's http address"
        )
    if scheme != "sqlite":
        return Store(uri, config.artifact_root, None, config.experiment)
    database = root / uri.removeprefix("sqlite:///")
    artifacts = root / (config.artifact_root or "mlartifacts")
    return Store(f"sqlite:///{database}", artifacts.as_uri(), database, config.experiment)


def open_store(store: Store) -> tuple[MlflowClient, str]:
    """A client and the id of the experiment, which is created if new and restored if deleted.

    A fresh sqlite file is destroyed if several processes initialise it together (daizutabi/hydraflow#245),
    so the first connection of each process happens behind a file lock.

    Raises:
        TrackingError: the store cannot be reached or its schema is of another MLflow.
    """
    if store.database is None:
        return _connect(store)
    store.database.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{store.database}.lock"):
        return _connect(store)


def _connect(store: Store) -> tuple[MlflowClient, str]:
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    for chatty in ("alembic", "mlflow.store.db", "mlflow.system_metrics", "mlflow.tracing"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    client = MlflowClient(tracking_uri=store.uri, registry_uri=store.uri)
    try:
        experiment = client.get_experiment_by_name(store.experiment)
        if experiment is None:
            try:
                return client, client.create_experiment(
                    store.experiment, store.artifact_root, tags=_description(store.experiment)
                )
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
                experiment = client.get_experiment_by_name(store.experiment)
                if experiment is None:
                    raise
        if experiment.lifecycle_stage == "deleted":
            log.warning("the MLflow experiment %s was deleted; it is restored", store.experiment)
            client.restore_experiment(experiment.experiment_id)
    except MlflowException as error:
        hint = "is its server running?"
        if "out-of-date database schema" in str(error):
            hint = f"back it up, then run `mlflow db upgrade {store.uri}`"
        raise TrackingError(f"tracking store {store.uri}: {_first_line(error)}; {hint}") from error
    return client, experiment.experiment_id


def _description(experiment: str) -> dict[str, str]:
    """The text of mlflow/experiments.yaml that MLflow shows above the runs."""
    text = read_yaml(PROJECT_ROOT / "mlflow" / "experiments.yaml").get(experiment)
    return {} if text is None else {"mlflow.note.content": text}


def find_orphans(client: MlflowClient, experiment_id: str) -> list[Run]:
    """Runs that look as if they ran though their process on this machine is gone."""
    running = client.search_runs([experiment_id], "attributes.status = 'RUNNING'", max_results=1000)
    return [run for run in running if owner_is_dead(run.data.tags)]


def reap_orphans(client: MlflowClient, experiment_id: str) -> list[str]:
    """Set runs to KILLED whose process on this machine is gone (SIGKILL leaves them RUNNING for ever)."""
    reaped = []
    for run in find_orphans(client, experiment_id):
        client.set_tag(run.info.run_id, "reaped", "true")
        client.set_terminated(run.info.run_id, "KILLED")
        reaped.append(run.info.run_id)
    return reaped


# ----------------------------------------------------------------------------------------------- run


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
                mlflow.set_tracking_uri(self._uri)
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
            log.warning("no plots: %s", _first_line(error))
            self.set_tags({"plots.error": f"{type(error).__name__}: {_first_line(error)}"})

    def _send_totals(self) -> None:
        """Time and cost so far, at step 0; those of a later attempt replace them as the latest value."""
        now_ms = int(time.time() * 1000)
        self._send([Point(name, value, 0, now_ms) for name, value in self.usage.totals(self.gpus).items()])

    def _send(self, points: list[Point]) -> None:
        from mlflow.entities import Metric

        metrics = [Metric(point.name, point.value, point.time_ms, point.step) for point in points]
        self._client.log_batch(self.run_id, metrics=metrics)


@contextmanager
def stage_run(stage: str, params: Params, root: Path = PROJECT_ROOT) -> Iterator[StageRun]:
    """The MLflow run of one stage: a child of $TOOLPLAN_PARENT_RUN_ID if set, a top-level run otherwise.

    An unfinished run of the same job (same parameters and dependencies) is continued, so that a killed
    training has one curve. Statuses: FINISHED, also on `sys.exit(0)`; KILLED on Ctrl-C and SIGTERM; FAILED
    on every other exception, which is passed on.

    Raises:
        TrackingError: the store cannot be used.
    """
    with _only_one(stage, root):
        yield from _stage_run(stage, params, root)


def _stage_run(stage: str, params: Params, root: Path) -> Iterator[StageRun]:
    store = resolve_store(params.tracking, root)
    client, experiment_id = open_store(store)
    reap_orphans(client, experiment_id)
    inputs = stage_inputs(stage, params, root)
    job = fingerprint(stage, inputs)
    records = RunRecords(root, stage)
    tags = run_tags(params, root) | {"dvc.stage": stage, "fingerprint": job}
    if parent := os.environ.get(PARENT_RUN_VARIABLE):
        tags[_PARENT_TAG] = parent
    earlier = _unfinished(client, records.run_id(job))
    if earlier is None:
        opened = client.create_run(experiment_id, tags={**tags, "attempt": "1"}, run_name=stage)
    else:
        opened = _reopen(client, earlier, tags)
    run = StageRun(client, opened, params, store.uri)
    records.write(job, run.run_id)
    _log_params(client, opened, params)
    with _open_run(run, params):
        yield run
        if "DVC_STAGE" in os.environ:
            _refuse_changed_inputs(stage, inputs, root)
        run.draw()
    if opened.data.tags.get("attempt") == "1":  # a continued run's time would be of its end only
        write_cost(root, stage, params, peak_memory_mb() * 1e6)


@contextmanager
def _only_one(stage: str, root: Path) -> Iterator[None]:
    """Two processes of one stage would write the same files. The earlier one may be on its way out, after
    its `dvc repro` was killed: wait a little for it."""
    lock = root / "outputs" / ".runs" / f"{stage}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(lock, timeout=60):
            yield
    except Timeout:
        raise TrackingError(
            f"{stage} is already at work in another process; wait for it, or stop it"
        ) from None


def _refuse_changed_inputs(stage: str, inputs: Mapping[str, str], root: Path) -> None:
    """DVC hashes dependencies after the command (treeverse/dvc#11058): an edit made meanwhile would be
    recorded as what the result was made from."""
    present = stage_inputs(stage, load_params(root / "params.yaml"), root)
    changed = sorted(name for name in {**inputs, **present} if inputs.get(name) != present.get(name))
    if changed:
        raise TrackingError(
            f"{stage}: {', '.join(changed[:3])} changed while it ran, so the result is not recorded; "
            "run again, or undo the change and run again to keep this result"
        )


@contextmanager
def pipeline_run(
    params: Params, root: Path = PROJECT_ROOT, tags: Mapping[str, str] | None = None
) -> Iterator[StageRun]:
    """The parent run of one pipeline execution. Pass its `run_id` to stages as $TOOLPLAN_PARENT_RUN_ID."""
    store = resolve_store(params.tracking, root)
    client, experiment_id = open_store(store)
    reap_orphans(client, experiment_id)
    opened = client.create_run(
        experiment_id, tags={**run_tags(params, root), **(tags or {})}, run_name=f"pipeline-{params.profile}"
    )
    run = StageRun(client, opened, params, store.uri)
    _log_params(client, opened, params)
    with _open_run(run, params, system_metrics=False):
        yield run


@contextmanager
def resumable_run(
    name: str,
    record: Path,
    params: Params,
    root: Path = PROJECT_ROOT,
    tags: Mapping[str, Any] | None = None,
    system_metrics: bool = True,
) -> Iterator[StageRun]:
    """A run that belongs to no stage, such as a sweep or one of its trials: a child of $TOOLPLAN_PARENT_RUN_ID if set.

    `record` is a file that keeps the run's id: the same run goes on for as long as the file and the run exist.
    """
    store = resolve_store(params.tracking, root)
    client, experiment_id = open_store(store)
    all_tags = {**run_tags(params, root), **{key: str(value) for key, value in (tags or {}).items()}}
    if parent := os.environ.get(PARENT_RUN_VARIABLE):
        all_tags[_PARENT_TAG] = parent
    earlier = _existing(client, record.read_text(encoding="utf-8") if record.is_file() else None)
    if earlier is None:
        opened = client.create_run(experiment_id, tags={**all_tags, "attempt": "1"}, run_name=name)
    else:
        opened = _reopen(client, earlier, all_tags)
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(opened.info.run_id, encoding="utf-8")
    run = StageRun(client, opened, params, store.uri)
    _log_params(client, opened, params)
    with _open_run(run, params, system_metrics):
        yield run


@contextmanager
def _open_run(run: StageRun, params: Params, system_metrics: bool = True) -> Iterator[None]:
    """Background flushing and machine metrics while the body runs, and the right status afterwards."""
    stop = threading.Event()
    flusher = threading.Thread(target=_flush_loop, args=(run, stop), name="metric-flusher", daemon=True)
    monitor = None
    if system_metrics:
        interval_s = params.tracking.system_metrics_interval_s
        monitor = start_monitor(run.run_id, run._uri, interval_s, run.next_sample, run.log_machine)
        run.gpus = gpu_count(monitor)
    status = "FAILED"
    with _terminate_on_sigterm():
        flusher.start()
        try:
            yield
            status = "FINISHED"
        except SystemExit as error:
            if isinstance(error, Terminated):
                status = "KILLED"
            elif error.code in (None, 0):
                status = "FINISHED"
            raise
        except Exception as error:
            run.set_tags({"error": f"{type(error).__name__}: {_first_line(error)}"})
            raise
        except BaseException:  # Ctrl-C, or a signal that Prefect took
            status = "KILLED"
            raise
        finally:
            stop.set()
            flusher.join()
            if monitor is not None:
                monitor.finish()
            run.close(status)


def _flush_loop(run: StageRun, stop: threading.Event) -> None:
    """Send waiting metrics every few seconds. What fails stays buffered; `close` fails loudly in the end.

    Also ends a stage whose `dvc repro` is gone: DVC does not pass SIGTERM on, and the next `dvc repro` would
    start a second process beside this one.
    """
    dvc = dvc_process()
    while not stop.wait(2.0):
        if dvc is not None and not dvc.is_running():
            log.warning("the dvc process that started this stage is gone: stopping")
            os.kill(os.getpid(), signal.SIGTERM)
            return
        try:
            run.flush_if_due()
        except Exception as error:
            log.warning("MLflow did not take metrics (%s); they are kept and sent again", _first_line(error))
            stop.wait(15.0)


@contextmanager
def _terminate_on_sigterm() -> Iterator[None]:
    """Turn the first SIGTERM into `Terminated` in the main thread; later ones don't disturb the clean-up.

    Who handles the signal already keeps it: a flow run under Prefect's own handler is told there whether it was
    cancelled, and without it Prefect calls every cancelled run a crash.
    """
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def handler(signum: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated

    signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class RunRecords:
    """`outputs/.runs/<stage>.json`: the MLflow run of each job. Not a DVC out, since it holds run ids."""

    def __init__(self, root: Path, stage: str) -> None:
        self._file = root / "outputs" / ".runs" / f"{stage}.json"

    def run_id(self, fingerprint: str) -> str | None:
        """The last run of the job with this fingerprint."""
        return self._read().get(fingerprint)

    def write(self, fingerprint: str, run_id: str) -> None:
        """Remember a run, atomically."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        draft = self._file.with_suffix(f".{os.getpid()}.tmp")
        draft.write_text(json.dumps({**self._read(), fingerprint: run_id}, indent=1))
        draft.replace(self._file)

    def _read(self) -> dict[str, str]:
        return json.loads(self._file.read_text()) if self._file.is_file() else {}


def _unfinished(client: MlflowClient, run_id: str | None) -> Run | None:
    """The run, if it still exists, has not finished, and nobody else is writing it."""
    run = _existing(client, run_id)
    if run is None:
        return None
    alive = run.info.status == "RUNNING" and not owner_is_dead(run.data.tags)
    return run if run.info.status in _UNFINISHED and not alive else None


def _existing(client: MlflowClient, run_id: str | None) -> Run | None:
    """The run, if it is still in the store."""
    from mlflow.exceptions import MlflowException

    if run_id is None:
        return None
    try:
        run = client.get_run(run_id)
    except MlflowException:
        return None
    return run if run.info.lifecycle_stage == "active" else None


def _reopen(client: MlflowClient, run: Run, tags: Mapping[str, str]) -> Run:
    """Continue an unfinished run under the present process and parent."""
    run_id = run.info.run_id
    client.update_run(run_id, status="RUNNING")
    attempt = int(run.data.tags.get("attempt", "1")) + 1
    for name, value in {**tags, "attempt": str(attempt)}.items():
        client.set_tag(run_id, name, value)
    if _PARENT_TAG not in tags and _PARENT_TAG in run.data.tags:
        client.delete_tag(run_id, _PARENT_TAG)
    log.info("continuing MLflow run %s (attempt %d)", run_id, attempt)
    return client.get_run(run_id)


def _log_params(client: MlflowClient, run: Run, params: Params) -> None:
    """All parameters, flat, and the whole configuration as config.yaml. A changed one becomes a tag, since
    MLflow's parameters can be written once (mlflow/mlflow#7046)."""
    from mlflow.entities import Param, RunTag
    from ruamel.yaml import YAML

    # A search space, with names such as `reward.*`, says nothing about a run.
    flat = {name: str(value) for name, value in flatten(params).items() if not name.startswith("sweep.")}
    known = run.data.params
    new = [Param(name, value) for name, value in flat.items() if name not in known]
    for start in range(0, len(new), 100):
        client.log_batch(run.info.run_id, params=new[start : start + 100])
    changed = {name: value for name, value in flat.items() if name in known and known[name] != value}
    if changed:
        client.log_batch(
            run.info.run_id, tags=[RunTag(f"resumed.{name}", value) for name, value in changed.items()]
        )
    from io import StringIO

    text = StringIO()
    YAML(typ="safe", pure=True).dump(params.model_dump(mode="json"), text)
    client.log_text(run.info.run_id, text.getvalue(), "config.yaml")


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:500] if lines else type(error).__name__
