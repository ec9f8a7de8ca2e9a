"""Stage promote: register the trained policy; it becomes champion only if it is better beyond chance.

The registry is MLflow's: versions of `promote.model_name`, aliases `champion` and `challenger`. The stage's
output says what was decided and why; it holds no run ids and no version numbers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tasks.cli import run_main
from tasks.model_card import data_gate, model_card
from tasks.params import PROJECT_ROOT, Params, load_params
from tasks.registry import CHALLENGER, CHAMPION, ensure_model, version_of
from tasks.tracked_run import StageRun
from tasks.tracking import stage_run
from tasks.tracking_store import Store, TrackingError, open_store, resolve_store

if TYPE_CHECKING:
    import pandas as pd
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

_ITEMS = "evaluation/items.parquet"
_ALREADY = "it is the champion already"
_SHA_TAG, _ITEMS_TAG = "model.sha256", "items.sha256"


class PromotionError(TrackingError):
    """There is nothing to promote; one line with what to do."""


@dataclass(frozen=True)
class Verdict:
    """`comparison` is against the champion on the same items; None where there was nothing to compare."""

    verdict: Literal["champion", "challenger"]
    reason: str
    comparison: dict[str, Any] | None = None


def decide(
    overall: float | None,
    items: pd.DataFrame,
    champion_items: pd.DataFrame | None,
    same_items: bool,
    confidence: float,
    seed: int,
) -> Verdict:
    """Whether a model takes the champion's place. Pure.

    Args:
        overall: its accuracy; None or NaN where it could not be measured.
        items: one row per item of the deciding suite, columns prompt_id and correct.
        champion_items: the champion's, None if there is no champion.
        same_items: whether both were asked the same questions.
        confidence: of the paired interval and of McNemar's test; both must say "better".
        seed: of the bootstrap.
    """
    from models.statistics import paired_comparison

    if overall is None or not math.isfinite(overall) or items.empty or items["correct"].isna().any():
        return Verdict(CHALLENGER, "its accuracy is not a number")
    if champion_items is None:
        return Verdict(CHAMPION, "it is the first model")
    if not same_items:
        return Verdict(CHALLENGER, "the champion was measured on other items; evaluate both on the same")
    both = items.merge(champion_items, on="prompt_id", suffixes=("_new", "_old"), validate="one_to_one")
    compared = paired_comparison(
        both["correct_new"].to_numpy(), both["correct_old"].to_numpy(), confidence, seed
    )
    facts = asdict(compared)
    if compared.better:
        return Verdict(CHAMPION, "it is better than the champion beyond chance", facts)
    if compared.wins == compared.losses:
        return Verdict(CHALLENGER, "it is as good as the champion; a tie does not win", facts)
    if compared.wins < compared.losses:
        return Verdict(CHALLENGER, "it is worse than the champion", facts)
    return Verdict(CHALLENGER, "it is ahead of the champion, but not beyond chance", facts)


def promote(params: Params, run: StageRun, root: Path = PROJECT_ROOT) -> Verdict:
    """Register the policy's folder under `run`, decide, set the alias, write outputs/promotion.json.

    The same weights are never registered twice.

    Raises:
        PromotionError: the evaluation has nothing about this policy and suite.
    """
    import pandas as pd

    config = params.promote
    store = resolve_store(params.tracking, root)
    client, _ = open_store(store)
    folder = root / "outputs" / config.policy
    evaluation = root / "outputs" / "evaluation"
    metrics = json.loads((evaluation / "metrics.json").read_text(encoding="utf-8"))
    if config.policy not in metrics.get(config.suite, {}):
        raise PromotionError(
            f"outputs/evaluation/metrics.json has no {config.policy} on {config.suite} items: "
            "set promote.policy and promote.suite to what the evaluation measured"
        )
    accuracy = {
        name: metrics[config.suite][config.policy][name] for name in ("navigation", "verification", "overall")
    }
    items = _deciding(pd.read_parquet(evaluation / "items.parquet"), config.suite, config.policy)
    items_sha = _items_digest(items, root / "data" / "cold_start" / "test_items.parquet", config.suite)
    model_sha = folder_digest(folder)

    champion = version_of(client, config.model_name, CHAMPION)
    if champion is not None and champion.tags.get(_SHA_TAG) == model_sha:
        verdict = Verdict(CHAMPION, _ALREADY)
    else:
        old = None if champion is None else _champion_items(champion, store)
        same = champion is not None and champion.tags.get(_ITEMS_TAG) == items_sha
        verdict = decide(
            accuracy["overall"]["accuracy"], items, old, same, params.evaluate.confidence, params.seed
        )
    result = {
        "model": config.model_name,
        "policy": config.policy,
        "suite": config.suite,
        "model_sha256": model_sha,
        "accuracy": accuracy,
        **asdict(verdict),
    }
    card = model_card(params, root, result, metrics)
    run.log_text(card, "model_card.md")
    digests = {_SHA_TAG: model_sha, _ITEMS_TAG: items_sha}
    version = _register(client, run, params, folder, verdict, card, digests, items)
    if verdict.reason != _ALREADY:  # else the tags say how it became champion
        against = None if champion is None else champion.version
        for name, value in verdict_tags(verdict, config.suite, against, data_gate(root)).items():
            client.set_model_version_tag(config.model_name, version, name, value)
    run.set_tags({"verdict": verdict.verdict, "verdict.reason": verdict.reason})
    out = root / "outputs" / "promotion.json"
    out.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return verdict


def _register(
    client: MlflowClient,
    run: StageRun,
    params: Params,
    folder: Path,
    verdict: Verdict,
    card: str,
    tags: dict[str, str],
    items: pd.DataFrame,
) -> str:
    """The number of the version of these weights, made unless it exists; it gets the verdict's alias."""
    import tempfile

    name = params.promote.model_name
    ensure_model(client, name)
    versions = client.search_model_versions(f"name = '{name}'")
    known = next((v for v in versions if v.tags.get(_SHA_TAG) == tags[_SHA_TAG]), None)
    if known is None:
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / "items.parquet"
            items.to_parquet(file, index=False)
            run.log_artifact(file, "evaluation")
        run.log_artifacts(folder, "model")
        source = f"{client.get_run(run.run_id).info.artifact_uri}/model"
        known = client.create_model_version(name, source, run.run_id, tags=tags, description=card)
    if verdict.verdict == CHAMPION:
        client.set_registered_model_alias(name, CHAMPION, known.version)
        challenger = version_of(client, name, CHALLENGER)
        if challenger is not None and challenger.version == known.version:
            client.delete_registered_model_alias(name, CHALLENGER)
    else:
        client.set_registered_model_alias(name, CHALLENGER, known.version)
    return str(known.version)


