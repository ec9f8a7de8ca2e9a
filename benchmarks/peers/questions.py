"""Questions to sample on, drawn as the online loop draws its own: fresh training maps, the shipped mix."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from environments.base import Prompt
    from tasks.params import Params


def fresh_prompts(
    params: Params, count: int, name: str, *, sizes: tuple[int, ...] = (), with_astar: bool = True
) -> list[Prompt]:
    """`count` prompts, the same for the same `name`; map sizes are those of `params.grpo` unless given."""
    from environments.vsp.prompts import BASE_TOOLS, VSP, Task
    from tools.vsp import VSP_TOOLS

    rng = random.Random(f"benchmark {params.seed} {name}")
    environment = VSP()
    navigation = round(count * params.grpo.navigation_share)
    offering = round(navigation * params.grpo.astar_share) if with_astar else 0
    return [
        environment.sample(
            rng,
            Task.NAVIGATION if index < navigation else Task.VERIFICATION,
            rng.choice(sizes or params.grpo.sizes),
            f"{name}-{index}",
            hole_density=params.data.hole_density,
            path_lengths=params.data.path_lengths,
            tools=VSP_TOOLS if index < offering else BASE_TOOLS,
        )
        for index in range(count)
    ]
