"""Risks in a real browser: filters that do not filter, keys that do nothing, policies beside other items, and a
frame without rights (as MLflow's) in which the page breaks.
"""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from models.rewards import total
from models.trajectory import StopReason, Trajectory
from tasks.rollout_report import report_html
from tests.browser import CHROMIUM, NO_CHROMIUM, Page, browser
from tests.tasks.test_rollout_report import REWARD, make_trajectories

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)

COUNT = 12
ROWS = "document.querySelectorAll('#list button').length"
CURRENT = (
    "[...document.querySelectorAll('#list button')].findIndex(b => b.getAttribute('aria-current') === 'true')"
)
TITLE = "document.querySelector('#detail > h2').textContent"
SIDES = "[...document.querySelectorAll('.sides > section')].map(s => s.textContent)"


def choose(control: str, value: str) -> str:
    """JavaScript that does what a user does with a control."""
    return (
        f"byId('{control}').value = {value!r};"
        f"byId('{control}').dispatchEvent(new Event('input', {{bubbles: true}})); {ROWS}"
    )


@pytest.fixture(scope="module")
def trajectories() -> list[Trajectory]:
    made = make_trajectories(COUNT)
    return [*made[:-1], replace(made[-1], steps=(), stop_reason=StopReason.MAX_TOKENS)]


@pytest.fixture(scope="module")
def page_file(trajectories: list[Trajectory], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """grpo beside sft, which was not asked the last question and has everything wrong."""
    other = [replace(t, components={**t.components, "accuracy": 0.0}) for t in reversed(trajectories[:-1])]
    file = tmp_path_factory.mktemp("report") / "report.html"
    file.write_text(report_html(trajectories, REWARD, "grpo", {"sft": other}), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    with browser() as page:
        yield page


@pytest.fixture
def page(tab: Page, page_file: Path) -> Page:
    tab.errors.clear()
    tab.open(page_file.as_uri())
    return tab


def test_each_filter_leaves_what_fits_and_reset_brings_all_back(
    page: Page, trajectories: list[Trajectory]
) -> None:
    assert page.run(ROWS) == COUNT
    assert page.run(choose("view", "grpo")) == COUNT
    expected = {
        ("task", "navigation"): sum(t.prompt.task == "navigation" for t in trajectories),
        ("result", "correct"): sum(t.components["accuracy"] > 0 for t in trajectories),
        ("stop_reason", "max_tokens"): 1,
        ("tool", "DRAW2DPATH"): sum(
            any(s.call is not None and s.call.name == "DRAW2DPATH" for s in t.steps) for t in trajectories
        ),
        ("low", "0.9"): sum(total(t.components, REWARD) >= 0.9 for t in trajectories),
        ("high", "0.5"): sum(total(t.components, REWARD) <= 0.5 for t in trajectories),
        ("text", trajectories[3].prompt.prompt_id): 1,
        ("text", "no such text"): 0,
    }
    for (control, value), count in expected.items():
        assert page.run(choose(control, value)) == count, (control, value)
        assert page.run("byId('count').textContent").startswith(f"{count} of {COUNT} episodes")
        page.run("byId('text').blur(); byId('view').blur()")
        page.press("x")
        page.wait_for(lambda: page.run(ROWS) == COUNT)
        page.run(choose("view", "grpo"))
    assert {0, COUNT} & set(expected.values()) == {0}
    assert page.errors == []


def test_keys_move_filter_and_help(page: Page) -> None:
    moves = [("j", 1), ("ArrowRight", 2), ("k", 1), ("ArrowLeft", 0), ("ArrowLeft", 0), ("End", COUNT - 1)]
    for key, position in moves:
        page.press(key)
        assert page.run(CURRENT) == position, key
    page.press("Home")
    page.press("/")
    assert page.run("document.activeElement.id") == "text"
    page.press("j")  # typed, not a command
    assert page.run("byId('text').value") == "j"
    page.press("Escape")
    page.press("x")
    page.wait_for(lambda: page.run(ROWS) == COUNT)
    page.press("?")
    assert page.run("byId('help').open") is True
    page.press("j")
    assert page.run(CURRENT) == 0
    page.press("Escape")
    assert page.run("byId('help').open") is False
    assert page.errors == []


def test_two_policies_stand_beside_each_other_on_the_same_item(
    page: Page, trajectories: list[Trajectory]
) -> None:
    for trajectory in trajectories[:-1]:
        left, right = page.run(SIDES)
        right_answer = "correct" if trajectory.components["accuracy"] > 0 else "wrong"
        assert page.run(TITLE) == trajectory.prompt.prompt_id
        assert left.startswith(f"grpo · {right_answer}")
        assert right.startswith("sft · wrong")
        page.press("j")
    assert page.run(SIDES)[1] == "sftnot asked"
    won = sum(t.components["accuracy"] > 0 for t in trajectories)
    assert page.run(choose("result", "only grpo correct")) == won
    assert page.run(choose("result", "only sft correct")) == 0
    assert page.run(choose("result", "all wrong")) == COUNT - won


def test_every_control_has_a_name_and_focus_can_be_seen(page: Page) -> None:
    nameless = """[...document.querySelectorAll('select, input, button')].filter(c =>
        !(c.labels && c.labels.length) && !c.textContent.trim()).map(c => c.id)"""
    assert page.run(nameless) == []
    assert page.run(
        "[...document.querySelectorAll('#detail svg, #detail img')].every(p => "
        "p.getAttribute('aria-label') || p.alt)"
    )
    page.press("Tab")
    assert page.run("document.activeElement.className") == "skip"
    page.press("Tab")
    style = "getComputedStyle(document.activeElement).outlineStyle"
    assert (page.run("document.activeElement.id"), page.run(style)) == ("text", "solid")


def test_it_works_in_mlflows_sandboxed_frame_and_in_the_dark(
    tab: Page, page_file: Path, tmp_path: Path
) -> None:
    """MLflow shows HTML artifacts with sandbox="allow-scripts": no storage, no origin, no other files."""
    framed = html.escape(page_file.read_text(encoding="utf-8"), quote=True)
    outer = tmp_path / "outer.html"
    outer.write_text(
        '<!doctype html><iframe style="width:1100px;height:700px" sandbox="allow-scripts" '
        f'srcdoc="{framed}"></iframe>',
        encoding="utf-8",
    )
    tab.errors.clear()
    tab.size(1200, 800, dark=True)
    tab.open(outer.as_uri())
    assert tab.run("window.origin", inside_frame=True) == "null"
    assert tab.run(ROWS, inside_frame=True) == COUNT
    tab.click(900, 600)
    tab.press("j")
    assert tab.run(CURRENT, inside_frame=True) == 1
    tab.press("?")
    assert tab.run("byId('help').open", inside_frame=True) is True
    assert tab.run("getComputedStyle(document.body).backgroundColor", inside_frame=True) == "rgb(23, 25, 28)"
    assert tab.errors == []
