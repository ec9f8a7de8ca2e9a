"""Disk, memory, GPUs, files and git, against what the profile needs."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

from tasks.dvc_graph import read_stages
from tasks.estimate import activation_bytes, disk_bytes, estimates, gigabytes, policy_bytes
from tasks.health.check import Check, fail, ok, warn
from tasks.params import Params
from tasks.provenance import git


@dataclass(frozen=True)
class Gpu:
    """One GPU as nvidia-smi shows it; bytes."""

    name: str
    total: float
    used: float


def check_disk(params: Params, root: Path, free: float | None = None) -> Check:
    """Room for data, weights, checkpoints and DVC's cache."""
    available = float(shutil.disk_usage(root).free) if free is None else free
    need = disk_bytes(params)
    finding = f"{gigabytes(available)} free, a whole run adds about {gigabytes(need)}"
    if available < need:
        return fail("disk", finding, "free some (`dvc gc -w` removes results that no commit here uses)")
    return ok("disk", finding)


def check_memory(params: Params, root: Path, available: float | None = None) -> Check:
    """Main memory for the largest stage. Where a GPU trains, the weights pass through it only."""
    free = float(psutil.virtual_memory().available) if available is None else available
    need = max(estimates(read_stages(root, params.profile), params, root), key=lambda each: each.memory_bytes)
    finding = f"{gigabytes(free)} free, {need.stage} needs about {gigabytes(need.memory_bytes)}"
    if params.policy.checkpoint is not None:
        return ok("memory", f"{gigabytes(free)} free; the GPU holds the policy")
    if free < need.memory_bytes:
        return fail("memory", finding, "end other programs, or lower sft.processes or policy sizes")
    return ok("memory", finding)


def check_gpu(params: Params, gpus: list[Gpu] | None = None) -> Check:
    """Whether the profile's policy can be trained and sampled from on the GPUs that are here.

    The need is that of weights, gradients and optimizer beside vLLM's share: what exceeds it cannot work
    (trl#2927). Activations depend on the batch, so they only warn.
    """
    found = list_gpus() if gpus is None else gpus
    if params.policy.checkpoint is None and params.rollout.engine != "vllm":
        return ok("gpu", f"{len(found)} found, none needed")
    if not found:
        return fail(
            "gpu",
            f"profile {params.profile} needs one, and nvidia-smi shows none",
            "use a machine with an NVIDIA GPU, or profile laptop",
        )
    if params.sft.processes > len(found):
        return fail(
            "gpu",
            f"sft.processes is {params.sft.processes}, more than the GPUs here ({len(found)})",
            f"set sft.processes to {len(found)}",
        )
    smallest = min(found, key=lambda gpu: gpu.total)
    shared = (
        params.rollout.gpu_memory_utilization * smallest.total if params.rollout.engine == "vllm" else 0.0
    )
    needs = {
        "sft": policy_bytes("sft", params),
        "grpo": policy_bytes("grpo", params) + shared,
    }
    stage = max(needs, key=lambda name: needs[name])
    finding = f"{len(found)} × {smallest.name}, {gigabytes(smallest.total)}; {stage} needs {gigabytes(needs[stage])}"
    if stage == "grpo" and shared:
        finding += f" with vLLM's {gigabytes(shared)}"
    remedies = "lower rollout.gpu_memory_utilization, raise the ZeRO stage, or set policy.lora_rank"
    if needs[stage] > smallest.total:
        return fail("gpu", finding, remedies)
    busy = max(gpu.used for gpu in found)
    if busy > 0.1 * smallest.total:
        return warn("gpu", f"{finding}; {gigabytes(busy)} are in use", "see who uses it: `nvidia-smi`")
    if needs[stage] + activation_bytes(params) > smallest.total:
        return warn(
            "gpu",
            f"{finding}, and a micro-batch about {gigabytes(activation_bytes(params))}",
            "lower sft.micro_batch_tokens and grpo.micro_batch_tokens if memory runs out",
        )
    return ok("gpu", finding)


def list_gpus() -> list[Gpu]:
    """NVIDIA's GPUs here; none without its driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total,memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30)
    return parse_gpus(done.stdout) if done.returncode == 0 else []


def parse_gpus(text: str) -> list[Gpu]:
    """Lines `name, total MiB, used MiB`; parts of a GPU (MIG) that show no memory are left out."""
    gpus = []
    for line in text.splitlines():
        parts = [part.strip() for part in line.rsplit(",", 2)]
        if len(parts) == 3 and parts[1].isdigit() and parts[2].isdigit():
            gpus.append(Gpu(parts[0], int(parts[1]) * 2.0**20, int(parts[2]) * 2.0**20))
    return gpus


def check_files(root: Path) -> Check:
    """Whether the folders that a run writes to can be written."""
    names = ("", "data", "outputs", "outputs/.runs", "outputs/logs", ".dvc/tmp", ".dvc/cache", "mlartifacts")
    wrong = []
    for name in names:
        folder = root / name
        if folder.exists() and not folder.is_dir():
            wrong.append(f"{name} is a file")
        elif folder.is_dir() and not os.access(folder, os.W_OK | os.X_OK):
            wrong.append(f"{name or root.name} cannot be written")
    files = ("params.yaml", "dvc.lock", "mlflow.db")
    wrong += [
        f"{name} cannot be written" for name in files if (root / name).exists() and not _writable(root / name)
    ]
    if wrong:
        return fail(
            "files",
            ", ".join(wrong),
            "give your user the right to write them (chown, chmod), or remove the file",
        )
    return ok("files", "everything that a run writes can be written")


def check_git(root: Path) -> Check:
    """Whether the commit says what is being run."""
    if git(root, "rev-parse", "--is-inside-work-tree") is None:
        return fail("git", "no repository, or no git", "work in a clone: DVC needs git")
    if git(root, "rev-parse", "HEAD") is None:
        return warn("git", "no commit yet", "commit once: runs name their commit, `dvc exp run` needs one")
    if git(root, "ls-files", "--unmerged", "dvc.lock"):
        return fail("git", "dvc.lock has a merge conflict", "see docs/how-to/merge-conflict-in-dvc-lock.md")
    if git(root, "check-ignore", "dvc.lock"):
        return fail("git", "dvc.lock is ignored", "remove the rule that `git check-ignore -v dvc.lock` shows")
    changes = (git(root, "status", "--porcelain") or "").splitlines()
    if changes:
        return warn(
            "git",
            f"{len(changes)} files are not committed",
            "runs are tagged git.dirty; commit to repeat them",
        )
    return ok("git", f"clean, at {(git(root, 'rev-parse', '--short', 'HEAD') or '')}")


def _writable(file: Path) -> bool:
    return file.is_file() and os.access(file, os.W_OK)
