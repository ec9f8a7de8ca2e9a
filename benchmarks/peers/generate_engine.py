"""Multi-turn sampling as people write it: transformers `generate` once per turn, batched over the live episodes.

Each turn reads the whole conversation again, left padded to the longest one, and decodes until the slowest episode of
the batch has ended its turn. Prompts, parsing, tools and limits are those of the project's engine (`EpisodeRules`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from transformers import GenerationConfig

from benchmarks.peers.measure import Clock
from models.agent_format import CALL_CLOSE, RESPONSE_CLOSE
from models.config import AgentConfig
from models.encoding import picture_grid, picture_patches
from models.episode import Episode, EpisodeRules, finished
from models.policy import Policy
from models.rollout import RolloutRequest
from models.trajectory import Trajectory
from tools.executor import ToolExecutor


class GenerateEngine:
    """See `models.rollout.RolloutEngine`. `batch` episodes run together; the next ones start when all have ended."""

    def __init__(self, policy: Policy, executor: ToolExecutor, agent: AgentConfig, batch: int) -> None:
        self.policy, self.agent, self.batch = policy, agent, batch
        self.rules = EpisodeRules(policy.encoder, executor, agent, deadline_s=3600.0)
        self.acting = Clock()
        closing = [policy.encoder.text(tag) for tag in (CALL_CLOSE, RESPONSE_CLOSE)]
        if any(len(ids) != 1 for ids in closing):
            raise ValueError("the tokenizer cuts the closing tags: generate cannot stop at them")
        self._ends = [policy.encoder.im_end, *(ids[0] for ids in closing)]

    def sync(self, version: int) -> None:
        """Nothing is kept between turns, so there is nothing to forget."""

    @torch.inference_mode()
    def sample(
        self,
        requests: list[RolloutRequest],
        temperature: float,
        on_finished: Callable[[int], None] | None = None,
    ) -> list[Trajectory]:
        """See `RolloutEngine.sample`. Random numbers are torch's, so only greedy episodes equal the engine's."""
        self.policy.model.eval()
        done: list[Trajectory] = []
        for first in range(0, len(requests), self.batch):
            part = requests[first : first + self.batch]
            torch.manual_seed(part[0].seed % 2**63)
            done += self._together(part, temperature)
            if on_finished is not None:
                on_finished(len(done))
        return done

    def _together(self, requests: list[RolloutRequest], temperature: float) -> list[Trajectory]:
        encoder = self.policy.encoder
        live = [Episode.begin(i, r, encoder.prompt(r.prompt)) for i, r in enumerate(requests)]
        ended: dict[int, Trajectory] = {}
        while live:
            going_on = []
            for episode, turn in zip(live, self._turn(live, temperature), strict=True):
                for token in turn:
                    episode.tokens.append_sampled(token, 0.0)
                with self.acting.running():
                    closed = turn[-1] in self._ends
                    reason = self.rules.act(episode) if closed else None
                    reason = reason or self.rules.over_limits(episode)
                if reason is None:
                    going_on.append(episode)
                else:
                    ended[episode.index] = finished(episode, reason, 0, temperature)
            live = going_on
        return [ended[index] for index in range(len(requests))]

    def _turn(self, live: list[Episode], temperature: float) -> list[list[int]]:
        """The sampled ids of each episode's next turn, up to and with its end."""
        encoder, network = self.policy.encoder, self.policy.model.network
        width = max(len(episode.tokens.ids) for episode in live)
        ids = np.full((len(live), width), encoder.tokenizer.pad_token_id, dtype=np.int64)
        mask = np.zeros((len(live), width), dtype=np.int64)
        for line, episode in enumerate(live):
            own = episode.tokens.ids
            ids[line, width - len(own) :], mask[line, width - len(own) :] = own, 1
        pictures = [picture for episode in live for picture in episode.tokens.pictures]
        scale = encoder.image_scale
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        config = GenerationConfig(
            **(sampling if temperature > 0 else {"do_sample": False}),
            max_new_tokens=self.agent.max_tokens - min(len(episode.tokens.ids) for episode in live),
            eos_token_id=self._ends,
            pad_token_id=encoder.tokenizer.pad_token_id,
            suppress_tokens=encoder.forbidden,
        )
        prompt = torch.from_numpy(ids)
        output = network.generate(
            input_ids=prompt,
            attention_mask=torch.from_numpy(mask),
            pixel_values=torch.from_numpy(np.concatenate([picture_patches(p, scale) for p in pictures])),
            image_grid_thw=torch.tensor([picture_grid(p, scale) for p in pictures]),
            mm_token_type_ids=(prompt == encoder.image_pad).int(),
            generation_config=config,
        )[:, width:].tolist()
        return [
            cut_turn(line, self._ends, self.agent.max_tokens - len(episode.tokens.ids))
            for line, episode in zip(output, live, strict=True)
        ]


def cut_turn(ids: list[int], ends: list[int], room: int) -> list[int]:
    """A turn without the padding behind its end, and at most `room` tokens long."""
    stop = next((index for index, token in enumerate(ids) if token in ends), len(ids))
    return ids[: min(stop + 1, room)]
