"""Risks of a daily measurement: yesterday's maps again, maps that were trained on, a result nobody can find."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from environments.vsp.maps import Split, split_of
from tasks.fresh_evaluation import evaluate_champion, fresh_prompts, table
from tasks.params import Params, override
from tasks.registry import CHAMPION, RegistryError, ensure_model
from tasks.tracking_store import open_store, resolve_store
from tests.models.policies import small_policy

DAY, NEXT = date(2026, 1, 31), date(2026, 2, 1)


@pytest.fixture
def few(params: Params) -> Params:
    changes = {"data.test_sizes": [3, 5], "agent.max_tokens": 160, "rollout.slots": 32}
    return override(params, changes)


def hashes(params: Params, day: date, known: frozenset[str] = frozenset()) -> list[str]:
    return [prompt.hidden["map_hash"] for prompt in fresh_prompts(params, day, 4, known)]


def test_maps_are_held_out_and_those_of_the_day(few: Params) -> None:
    first = hashes(few, DAY)
    assert len(first) == 4 * 2 * 2
    assert {split_of(each) for each in first} == {Split.TEST}
    assert hashes(few, DAY) == first
    assert hashes(few, NEXT) != first
    # of size 3 there are not many maps; of size 5 there are
    assert not set(hashes(few, NEXT)[8:]) & set(first[8:])


def test_a_map_of_the_stored_test_items_is_not_asked_again(few: Params) -> None:
    known = frozenset(hashes(few, DAY)[:3])
    again = hashes(few, DAY, known)
    assert len(again) == 16
    assert not known & set(again)


def test_the_champion_is_measured_and_recorded(records: Path, few: Params, tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match="no champion"):
        evaluate_champion(few, DAY, 1, records)
    small_policy().save(tmp_path / "policy")
    client, _ = open_store(resolve_store(few.tracking, records))
    ensure_model(client, few.promote.model_name)
    version = client.create_model_version(few.promote.model_name, (tmp_path / "policy").as_uri())
    client.set_registered_model_alias(few.promote.model_name, CHAMPION, version.version)
    result = evaluate_champion(few, DAY, 1, records)
    assert [row["task"] for row in table(result)] == ["navigation", "verification", "overall"]
    run = client.get_run(result.run_id)
    assert run.info.status == "FINISHED"
    assert (run.data.tags["fresh.day"], run.data.tags["model.version"]) == ("2026-01-31", "1")
    assert run.data.metrics["eval/fresh/champion/overall"] == result.accuracies["overall"]["accuracy"]
    assert evaluate_champion(few, NEXT, 1, records).run_id != result.run_id
