"""What the online loop asks and how hard it is: progress, and fresh maps of the training split by (seed, step)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from environments.base import Prompt
from environments.vsp.config import ColdStartConfig
from environments.vsp.maps import Split
from environments.vsp.prompts import BASE_TOOLS, VSP, Task
from environments.vsp.render import draw_cell_px
from models.config import CurriculumConfig, GRPOConfig

_MEMORY = 0.8  # of the running share of solved rollouts


@dataclass
class Curriculum:
    """How far the run has come, in [0, 1]: what N, ε, β and the map sizes follow. Part of the checkpoint.

    `by: steps` is the share of steps done (S1 §2.1). `by: success` moves on only while the running share of solved
    rollouts is at least `success`, at most twice as fast as the steps, and never back (S2 §5.2, from easy to hard).
    """

    config: CurriculumConfig
    steps: int
    progress: float = 0.0
    solved: float = 0.0  # running share

    def update(self, solved: float, step: int) -> None:
        """Take in the share of solved fresh rollouts of the step that made `step` steps done."""
        self.solved = solved if step <= 1 else _MEMORY * self.solved + (1 - _MEMORY) * solved
        last = max(1, self.steps - 1)
        if self.config.by == "steps":
            self.progress = min(1.0, step / last)
        elif self.solved >= self.config.success:
            self.progress = min(1.0, self.progress + 2 / last)


def prompt_source(
    environment: VSP,
    config: GRPOConfig,
    tools: Sequence[str],
    data: ColdStartConfig,
    seed: int,
) -> Callable[[int, float], list[Prompt]]:
    """A function (step, progress in [0, 1]) -> `prompts_per_step` prompts.

    The mix of tasks is exact in each step, not only on average. Difficulty follows progress (S2 §3.2, from easy to
    hard): the smallest sizes first, all of them from half-way on; navigation without ASTAR on the hardest of
    `curriculum.hardest_of` maps. `tools` are those offered where ASTAR is. Of `data` hole density, path lengths and
    sizes of drawn cells count, so that the loop goes on where the cold start ended.
    """
    navigation = round(config.prompts_per_step * config.navigation_share)
    with_astar = round(navigation * config.astar_share)

    def draw(step: int, progress: float) -> list[Prompt]:
        rng = random.Random(f"grpo prompts {seed} {step}")
        sizes = sorted(config.sizes)
        hardest_of = round(config.curriculum.hardest_of.at(progress))
        open_sizes = sizes[: max(1, round(len(sizes) * min(1.0, 0.5 + progress)))]
        prompts = []
        for index in range(config.prompts_per_step):
            task = Task.NAVIGATION if index < navigation else Task.VERIFICATION
            offered = tools if index < with_astar else BASE_TOOLS
            searched = task is Task.NAVIGATION and index >= with_astar
            prompts.append(
                environment.sample(
                    rng,
                    task,
                    rng.choice(open_sizes),
                    f"grpo-{step}-{index}",
                    split=Split.TRAIN,
                    hole_density=data.hole_density,
                    path_lengths=data.path_lengths,
                    tools=offered,
                    cell_px=draw_cell_px(rng, data.other_cells_share, data.other_cells_px),
                    hardest_of=hardest_of if searched else 1,
                )
            )
        return prompts

    return draw
