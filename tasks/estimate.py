"""How long a stage will take and how much memory it needs, before it runs.

From what the last run of the stage on this machine took, scaled by the amount of work, or else from a formula. The
formula is right within a factor of three at best: it is there to tell minutes from days, and what fits from what
does not. Nothing here imports torch or MLflow, so that a dry run stays quick.
"""

from __future__ import annotations

import json
import os
import textwrap
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from models.memory import training_bytes
from tasks.dvc_graph import read_stages
from tasks.params import PROJECT_ROOT, Params, config_hash, flatten, load_params
from tasks.policy_size import parameters_of

# Seconds per unit of `work`, measured with the laptop's policy on two cores (docs/results.md, "Time and memory").
_LAPTOP_SECONDS = {
    "cold_start": 128 / 33_600,
    "validate": 40 / 33_600,
    "sft": 630 / 46_200,
    "baseline": 405 / 46_200,
    "grpo": 192 / 5_230,
    "evaluate": 55 / 1_680,
    "promote": 5.0,
}
_LAPTOP_PARAMETERS = 0.9e6
_TRAINING = ("sft", "baseline", "grpo")
_POLICY_STAGES = (*_TRAINING, "evaluate")
_PROCESS_BYTES = 0.8e9  # Python with torch, transformers and DeepSpeed loaded
_DATA_BYTES = 12_000.0  # of one trajectory as parquet with its pictures, and again as tensors in memory
_ACTIVATION_BYTES = (
    34.0  # per token, layer and unit of width, in 16 bits (Korthikanti 2022, arXiv 2205.05198)
)
# What a large policy reaches per GPU: half the peak of an A100 in training is rare, a third is common.
_TRAINING_FLOPS, _SAMPLING_FLOPS = 1.0e14, 1.0e13


@dataclass(frozen=True)
class Cost:
    """What one run of a stage took. `policy` is the hash of the policy block, `work` as of `work`."""

    seconds: float
    memory_bytes: float
    work: float
    profile: str
    policy: str


@dataclass(frozen=True)
class Estimate:
    """Expected cost of a stage; `recorded` tells a measured one from a formula's."""

    stage: str
    seconds: float
    memory_bytes: float
    recorded: bool

    def __str__(self) -> str:
        source = "as recorded" if self.recorded else "by formula"
        return f"{duration(self.seconds)}, {gigabytes(self.memory_bytes)} ({source})"


def work(stage: str, params: Params) -> float:
    """Amount of work of a stage: trajectories made, checked, trained on, or sampled. 1 for any other stage."""
    data, grpo = params.data, params.grpo
    made = data.n_trajectories + data.validation_trajectories
    if stage in {"cold_start", "validate"}:
        return made
    if stage in {"sft", "baseline"}:
        return max(1.0, data.n_trajectories * params.sft.epochs)
    if stage == "grpo":
        group = (grpo.group_size.start + grpo.group_size.end) / 2
        looks = grpo.steps // grpo.eval_every + 1
        return grpo.steps * grpo.prompts_per_step * group + looks * grpo.validation_items
    if stage == "evaluate":
        per_size = params.evaluate.items_per_size or data.test_items_per_size
        return 3.0 * 2 * min(per_size, data.test_items_per_size) * len(data.test_sizes)  # policies, tasks
    return 1.0


def estimate(stage: str, params: Params, root: Path = PROJECT_ROOT) -> Estimate:
    """Time and memory of a stage under these parameters."""
    known = read_cost(root, stage)
    fits = (
        known is not None
        and known.profile == params.profile
        and (stage not in _POLICY_STAGES or known.policy == config_hash(params, ["policy"]))
    )
    if known is not None and fits:
        share = work(stage, params) / known.work
        return Estimate(stage, known.seconds * share, known.memory_bytes, recorded=True)
    return Estimate(stage, _seconds(stage, params), memory_bytes(stage, params), recorded=False)


def estimates(stages: Iterable[str], params: Params, root: Path = PROJECT_ROOT) -> list[Estimate]:
    """`estimate` of each stage."""
    return [estimate(stage, params, root) for stage in stages]


def write_cost(root: Path, stage: str, params: Params, memory: float) -> None:
    """Record what this process took for the stage, for the next estimate. Atomic, and an extra: no error stops a
    stage that has succeeded."""
    file = _cost_file(root, stage)
    seconds = time.time() - psutil.Process().create_time()  # with the imports, which the next run has too
    ranks = params.sft.processes if stage in {"sft", "baseline"} else 1
    cost = Cost(seconds, memory * ranks, work(stage, params), params.profile, config_hash(params, ["policy"]))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_suffix(f".{os.getpid()}.tmp")
        draft.write_text(json.dumps(asdict(cost)), encoding="utf-8")
        draft.replace(file)
    except OSError:
        return


