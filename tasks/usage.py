"""What a run takes: time, processors, memory and tokens, and the load of the machine while it runs.

All of it is logged in the group `sys/`. MLflow's own sampler names its metrics `system/<name>`; here they are
`sys/<name>`, with the name kept, so that one group holds all that is about the machine.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

GROUP = "sys/"
# Totals over all attempts of a run. MLflow metrics, so that runs can be sorted and compared by them.
SECONDS, CPU_HOURS, GPU_HOURS = "sys/seconds", "sys/cpu_hours", "sys/gpu_hours"
PEAK_MEMORY = "sys/peak_memory_megabytes"
TOKENS, TOKENS_PER_SECOND = "sys/tokens", "sys/tokens_per_second"
# Metrics of a training step that say how many of the agent's tokens it trained on.
_TRAINED = ("sft/agent_tokens", "grpo/updated_tokens")


class Usage:
    """Counts from its making on. `earlier` are the totals of a run's earlier attempts (`totals`)."""

    def __init__(self, earlier: Mapping[str, float]) -> None:
        self._earlier = dict(earlier)
        self._began = time.monotonic()
        self._cpu_before = _cpu_seconds()
        self._tokens = 0.0

    def count_tokens(self, count: float) -> None:
        """Tokens that the agent wrote or was trained on."""
        self._tokens += count

    def watch(self, metrics: Mapping[str, float]) -> None:
        """Take the tokens out of a training step's metrics."""
        self._tokens += sum(metrics.get(name, 0.0) for name in _TRAINED)

    def totals(self, gpus: int) -> dict[str, float]:
        """The run's metrics by now; `gpus` are held all the time. Of tokens only if there were any."""
        seconds = time.monotonic() - self._began
        tokens = self._earlier.get(TOKENS, 0.0) + self._tokens
        found = {
            SECONDS: self._earlier.get(SECONDS, 0.0) + seconds,
            CPU_HOURS: self._earlier.get(CPU_HOURS, 0.0) + (_cpu_seconds() - self._cpu_before) / 3600,
            GPU_HOURS: self._earlier.get(GPU_HOURS, 0.0) + gpus * seconds / 3600,
            PEAK_MEMORY: max(self._earlier.get(PEAK_MEMORY, 0.0), peak_memory_mb()),
        }
        if tokens:
            found |= {TOKENS: tokens, TOKENS_PER_SECOND: tokens / max(found[SECONDS], 1e-3)}
        return found


def peak_memory_mb() -> float:
    """Largest resident memory of this process or of a finished child, in MB."""
    unit = 1 if sys.platform == "darwin" else 1024  # macOS reports bytes, Linux kilobytes
    peaks = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return max(peaks) * unit / 1e6


def start_monitor(
    run_id: str,
    uri: str,
    interval_s: float,
    first_step: int,
    publish: Callable[[dict[str, float], int], None],
) -> Any:
    """MLflow's sampler of CPU, memory, disk, network and GPU, started; `finish()` ends it.

    `publish(metrics, step)` gets each sample, named `sys/<MLflow's name>`; steps count samples from `first_step`.
    """
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

    class Monitor(SystemMetricsMonitor):
        """Hands its samples to the run's own buffer, which names and thins them."""

        def publish_metrics(self, metrics: dict[str, float]) -> None:
            publish({f"{GROUP}{name}": float(value) for name, value in metrics.items()}, self._logging_step)
            self._logging_step += 1
            for monitor in self.monitors:
                monitor.clear_metrics()

    monitor = Monitor(run_id, sampling_interval=interval_s, tracking_uri=uri)
    monitor._logging_step = first_step
    monitor.start()
    return monitor


def gpu_count(monitor: Any) -> int:
    """GPUs that the process holds: those of the machine, unless CUDA_VISIBLE_DEVICES names fewer."""
    found = max((getattr(each, "num_gpus", 0) for each in monitor.monitors), default=0)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (
        found if visible is None else min(found, len([name for name in visible.split(",") if name.strip()]))
    )


def _cpu_seconds() -> float:
    """Processor time of this process and of its finished children."""
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in spent)
