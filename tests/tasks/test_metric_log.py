"""Risks of metrics: lost, merged, doubled, endless or non-finite curves."""

from __future__ import annotations

import itertools
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.metric_log import MetricBuffer, Point, bucket, metric_name


class Store:
    """Takes what a buffer sends; fails as often as told."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.failures = 0

    def send(self, points: list[Point]) -> None:
        if self.failures:
            self.failures -= 1
            raise ConnectionError("the server is away")
        assert len(points) <= 1000
        self.points.extend(points)

    def curve(self, name: str) -> list[tuple[int, float]]:
        return [(point.step, point.value) for point in self.points if point.name == name]


def buffer(store: Store, points: int = 1000, history: dict[str, list[int]] | None = None) -> MetricBuffer:
    return MetricBuffer(store.send, history or {}, points, flush_every_s=1e9)


def test_names_that_mlflow_refuses_never_merge_into_one() -> None:
    names = [
        "a@1",
        "a(1)",
        "a_1",
        "a[1]",
        "x//y",
        "x/y",
        "/x/y",
        "../z",
        "z",
        "日本",
        "本日",
        "",
        "timing(s)/gen",
    ]
    assert len({metric_name(name) for name in names}) == len(names)
    assert metric_name("train/loss") == "train/loss"


@settings(deadline=None)  # the first call imports MLflow
@given(st.text(max_size=300))
def test_every_name_becomes_one_that_mlflow_accepts(name: str) -> None:
    from mlflow.utils.validation import _validate_metric_name

    _validate_metric_name(metric_name(name))
    assert re.fullmatch(r"[\w.\- :/]{1,250}", metric_name(name), re.ASCII)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_non_finite_value_is_counted_and_never_stored(value: float) -> None:
    store = Store()
    log = buffer(store)
    for step in range(3):
        log.add({"train/loss": value, "train/lr": 0.1}, step)
    log.close()
    assert all(math.isfinite(point.value) for point in store.points)
    assert store.curve("train/loss") == []
    assert store.curve("nonfinite/train/loss")[-1] == (2, 3.0)
    assert log.nonfinite == {"train/loss": 3}
    assert len(store.curve("train/lr")) == 3


@pytest.mark.parametrize("total", [None, 10_000])
def test_ten_thousand_steps_store_at_most_a_thousand_points_and_the_last(total: int | None) -> None:
    store = Store()
    log = buffer(store)
    if total is not None:
        log.expect_steps(total)
    for step in range(10_000):
        log.add({"loss": 1 / (step + 1)}, step)
    log.close()
    curve = store.curve("loss")
    assert len(curve) <= 1000
    assert curve[0] == (0, 1.0)
    assert curve[-1] == (9999, 1e-4)
    gaps = [later[0] - earlier[0] for earlier, later in itertools.pairwise(curve)]
    assert max(gaps) <= (11 if total else 200)


def test_a_short_curve_is_stored_whole_and_in_order() -> None:
    store = Store()
    log = buffer(store)
    log.expect_steps(24)
    for step in range(25):
        log.add({"reward": float(step)}, step)
    log.close()
    assert store.curve("reward") == [(step, float(step)) for step in range(25)]


def test_a_resumed_run_repeats_no_point_and_ends_in_the_same_curve() -> None:
    whole, first, second = Store(), Store(), Store()
    log = buffer(whole, points=50)
    log.expect_steps(400)
    for step in range(400):
        log.add({"loss": float(step)}, step)
    log.close()
    killed = buffer(first, points=50)
    killed.expect_steps(400)
    for step in range(217):
        killed.add({"loss": float(step)}, step)
    killed.flush()  # then SIGKILL: no close
    resumed = buffer(second, points=50, history={"loss": [step for step, _ in first.curve("loss")]})
    resumed.expect_steps(400)
    for step in range(200, 400):  # from the checkpoint
        resumed.add({"loss": float(step)}, step)
    resumed.close()
    assert first.curve("loss") + second.curve("loss") == whole.curve("loss")


def test_points_survive_an_outage_of_the_server() -> None:
    store = Store()
    log = buffer(store)
    store.failures = 1
    log.add({"loss": 1.0}, 0)
    with pytest.raises(ConnectionError):
        log.flush()
    log.add({"loss": 2.0}, 1)
    log.close()
    assert store.curve("loss") == [(0, 1.0), (1, 2.0)]


@given(st.integers(0, 10**9), st.integers(1, 10**6), st.integers(15, 2000))
def test_slots_stay_in_range_and_in_order(step: int, total: int, points: int) -> None:
    for known in (None, total):
        assert 0 <= bucket(step, known, points) < points
        assert bucket(step, known, points) <= bucket(step + 1, known, points)
