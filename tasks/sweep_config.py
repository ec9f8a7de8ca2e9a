"""Typed settings of the sweep: how many trials, how short, over which parameters."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from models.config import Settings

Choice = bool | int | float | str | None


class DimensionConfig(Settings):
    """What one parameter may be: a range or a list. An end that is left out is the parameter's own limit."""

    low: float | None = None
    high: float | None = None
    log: bool = False
    step: float | None = Field(None, gt=0)
    choices: tuple[Choice, ...] | None = Field(None, min_length=2)

    @model_validator(mode="after")
    def _range_or_choices(self) -> DimensionConfig:
        ranged = self.low is not None or self.high is not None or self.log or self.step is not None
        if self.choices is not None and ranged:
            raise ValueError("is both a range and choices; keep one of them")
        if self.log and self.step is not None:
            raise ValueError("has log and step; a logarithmic range has no step")
        return self


class PrunerConfig(Settings):
    """When a weak trial is stopped; of no effect with two objectives."""

    percentile: float = Field(
        50.0, gt=0, le=100, description="a trial must be among this share of the best; 100 stops none"
    )
    startup_trials: int = Field(4, ge=1, description="trials that run to their end before any is stopped")
    warmup_steps: int = Field(4, ge=0, description="policy updates before a trial may be stopped")


class SweepConfig(Settings):
    """The search over weights and settings of GRPO (`python -m tasks.sweep`)."""

    n_trials: int = Field(20, ge=1, description="settings to try; the first is what params.yaml holds")
    workers: int = Field(1, ge=1, description="trials at a time, each in a process of its own")
    objectives: tuple[Literal["success", "calls"], ...] = Field(
        ("success",), description="success: of validation, upwards; calls: per validation episode, downwards"
    )
    steps: int = Field(12, ge=1, description="policy updates of a trial")
    eval_every: int = Field(4, ge=1, description="policy updates between validations and checkpoints")
    fresh_prompts: int = Field(4, ge=1, description="prompts sampled anew in each step of a trial")
    replayed_groups: int = Field(12, ge=0, description="stored groups, re-scored, beside the fresh ones")
    shared_prompts: int = Field(
        96, ge=0, description="prompts sampled once, by the SFT policy, for all trials"
    )
    pruner: PrunerConfig = PrunerConfig()
    space: dict[str, DimensionConfig] = Field(
        ..., min_length=1, description="parameter, or `block.*` for all of a block, to what it may be"
    )

    @model_validator(mode="after")
    def _objectives(self) -> SweepConfig:
        if self.objectives not in (("success",), ("success", "calls")):
            raise ValueError("sweep: objectives must be [success] or [success, calls]")
        return self
