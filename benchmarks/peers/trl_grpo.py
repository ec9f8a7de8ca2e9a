"""TRL's GRPOTrainer on the project's policy, prompts and tools, driven step by step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import Qwen2_5_VLForConditionalGeneration as QwenVL
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.peers.measure import Clock
from benchmarks.peers.trl_format import messages, processor, scaled, turn_ends
from environments.base import Prompt
from models.encoding import Encoder
from tasks.params import Params
from tools.base import Observation, ToolCall
from tools.executor import ToolExecutor


@dataclass(frozen=True)
class TRLStep:
    """What one step of the trainer took."""

    seconds: float
    rollout_seconds: float
    tool_seconds: float
    sampled_tokens: int
    trained_tokens: int
    episodes: int
    calls: int
    success: float


class Desk:
    """What the trainer's environments share: the questions, the executor, and the counts of the current step."""

    def __init__(self, prompts: Sequence[Prompt], executor: ToolExecutor) -> None:
        self.prompts, self.executor = prompts, executor
        self.acting = Clock()
        self.calls = 0


def environment_class(desk: Desk) -> type:
    """An environment of TRL: an instance per rollout, its public methods are the tools."""

    class Environment:
        def reset(self, number: int, **row: Any) -> None:
            """Take up a question.

            Args:
                number: index of the question.
            """
            self._prompt = desk.prompts[number]

        def POINT(self, target: str) -> Any:
            """Finds the start, the goal or all holes.

            Args:
                target: start, goal or holes.
            """
            return self._call("POINT", target=target)

        def DRAW2DPATH(
            self,
            points: list[list[int]] | None = None,
            start: list[int] | None = None,
            directions: str | None = None,
        ) -> Any:
            """Draws a path and says whether it is safe.

            Args:
                points: pixels of the corners.
                start: pixel of the first cell.
                directions: moves.
            """
            return self._call("DRAW2DPATH", points=points, start=start, directions=directions)

        def CROP(self, box: list[int]) -> Any:
            """Cuts out a part of the picture.

            Args:
                box: left, top, right and bottom pixel.
            """
            return self._call("CROP", box=box)

        def ASTAR(self, start: list[int], goal: list[int], obstacles: list[list[int]] | None = None) -> Any:
            """Finds a shortest safe path.

            Args:
                start: pixel of the first cell.
                goal: pixel of the last cell.
                obstacles: pixels of cells to avoid.
            """
            return self._call("ASTAR", start=start, goal=goal, obstacles=obstacles)

        def _call(self, tool: str, **params: Any) -> str:
            given = {name: value for name, value in params.items() if value is not None}
            with desk.acting.running():
                desk.calls += 1
                seen = desk.executor.run(ToolCall(tool, given), self._prompt.pictures[0], self._prompt.tools)
                return told(seen)

    return Environment


def told(observation: Observation) -> str:
    """The text between the obs tags, as `Encoder.observation` writes it."""
    return observation.to_json().replace("<", "\\u003c")


class _Timed(GRPOTrainer):
    """The trainer itself, with a stop-watch around its rollouts."""

    rolling = Clock()
    sampled = 0
    trained = 0

    def _generate(self, prompts: list[Any]) -> Any:
        with self.rolling.running():
            output = super()._generate(prompts)
        self.sampled = sum(sum(mask) for mask in output[2])
        return output


class _OnStep(TrainerCallback):
    """Calls back after every step with its seconds; the caller's own work counts for neither side."""

    def __init__(self, finished: Callable[[int, float], None]) -> None:
        self._finished, self._began = finished, 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._finished(state.global_step - 1, time.perf_counter() - self._began)
        self._began = time.perf_counter()


def build(
    folder: Path,
    steps: Sequence[Sequence[Prompt]],
    encoder: Encoder,
    executor: ToolExecutor,
    grade: Callable[[Prompt, str], bool],
    params: Params,
    group: int,
    batch: int,
    on_step: Callable[[int, TRLStep], None],
    scratch: Path,
) -> GRPOTrainer:
    """A trainer that trains on `steps[k]` in step k and then calls `on_step(k, facts)`.

    Build it before any DeepSpeed engine: with one in the process, accelerate wraps TRL's model for several ranks.

    Everything that costs time without need is off: gradient checkpointing, bf16, logging, saving. `batch` sequences
    go through the network together; gradients add up to one optimizer step over all `group` × prompts episodes.
    """
    prompts = [prompt for step in steps for prompt in step]
    desk = Desk(prompts, executor)
    model = QwenVL.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = turn_ends(encoder)
    success: list[float] = []

    def correct(completions: list[Any], number: list[int], **row: Any) -> list[float]:
        answers = [turns[-1].get("content") or "" for turns in completions]
        right = [float(grade(prompts[i], answer)) for i, answer in zip(number, answers, strict=True)]
        success.append(sum(right) / len(right))
        return right

    rows = Dataset.from_list(
        [{"prompt": messages(encoder, p), "number": i} for i, p in enumerate(prompts)]
    ).add_column("image", [_png(scaled(p.pictures[0], encoder.image_scale)) for p in prompts])
    from datasets import Image

    rows = rows.cast_column("image", Image())
    episodes = len(steps[0]) * group
    settings = GRPOConfig(
        output_dir=str(scratch),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        shuffle_dataset=False,
        max_steps=len(steps),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=episodes // batch,
        num_generations=group,
        max_completion_length=params.agent.max_tokens - min(len(encoder.prompt(p).ids) for p in prompts),
        max_tool_calling_iterations=params.agent.max_turns - 1,
        temperature=params.grpo.temperature,
        beta=params.grpo.kl_beta.start,
        epsilon=params.grpo.clip_epsilon.start,
        learning_rate=params.grpo.lr,
        lr_scheduler_type="constant",
        weight_decay=params.grpo.weight_decay,
        max_grad_norm=params.grpo.max_grad_norm,
        generation_kwargs={"suppress_tokens": encoder.forbidden},
        seed=params.seed,
    )

    def finished(step: int, seconds: float) -> None:
        on_step(
            step,
            TRLStep(
                seconds,
                trainer.rolling.seconds,
                desk.acting.seconds,
                trainer.sampled,
                trainer.sampled,
                episodes,
                desk.calls,
                success[-1],
            ),
        )
        trainer.rolling.seconds, desk.acting.seconds, desk.calls = 0.0, 0.0, 0

    trainer = _Timed(
        model=model,
        args=settings,
        train_dataset=rows,
        processing_class=processor(encoder),
        reward_funcs=correct,
        environment_factory=environment_class(desk),
        callbacks=[_OnStep(finished)],
    )
    return trainer


def _png(image: Any) -> dict[str, bytes]:
    import io

    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return {"bytes": buffer.getvalue()}
