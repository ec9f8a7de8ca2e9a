"""The search space: what `sweep.space` means, checked against the models of the parameters it names."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tasks.params import Params, ParamsError, flatten, override
from tasks.sweep_config import Choice, DimensionConfig

# What a trial runs starts from the SFT policy: only these blocks change it.
SEARCHED = ("grpo", "reward")
# What a trial is, or is measured by, cannot differ between trials.
_SET_BY_SWEEP = {
    "grpo.steps": "sweep.steps",
    "grpo.prompts_per_step": "sweep.fresh_prompts",
    "grpo.replay.replayed_groups": "sweep.replayed_groups",
    "grpo.eval_every": "sweep.eval_every",
    "grpo.checkpoint_every": "sweep.eval_every",
    "grpo.validation_items": "params.yaml",
}
_LIMITS = {"Ge": "ge", "Gt": "gt", "Le": "le", "Lt": "lt"}


@dataclass(frozen=True)
class Dimension:
    """One searched parameter: either `choices` or the range from `low` to `high`, both included."""

    integer: bool = False
    low: float | None = None
    high: float | None = None
    log: bool = False
    step: float | None = None
    choices: tuple[Choice, ...] | None = None

    def holds(self, value: Any) -> bool:
        """Whether a value lies in the range (`step` is not looked at) or among the choices."""
        if self.choices is not None:
            return value in self.choices
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and self.low is not None and self.high is not None and self.low <= value <= self.high

    def text(self) -> str:
        """For people: `0.001 … 0.01, log`."""
        if self.choices is not None:
            return " | ".join(str(choice) for choice in self.choices)
        notes = (", log" if self.log else "") + (f", step {self.step:g}" if self.step else "")
        return f"{self.low:g} … {self.high:g}{notes}"


Space = dict[str, Dimension]


def resolve_space(params: Params) -> Space:
    """The searched parameters in alphabetical order, `block.*` replaced by what the block's model has.

    A name of its own wins over `block.*`, which stands for every number with an upper and a lower limit.

    Raises:
        ParamsError: one line per mistake: an unknown parameter, one that a trial does not use, a range that
            its model refuses or that the present value is outside of.
    """
    present = flatten(params)
    wanted: dict[str, DimensionConfig] = {}
    mistakes: list[str] = []
    for name, config in params.sweep.space.items():
        if name.endswith(".*"):
            found = dict.fromkeys(_numbers_of(name.removesuffix(".*")), config)
            wanted |= {each: config for each in found if each not in params.sweep.space}
            if not found:
                mistakes.append(f"sweep.space.{name}: no block has this name or any number with limits in it")
        else:
            wanted[name] = config
    space: Space = {}
    for name in sorted(wanted):
        try:
            space[name] = _resolve(name, wanted[name], present, params)
        except ParamsError as error:
            mistakes.append(f"params.yaml: sweep.space.{name}: {error}")
    if mistakes:
        raise ParamsError("\n".join(mistakes))
    return space


def base_values(params: Params, space: Mapping[str, Dimension]) -> dict[str, Any]:
    """What params.yaml and its profile hold for the searched parameters: the settings of trial 0."""
    present = flatten(params)
    return {name: present[name] for name in space}


def space_data(space: Mapping[str, Dimension]) -> dict[str, dict[str, Any]]:
    """Plain data of a space, for hashes and comparisons."""
    return {
        name: {key: value for key, value in asdict(dimension).items() if value not in (None, False)}
        for name, dimension in sorted(space.items())
    }


def _resolve(name: str, config: DimensionConfig, present: Mapping[str, Any], params: Params) -> Dimension:
    field = _field(name)
    if field is None or name not in present:
        known = [each for each in present if each.split(".")[0] in SEARCHED]
        close = difflib.get_close_matches(name, known, 1)
        raise ParamsError(
            f"unknown parameter; {f'did you mean {close[0]}?' if close else 'see docs/reference'}"
        )
    if name in _SET_BY_SWEEP:
        raise ParamsError(f"is the same in all trials; set it by {_SET_BY_SWEEP[name]}")
    if name.split(".")[0] not in SEARCHED:
        raise ParamsError(
            f"does not change a trial, which starts from the SFT policy; use {' or '.join(SEARCHED)}"
        )
    dimension = _dimension(field, config)
    ends = dimension.choices if dimension.choices is not None else (dimension.low, dimension.high)
    for value in ends:
        try:
            override(params, {name: value})
        except ParamsError as error:
            raise ParamsError(str(error).splitlines()[0].removeprefix(f"override: {name}: ")) from None
    if not dimension.holds(present[name]):
        raise ParamsError(
            f"the present value {present[name]} is outside of {dimension.text()}; "
            "trial 0 uses it, so widen the range"
        )
    return dimension


def _dimension(field: FieldInfo, config: DimensionConfig) -> Dimension:
    if config.choices is not None:
        return Dimension(choices=config.choices)
    limits = _limits(field)
    low = limits.get("ge") if config.low is None else config.low
    high = limits.get("le") if config.high is None else config.high
    if field.annotation not in (int, float) and not _optional_number(field):
        raise ParamsError("is no number; give `choices`")
    if low is None or high is None:
        raise ParamsError(f"has no {'low' if low is None else 'high'} and its model sets no limit; add one")
    if low >= high:
        raise ParamsError(f"low {low:g} is not below high {high:g}")
    if config.log and low <= 0:
        raise ParamsError(f"low {low:g} of a logarithmic range must be above 0")
    integer = field.annotation is int
    if integer and any(value % 1 for value in (low, high, config.step or 1)):
        raise ParamsError("is a whole number; so must be low, high and step")
    kind = int if integer else float
    return Dimension(integer, kind(low), kind(high), config.log, config.step)


def _optional_number(field: FieldInfo) -> bool:
    return field.annotation in (int | None, float | None)


def _limits(field: FieldInfo) -> dict[str, float]:
    """Limits that the model sets, by their pydantic names."""
    return {
        _LIMITS[type(limit).__name__]: getattr(limit, _LIMITS[type(limit).__name__])
        for limit in field.metadata
        if type(limit).__name__ in _LIMITS
    }


def _field(name: str) -> FieldInfo | None:
    """The field behind a dotted name, None if there is none or if it is a block."""
    model: type[BaseModel] = Params
    *blocks, leaf = name.split(".")
    for block in blocks:
        field = model.model_fields.get(block)
        kind = None if field is None else field.annotation
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            return None
        model = kind
    return model.model_fields.get(leaf)


def _numbers_of(block: str) -> Iterator[str]:
    """Numbers of a block that have a lower and an upper limit."""
    field = _field(block)
    kind = None if field is None else field.annotation
    if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return
    for name, inner in kind.model_fields.items():
        if inner.annotation in (int, float) and {"ge", "le"} <= set(_limits(inner)):
            yield f"{block}.{name}"
