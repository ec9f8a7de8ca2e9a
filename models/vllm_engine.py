"""Multi-turn sampling on vLLM, for machines with a GPU: the same episodes, turn by turn for all of them.

vLLM keeps the KV cache of shared prefixes itself (`enable_prefix_caching`), so each turn sends the whole id
sequence and only the new part is computed. vLLM is imported when the engine is built: it is an optional extra.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from models.agent_format import CALL_CLOSE, RESPONSE_CLOSE
from models.config import AgentConfig, PolicyConfig, RolloutConfig
from models.encoding import Encoder, picture_size
from models.episode import Episode, EpisodeRules, Hopeless, finished
from models.rollout import RolloutRequest
from models.trajectory import StopReason, Trajectory
from tools.base import Picture
from tools.executor import ToolExecutor


def start_vllm(folder: Path, policy: PolicyConfig, agent: AgentConfig, rollout: RolloutConfig) -> Any:
    """A vLLM `LLM` on a saved policy, with log-probs as the trainer computes them."""
    from vllm import LLM

    return LLM(
        model=str(folder),
        dtype=policy.dtype,
        max_model_len=agent.max_tokens,
        max_num_seqs=rollout.slots,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        enable_prefix_caching=True,
        # log-probs after temperature, or the ratio is off from the first token (trl#4159)
        logprobs_mode="processed_logprobs",
        limit_mm_per_prompt={"image": agent.max_turns + 1},
        # pictures arrive in their final size: the processor must not scale them again
        mm_processor_kwargs={"min_pixels": 28 * 28, "max_pixels": 4096 * 28 * 28},
    )


class VLLMEngine:
    """See `models.rollout.RolloutEngine`. `save_weights(folder)` writes the trainer's weights for `sync`."""

    def __init__(
        self,
        llm: Any,
        encoder: Encoder,
        executor: ToolExecutor,
        agent: AgentConfig,
        rollout: RolloutConfig,
        save_weights: Callable[[], Path],
        hopeless: Hopeless | None = None,
    ) -> None:
        self.llm, self.encoder, self.agent, self.save_weights = llm, encoder, agent, save_weights
        self.rules = EpisodeRules(encoder, executor, agent, rollout.episode_deadline_s, hopeless)
        self.version = 0

    def sync(self, version: int) -> None:
        """Load the trainer's weights, then drop the prefix and the picture caches of the old ones, in that order.

        Both caches survive a weight update and serve stale states (vllm#44910, verl#6523, trl#3024).
        """
        folder = self.save_weights()
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        self.llm.reset_prefix_cache()
        self.llm.llm_engine.reset_mm_cache()
        self.version = version

    def sample(
        self,
        requests: list[RolloutRequest],
        temperature: float,
        on_finished: Callable[[int], None] | None = None,
    ) -> list[Trajectory]:
        """See `RolloutEngine.sample`."""
        prompts = {r.prompt.prompt_id: self.encoder.prompt(r.prompt) for r in requests}
        running = [Episode.begin(i, r, prompts[r.prompt.prompt_id]) for i, r in enumerate(requests)]
        done: dict[int, Trajectory] = {}

        def end(episode: Episode, reason: StopReason) -> None:
            done[episode.index] = finished(episode, reason, self.version, temperature)
            if on_finished is not None:
                on_finished(len(done))

        for episode in running:
            if len(episode.tokens.ids) >= self.agent.max_tokens:
                end(episode, StopReason.MAX_TOKENS)
        running = [episode for episode in running if episode.index not in done]
        for episode in running:
            self.rules.force(episode)
        while running:
            outputs = self.llm.generate(
                [self._prompt(episode) for episode in running],
                [self._sampling(episode, temperature) for episode in running],
                use_tqdm=False,
            )
            still = []
            for episode, output in zip(running, outputs, strict=True):
                reason = self._take(episode, output.outputs[0])
                if reason is None:
                    still.append(episode)
                else:
                    end(episode, reason)
            running = still
        return [done[index] for index in range(len(requests))]

    def _prompt(self, episode: Episode) -> dict[str, Any]:
        """vLLM expands one placeholder per picture itself, so runs of them are collapsed to one."""
        ids, pad = episode.tokens.ids, self.encoder.image_pad
        collapsed = [t for i, t in enumerate(ids) if t != pad or ids[i - 1] != pad]
        pictures = [scaled_image(picture, self.encoder.image_scale) for picture in episode.tokens.pictures]
        return {"prompt_token_ids": collapsed, "multi_modal_data": {"image": pictures}}

    def _sampling(self, episode: Episode, temperature: float) -> Any:
        from vllm import SamplingParams

        turn = len(episode.steps)
        return SamplingParams(
            temperature=temperature,
            max_tokens=self.agent.max_tokens - len(episode.tokens.ids),
            logprobs=0,
            stop=[CALL_CLOSE, RESPONSE_CLOSE],
            include_stop_str_in_output=True,
            stop_token_ids=sorted(self.rules.turn_ends),
            skip_special_tokens=False,
            logit_bias=dict.fromkeys(self.encoder.forbidden, -100.0),
            seed=int(np.random.default_rng([episode.request.seed, turn]).integers(2**31)),
        )

    def _take(self, episode: Episode, output: Any) -> StopReason | None:
        """Append a sampled turn and act on it."""
        for token, entry in zip(output.token_ids, output.logprobs, strict=True):
            episode.tokens.append_sampled(token, entry[token].logprob)
        if output.finish_reason == "length":
            return StopReason.MAX_TOKENS  # a call cut by the limit is never run (hud-python#480)
        return self.rules.act(episode) or self.rules.over_limits(episode)


def scaled_image(picture: Picture, scale: float) -> Image.Image:
    """The picture in the size in which the policy sees it."""
    height, width = picture_size(picture, scale)
    image = Image.fromarray(picture.decode())
    return image if image.size == (width, height) else image.resize((width, height), Image.Resampling.BOX)
