"""Risks: links that lead nowhere, commands and keys that do not exist, tables that the code has left behind, examples
that do not run.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from models.trajectory import StopReason
from tasks.dvc_graph import read_stages
from tasks.evaluation_report import ITEM_COLUMNS
from tasks.params import PROJECT_ROOT, Params, flatten, load_params, read_yaml
from tasks.reference import PAGE, one_row, parameters_page, unwritten
from tasks.schema import ITEMS, TRAJECTORIES, TURN
from tools.errors import ERROR_TABLE
from tools.vsp import VSP_TOOLS, vsp_registry

DOCS = PROJECT_ROOT / "docs"
PAGES = sorted([PROJECT_ROOT / "README.md", *DOCS.rglob("*.md")])
REFERENCE = DOCS / "reference"
HOW_TO = DOCS / "how-to"

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(PROJECT_ROOT).as_posix())


def blocks(page: Path, language: str) -> list[str]:
    """The fenced code blocks of a language."""
    return re.findall(
        rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def code_spans(page: Path) -> Iterator[str]:
    """All that stands between single backticks outside fenced blocks."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    yield from re.findall(r"`([^`\n]+)`", prose)


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert not broken


@every_page
def test_commands_exist_with_the_options_shown(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for module, options in re.findall(r"python -m ((?:tasks|flows)\.\w+)([^\n`|#]*)", text):
        file = PROJECT_ROOT / f"{module.replace('.', '/')}.py"
        assert file.is_file(), f"no module {module}"
        source = file.read_text(encoding="utf-8")
        missing = [option for option in re.findall(r"--[\w-]+", options) if f'"{option}"' not in source]
        assert not missing, f"{module} has no {missing}"
    makefile = (PROJECT_ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"(?:^    |`)make ([a-z-]+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"no target {target}"


@every_page
def test_parameter_names_exist(page: Path) -> None:
    params = flatten(read_yaml(PROJECT_ROOT / "params.yaml"))
    known = {".".join(key.split(".")[:n]) for key in params for n in (1, 2, 3, 4)}
    starts = tuple(f"{name}." for name in Params.model_fields)
    named = [re.split(r"[:=]", span)[0] for span in code_spans(page) if span.startswith(starts)]
    unknown = [key for key in named if re.fullmatch(r"[a-z_0-9.]+", key) and key not in known]
    # tags of MLflow runs look alike
    code = "".join(file.read_text(encoding="utf-8") for file in (PROJECT_ROOT / "tasks").glob("*.py"))
    assert not [key for key in unknown if f'"{key}"' not in code]


@every_page
def test_files_and_folders_named_in_the_text_exist(page: Path) -> None:
    roots = ("tasks/", "flows/", "models/", "environments/", "tools/", "tests/", "benchmarks/", "profiles/")
    made_up = {"profiles/quick.yaml", "tools/distance.py"}  # of the examples
    paths = [span.split(":")[0] for span in code_spans(page) if span.startswith(roots) and "<" not in span]
    assert not [path for path in paths if not (PROJECT_ROOT / path).exists() and path not in made_up]


@every_page
def test_examples_in_json_and_python_can_be_parsed(page: Path) -> None:
    for block in blocks(page, "json"):
        json.loads(block)
    for block in blocks(page, "python"):
        ast.parse(block)


@every_page
def test_pages_hold_no_machine_paths(page: Path) -> None:
    assert not re.search(r"(?<![\w.])/(?:home|root|work|tmp|Users)/", page.read_text(encoding="utf-8"))


def test_every_page_is_in_the_index() -> None:
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    pages = [page.relative_to(DOCS).as_posix() for page in PAGES if page.is_relative_to(DOCS)]
    assert not [page for page in pages if page != "README.md" and f"({page})" not in index]


def test_the_parameters_page_is_current() -> None:
    assert unwritten() == []
    page = (PROJECT_ROOT / PAGE).read_text(encoding="utf-8")
    assert page == parameters_page(), "run `python -m tasks.reference`"


def test_the_parameters_page_has_every_key() -> None:
    page = (PROJECT_ROOT / PAGE).read_text(encoding="utf-8")
    keys = {one_row(key) for key in flatten(load_params())}
    assert not [key for key in keys if f"| `{key}` |" not in page]


def test_the_error_table_is_that_of_the_code() -> None:
    text = (REFERENCE / "tools.md").read_text(encoding="utf-8")
    section = text.partition("## Error codes")[2].partition("## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", section, re.MULTILINE)
    assert rows == [(code.value, meaning) for code, meaning in ERROR_TABLE.items()]


def test_tools_are_described_with_their_signatures_and_errors() -> None:
    text, registry = (REFERENCE / "tools.md").read_text(encoding="utf-8"), vsp_registry()
    assert registry.signatures(VSP_TOOLS) in text
    for name in VSP_TOOLS:
        section = text.partition(f"## {name}\n")[2].partition("\n## ")[0]
        assert section, f"no section {name}"
        own = re.findall(
            r"`(\w+)`", section.partition("Errors of its own:")[2].partition("\n\n")[0].partition(". ")[0]
        )
        assert set(own) == {code.value for code in registry.get(name).error_codes}, name


def test_every_stop_reason_is_explained() -> None:
    text = (REFERENCE / "agent-format.md").read_text(encoding="utf-8")
    assert {reason for reason in StopReason if f"| `{reason}` |" in text} == set(StopReason)


def test_every_stage_is_listed_with_command_inputs_and_outputs() -> None:
    rows = (REFERENCE / "stages.md").read_text(encoding="utf-8").splitlines()
    for stage in read_stages().values():
        row = next((row for row in rows if row.startswith(f"| `{stage.name}` |")), "")
        files = [dep for dep in stage.deps if dep.startswith(("data/", "outputs/"))] + list(stage.outs)
        assert not [name for name in (stage.command, *files) if f"`{name}`" not in row], stage.name


def test_every_column_of_the_data_set_is_listed() -> None:
    text = (REFERENCE / "data-set.md").read_text(encoding="utf-8")
    names = {*TRAJECTORIES.names, *ITEMS.names, *(field.name for field in TURN)}
    assert not [name for name in names if f"`{name}`" not in text]


def test_every_column_of_the_evaluation_is_listed() -> None:
    text = (REFERENCE / "evaluation-json.md").read_text(encoding="utf-8")
    assert not [name for name in ITEM_COLUMNS if f"`{name}`" not in text]


def logged_names() -> set[str]:
    """Metric names in the code's string literals, fields of f-strings as `<>`."""
    groups = r"sft|grpo|reward|replay|tools|gate|eval|sweep|sys|nonfinite"
    sources = [
        file for folder in ("models", "tasks", "flows") for file in (PROJECT_ROOT / folder).glob("*.py")
    ]
    found: set[str] = set()
    for source in sources:
        found.update(re.findall(rf'"((?:{groups})/[\w{{}}/.]+)"', source.read_text(encoding="utf-8")))
    return {re.sub(r"\{[^}]*\}", "<>", name) for name in found}


def documented_names() -> set[str]:
    text = (REFERENCE / "metrics.md").read_text(encoding="utf-8")
    names = re.findall(r"`([a-z]+/[\w<>/]+)`", text)
    return {re.sub(r"<\w+>", "<>", name) for name in names}


def matches(name: str, pattern: str) -> bool:
    """Whether `name` may be one that `pattern`, with `<>` for anything, stands for."""
    return re.fullmatch(".+".join(map(re.escape, pattern.split("<>"))), name) is not None


def test_logged_metrics_are_documented() -> None:
    documented = documented_names()
    missing = [
        name
        for name in logged_names()
        if not any(matches(name, other) or matches(other, name) for other in documented)
    ]
    assert not missing


def test_documented_metrics_are_logged() -> None:
    logged = logged_names()
    assert not [name for name in documented_names() if not any(matches(name, pattern) for pattern in logged)]


def test_the_tool_of_add_a_tool_works(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = 0
    for block in blocks(HOW_TO / "add-a-tool.md", "python"):
        path = block.splitlines()[0].removeprefix("# ")
        module = ModuleType(path.removesuffix(".py").replace("/", "."))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(compile(block, path, "exec"), module.__dict__)
        for name, value in list(vars(module).items()):
            if name.startswith("test_"):
                value()
                ran += 1
    assert ran == 3


def test_the_profile_of_change_parameters_can_be_used(tmp_path: Path) -> None:
    (profile,) = blocks(HOW_TO / "change-parameters.md", "yaml")
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "quick.yaml").write_text(profile, encoding="utf-8")
    (tmp_path / "params.yaml").write_bytes((PROJECT_ROOT / "params.yaml").read_bytes())
    params = load_params(tmp_path / "params.yaml", "quick")
    assert params.grpo.steps == 4
    assert params.promote.model_name == "toolplan-quick"


def test_the_message_shown_for_a_typo_is_the_real_one(tmp_path: Path) -> None:
    from tasks.params import ParamsError

    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "laptop.yaml").write_bytes((PROJECT_ROOT / "profiles/laptop.yaml").read_bytes())
    text = (PROJECT_ROOT / "params.yaml").read_text(encoding="utf-8")
    broken = re.sub(r"(?m)^(grpo:.*\n)", r"\1  lrr: 1.0\n", text, count=1)
    (tmp_path / "params.yaml").write_text(broken, encoding="utf-8")
    with pytest.raises(ParamsError) as error:
        load_params(tmp_path / "params.yaml")
    shown = (HOW_TO / "change-parameters.md").read_text(encoding="utf-8")
    assert str(error.value).replace(f"{tmp_path}/", "") in shown
