"""Risks: a report that loads from the net, breaks on hostile text, grows without bound, or changes bytes."""

import json
import random
import re
from dataclasses import replace

import cv2
import numpy as np
import pytest

import tasks.rollout_report as rollout_report
from environments.base import Prompt
from environments.vsp.expert import Kind, demonstrate
from environments.vsp.hypotheses import failures
from environments.vsp.prompts import VSP, Task, map_of
from models.config import RewardConfig
from models.rewards import components, total
from models.trajectory import Step, StopReason, Trajectory
from tasks.rollout_report import report_html, write_report
from tools.base import Observation, Picture, ToolCall
from tools.cache import ToolResultCache
from tools.errors import ToolErrorCode
from tools.executor import ToolExecutor
from tools.vsp import vsp_registry

REWARD = RewardConfig(lambda_tool=2.0, lambda_acc=1.0, step_cost=0.0)


def make_trajectories(count: int, size: int = 4) -> list[Trajectory]:
    """Episodes of the expert, with real calls and pictures."""
    environment, rng = VSP(), random.Random(0)
    executor = ToolExecutor(vsp_registry(), ToolResultCache(64), 5.0)
    trajectories = []
    for index in range(count):
        task = (Task.NAVIGATION, Task.VERIFICATION)[index % 2]
        prompt = environment.sample(rng, task, size, f"{task}-{index}")
        kind = Kind.CLEAN
        if task is Task.NAVIGATION:
            while (wrong := failures(map_of(prompt))) not in (0, 1, 2):
                prompt = environment.sample(rng, task, size, f"{task}-{index}")
            kind = (Kind.CLEAN, Kind.REFLECTION_1, Kind.REFLECTION_2)[wrong]
        shown = demonstrate(prompt, kind, executor, environment, rng)
        steps = tuple(
            Step(step.turn.think, step.turn.call, step.observation, step.turn.response, True, 4)
            for step in shown.steps
        )
        trajectories.append(make_trajectory(prompt, steps, correct=index % 3 > 0))
    return trajectories


def make_trajectory(prompt: Prompt, steps: tuple[Step, ...], correct: bool) -> Trajectory:
    return Trajectory(
        prompt=prompt,
        sample=0,
        ids=np.zeros(3, dtype=np.int32),
        mask=np.array([False, True, True]),
        logprobs=np.zeros(3, dtype=np.float32),
        pictures=prompt.pictures,
        steps=steps,
        stop_reason=StopReason.ANSWERED,
        policy_version=3,
        temperature=0.0,
        seed=0,
        seconds=random.random(),
        components=components(steps, StopReason.ANSWERED, correct),
    )


@pytest.fixture(scope="module")
def trajectories() -> list[Trajectory]:
    return make_trajectories(6)


def episodes_of(page: str, side: int = 0) -> list[dict]:
    return [item["episodes"][side] for item in data_of(page)["items"]]


def data_of(page: str) -> dict:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


def test_every_turn_call_observation_and_component_is_in_the_page(trajectories):
    page = report_html(trajectories, REWARD)
    data = data_of(page)
    for trajectory, episode in zip(trajectories, episodes_of(page), strict=True):
        assert episode["id"] == trajectory.prompt.prompt_id
        assert episode["components"] == trajectory.components
        assert episode["reward"] == total(trajectory.components, REWARD)
        assert episode["correct"] == (trajectory.components["accuracy"] > 0)
        assert [step["call"] for step in episode["steps"][:-1]] == [
            s.call.to_json() for s in trajectory.steps[:-1]
        ]
        assert [step["observation"] for step in episode["steps"][:-1]] == [
            s.observation.to_json() for s in trajectory.steps[:-1]
        ]
        assert episode["steps"][-1]["response"] == trajectory.response
        keys = episode["pictures"] + [step["picture"] for step in episode["steps"] if step["picture"]]
        assert len(keys) > 1
        assert all(data["pictures"][key].startswith("data:image/") for key in keys)


def test_the_page_needs_no_network_and_no_storage(trajectories):
    page = report_html(trajectories, REWARD)
    links = set(re.findall(r"https?://[^\s\"'`]+", page))
    assert links == {"http://www.w3.org/2000/svg"}  # a namespace, never loaded
    for forbidden in (
        "localStorage",
        "sessionStorage",
        "document.cookie",
        "fetch(",
        "import(",
        "@import",
        "innerHTML",
    ):
        assert forbidden not in page