def verdict_tags(verdict: Verdict, suite: str, against: str | None, gate: str) -> dict[str, str]:
    """What the gates said, as tags of the version. `against` is the version that was champion before."""
    tags = {
        "verdict": verdict.verdict,
        "verdict.reason": verdict.reason,
        "verdict.suite": suite,
        "gate.data": gate,
    }
    if verdict.comparison is not None and against is not None:
        facts = verdict.comparison
        low, high = facts["interval"]
        tags |= {
            "verdict.against": f"version {against}",
            "verdict.difference": f"{facts['difference']:+.4f} [{low:+.4f}, {high:+.4f}]",
            "verdict.p_value": f"{facts['p_value']:.3g}",
        }
    return tags


def folder_digest(folder: Path) -> str:
    """SHA-256 (hex) of a folder's relative names and contents.

    Raises:
        PromotionError: there is no such folder.
    """
    if not folder.is_dir():
        raise PromotionError(f"no model in {folder}: train it first with `dvc repro {folder.name}`")
    total = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        total.update(f"{file.relative_to(folder).as_posix()} {digest}\n".encode())
    return total.hexdigest()


def _deciding(items: pd.DataFrame, suite: str, policy: str) -> pd.DataFrame:
    chosen = items[(items["suite"] == suite) & (items["policy"] == policy)]
    return chosen.sort_values("prompt_id")[["prompt_id", "task", "tools", "size", "correct"]].reset_index(
        drop=True
    )


def _items_digest(items: pd.DataFrame, test_items: Path, suite: str) -> str:
    """What was asked: the items' keys, and for held-out ones the file with the maps (its ids are numbers)."""
    total = hashlib.sha256(items[["prompt_id", "task", "tools", "size"]].to_csv(index=False).encode())
    if suite == "held_out":
        total.update(test_items.read_bytes())
    return total.hexdigest()


def _champion_items(champion: ModelVersion, store: Store) -> pd.DataFrame:
    import pandas as pd
    from mlflow.artifacts import download_artifacts

    path = download_artifacts(run_id=champion.run_id, artifact_path=_ITEMS, tracking_uri=store.uri)
    return pd.read_parquet(path)[["prompt_id", "correct"]]


def main() -> None:
    """Command line of the stage."""
    argparse.ArgumentParser(
        prog="python -m tasks.promote",
        description="Register the trained policy in MLflow. It becomes champion if there is none, or if it is "
        "better than the champion beyond chance on the same items.",
        epilog="Example: python -m tasks.promote",
    ).parse_args()
    params = load_params()
    with stage_run("promote", params) as run:
        verdict = promote(params, run)
    print(f"{params.promote.model_name}: {verdict.verdict}, {verdict.reason}")


if __name__ == "__main__":
    run_main(main, PromotionError)
