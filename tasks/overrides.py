"""Parameters for one run only: a typed form of all of params.yaml, written into a copy of the project.

`Overrides` is `Params` with every key optional, so that a form, a schedule or a command line can name a few
keys, and a misspelt or impossible one is refused before a run exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, Field, SerializerFunctionWrapHandler, create_model, model_serializer
from pydantic.json_schema import SkipJsonSchema

from models.config import Settings
from tasks.params import Params, flatten, load_params, merge, read_yaml


class Optional(Settings):
    """Base of models without required keys: what is not set is not written either."""

    @model_serializer(mode="wrap")
    def _without_nulls(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in handler(self).items() if value is not None}


def optional(model: type[BaseModel], leave_out: frozenset[str] = frozenset()) -> type[BaseModel]:
    """A model with the keys and limits of `model`, none of them required and none with a default.

    A key that is left out, or null, stays as it is. Checks over several keys are not carried over:
    `load_params` makes them on the result.
    """
    annotated: Any = Annotated  # a type checker wants the limits written out
    hidden: Any = SkipJsonSchema
    fields: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        if name in leave_out:
            continue
        kind: Any = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            block = optional(kind)
            fields[name] = (block, Field(default_factory=block, description=kind.__doc__))
        else:
            limited: Any = annotated[(kind, *field.metadata)] if field.metadata else kind
            fields[name] = (
                limited | hidden[None],
                Field(default=None, description=field.description, json_schema_extra=without_default),
            )
    return create_model(f"{model.__name__}Overrides", __base__=Optional, **fields)


def without_default(schema: dict[str, Any]) -> None:
    """A form shows no value where nothing is overridden, instead of null."""
    schema.pop("default", None)


if TYPE_CHECKING:
    Overrides = Optional  # a type checker cannot follow create_model
else:
    # The profile is chosen, not overridden; a run neither searches nor chooses where its records go.
    Overrides = optional(Params, frozenset({"profile", "sweep", "tracking"}))


def changed_keys(overrides: Overrides) -> dict[str, Any]:
    """The keys that are set, dotted."""
    flat = flatten(overrides.model_dump(mode="json", exclude_unset=True))
    return {key: value for key, value in flat.items() if value is not None and value != {}}


def difference(before: Params, after: Params) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ, each with the value before and after."""
    old, new = flatten(before), flatten(after)
    return {key: (old.get(key), new.get(key)) for key in {**old, **new} if old.get(key) != new.get(key)}


def difference_table(changes: Mapping[str, tuple[Any, Any]]) -> str:
    """Markdown: one row per changed parameter."""
    rows = ["| parameter | params.yaml | this run |", "|---|---|---|"]
    return "\n".join([*rows, *(f"| `{key}` | {old} | {new} |" for key, (old, new) in changes.items())])


def write_overrides(root: Path, profile: str | None, changes: Mapping[str, Any]) -> Params:
    """Write profile and changes into the parameter files in `root`, and return what they now say.

    A key that the profile sets is changed there, since the profile lies over params.yaml.

    Raises:
        ParamsError: the result is not valid.
    """
    base_file = root / "params.yaml"
    base = read_yaml(base_file)
    if profile is not None:
        base["profile"] = profile
        _write(base_file, base)
    params = load_params(base_file)
    overlay_file = root / "profiles" / f"{params.profile}.yaml"
    overlay = read_yaml(overlay_file)
    of_profile = set(flatten(overlay))
    for key, value in changes.items():
        if key in of_profile:
            overlay = merge(overlay, _nested(key, value))
        else:
            base = merge(base, _nested(key, value))
    _write(base_file, base)
    _write(overlay_file, overlay)
    return load_params(base_file)


def _nested(dotted: str, value: Any) -> dict[str, Any]:
    *parents, leaf = dotted.split(".")
    tree: dict[str, Any] = {leaf: value}
    for parent in reversed(parents):
        tree = {parent: tree}
    return tree


def _write(file: Path, content: Mapping[str, Any]) -> None:
    from ruamel.yaml import YAML

    with file.open("w", encoding="utf-8") as stream:
        YAML(typ="safe", pure=True).dump(dict(content), stream)
