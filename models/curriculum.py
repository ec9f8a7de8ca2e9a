"""Which prompts the online loop asks at which step: fresh maps of the training split, drawn from (seed, step)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from environments.base import Prompt
from environments.vsp.maps import Split
from environments.vsp.prompts import BASE_TOOLS, VSP, Task
from models.config import GRPOConfig


def prompt_source(
    environment: VSP,
    config: GRPOConfig,
    tools: Sequence[str],
    hole_density: float,
    path_lengths: Sequence[int],
    seed: int,
) -> Callable[[int, float], list[Prompt]]:
    """A function (step, progress in [0, 1]) -> `prompts_per_step` prompts.

    The mix of tasks is exact in each step, not only on average. Difficulty follows progress (S2 §3.2, from easy to
    hard): the smallest sizes first, all of them from half-way on. `tools` are those offered where ASTAR is.
    """
    navigation = round(config.prompts_per_step * config.navigation_share)
    with_astar = round(navigation * config.astar_share)

    def draw(step: int, progress: float) -> list[Prompt]:
        rng = random.Random(f"grpo prompts {seed} {step}")
        sizes = sorted(config.sizes)
        open_sizes = sizes[: max(1, round(len(sizes) * min(1.0, 0.5 + progress)))]
        prompts = []
        for index in range(config.prompts_per_step):
            task = Task.NAVIGATION if index < navigation else Task.VERIFICATION
            offered = tools if index < with_astar else BASE_TOOLS
            prompts.append(
                environment.sample(
                    rng,
                    task,
                    rng.choice(open_sizes),
                    f"grpo-{step}-{index}",
                    split=Split.TRAIN,
                    hole_density=hole_density,
                    path_lengths=path_lengths,
                    tools=offered,
                )
            )
        return prompts

    return draw
