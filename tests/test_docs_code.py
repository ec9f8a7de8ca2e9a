"""Risks: example code in the how-tos that no longer runs against the product."""

from __future__ import annotations

import re
import sys
from types import ModuleType

import pytest

from models.rewards import BOUNDS
from tasks.params import PROJECT_ROOT
from tests.test_docs import HOW_TO, blocks

COUNTING = ("own-tool.md", "own-environment.md")


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The code blocks of both pages, run as the files that their first lines name, in the pages' order."""
    made: dict[str, ModuleType] = {}
    for page in COUNTING:
        for block in blocks(HOW_TO / page, "python"):
            path = block.splitlines()[0].removeprefix("# ")
            assert re.fullmatch(r"[\w/]+\.py", path), f"{page}: a block without its file's name"
            assert not (PROJECT_ROOT / path).exists(), f"{path} exists: the page would overwrite it"
            module = ModuleType(path.removesuffix(".py").replace("/", "."))
            monkeypatch.setitem(sys.modules, module.__name__, module)
            exec(compile(block, path, "exec"), module.__dict__)
            made[path] = module
    return made


def test_the_tests_of_the_pages_pass(modules: dict[str, ModuleType]) -> None:
    ran = 0
    for path, module in modules.items():
        for name, value in list(vars(module).items()):
            if path.startswith("tests/") and name.startswith("test_"):
                value()
                ran += 1
    assert ran == 8


def test_a_policy_can_act_in_the_environment_of_the_page(modules: dict[str, ModuleType]) -> None:
    scored = modules["benchmarks/try_counting.py"].episodes(4)
    assert len(scored) == 4
    for episode in scored:
        assert episode.prompt.environment == "counting"
        assert set(episode.components) == set(BOUNDS)
        assert episode.mask.any()
