"""Names, thinning and batching of metrics before they go to MLflow. Nothing here imports MLflow."""

from __future__ import annotations

import hashlib
import math
import posixpath
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

_ILLEGAL = re.compile(r"[^\w.\- :/]", re.ASCII)
_LONGEST_STEP = 10_000_000


@dataclass(frozen=True)
class Point:
    """One value of one metric; `time_ms` is Unix time in milliseconds."""

    name: str
    value: float
    step: int
    time_ms: int


def metric_name(name: str) -> str:
    """A name that MLflow accepts. A legal name is kept; any other gets a hash of the original, so that
    `mean@1`, `mean(1)` and `mean_1` stay three metrics (verl-project/verl#119)."""
    legal = _ILLEGAL.sub("_", name)
    parts = [part for part in legal.split("/") if part not in {"", ".", ".."}]
    legal = "/".join(parts)[:200] or "metric"
    if legal == name and posixpath.normpath(legal) == legal:
        return name
    return f"{legal}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def bucket(step: int, total_steps: int | None, points: int) -> int:
    """Which of at most `points` slots of a curve `step` falls into; the slot's first value is kept.

    With a known total the slots are equally wide. Without one, the first half of the slots holds one step
    each and the rest grow geometrically. A pure function of the step, so that a resumed run thins alike.
    """
    if total_steps is not None:
        return min(max(step, 0) * points // max(total_steps + 1, points), points - 1)
    half = points // 2
    if step < half:
        return max(step, 0)
    share = math.log(step / half) / math.log(_LONGEST_STEP / half)
    return half + min(int(share * (points - half)), points - half - 1)


class MetricBuffer:
    """Collects points and hands them to `send` in batches. Thread safe.

    * Non-finite values are counted as `nonfinite/<name>` and never sent: MLflow stores an infinity as
      1.8e308 and its pages break on NaN (mlflow/mlflow#16555, #15535).
    * At most `points` per metric are sent (mlflow/mlflow#5653: pages with many points are slow); the last
      value always is, by `close`.
    * A step that `history` knows is not sent again: a resumed run repeats the steps since its checkpoint.

    Args:
        send: takes a batch of at most 1,000 points; may raise, then the batch is kept and retried.
        history: steps already stored, per metric.
        points: longest stored curve.
        flush_every_s: a full batch goes at once, a partial one after this many seconds.
    """

    def __init__(
        self,
        send: Callable[[list[Point]], None],
        history: Mapping[str, Iterable[int]],
        points: int,
        flush_every_s: float = 5.0,
    ) -> None:
        self._send = send
        self._known = {name: set(steps) for name, steps in history.items()}
        self._points = points - 1  # one is reserved for the last value
        self._flush_every_s = flush_every_s
        self._total_steps: int | None = None
        self._slots: dict[str, set[int]] = {}
        self._waiting: list[Point] = []
        self._thinned: dict[str, Point] = {}
        self._nonfinite: Counter[str] = Counter()
        self._flushed = time.monotonic()
        self._lock = threading.RLock()

    @property
    def nonfinite(self) -> dict[str, int]:
        """How many non-finite values each metric had."""
        with self._lock:
            return dict(self._nonfinite)

    def expect_steps(self, total: int) -> None:
        """Say how long the curves will be, which makes thinning even. Call before the first `add`."""
        with self._lock:
            self._total_steps = total

    def add(self, values: Mapping[str, float], step: int) -> None:
        """Take one value per metric at `step`; sends if a batch is full or old."""
        now_ms = int(time.time() * 1000)
        with self._lock:
            for raw, value in values.items():
                name = metric_name(raw)
                if not math.isfinite(value):
                    self._nonfinite[name] += 1
                    name, value = f"nonfinite/{name}", float(self._nonfinite[name])
                self._add(Point(name, float(value), step, now_ms))
        self.flush_if_due()

    def flush_if_due(self) -> None:
        """Send if a batch is full or the last one was `flush_every_s` ago."""
        with self._lock:
            due = len(self._waiting) >= 500 or time.monotonic() - self._flushed >= self._flush_every_s
            if due:
                self.flush()

    def flush(self) -> None:
        """Send what waits. If `send` raises, the points stay for the next flush."""
        with self._lock:
            self._flushed = time.monotonic()
            while self._waiting:
                batch = self._waiting[:1000]
                self._send(batch)
                del self._waiting[: len(batch)]

    def close(self) -> None:
        """Send everything, the last value of thinned curves included."""
        with self._lock:
            self._waiting.extend(self._thinned.values())
            self._thinned.clear()
            self.flush()

    def _add(self, point: Point) -> None:
        known = self._known.setdefault(point.name, set())
        if point.name not in self._slots:
            self._slots[point.name] = {bucket(step, self._total_steps, self._points) for step in known}
        if point.step in known:
            return
        slots = self._slots[point.name]
        slot = bucket(point.step, self._total_steps, self._points)
        if slot in slots:
            self._thinned[point.name] = point
            return
        slots.add(slot)
        known.add(point.step)
        self._thinned.pop(point.name, None)
        self._waiting.append(point)
