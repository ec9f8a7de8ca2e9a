"""Stage 2: the data gate. Great Expectations over the cold start; what fails is named and stops the pipeline.

outputs/validation/report.json   every expectation, its verdict and the first bad rows; the same bytes
for the
                                 same data
outputs/data_docs/index.html     Great Expectations' own pages. Not an output of the stage: they hold
times
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from environments.vsp.config import ColdStartConfig
from tasks.gate.files import MANIFEST
from tasks.gate.report import GateFailed, GateReport
from tasks.params import ValidateConfig

if TYPE_CHECKING:
    from models.encoding import Encoder

logger = logging.getLogger("tasks.validate")  # __name__ is "__main__" when run as a command

REPORT = Path("outputs/validation/report.json")
DATA_DOCS = Path("outputs/data_docs")


def validate(
    data_dir: Path, config: ValidateConfig, data: ColdStartConfig, encoder: Encoder, docs_dir: Path | None
) -> GateReport:
    """Check the data set in `data_dir` against the limits of `config` and the mix of `data`.

    `encoder` counts tokens and knows the tools. Data Docs go into `docs_dir` (if given), replacing older
    ones. Bad data are findings in the report; only an absent folder raises (FileNotFoundError).
    """
    from tasks.gate.checkpoint import run_suites
    from tasks.gate.expectations import suites
    from tasks.gate.facts import PictureReader
    from tasks.gate.frames import build_frames
    from tasks.gate.tokens import TokenCounter

    read_picture = PictureReader()
    counter = TokenCounter(encoder, read_picture)
    frames = build_frames(
        data_dir, data, config.share_tolerance, encoder.registry, read_picture, counter.token_lengths
    )
    if docs_dir is not None and docs_dir.exists():
        shutil.rmtree(docs_dir)
    checks = suites(config, data, ingested="ingested" in frames)
    results = run_suites(checks, frames, config.report_rows, docs_dir)
    return GateReport({name: len(frame) for name, frame in frames.items()}, tuple(results))


def main() -> None:
    """Check the data, write the report, and fail if anything is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m tasks.validate",
        description="Check that the cold start is fit to train on. Exits with 1 and names bad rows if not.",
        epilog="Example: python -m tasks.validate --data data/cold_start --warn-only",
    )
    parser.add_argument(
        "--data", type=Path, default=Path("data/cold_start"), help="folder to check (default %(default)s)"
    )
    parser.add_argument(
        "--tokenizer", type=Path, default=Path("data/tokenizer"), help="counts tokens (default %(default)s)"
    )
    parser.add_argument("--warn-only", action="store_true", help="print what fails, but exit with 0")
    arguments = parser.parse_args()

    for folder in (arguments.data, arguments.tokenizer):
        if not folder.is_dir():
            raise FileNotFoundError(f"no folder {folder}: make it first with `python -m tasks.cold_start`")

    from transformers import PreTrainedTokenizerFast

    from models.encoding import Encoder
    from tasks.params import load_params
    from tasks.tracking import stage_run
    from tools.vsp import vsp_registry

    params = load_params()
    with stage_run("validate", params) as run:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(arguments.tokenizer)
        encoder = Encoder(tokenizer, vsp_registry(), params.agent, params.policy.image_scale)
        report = validate(arguments.data, params.gate, params.data, encoder, DATA_DOCS)
        REPORT.parent.mkdir(parents=True, exist_ok=True)
        REPORT.write_text(report.to_json(), encoding="utf-8")
        rows = {f"gate/{frame}": count for frame, count in report.rows.items()}
        counts = {"gate/expectations": len(report.results), "gate/failed": len(report.failures)}
        run.log_summary(rows | counts | {"gate/ingested_share": report.ingested_share})
        run.log_artifact(REPORT, "validation")
        run.log_artifacts(DATA_DOCS, "data_docs")
        manifest = arguments.data / MANIFEST
        if manifest.is_file():
            digest = hashlib.sha256(manifest.read_bytes()).hexdigest()
            trajectories = report.rows["trajectories"] + report.rows.get("ingested", 0)
            run.log_dataset("cold_start", arguments.data, digest, "validation", trajectories)
        if not (report.success or arguments.warn_only):
            raise GateFailed(report)
    for line in report.lines():
        logger.log(logging.INFO if report.success else logging.WARNING, line)
    logger.info("report: %s, Data Docs: %s", REPORT, DATA_DOCS / "index.html")


if __name__ == "__main__":
    from tasks.cli import run_main

    run_main(main, GateFailed)
