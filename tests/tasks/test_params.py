"""Risks of parameters: silently wrong types, silently dropped typos, unreadable errors."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.params import (
    PROJECT_ROOT,
    Params,
    ParamsError,
    config_hash,
    flatten,
    load_params,
    override,
    read_yaml,
)

# The edits below start from these values, however the shipped ones are tuned.
KNOWN_VALUES = {
    r"^profile: ": "laptop",
    r"^seed: ": "0",
    r"^sft:.*\n  lr: ": "1e-3",
    r"^    capacity: ": "2000",
    r"^  engine: ": "transformers",
    r"^  confidence: ": "0.95",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    text = (PROJECT_ROOT / "params.yaml").read_text()
    for pattern, value in KNOWN_VALUES.items():
        text, found = re.subn(rf"(?m)({pattern})\S+", rf"\g<1>{value}", text, count=1)
        assert found, pattern
    (tmp_path / "params.yaml").write_text(text)
    shutil.copytree(PROJECT_ROOT / "profiles", tmp_path / "profiles")
    return tmp_path


def edited(project: Path, old: str, new: str) -> Params:
    file = project / "params.yaml"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    return load_params(file)


@pytest.mark.parametrize("text", ["1e-5", "1E-5", "0.00001", "1.0e-5", ".00001"])
def test_every_spelling_of_a_small_rate_is_a_float(project: Path, text: str) -> None:
    """PyYAML reads 1e-5 as a string; `dvc exp run -S` rewrites 0.00001 as 1e-05."""
    rate = edited(project, "lr: 1e-3", f"lr: {text}").sft.lr
    assert isinstance(rate, float)
    assert rate == 1e-5


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("lr: 1e-3 ", "lrr: 1e-3 ", "params.yaml: sft.lrr: unknown key; did you mean lr?"),
        ("lr: 1e-3", "lr: '1e-3'", 'params.yaml: sft.lr: "1e-3": input should be a valid number'),
        ("lr: 1e-3", "lr: fast", 'params.yaml: sft.lr: "fast": input should be a valid number'),
        ("lr: 1e-3", "lr: .nan", "params.yaml: sft.lr: nan is not a finite number"),
        ("lr: 1e-3", "lr: .inf", "params.yaml: sft.lr: inf is not a finite number"),
        ("lr: 1e-3", "lr: 0", "params.yaml: sft.lr: 0: input should be greater than 0"),
        ("seed: 0", "seed: true", "params.yaml: seed: true: input should be a valid integer"),
        ("seed: 0", "seed: 0.5", "params.yaml: seed: 0.5: input should be a valid integer"),
        ("seed: 0", "sed: 0", "params.yaml: seed: is missing; add it"),
        ("seed: 0", "seed: 0\nseed: 1", 'is not valid YAML: found duplicate key "seed"'),
        ("capacity: 2000", "capactiy: 2000", "grpo.replay.capactiy: unknown key; did you mean capacity?"),
        (
            "engine: transformers",
            "engine: hf",
            "rollout.engine: \"hf\": input should be 'transformers' or 'vllm'",
        ),
        ("confidence: 0.95", "confidence: 2024-01-01", "evaluate.confidence: 2024-01-01 is read as a date"),
        ("profile: laptop", "profile: labtop", "did you mean laptop?"),
        ("profile: laptop", "profile: ../x", "is no profile; use one of"),
        ("data: ", "data: [", "is not valid YAML"),
    ],
)
def test_a_mistake_is_one_line_with_file_key_value_and_remedy(
    project: Path, old: str, new: str, said: str
) -> None:
    with pytest.raises(ParamsError) as caught:
        edited(project, old, new)
    lines = str(caught.value).splitlines()
    assert any(said in line for line in lines), lines
    assert len(lines) <= 2  # a misspelt required key is also a missing one


def test_a_mistake_in_a_profile_names_the_profile(project: Path) -> None:
    file = project / "profiles" / "laptop.yaml"
    file.write_text(re.sub(r"^sft: .*$", "sft: {lr: high}", file.read_text(), flags=re.M))
    with pytest.raises(ParamsError, match=r'laptop\.yaml: sft\.lr: "high"'):
        load_params(project / "params.yaml")


def test_a_profile_without_a_block_is_refused_before_dvc_stumbles_over_it(project: Path) -> None:
    file = project / "profiles" / "laptop.yaml"
    file.write_text(re.sub(r"^grpo: .*\n", "", file.read_text(), flags=re.M))
    with pytest.raises(ParamsError, match=r"grpo: is missing; add `grpo: \{\}`"):
        load_params(project / "params.yaml")


def test_a_profile_cannot_hide_a_seed_given_on_the_command_line(project: Path) -> None:
    file = project / "profiles" / "laptop.yaml"
    file.write_text("seed: 1\n" + file.read_text())
    with pytest.raises(ParamsError, match=r"seed: belongs in params\.yaml"):
        load_params(project / "params.yaml")


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ParamsError, match=r"params\.yaml: no such file") as caught:
        load_params(tmp_path / "params.yaml")
    assert "\n" not in str(caught.value)


def test_a_folder_or_binary_in_its_place_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    for name in ("folder.yaml", "binary.yaml"):
        with pytest.raises(ParamsError, match="cannot be read"):
            read_yaml(tmp_path / name)


def test_every_parameter_is_written_down_in_params_yaml() -> None:
    """A default that only stands in code is invisible to users, to DVC and to `dvc exp run -S`."""
    known, written = flatten(load_params(profile="laptop")), flatten(read_yaml(PROJECT_ROOT / "params.yaml"))
    free = "sweep.space."  # a mapping from the user's own choice of parameters to their ranges
    assert {k for k in known if not k.startswith(free)} == {k for k in written if not k.startswith(free)}


def test_laptop_is_params_yaml_as_it_stands() -> None:
    """Else `dvc exp run -S sft.lr=…` would silently lose against the default profile."""
    assert flatten(load_params(profile="laptop")) == flatten(load_params()) | {"profile": "laptop"}
    overlay = read_yaml(PROJECT_ROOT / "profiles" / "laptop.yaml")
    assert not any(overlay.values())


def test_the_hash_follows_values_and_not_their_spelling(project: Path) -> None:
    before = load_params(project / "params.yaml")
    same = edited(project, "lr: 1e-3", "lr: 0.001")
    assert config_hash(same, ["sft"]) == config_hash(before, ["sft"])
    other = override(before, {"sft.lr": 2e-3})
    assert config_hash(other, ["sft"]) != config_hash(before, ["sft"])
    assert config_hash(other, ["grpo"]) == config_hash(before, ["grpo"])


def test_an_override_is_checked_like_the_file(params: Params) -> None:
    assert override(params, {"grpo.lr": 1e-4, "seed": 3}).grpo.lr == 1e-4
    with pytest.raises(ParamsError, match=r"grpo\.lrr: unknown key"):
        override(params, {"grpo.lrr": 1e-4})


def test_a_command_exits_with_2_and_one_line_on_bad_parameters(project: Path) -> None:
    code = (
        "from tasks.cli import run_main\nfrom tasks.params import load_params\n"
        f"run_main(lambda: load_params({str(project / 'none.yaml')!r}) and 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PROJECT_ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("hidden", [False, True], ids=["errno", "message only"])
def test_a_full_disk_is_one_line(hidden: bool) -> None:
    error = "RuntimeError('PytorchStreamWriter failed writing file data/0: file write failed')"
    code = "import errno\nfrom tasks.cli import run_main\ndef main():\n  raise "
    code += error if hidden else "OSError(errno.ENOSPC, 'No space left on device', 'weights')"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nrun_main(main)"],
        cwd=PROJECT_ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert re.fullmatch(r"error: no space left on the disk of .*\n", done.stderr)


def test_dvc_writes_numbers_that_the_loader_reads_back(small_project: Path) -> None:
    """`dvc exp run -S` rewrites the file (treeverse/dvc#8466)."""
    from dvc.utils.serialize import modify_yaml

    with modify_yaml(str(small_project / "params.yaml")) as data:
        data["sft"]["lr"] = 0.000001
    assert load_params(small_project / "params.yaml").sft.lr == 1e-6
