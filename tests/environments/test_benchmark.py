"""Reading the published benchmark: every item right, and a broken folder is one clear line."""

import shutil
from pathlib import Path

import pytest

from environments.vsp.benchmark import BenchmarkError, load_benchmark, parse_map
from environments.vsp.maps import shortest_path
from environments.vsp.prompts import VSP, map_of
from environments.vsp.world import is_safe

SAMPLE = Path(__file__).resolve().parents[3] / "shared" / "vsp_sample"
needs_sample = pytest.mark.skipif(not SAMPLE.is_dir(), reason=f"published samples are not at {SAMPLE}")
MAP_TEXT = "This is a 3x3 map.\nThe player is at: row 2, column 2;\nThe hole(s) are at: Row 3, Column 1;\n"
MAP_TEXT += "The goal is at: Row 3, Column 3."


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(SAMPLE, tmp_path / "vsp")
    return tmp_path / "vsp"


@needs_sample
def test_all_sample_items_are_read_and_the_published_answers_agree_with_our_rules():
    prompts = load_benchmark(SAMPLE)
    assert [p.task for p in prompts] == ["navigation"] * 12 + ["verification"] * 15
    assert len({p.prompt_id for p in prompts}) == 27
    for prompt in prompts:
        grid = map_of(prompt)
        if prompt.task == "navigation":
            assert prompt.prompt_id.split("/")[1] == f"level{grid.size}"
            assert VSP().grade(prompt, shortest_path(grid))
        else:
            assert prompt.hidden["answer"] == ("Yes" if is_safe(grid, prompt.hidden["path"]) else "No")
            assert prompt.prompt_id.split("/")[1] == f"level_step{len(prompt.hidden['path'])}"


@needs_sample
def test_the_maze_folder_itself_will_do():
    assert [p.prompt_id for p in load_benchmark(SAMPLE / "maze")] == [
        p.prompt_id for p in load_benchmark(SAMPLE)
    ]


@needs_sample
def test_text_for_grading_reaches_neither_question_nor_tools():
    for prompt in load_benchmark(SAMPLE):
        assert "row" not in prompt.question.lower()
        assert prompt.hidden["answer"] not in prompt.question.split()


def test_a_map_without_holes_is_read():
    text = MAP_TEXT.replace("The hole(s) are at: Row 3, Column 1;\n", "The hole(s) are at: \n")
    assert parse_map(text).rows == ("FFF", "FSF", "FFG")
    assert parse_map(MAP_TEXT).rows == ("FFF", "FSF", "HFG")


def test_a_missing_folder_is_one_clear_line(tmp_path):
    with pytest.raises(BenchmarkError, match="does not exist"):
        load_benchmark(tmp_path / "nowhere")


def test_a_folder_without_items_is_an_error_and_not_an_accuracy_of_nothing(tmp_path):
    with pytest.raises(BenchmarkError, match="no items"):
        load_benchmark(tmp_path)


@needs_sample
@pytest.mark.parametrize(
    ("path", "content", "message"),
    [
        ("task-main/maps/level3/img/11.png", None, "missing picture"),
        ("task-main/maps/level3/img/11.png", b"no picture", "cannot be decoded"),
        ("task-main/maps/level3/img/11.png", b"", "cannot be decoded"),
        ("task-main/maps/level3/pure_text/11.txt", None, "has no text"),
        ("task-main/maps/level3/pure_text/11.txt", b"\xff\xfe\xfa", "cannot read"),
        ("task-main/maps/level3/pure_text/11.txt", b"", "does not describe a map"),
        ("task-main/maps/level3/pure_text/11.txt", MAP_TEXT.replace("Row 3", "Row 9").encode(), "outside"),
        ("task4/maps/level_step5/question/8.txt", None, "cannot read"),
        ("task4/maps/level_step5/question/8.txt", b"go up", "expected moves"),
        ("task4/maps/level_step5/answer/8.txt", b"perhaps", "expected Y or N"),
    ],
)
def test_a_broken_item_is_one_clear_line_that_names_the_file(folder, path, content, message):
    file = folder / "maze" / path
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    with pytest.raises(BenchmarkError, match=message) as caught:
        load_benchmark(folder)
    assert "\n" not in str(caught.value)
    assert file.stem in str(caught.value)


@needs_sample
def test_a_missing_part_of_a_level_is_named(folder):
    shutil.rmtree(folder / "maze/task-main/maps/level5/img")
    with pytest.raises(BenchmarkError, match=r"level5 has no img folder"):
        load_benchmark(folder)
