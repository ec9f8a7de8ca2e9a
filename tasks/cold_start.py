"""Stage 1: write the cold start, expert trajectories on VSP with every tool call really executed.

    data/cold_start/train-00000-of-000NN.parquet …    trajectories (tasks.schema.TRAJECTORIES)
                    train-ingested-*.parquet           those of data/ingested, if any (tasks.ingest)
                    validation-00000-of-00001.parquet  trajectories on validation maps
                    validation_items.parquet           questions on validation maps (tasks.schema.ITEMS)
                    test_items.parquet                 questions on test maps, at unseen sizes too
                    manifest.json                      counts, hashes, seed and settings

The same seed and settings give the same bytes, with any number of workers: each file is a function of its
plan.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import logging
import multiprocessing
import os
import random
import shutil
import signal
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from environments.vsp.config import ColdStartConfig
from environments.vsp.expert import demonstrate
from environments.vsp.maps import Split
from environments.vsp.plan import MapPlan, PlanError, Planner
from environments.vsp.prompts import VSP
from tasks.ingested import INGESTED_SPLIT, ingested_name, ingested_parts, is_ingested
from tasks.schema import ITEMS, TRAJECTORIES, item_row, iter_trajectories, trajectory_row
from tools.cache import ToolResultCache
from tools.executor import ToolExecutor
from tools.vsp import vsp_registry

if TYPE_CHECKING:
    from tasks.params import Params

logger = logging.getLogger("tasks.cold_start")  # its own name too when it is started with -m

CALL_DEADLINE_S = 60.0  # far above any call's time: a slow machine must not turn a result into an error
CACHED_RESULTS = 256  # the questions of one map follow each other
COUNTED = ("task", "kind", "size")
TOKENIZER_TRAJECTORIES = 8000  # more change no merge that matters


class ColdStartError(Exception):
    """The data set cannot be written; the message is one line."""


@dataclass(frozen=True)
class FilePlan:
    """What goes into one file. `split` None: a file of questions without trajectories."""

    name: str
    split: Split | None
    maps: tuple[MapPlan, ...]


@dataclass(frozen=True)
class FileReport:
    """What a file holds, for the manifest. `counts`: rows by (task, kind, size)."""

    name: str
    split: Split | None
    rows: int
    maps: int
    sha256: str
    size_bytes: int
    counts: Counter[tuple[str, str, int]]


def build_cold_start(
    config: ColdStartConfig,
    seed: int,
    out_dir: Path,
    progress: Callable[[int, int], None] | None = None,
    ingested: Sequence[Path] = (),
) -> dict[str, Any]:
    """Write the data set into `out_dir`, replacing an older one, and return its manifest.

    All files are written next to `out_dir` and moved there at the end; a build that ends early leaves
    nothing. `progress(done, total)` counts rows. `ingested`: files of trajectories from elsewhere that are
    taken in as they are. Raises ColdStartError if `out_dir` holds something else,
    PlanError if the settings ask for more than exists, OSError if it cannot be written.
    """
    out_dir = Path(out_dir).resolve()
    if out_dir.exists() and any(out_dir.iterdir()) and not (out_dir / "manifest.json").is_file():
        raise ColdStartError(
            f"{out_dir} holds something other than a cold start; name an empty folder with --out"
        )
    with _staging(out_dir) as staging:
        reports = _write_files(config, seed, staging, progress or (lambda done, total: None))
        reports += [
            _take_in(part, staging / ingested_name(number, len(ingested)))
            for number, part in enumerate(ingested)
        ]
        manifest = _manifest(config, seed, reports)
        (staging / "manifest.json").write_text(
            json.dumps(manifest, indent=1, sort_keys=True) + "\n", encoding="utf-8"
        )
    return manifest


def _take_in(part: Path, path: Path) -> FileReport:
    """Copy a file of trajectories from elsewhere. Raises ColdStartError if it is not one."""
    try:
        shutil.copyfile(part, path)
        rows = pq.read_table(path, columns=["map_hash", *COUNTED]).to_pylist()
    except (pa.ArrowException, FileNotFoundError) as error:
        problem = " ".join(str(error).split())
        raise ColdStartError(f"{part} cannot be read ({problem}); restore it with `dvc checkout`") from None
    counts = Counter((row["task"], row["kind"], row["size"]) for row in rows)
    return _report(path, Split.TRAIN, len(rows), len({row["map_hash"] for row in rows}), counts)


@contextmanager
def _staging(out_dir: Path) -> Iterator[Path]:
    """A folder beside `out_dir` that takes its place if the block ends well and is removed if not."""
    staging, old = (out_dir.with_name(f".{out_dir.name}.{suffix}") for suffix in ("partial", "old"))
    for left_over in (staging, old):  # of a build that was killed
        shutil.rmtree(left_over, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        yield staging
    except BaseException as error:
        shutil.rmtree(staging, ignore_errors=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(out_dir)  # arrow does not say which file did not fit on the disk
        raise
    if out_dir.exists():
        out_dir.rename(old)
    staging.rename(out_dir)
    shutil.rmtree(old, ignore_errors=True)


def plan_files(config: ColdStartConfig, seed: int) -> Iterator[FilePlan]:
    """The plan of every file, questions first. Lazy, so that writing can begin before planning ends."""
    planner = Planner(config, seed)
    yield FilePlan("test_items.parquet", None, tuple(planner.test_items()))
    yield FilePlan("validation_items.parquet", None, tuple(planner.validation_items()))
    validation = tuple(planner.trajectories(Split.VALIDATION, config.validation_trajectories))
    yield FilePlan("validation-00000-of-00001.parquet", Split.VALIDATION, validation)
    shard: list[MapPlan] = []
    number = rows = 0
    for plan in planner.trajectories(Split.TRAIN, config.n_trajectories):
        shard.append(plan)
        rows += len(plan.questions)
        if rows * config.shards >= (number + 1) * config.n_trajectories:
            yield FilePlan(f"train-{number:05d}-of-{config.shards:05d}.parquet", Split.TRAIN, tuple(shard))
            number, shard = number + 1, []


def _total_rows(config: ColdStartConfig) -> int:
    items = config.validation_items + 2 * config.test_items_per_size * len(config.test_sizes)
    return items + config.validation_trajectories + config.n_trajectories


def _write_files(
    config: ColdStartConfig, seed: int, folder: Path, progress: Callable[[int, int], None]
) -> list[FileReport]:
    total, reports = _total_rows(config), []

    def finished(report: FileReport) -> None:
        reports.append(report)
        progress(sum(r.rows for r in reports), total)

    plans = plan_files(config, seed)
    if config.workers == 1:
        environment = VSP()
        for plan in plans:
            finished(write_file(plan, config, seed, folder, environment))
    else:
        with closing(_write_in_workers(plans, config, seed, folder)) as written:
            for report in written:
                finished(report)
    return sorted(reports, key=lambda report: report.name)


def _write_in_workers(
    plans: Iterator[FilePlan], config: ColdStartConfig, seed: int, folder: Path
) -> Generator[FileReport, None, None]:
    """Reports in the order of completion. The processes never outlive the iterator, however it ends.

    A pipe to each worker and no threads: terminating a ProcessPoolExecutor whose queue holds more than a pipe
    takes hangs (python/cpython#94777).
    """
    # spawn: pygame and OpenCV have threads, which a fork would cut off
    context = multiprocessing.get_context("spawn")
    workers: dict[Connection, BaseProcess] = {}
    busy: list[Connection] = []

    def collect() -> Iterator[FileReport]:
        for connection in wait(busy):
            assert isinstance(connection, Connection)
            try:
                outcome = connection.recv()
            except EOFError:
                raise ColdStartError("a worker was killed, perhaps for memory; lower data.workers") from None
            if isinstance(outcome, Exception):
                raise outcome
            busy.remove(connection)
            yield outcome

    try:
        for _ in range(config.workers):
            connection, theirs = context.Pipe()
            process: BaseProcess = context.Process(
                target=_serve, args=(theirs, config, seed, folder), daemon=True
            )
            process.start()
            theirs.close()
            workers[connection] = process
        for plan in plans:
            while len(busy) == len(workers):
                yield from collect()
            idle = next(connection for connection in workers if connection not in busy)
            idle.send(plan)
            busy.append(idle)
        while busy:
            yield from collect()
    finally:
        for process in workers.values():
            process.kill()  # they have nothing to tidy up: the folder is the parent's
            process.join()


def _serve(connection: Connection, config: ColdStartConfig, seed: int, folder: Path) -> None:
    """A worker: writes the files whose plans arrive, until its parent ends it or is gone."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole group; the parent ends its workers
    parent = multiprocessing.parent_process()
    assert parent is not None  # runs in a child only

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    environment = VSP()
    while True:
        plan = connection.recv()
        try:
            connection.send(write_file(plan, config, seed, folder, environment))
        except Exception as error:
            error.add_note("In a worker:\n" + traceback.format_exc())
            connection.send(error)


def write_file(
    plan: FilePlan, config: ColdStartConfig, seed: int, folder: Path, environment: VSP
) -> FileReport:
    """Draw the maps, let the experts act, and write one file. The result depends on nothing but the arguments, and
    not on what `environment` has drawn before, which only saves time: a sheet of cells for each size and cell size.
    """
    executor = ToolExecutor(vsp_registry(), ToolResultCache(CACHED_RESULTS), CALL_DEADLINE_S)
    rows: list[dict[str, Any]] = []
    counts: Counter[tuple[str, str, int]] = Counter()
    for map_plan in plan.maps:
        picture = environment.renderer.render(map_plan.grid, map_plan.cell_px)
        for question in map_plan.questions:
            prompt = question.prompt(map_plan.grid, picture)
            kind = str(question.kind) if plan.split else "question"
            counts[str(question.task), kind, map_plan.grid.size] += 1
            if plan.split is None:
                rows.append(item_row(prompt))
                continue
            rng = random.Random(f"{seed}/{prompt.prompt_id}")
            shown = demonstrate(prompt, question.kind, executor, environment, rng, question.point_holes)
            rows.append(trajectory_row(shown, plan.split, config.stored_pictures))
    schema = TRAJECTORIES if plan.split else ITEMS
    path = folder / plan.name
    pq.write_table(
        pa.Table.from_pylist(rows, schema=schema),
        path,
        compression="zstd",
        row_group_size=max(len(rows), 1),
        use_dictionary=True,
        dictionary_pagesize_limit=1 << 30,  # the default of 1 MiB stores a map's picture once per question
        write_statistics=False,  # of pictures and nested turns they are of no use
    )
    return _report(path, plan.split, len(rows), len(plan.maps), counts)


def _report(
    path: Path, split: Split | None, rows: int, maps: int, counts: Counter[tuple[str, str, int]]
) -> FileReport:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileReport(path.name, split, rows, maps, digest, path.stat().st_size, counts)


def _manifest(config: ColdStartConfig, seed: int, reports: list[FileReport]) -> dict[str, Any]:
    groups: dict[str, list[FileReport]] = {}
    for report in reports:
        groups.setdefault(_group(report), []).append(report)
    return {
        "seed": seed,
        "config": config.model_dump(mode="json", exclude={"workers"}),  # on which the data do not depend
        "splits": {name: _counts(group) for name, group in sorted(groups.items())},
        "files": {r.name: {"rows": r.rows, "sha256": r.sha256, "bytes": r.size_bytes} for r in reports},
    }


def _group(report: FileReport) -> str:
    """The files that the manifest counts together."""
    if is_ingested(report.name):
        return "ingested"
    return str(report.split) if report.split else report.name.removesuffix(".parquet")


def _counts(reports: list[FileReport]) -> dict[str, Any]:
    counts = sum((report.counts for report in reports), Counter[tuple[str, str, int]]())
    summary: dict[str, Any] = {"rows": counts.total(), "maps": sum(report.maps for report in reports)}
    for position, name in enumerate(COUNTED):
        by: Counter[str] = Counter()
        for key, number in counts.items():
            by[str(key[position])] += number
        summary[f"by_{name}"] = dict(sorted(by.items()))
    summary["by_task_kind_size"] = {"/".join(map(str, key)): number for key, number in sorted(counts.items())}
    return summary


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, a log line per file elsewhere."""
    if not sys.stderr.isatty():
        yield lambda done, total: logger.info("cold start: %d of %d rows", done, total)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("cold start"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("cold start", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def main() -> None:
    """Write the data set that params.yaml describes."""
    parser = argparse.ArgumentParser(
        prog="python -m tasks.cold_start",
        description="Write the cold start: expert trajectories on VSP, every tool call really executed.",
        epilog="Example: python -m tasks.cold_start --out data/cold_start",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--out", type=Path, default=Path("data/cold_start"), help="folder to write (default %(default)s)"
    )
    arguments = parser.parse_args()
    from tasks.params import load_params
    from tasks.tracking import stage_run

    params = load_params()
    # SIGTERM arrives as an exception in a stage run, so that the unfinished folder goes
    with stage_run("cold_start", params) as run:
        with _progress() as progress:
            parts = ingested_parts()
            manifest = build_cold_start(params.data, params.seed, arguments.out, progress, parts)
        write_tokenizer(params, arguments.out, arguments.out.parent / "tokenizer")
        size = sum(file["bytes"] for file in manifest["files"].values())
        run.log_summary({"data/bytes": size} | _count_metrics(manifest))
        run.log_artifact(arguments.out / "manifest.json", "data")
    rows = sum(counts["rows"] for name, counts in manifest["splits"].items() if name in ("train", "ingested"))
    logger.info("wrote %s: %d training trajectories, %.1f MB", arguments.out, rows, size / 1e6)


def write_tokenizer(params: Params, data: Path, folder: Path) -> None:
    """Train the tiny policy's tokenizer on the first training trajectories and save it to `folder`.

    Those from elsewhere come first: they are few, and their words are the ones that the experts never use.
    """
    from models.demonstrations import demonstration_text
    from models.tokenizer import train_tokenizer
    from tasks.workspace import fresh_folder

    registry = vsp_registry()
    shown = iter_trajectories(data, "train")
    if any(is_ingested(path.name) for path in data.iterdir()):
        shown = itertools.chain(iter_trajectories(data, INGESTED_SPLIT), shown)
    first = itertools.islice(shown, TOKENIZER_TRAJECTORIES)
    texts = [demonstration_text(each, registry, params.agent) for each in first]
    with fresh_folder(folder) as draft:
        train_tokenizer(texts, params.policy.vocab_size).save_pretrained(draft)


def _count_metrics(manifest: dict[str, Any]) -> dict[str, float]:
    """Rows and maps of each split."""
    return {
        f"data/{split}_{name}": counts[name]
        for split, counts in manifest["splits"].items()
        for name in ("rows", "maps")
    }


if __name__ == "__main__":
    from tasks.cli import run_main

    run_main(main, ColdStartError, PlanError)
