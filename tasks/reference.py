"""The page docs/reference/parameters.md, made from the pydantic models, params.yaml and the profiles.

Types, ranges and defaults come from the models, values from the files as they are written there, meanings from
the comments in params.yaml or, without one, from the model's description. A test keeps the page current.
"""

from __future__ import annotations

import argparse
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from models.config import Schedule
from tasks.dvc_graph import read_stages
from tasks.params import PROJECT_ROOT, Params, flatten, read_yaml

PAGE = Path("docs/reference/parameters.md")
PROFILES = ("gpu", "a100x8")

_HEAD = """\
# Parameters

All keys of `params.yaml`, in its order. This page is made by `python -m tasks.reference` from the models in
`models/config.py`, `environments/vsp/config.py` and `tasks/params.py`, from `params.yaml` and from `profiles/`.

* The column `laptop` is the value in `params.yaml`; the profile `laptop` changes nothing.
* `gpu` and `a100x8` show what the profile lays over it; an empty cell keeps the value of the laptop.
* *Read by* names the stages that depend on the block or on some of its keys (`dvc.yaml` has the keys). When such
  a value changes, these stages and those behind them run again.

How to change a value: [change parameters](../how-to/change-parameters.md).
"""

_NAMES = {int: "integer", float: "number", str: "text", bool: "true or false"}
# As DVC keeps params.yaml: `key: value   # meaning`. No value holds a "#".
_LINE = re.compile(r"^(?P<indent> *)(?P<key>[a-z_0-9]+):[ ]*(?P<value>[^#]*?)[ ]*(?:#[ ]*(?P<meaning>.*))?$")


@dataclass(frozen=True)
class Entry:
    """A key as it is written in a file: its value and the comment behind it, either of them perhaps empty."""

    value: str
    meaning: str


def parameters_page(root: Path = PROJECT_ROOT) -> str:
    """The page as Markdown. Raises ParamsError if params.yaml, a profile or dvc.yaml cannot be read."""
    written = _entries(root / "params.yaml")
    profiles = {name: _overlay(root, name) for name in PROFILES}
    readers = _readers(root)
    parts = [_HEAD]
    top = [name for name, field in Params.model_fields.items() if _block(field) is None]
    parts.append(_table(Params, "", top, written, profiles))
    for name, field in Params.model_fields.items():
        block = _block(field)
        if block is None:
            continue
        used = ", ".join(f"`{stage}`" for stage in readers.get(name, ())) or "no stage"
        meaning = written[name].meaning
        heading = f"## `{name}`\n\n{meaning[:1].upper()}{meaning[1:]}.\n\nRead by: {used}."
        parts.append(f"{heading}\n\n{_table(block, f'{name}.', list(block.model_fields), written, profiles)}")
    return "\n".join(parts)


def _table(
    model: type[BaseModel],
    prefix: str,
    names: list[str],
    written: Mapping[str, Entry],
    profiles: Mapping[str, Mapping[str, str]],
) -> str:
    lines = [
        f"| key | laptop | {' | '.join(PROFILES)} | type | meaning |",
        f"|---|---|{'---|' * len(PROFILES)}---|---|",
    ]
    lines += _rows(model, prefix, names, written, profiles)
    return "\n".join(lines) + "\n"


def _rows(
    model: type[BaseModel],
    prefix: str,
    names: list[str],
    written: Mapping[str, Entry],
    profiles: Mapping[str, Mapping[str, str]],
) -> Iterator[str]:
    for name in names:
        key, field = prefix + name, model.model_fields[name]
        inner = _block(field)
        if inner is not None:
            yield from _rows(inner, f"{key}.", list(inner.model_fields), written, profiles)
            continue
        entry = written.get(key, Entry("", ""))
        cells = [f"`{key}`", _code(entry.value)]
        cells += [_code(overlay.get(key, "")) for overlay in profiles.values()]
        cells += [_type_text(field), _meaning(entry, field)]
        yield f"| {' | '.join(cells)} |"


def _meaning(entry: Entry, field: FieldInfo) -> str:
    """The comment, unless it only lists the choices, which the type does already."""
    choices = " | ".join(map(str, typing.get_args(field.annotation)))
    meaning = field.description if entry.meaning in ("", choices) else entry.meaning
    return (meaning or "").replace(" | ", "; ")


def _block(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a field that is a block of keys, None for a value. A schedule is a value of two numbers."""
    kind = field.annotation
    if isinstance(kind, type) and issubclass(kind, BaseModel) and kind is not Schedule:
        return kind
    return None


def _type_text(field: FieldInfo) -> str:
    limits = {type(limit).__name__.lower(): limit for limit in field.metadata}
    text = _annotation_text(field.annotation)
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    ranges = [
        f"{sign} {getattr(limits[name], name):g}"
        for name, sign in signs.items()
        if name in limits and not isinstance(getattr(limits[name], name), str)
    ]
    return f"{text}, {' and '.join(ranges)}" if ranges else text


def _annotation_text(kind: Any) -> str:
    if kind is Schedule:
        return "`{start, end}`, moves linearly over the run"
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        plain = [_annotation_text(each) for each in arguments if each is not type(None)]
        return " or ".join([*plain, "null"])
    if origin is typing.Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin is dict:
        return "mapping"
    if origin is tuple:
        return f"list of {_annotation_text(arguments[0])}s"
    return _NAMES.get(kind, str(kind))


def _code(value: str) -> str:
    return f"`{value}`" if value else ""


def _entries(file: Path) -> dict[str, Entry]:
    """Dotted keys to what the file has for them. The parser knows only what our own files use: block mappings
    of two spaces, with one value a line; `read_yaml` has to agree, or the page would miss keys."""
    entries: dict[str, Entry] = {}
    path: list[str] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        depth = len(match["indent"]) // 2
        path = [*path[:depth], match["key"]]
        entries[".".join(path)] = Entry(match["value"], match["meaning"] or "")
    return entries


def _overlay(root: Path, profile: str) -> dict[str, str]:
    """Dotted keys to values of a profile, blocks left out."""
    entries = _entries(root / "profiles" / f"{profile}.yaml")
    return {key: entry.value for key, entry in entries.items() if "." in key and entry.value}


def _readers(root: Path) -> dict[str, list[str]]:
    """Top-level blocks to the stages that have them, or a key of them, among their parameters."""
    readers: dict[str, list[str]] = {}
    for stage in read_stages(root).values():
        for block in dict.fromkeys(key.split(".")[0] for key in stage.params):
            readers.setdefault(block, []).append(stage.name)
    return readers


def unwritten(root: Path = PROJECT_ROOT) -> list[str]:
    """Keys that the YAML reader finds in params.yaml and the page's own reader does not."""
    known = _entries(root / "params.yaml")
    keys = {one_row(key) for key in flatten(read_yaml(root / "params.yaml"))}
    return sorted(keys - set(known))


def one_row(key: str) -> str:
    """The key under whose row of the page a leaf stands: a schedule has two leaves, a search space many."""
    return re.sub(r"\.(start|end)$|(?<=^sweep\.space)\..*$", "", key)


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(
        prog="python -m tasks.reference",
        description="Write docs/reference/parameters.md from the models, params.yaml and the profiles.",
        epilog="Example: python -m tasks.reference",
    )
    parser.parse_args()
    file = PROJECT_ROOT / PAGE
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(parameters_page(), encoding="utf-8")
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    from tasks.cli import run_main

    run_main(main)