def test_the_page_has_the_same_bytes_twice_whatever_the_times(trajectories, tmp_path):
    write_report(trajectories, REWARD, tmp_path / "new" / "a.html")
    write_report([replace(t, seconds=t.seconds + 9) for t in trajectories], REWARD, tmp_path / "b.html")
    assert (tmp_path / "new" / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_what_an_agent_writes_cannot_leave_its_place(trajectories):
    hostile = '</script><script>alert(1)</script><!-- \u2028 \ud800 "\\'
    call = ToolCall(hostile, {hostile: [hostile]})
    observation = Observation.failure(ToolErrorCode.UNKNOWN_TOOL, hostile)
    steps = (Step(hostile, call, observation, None, False), Step(hostile, None, None, hostile, True))
    page = report_html([make_trajectory(trajectories[0].prompt, steps, correct=False)], REWARD)
    assert page.count("</script>") == 2
    assert "<!--" not in page
    episode = episodes_of(page)[0]
    assert episode["steps"][0]["think"] == hostile
    assert episode["steps"][0]["failed"]
    page.encode("utf-8")  # lone surrogates are escaped


def test_an_episode_without_picture_steps_or_answer_is_shown():
    prompt = Prompt("p", "sql", "query", "How many?", (), ())
    trajectory = replace(make_trajectory(prompt, (), correct=False), stop_reason=StopReason.MAX_TOKENS)
    (episode,) = episodes_of(report_html([trajectory], REWARD))
    assert (episode["pictures"], episode["steps"], episode["response"]) == ([], [], None)
    assert episode["stop_reason"] == "max_tokens"
    assert data_of(report_html([], REWARD))["items"] == []


def test_points_paths_crops_and_the_answer_are_marked_where_they_are(trajectories):
    """On 4x4 maps of 256 pixels, cells are 64 pixels wide."""
    prompt = next(t.prompt for t in trajectories if t.prompt.task == Task.NAVIGATION)
    prompt = replace(
        prompt, hidden={**prompt.hidden, "map_rows": ["SFFF", "FFFF", "FFHF", "FFFG"], "size": 4}
    )

    def step(name: str, asked: dict, seen: dict) -> Step:
        return Step("", ToolCall(name, asked), Observation(seen), None, True, 4)

    steps = (
        step("POINT", {"target": "holes"}, {"coordinates": [[160, 160], [32, 224]]}),
        step("POINT", {"target": "start"}, {"coordinates": [32, 32]}),
        step("DRAW2DPATH", {"start": [40, 10], "directions": "LR"}, {"result": "x", "at": [96, 32]}),
        step("DRAW2DPATH", {"points": [[1, 2], [3, 4]]}, {"result": "path_safe"}),
        step("CROP", {"box": [0, 0, 64, 64]}, {"size": [64, 64]}),
        step("ASTAR", {"start": [32, 32], "goal": [96, 96]}, {"path": "RD"}),
        Step(
            "",
            ToolCall("CROP", {"box": "all"}),
            Observation.failure(ToolErrorCode.INVALID_VALUE, "no"),
            None,
            True,
        ),
        Step("", None, None, "RU", True),
    )
    (episode,) = episodes_of(report_html([make_trajectory(prompt, steps, correct=False)], REWARD))
    assert [[(m["kind"], m["at"]) for m in s["marks"]] for s in episode["steps"]] == [
        [("point", [160, 160]), ("point", [32, 224])],
        [("point", [32, 32])],
        [("path", [[32, 32], [32, 32], [96, 32]]), ("stop", [96, 32])],
        [("path", [[1, 2], [3, 4]])],
        [("box", [0, 0, 64, 64])],
        [("path", [[32, 32], [96, 32], [96, 96]])],
        [],
        [("path", [[32, 32], [96, 32], [96, 32]])],
    ]


def test_another_policy_stands_beside_on_the_same_question_tools_and_sample(trajectories):
    other = [replace(t, policy_version=9) for t in reversed(trajectories[:4])]
    other += [replace(t, prompt=replace(t.prompt, tools=("POINT",))) for t in trajectories[4:5]]
    page = report_html(trajectories, REWARD, "grpo", {"sft": other})
    assert data_of(page)["policies"] == ["grpo", "sft"]
    first, second = episodes_of(page), episodes_of(page, 1)
    assert [e["id"] for e in second[:4]] == [e["id"] for e in first[:4]]
    assert {e["policy_version"] for e in second[:4]} == {9}
    assert second[4:] == [None, None]  # asked with other tools, and not asked at all


def test_200_episodes_of_the_largest_maps_stay_below_10_mb():
    episodes = make_trajectories(40, size=8)
    page = report_html(episodes, REWARD, "new", {"old": episodes})
    assert len(page.encode()) < 10_000_000 * 40 / 200
    assert data_of(page)["left_out"] == 0


def test_noisy_pictures_are_shrunk_and_then_left_out_with_a_count(trajectories, monkeypatch):
    monkeypatch.setattr(rollout_report, "PICTURE_BUDGET", 60_000)
    rng = np.random.default_rng(0)
    noisy = [
        Picture.from_rgb(cv2.resize(rng.integers(0, 255, (40, 60, 3), dtype=np.uint8), (600, 400)))
        for _ in range(12)
    ]
    many = [replace(trajectories[0], prompt=replace(trajectories[0].prompt, pictures=(p,))) for p in noisy]
    page = report_html(many, REWARD)
    data = data_of(page)
    kept = sum(bool(episode["pictures"]) for episode in episodes_of(page))
    assert 0 < kept < 12
    assert data["left_out"] >= 12 - kept
    assert sum(map(len, data["pictures"].values())) <= 60_000
    shrunk = data["pictures"][episodes_of(page)[0]["pictures"][0]]
    assert shrunk.startswith("data:image/webp")
