"""Write the best settings of a sweep into the parameters, after showing what would change."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import Any

from tasks.cli import run_main
from tasks.params import PROJECT_ROOT, ParamsError, flatten, load_params, override, read_yaml
from tasks.sweep_plan import FOLDER, SweepError


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tasks.apply_sweep",
        description="Show how the best settings of a sweep differ from the parameters, and write them on consent.",
        epilog="Example: python -m tasks.apply_sweep 3f2a9c81d7e4",
    )
    parser.add_argument(
        "run", metavar="RUN", help=f"name of the sweep (its folder in {FOLDER}) or its MLflow run id"
    )
    parser.add_argument("--yes", action="store_true", help="write without asking")
    arguments = parser.parse_args()
    changed = changes(best_settings(arguments.run, PROJECT_ROOT), PROJECT_ROOT)
    if not changed:
        print("the parameters hold these settings already")
        return
    for file, text in changed.items():
        print(difference(file, text, PROJECT_ROOT), end="")
    if not (arguments.yes or _consent()):
        print("nothing written")
        return
    for file, text in changed.items():
        file.write_text(text, encoding="utf-8")
        print(f"wrote {file.relative_to(PROJECT_ROOT)}")
    print("now: dvc repro")


def best_settings(run: str, root: Path) -> dict[str, Any]:
    """Dotted names to values of a sweep's `best.yaml`.

    Raises:
        SweepError: neither a sweep in outputs/sweeps nor a run of a finished sweep has this name.
        ParamsError: the sweep was made with another profile than the parameters have now.
    """
    if Path(run).name != run:
        raise SweepError(f"{run!r} is neither the name of a sweep nor an MLflow run id")
    file = root / FOLDER / run / "best.yaml"
    text = file.read_text(encoding="utf-8") if file.is_file() else _from_mlflow(run, root)
    profile = re.search(r"^# .*, profile (\S+):", text)
    present = load_params(root / "params.yaml").profile
    if profile is not None and profile[1] != present:
        raise ParamsError(f"sweep {run} was made with profile {profile[1]}, params.yaml has {present}")
    from ruamel.yaml import YAML

    return flatten(YAML(typ="safe", pure=True).load(text))


def _from_mlflow(run_id: str, root: Path) -> str:
    from mlflow import artifacts
    from mlflow.exceptions import MlflowException

    from tasks.tracking_store import open_store, resolve_store

    store = resolve_store(load_params(root / "params.yaml").tracking, root)
    client, _ = open_store(store)
    try:
        run = client.get_run(run_id)
        return artifacts.load_text(f"{run.info.artifact_uri}/sweep/best.yaml")
    except (MlflowException, OSError):
        known = sorted(path.parent.name for path in (root / FOLDER).glob("*/best.yaml"))
        raise SweepError(
            f"{run_id}: no sweep with best settings has this name or MLflow run id; "
            f"in {FOLDER} there are {', '.join(known) or 'none'}"
        ) from None


def changes(settings: Mapping[str, Any], root: Path) -> dict[Path, str]:
    """The files to change and their new texts: the profile where it sets a parameter, else params.yaml.

    Only the values change; comments, order and the spelling of everything else stay.

    Raises:
        ParamsError: the settings do not fit the parameters of today.
    """
    base = root / "params.yaml"
    params = load_params(base)
    override(params, settings)
    present = flatten(params)
    profile = root / "profiles" / f"{params.profile}.yaml"
    of_profile = set(flatten(read_yaml(profile)))
    texts: dict[Path, str] = {}
    for file in (base, profile):
        own = {
            name: value
            for name, value in settings.items()
            if value != present[name] and (name in of_profile) == (file == profile)
        }
        if own:
            texts[file] = _with_values(file.read_text(encoding="utf-8"), own)
    return texts


def difference(file: Path, text: str, root: Path) -> str:
    """A unified diff of a file and its new text."""
    name = file.relative_to(root).as_posix()
    before = file.read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(difflib.unified_diff(before, text.splitlines(keepends=True), name, name, n=0))


def _with_values(text: str, settings: Mapping[str, Any]) -> str:
    """The YAML text with the values at dotted names replaced; a missing key is added to its block."""
    from ruamel.yaml import YAML
    from ruamel.yaml.comments import CommentedMap

    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 10_000  # it would break long lines
    yaml.representer.add_representer(type(None), _null)
    tree = yaml.load(text)
    for name, value in settings.items():
        *blocks, leaf = name.split(".")
        node = tree
        for block in blocks:
            if block not in node:
                node.insert(0, block, CommentedMap())
            node = node[block]
        if isinstance(node.get(leaf), int) and isinstance(value, float) and value.is_integer():
            value = int(value)  # spelt as before
        if leaf in node:
            node[leaf] = value
        else:
            node.insert(0, leaf, value)  # at the end it would come behind the block's blank line
    out = StringIO()
    yaml.dump(tree, out)
    return out.getvalue()


def _null(representer: Any, _: None) -> Any:
    """Spelt out: a key without a value looks like a mistake."""
    return representer.represent_scalar("tag:yaml.org,2002:null", "null")


def _consent() -> bool:
    if not sys.stdin.isatty():
        raise SweepError("nobody to ask here; add --yes to write this")
    return input("write this? [y/N] ").strip().lower() in {"y", "yes"}


if __name__ == "__main__":
    run_main(main, SweepError)
