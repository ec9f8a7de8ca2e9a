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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from tasks.dvc_graph import fingerprint, stage_inputs
from tasks.estimate import write_cost
from tasks.params import PROJECT_ROOT, Params, flatten, load_params
from tasks.provenance import dvc_process, owner_is_dead, run_tags
from tasks.tracked_run import StageRun
from tasks.tracking_store import TrackingError, first_line, open_store, reap_orphans, resolve_store
from tasks.usage import gpu_count, peak_memory_mb, start_monitor

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

log = logging.getLogger(__name__)

PARENT_RUN_VARIABLE = "TOOLPLAN_PARENT_RUN_ID"
_PARENT_TAG = "mlflow.parentRunId"
_UNFINISHED = ("RUNNING", "KILLED", "FAILED")


class Terminated(SystemExit):
    """Raised in the main thread on SIGTERM, so that runs close as KILLED and files are left whole."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


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
            run.set_tags({"error": f"{type(error).__name__}: {first_line(error)}"})
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
            log.warning("MLflow did not take metrics (%s); they are kept and sent again", first_line(error))
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
