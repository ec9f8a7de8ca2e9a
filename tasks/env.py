"""Environment variables that keep the stack local: no telemetry, no look-ups on the net, no window."""

from __future__ import annotations

import os


def offline_environment() -> dict[str, str]:
    """Defaults for the pipeline's processes; a variable that the user has set keeps the user's value.

    MLflow compares DO_NOT_TRACK with the word "true", Prefect takes either spelling.
    """
    defaults = {
        "DO_NOT_TRACK": "true",
        "DVC_NO_ANALYTICS": "1",
        "GX_ANALYTICS_ENABLED": "false",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
        "RAY_USAGE_STATS_ENABLED": "0",
        "SDL_VIDEODRIVER": "dummy",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return {name: os.environ.get(name, value) for name, value in defaults.items()}


if __name__ == "__main__":  # for the Makefile: env $(python -m tasks.env) command
    print(" ".join(f"{name}={value}" for name, value in offline_environment().items()))
