"""Grading: no reward for empty, degenerate, hedged or multiple answers."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.vsp.grade import grade_verification, parse_moves, parse_yes_no
from environments.vsp.maps import GridMap, Split, shortest_path, split_of
from environments.vsp.prompts import VSP, Task, map_of, navigation_prompt, verification_prompt
from environments.vsp.world import is_safe
from tools.base import Picture

GRID = GridMap(("SFF", "FHF", "FFG"))
NAVIGATION = navigation_prompt(GRID, Picture(b""), ("POINT",), "n")
SAFE = verification_prompt(GRID, "RR", Picture(b""), ("POINT",), "y")
UNSAFE = verification_prompt(GRID, "RD", Picture(b""), ("POINT",), "x")


@pytest.mark.parametrize(
    "response",
    [
        "RRDD",
        " RRDD\n",
        "R, R, D, D",
        "R,R,D,D",
        "R R D D",
        "R->R->D->D",
        r"\boxed{R,R,D,D}",
        r"The answer is \boxed{RRDD}.",
        "A safe path: RRDD.",
        "DDRR",
        "LUDDRR",  # bumps are allowed
        "RRDDLL",  # moves after the goal do not matter
    ],
)
def test_right_paths_are_right_however_written(response):
    assert VSP().grade(NAVIGATION, response)


@pytest.mark.parametrize(
    "response",
    [
        "",  # Visual-RFT#176
        "   \n",
        "R",
        "L",
        "RRD",
        "RDRD",  # through the hole
        "rrdd",
        "RRDD or DDRR",
        "RRDD\nRDRD",
        r"\boxed{RRDD} \boxed{DDRR}",  # open-r1#418
        r"\boxed{}",
        r"\boxed{path} RRDD",
        "RRDDX",
        "xRRDD",
        "RRUDRRUDDD",  # more moves than cells
        "RLRLRLRLRLRRDD",
        "Yes",
        "[480, 480]",
        "RRDD" * 5000,
    ],
)
def test_farming_and_wrong_paths_get_nothing(response):
    assert not VSP().grade(NAVIGATION, response)


@pytest.mark.parametrize(
    "response", ["Yes", "yes", "YES.", "Y", "y", r"\boxed{Yes}", "Yes, the path is safe."]
)
def test_yes_is_right_for_a_safe_path_only(response):
    assert VSP().grade(SAFE, response)
    assert not VSP().grade(UNSAFE, response)


@pytest.mark.parametrize("response", ["No", "no.", "N", r"\boxed{no}", "It is unsafe: No"])
def test_no_is_right_for_an_unsafe_path_only(response):
    assert VSP().grade(UNSAFE, response)
    assert not VSP().grade(SAFE, response)


@pytest.mark.parametrize(
    "response",
    [
        "",
        " ",
        "Yes No",
        "Yes or no",
        "yes/no",
        r"\boxed{Yes} \boxed{No}",
        r"\boxed{} Yes",
        "maybe",
        "yesno",
        "YN",
    ],
)
def test_hedged_answers_get_nothing(response):
    assert not VSP().grade(SAFE, response)
    assert not VSP().grade(UNSAFE, response)


@given(st.text())
def test_grading_never_raises(response):
    for prompt in (NAVIGATION, SAFE, UNSAFE):
        assert VSP().grade(prompt, response) in (True, False)
    moves = parse_moves(response)
    assert moves is None or set(moves) <= set("LRUD")
    assert parse_yes_no(response) in (True, False, None)


def test_published_letters_and_our_words_are_the_same_answer():
    assert grade_verification("Yes", "Y")
    assert grade_verification("No", "N")


def test_questions_have_no_move_letters_outside_paths():
    for prompt in (NAVIGATION, SAFE):
        text = prompt.question.replace(f'"{prompt.hidden["path"]}"', "")
        assert not set(text) & set("LRUD")


def test_hidden_state_is_not_in_the_question():
    assert shortest_path(GRID) not in NAVIGATION.question
    assert "Yes" not in SAFE.question


def test_sampled_prompts_keep_to_their_split_and_their_own_answers():
    environment, rng = VSP(), random.Random(3)
    for task in Task:
        for split in Split:
            prompt = environment.sample(rng, task, 4, "p", split=split)
            assert split_of(prompt.hidden["map_hash"]) is split
            assert environment.grade(prompt, prompt.hidden["answer"])
            if task is Task.VERIFICATION:
                assert (prompt.hidden["answer"] == "Yes") == is_safe(map_of(prompt), prompt.hidden["path"])


def test_sampling_is_a_function_of_the_seed():
    first, second = (
        VSP().sample(random.Random(9), Task.VERIFICATION, 6, "p", split=Split.TRAIN) for _ in range(2)
    )
    assert first == second
