"""The interface of a rollout engine: prompts in, trajectories out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from environments.base import Prompt
from models.trajectory import Trajectory
from tools.base import ToolCall


@dataclass(frozen=True)
class RolloutRequest:
    """One episode to sample. `seed` alone decides its random numbers, whatever else is in the batch.

    With `forced` the episode begins with that call, as if the agent had made it, but its tokens are not trained on.
    """

    prompt: Prompt
    sample: int
    seed: int
    forced: ToolCall | None = None


class RolloutEngine(Protocol):
    """Samples multi-turn episodes. Implemented on transformers here, on vLLM where there is a GPU."""

    def sample(
        self,
        requests: list[RolloutRequest],
        temperature: float,
        on_finished: Callable[[int], None] | None = None,
    ) -> list[Trajectory]:
        """Run every request to its end, in the order given. Temperature 0 is greedy.

        `on_finished(count)` reports progress. Episodes never raise: they end with a stop reason.
        """
        ...

    def sync(self, version: int) -> None:
        """Use the trainer's current weights and drop every cache that depends on the old ones."""
        ...
