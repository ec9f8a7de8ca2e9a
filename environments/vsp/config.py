"""Typed settings of the cold-start data set."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator


class ColdStartConfig(BaseModel):
    """What goes into the cold start: how much, on which maps, in which mix. Shares are between 0 and 1."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    n_trajectories: int = Field(33000, ge=1, description="training trajectories")
    validation_trajectories: int = Field(600, ge=1, description="trajectories on validation maps")
    validation_items: int = Field(
        400, ge=2, description="questions on validation maps, to follow training by"
    )
    test_items_per_size: int = Field(60, ge=1, description="questions of each task at each test size")
    sizes: tuple[int, ...] = Field(
        (4, 6, 8), min_length=1, description="map sizes of training and validation"
    )
    test_sizes: tuple[int, ...] = Field((3, 4, 5, 6, 7, 8, 9), min_length=1)
    hole_density: float = Field(0.2, ge=0, lt=1)
    other_cells_share: float = Field(
        0.4,
        ge=0,
        le=1,
        description="of the demonstrations' and GRPO's maps: drawn with cells of another size",
    )
    other_cells_px: tuple[int, ...] = Field(
        tuple(range(33, 64)), min_length=1, description="side of a cell of those maps"
    )
    path_lengths: tuple[int, ...] = Field(
        tuple(range(1, 10)), min_length=1, description="moves of paths to verify"
    )
    trajectories_per_map: int = Field(
        2,
        ge=1,
        description="questions that share a map and its picture; fewer where the shares need more maps",
    )
    navigation_share: float = Field(
        0.5, ge=0, le=1, description="of all trajectories; the rest is verification"
    )
    astar_share: float = Field(0.4, ge=0, le=1, description="of all trajectories: prompts that offer ASTAR")
    holes_share: float = Field(
        0.1, ge=0, le=1, description="of navigation without ASTAR and wrong paths: holes are pointed at first"
    )
    reflection_1_share: float = Field(
        0.2, ge=0, le=1, description="of navigation without ASTAR: one wrong path first"
    )
    reflection_2_share: float = Field(
        0.4, ge=0, le=1, description="of navigation without ASTAR: two to six wrong paths first"
    )
    tool_failure_share: float = Field(
        0.1, ge=0, le=1, description="of all trajectories: a call fails, then is mended"
    )
    stored_pictures: tuple[str, ...] = Field(
        ("CROP",),
        description="tools whose pictures are stored; the others' are made again by running the call",
    )
    shards: int = Field(16, ge=1, description="files of the training split")
    workers: int = Field(2, ge=1, description="processes; the data do not depend on it")

    @property
    def shown_cells_px(self) -> tuple[int, ...]:
        """Sides of cells, besides gymnasium's own, that training maps are drawn with."""
        return self.other_cells_px if self.other_cells_share else ()

    @model_validator(mode="after")
    def _consistent(self) -> ColdStartConfig:
        shares = self.reflection_1_share + self.reflection_2_share + self.tool_failure_share
        if shares > 1:
            names = "reflection_1_share + reflection_2_share + tool_failure_share"
            raise ValueError(f"data: {names} is {shares:g}; lower them to 1 together")
        for name, sizes in (("sizes", self.sizes), ("test_sizes", self.test_sizes)):
            if any(not 3 <= size <= 9 for size in sizes) or len(set(sizes)) != len(sizes):
                raise ValueError(f"data: {name} must be different numbers from 3 to 9, got {list(sizes)}")
        if any(not 32 <= side <= 64 for side in self.other_cells_px):
            raise ValueError(f"data: other_cells_px must be from 32 to 64, got {list(self.other_cells_px)}")
        if any(not 1 <= length <= 200 for length in self.path_lengths):
            raise ValueError(f"data: path_lengths must be from 1 to 200, got {list(self.path_lengths)}")
        if self.shards * self.trajectories_per_map > self.n_trajectories:
            raise ValueError(
                f"data: {self.n_trajectories} trajectories are too few for {self.shards} shards; lower shards"
            )
        return self