def read_cost(root: Path, stage: str) -> Cost | None:
    """The cost that the last complete run of the stage left; None without one, or if it cannot be read."""
    try:
        cost = Cost(**json.loads(_cost_file(root, stage).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return cost if cost.work > 0 and cost.seconds >= 0 else None


def memory_bytes(stage: str, params: Params) -> float:
    """Main memory of all processes of a stage by formula, without a GPU; with one, it is a smaller need."""
    if stage not in _POLICY_STAGES:
        return _PROCESS_BYTES * (params.data.workers if stage == "cold_start" else 1)
    ranks = params.sft.processes if stage in {"sft", "baseline"} else 1
    data = params.data.n_trajectories * _DATA_BYTES if stage in {"sft", "baseline"} else 0.0
    return ranks * (_PROCESS_BYTES + data) + ranks * policy_bytes(stage, params) + activation_bytes(params)


def policy_bytes(stage: str, params: Params) -> float:
    """Bytes on one rank for the policy that a stage holds: weights, and for training gradients and optimizer."""
    weights = _weight_bytes(params)
    if stage not in _TRAINING:
        return weights
    if stage == "grpo":  # one process, and the reference policy beside
        return weights + _state_bytes(params, params.grpo.zero_stage, 1)
    return _state_bytes(params, params.sft.zero_stage, params.sft.processes)


def activation_bytes(params: Params) -> float:
    """Bytes of one micro-batch's activations, nothing recomputed. Width and depth of a checkpoint are guessed from
    its number of weights, which is near enough for a warning."""
    size = parameters_of(params.policy)
    tokens = max(params.sft.micro_batch_tokens, params.grpo.micro_batch_tokens)
    if params.policy.checkpoint is None:
        return tokens * params.policy.hidden_size * params.policy.layers * _ACTIVATION_BYTES * 2
    width_times_depth = 100_000.0 * (size / 8.3e9) ** (2 / 3)  # 3584 × 28 for the 7B
    return tokens * width_times_depth * _ACTIVATION_BYTES


def disk_bytes(params: Params) -> float:
    """Bytes that a whole run adds: data and weights, once in place and once in DVC's cache, and two checkpoints with
    optimizer states of the stage that is training."""
    outputs = 3 * _weight_bytes(params) + params.data.n_trajectories * _DATA_BYTES
    return 2 * outputs + 2 * _state_bytes(params, 0, 1) + 0.2e9


def plan_text(stages: Iterable[str], params: Params, root: Path = PROJECT_ROOT) -> str:
    """What the stages that run will take together, a line for each and a sum."""
    expected = estimates(stages, params, root)
    if not expected:
        return "nothing to run"
    total = sum(each.seconds for each in expected)
    most = max(each.memory_bytes for each in expected)
    lines = [f"  {each.stage:<12} {each}" for each in expected]
    return "\n".join(
        [
            "estimated time and memory:",
            *lines,
            f"  {'together':<12} {duration(total)}, {gigabytes(most)} at most",
        ]
    )


def config_text(params: Params, root: Path = PROJECT_ROOT) -> str:
    """The resolved configuration, a paragraph for each block that a stage reads, and what in it is not as in
    params.yaml alone. What is null is left out."""
    values = flatten(params)
    read = {key.split(".")[0] for stage in read_stages(root, params.profile).values() for key in stage.params}
    lines = ["config:"]
    for block in (name for name in type(params).model_fields if name in read):
        keys = {
            key: value for key, value in values.items() if key.startswith(f"{block}.") and value is not None
        }
        inner = " ".join(f"{key.removeprefix(f'{block}.')}={_shown(value)}" for key, value in keys.items())
        if inner:
            lines += textwrap.wrap(f"  {block:<12} {inner}", 118, subsequent_indent=" " * 15)
    differing = differences(params, root)
    if not differing:
        return "\n".join([*lines, "  all as in params.yaml"])
    lines.append(f"  {len(differing)} values differ from params.yaml (profile {params.profile}):")
    return "\n".join([*lines, *(f"    {key}: {old} -> {new}" for key, (old, new) in differing.items())])


def differences(params: Params, root: Path = PROJECT_ROOT) -> dict[str, tuple[str, str]]:
    """Keys whose value is not that of params.yaml under the laptop's (empty) profile: there, and here."""
    plain = flatten(load_params(root / "params.yaml", "laptop"))
    return {
        key: (_shown(plain.get(key)), _shown(value))
        for key, value in flatten(params).items()
        if key != "profile" and plain.get(key) != value
    }


def duration(seconds: float) -> str:
    """`40 s`, `12 min`, `3.5 h`, `4 days`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.0f} days"


def gigabytes(number: float) -> str:
    """`2.7 GB` (10⁹ bytes)."""
    return f"{number / 1e9:.1f} GB"


def _weight_bytes(params: Params) -> float:
    return parameters_of(params.policy) * (2.0 if params.policy.dtype == "bfloat16" else 4.0)


def _state_bytes(params: Params, zero_stage: int, ranks: int) -> float:
    """Weights, gradients and optimizer states on one rank. Adapters lie beside frozen weights, and are as many as
    their rank is to half the width of a checkpoint (2,048 in the 3B)."""
    size, bf16 = parameters_of(params.policy), params.policy.dtype == "bfloat16"
    if not params.policy.lora_rank:
        return training_bytes(int(size), zero_stage, ranks, bf16)
    adapters = int(size * min(1.0, 2 * params.policy.lora_rank / 2048))
    return _weight_bytes(params) + training_bytes(adapters, zero_stage, ranks, bf16)


def _seconds(stage: str, params: Params) -> float:
    amount, size = work(stage, params), parameters_of(params.policy)
    if stage not in _POLICY_STAGES or params.policy.checkpoint is None:
        per_unit = _LAPTOP_SECONDS.get(stage, 1.0)
        if stage == "cold_start":
            per_unit *= 2 / params.data.workers
        return amount * per_unit * (max(1.0, size / _LAPTOP_PARAMETERS) if stage in _POLICY_STAGES else 1.0)
    # A picture of 512 pixels is 334 tokens; an episode shows about two and says as much in text.
    tokens = amount * min(1000.0, params.agent.max_tokens)
    trained = 6.0 * size * tokens / _TRAINING_FLOPS
    sampled = 2.0 * size * tokens / _SAMPLING_FLOPS
    if stage in {"sft", "baseline"}:
        return trained / params.sft.processes
    return sampled + (trained if stage == "grpo" else 0.0)


def _shown(value: object) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return "null" if value is None else str(value)


def _cost_file(root: Path, stage: str) -> Path:
    return root / "outputs" / ".runs" / f"{stage}.cost.json"
