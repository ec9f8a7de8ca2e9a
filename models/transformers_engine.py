"""Multi-turn sampling on transformers: slots that keep their KV cache between turns, one pass for all of them.

Each loop reads the waiting prompts and observations into their rows (a few wide passes), then extends every
running sequence by a token, or by several where a guess of them proves right (one narrow pass, `models.drafts`). A
sequence that ends frees its row for the next request.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from models.agent_format import CALL_CLOSE, RESPONSE_CLOSE
from models.config import AgentConfig, RolloutConfig
from models.drafts import Drafts
from models.encoding import Tokens, picture_grid, picture_patches, rope_positions
from models.episode import Episode, EpisodeRules, Hopeless, finished, returned
from models.policy import Policy
from models.rollout import RolloutRequest
from models.slot_cache import SlotCache
from models.trajectory import StopReason, Trajectory
from tools.base import Picture
from tools.executor import ToolExecutor

TOOL_THREADS = 16  # calls that run beside the sampling


@dataclass
class _Running:
    """An episode in a row of the KV cache."""

    episode: Episode
    draws: np.ndarray  # one uniform number per token it may ever sample
    row: int
    read: int = 0  # tokens already in the row
    position: int = 0  # next rotary position
    learned: int = 0  # tokens that the drafts have taken in

    @property
    def waiting(self) -> int:
        """Tokens to be read into the row; 0 while a call is running: the row rests until it has ended."""
        return len(self.episode.tokens.ids) - self.read if self.episode.calling is None else 0


class TransformersEngine:
    """See `models.rollout.RolloutEngine`. Shares the trainer's weights, so syncing them costs nothing."""

    def __init__(
        self,
        policy: Policy,
        executor: ToolExecutor,
        agent: AgentConfig,
        rollout: RolloutConfig,
        hopeless: Hopeless | None = None,
    ) -> None:
        self.policy, self.agent, self.slots = policy, agent, rollout.slots
        self.rules = EpisodeRules(policy.encoder, executor, agent, rollout.episode_deadline_s, hopeless)
        self.overlap_tools, self.draft_tokens = rollout.overlap_tools, rollout.draft_tokens
        self.version = 0
        self._features: dict[str, Tensor] = {}
        self._cache: SlotCache | None = None
        closing = [policy.encoder.text(tag) for tag in (CALL_CLOSE, RESPONSE_CLOSE)]
        # transformers 5.24 renamed the parameter, 5.19 (which vLLM 0.32 needs) has the old name only
        forward = inspect.signature(policy.model.network.model.language_model.forward).parameters
        self._cache_name = "cache" if "cache" in forward else "past_key_values"
        # where the closing tags are single tokens, the end of a turn is seen without decoding
        self._closing = {ids[0] for ids in closing} if all(len(ids) == 1 for ids in closing) else None

    def sync(self, version: int) -> None:
        """Forget picture features of the old weights (vllm#44910: a stale encoder cache goes unnoticed)."""
        self.version = version
        self._features.clear()

    @torch.inference_mode()
    def sample(
        self,
        requests: list[RolloutRequest],
        temperature: float,
        on_finished: Callable[[int], None] | None = None,
    ) -> list[Trajectory]:
        """See `RolloutEngine.sample`."""
        was_training = self.policy.model.training
        self.policy.model.eval()
        waiting = deque(enumerate(requests))
        done: dict[int, Trajectory] = {}
        slots = min(self.slots, len(requests))
        cache, drafts = self._cache_of(slots), Drafts()
        free = list(range(slots - 1, -1, -1))
        running: dict[int, _Running] = {}

        def end(episode: Episode, reason: StopReason) -> None:
            done[episode.index] = finished(episode, reason, self.version, temperature)
            if on_finished is not None:
                on_finished(len(done))

        with ThreadPoolExecutor(TOOL_THREADS, "tool call") as pool:
            while waiting or running:
                for episode in self._admit(waiting, free, running, cache):
                    end(episode, StopReason.MAX_TOKENS)
                to_read = [each for each in running.values() if each.waiting > 1]
                ready = sum(each.waiting == 1 for each in running.values())
                if to_read and (len(to_read) >= len(running) // 8 or ready <= len(running) // 2):
                    self._read(to_read, cache)
                extended = self._extend(running, cache, drafts, temperature)
                outcomes = [(each.row, self._advance(each.episode, pool)) for each in extended]
                calling = {row: each.episode for row, each in running.items() if each.episode.calling}
                back = returned(calling, block=not extended)
                outcomes += [(row, self.rules.resume(calling[row])) for row in back]
                for row, reason in outcomes:
                    if reason is not None:
                        end(running.pop(row).episode, reason)
                        free.append(row)
                if not waiting:
                    self._move_up(running, cache)
        self.policy.model.train(was_training)
        return [done[index] for index in range(len(requests))]

    def _advance(self, episode: Episode, pool: ThreadPoolExecutor) -> StopReason | None:
        """After a sampled token: end of turn? Then act. Returns why the episode is over, or None."""
        reason = None
        if self._turn_ends(episode):
            reason = self.rules.begin(episode, pool) if self.overlap_tools else self.rules.act(episode)
        return reason or (None if episode.calling else self.rules.over_limits(episode))

    def _turn_ends(self, episode: Episode) -> bool:
        last = episode.tokens.ids[-1]
        if last in self.rules.turn_ends:
            return True
        if self._closing is not None:
            return last in self._closing
        tail = self.policy.encoder.decode(episode.tokens.ids[episode.turn_start :][-16:])
        return CALL_CLOSE in tail or RESPONSE_CLOSE in tail

    # --- the network -------------------------------------------------------------------------------------

    def _cache_of(self, slots: int) -> SlotCache:
        """A cache with at least so many rows. In main memory, where the first touch of a page is what costs, it is kept
        for the next call; on a GPU the trainer needs the memory in between."""
        if self._cache is not None and self._cache.slots >= slots:
            return self._cache
        config = self.policy.model.network.config.get_text_config()
        like = self.policy.model.network.lm_head.weight
        cache = SlotCache(
            config.num_hidden_layers,
            slots,
            self.agent.max_tokens + 1,
            config.num_key_value_heads,
            config.hidden_size // config.num_attention_heads,
            like,
        )
        if like.device.type == "cpu":
            self._cache = cache
        return cache

    def _admit(
        self,
        waiting: deque[tuple[int, RolloutRequest]],
        free: list[int],
        running: dict[int, _Running],
        cache: SlotCache,
    ) -> list[Episode]:
        """Fill free rows, several at a time. The prompt of a group is read once and its row copied.

        Returns the episodes that need no row, because their prompt leaves no room for a single token.
        """
        if not waiting or not free or (running and len(free) < min(len(waiting), self.slots // 8)):
            return []
        too_long: list[Episode] = []
        admitted: dict[str, list[_Running]] = {}
        prompts: dict[str, Tokens] = {}
        while waiting and free:
            index, request = waiting.popleft()
            key = request.prompt.prompt_id
            if key not in prompts:
                prompts[key] = self.policy.encoder.prompt(request.prompt)
            episode = Episode.begin(index, request, prompts[key])
            if len(episode.tokens.ids) >= self.agent.max_tokens:
                too_long.append(episode)
                continue
            draws = np.random.default_rng(request.seed).random(self.agent.max_tokens + 1)
            each = _Running(episode, draws, free.pop(), learned=len(episode.tokens.ids))
            running[each.row] = each
            admitted.setdefault(key, []).append(each)
        if admitted:
            self._read([group[0] for group in admitted.values()], cache)
        for leader, *others in admitted.values():
            if others:
                cache.copy_row(leader.row, [other.row for other in others], leader.read)
            for other in others:
                other.read, other.position = leader.read, leader.position
            for each in (leader, *others):
                self.rules.force(each.episode)
        return too_long

    @staticmethod
    def _move_up(running: dict[int, _Running], cache: SlotCache) -> None:
        """Once nothing waits for a row: the running ones into the first rows, so that the freed cost nothing more."""
        gaps = (row for row in range(len(running)) if row not in running)
        for row in [row for row in running if row >= len(running)]:
            each = running.pop(row)
            each.row = next(gaps)
            cache.copy_row(row, [each.row], each.read)
            running[each.row] = each

    def _read(self, group: list[_Running], cache: SlotCache) -> None:
        """Read all but the last waiting token of each episode into its row (the last one is `_extend`'s)."""
        encoder = self.policy.encoder
        counts = [each.waiting - 1 for each in group]
        width = max(counts)
        ids = np.zeros((len(group), width), dtype=np.int64)
        cells = np.zeros((len(group), width), dtype=np.int64)
        positions = np.zeros((3, len(group), width), dtype=np.int64)
        pictures: list[Picture] = []
        for line, (each, count) in enumerate(zip(group, counts, strict=True)):
            tokens = each.episode.tokens
            new = np.array(tokens.ids[each.read : each.read + count])
            seen = tokens.ids[: each.read].count(encoder.vision_start)
            shown = tokens.pictures[seen : seen + int((new == encoder.vision_start).sum())]
            grids = [picture_grid(picture, encoder.image_scale) for picture in shown]
            rope = rope_positions(new, grids, encoder.image_pad) + each.position
            pictures += shown
            ids[line, :count] = new
            positions[:, line, :count] = rope
            # padding is written behind the row's last token, where the next token overwrites it
            cells[line] = np.minimum(each.read + np.arange(width), cache.capacity - 1)
            each.read += count
            each.position = int(rope.max()) + 1
        rows = self._tensor(np.array([each.row for each in group]))
        embeddings = self._embed(self._tensor(ids), pictures)
        self._forward(embeddings, self._tensor(positions), rows, self._tensor(cells), cache)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.policy.model.device)

    def _embed(self, ids: Tensor, pictures: list[Picture]) -> Tensor:
        model = self.policy.model
        embeddings = model.network.get_input_embeddings()(ids)
        if not pictures:
            return embeddings
        missing = {p.sha256: p for p in pictures if p.sha256 not in self._features}
        if missing:
            scale = self.policy.encoder.image_scale
            patches = self._tensor(np.concatenate([picture_patches(p, scale) for p in missing.values()]))
            grids = self._tensor(np.array([picture_grid(p, scale) for p in missing.values()]))
            outputs = model.network.model.get_image_features(
                patches.to(embeddings.dtype), grids
            ).pooler_output
            self._features.update(zip(missing, outputs, strict=True))
        features = torch.cat([self._features[picture.sha256] for picture in pictures])
        return embeddings.masked_scatter((ids == model.image_pad).unsqueeze(-1), features)

    def _forward(
        self, embeddings: Tensor, positions: Tensor, rows: Tensor, cells: Tensor, cache: SlotCache
    ) -> Tensor:
        mask = cache.select(rows, cells)
        return self.policy.model.network.model.language_model(
            inputs_embeds=embeddings, position_ids=positions, attention_mask=mask, **{self._cache_name: cache}
        ).last_hidden_state

    def _extend(
        self, running: dict[int, _Running], cache: SlotCache, drafts: Drafts, temperature: float
    ) -> list[_Running]:
        """Feed each ready episode its last token and a guess, and sample as far as the guess is right.

        Returns those episodes; each has at least one token more.
        """
        ready = [each for each in running.values() if each.waiting == 1]
        if not ready:
            return ready
        guesses = self._guesses(ready, drafts)
        # idle rows among the first ones compute too, which is cheaper than copying the cache of the others, unless
        # they are the most
        first = max(each.row for each in ready) + 1
        rows = list(range(first)) if len(ready) > first // 2 else [each.row for each in ready]
        line_of = {row: line for line, row in enumerate(rows)}
        lines = [line_of[each.row] for each in ready]
        width = 1 + max(map(len, guesses))
        ids, begin, positions = (np.zeros((len(rows), n), dtype=np.int64) for n in (width, 1, 1))
        for row in rows:
            if row in running:  # an idle row writes where its next real token will overwrite it
                begin[line_of[row]] = running[row].read
        for line, each, guess in zip(lines, ready, guesses, strict=True):
            ids[line, : 1 + len(guess)] = [each.episode.tokens.ids[-1], *guess]
            positions[line] = each.position
        cells = np.minimum(begin + np.arange(width), cache.capacity - 1)
        embeddings = self.policy.model.network.get_input_embeddings()(self._tensor(ids))
        rope = self._tensor(positions + np.arange(width)).expand(3, -1, -1)
        row_index = self._tensor(np.array(rows))
        hidden = self._forward(embeddings, rope, row_index, self._tensor(cells), cache)
        logits = self.policy.model.logits(hidden[lines].flatten(0, 1))
        tokens, logprobs = (
            t.unflatten(0, (-1, width)).tolist() for t in self._choose(ready, logits, temperature)
        )
        for each, guess, chosen, likely in zip(ready, guesses, tokens, logprobs, strict=True):
            for token, logprob, guessed in zip(chosen, likely, [*guess, None], strict=False):
                each.read += 1
                each.position += 1
                each.episode.tokens.append_sampled(token, logprob)
                # what comes after a wrong guess, or after the end of a turn, was read in vain
                if token != guessed or self._turn_ends(each.episode):
                    break
        return ready

    def _guesses(self, ready: list[_Running], drafts: Drafts) -> list[list[int]]:
        """The tokens that each episode may sample next; the last of its limit is never guessed."""
        guesses = []
        for each in ready:
            ids = each.episode.tokens.ids
            most = min(self.draft_tokens, self.agent.max_tokens - len(ids) - 1)
            if most > 0:
                drafts.learn(ids, each.learned)
                each.learned = len(ids)
            guesses.append(drafts.guess(ids, most))
        return guesses

    def _choose(self, ready: list[_Running], logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Tokens and their log-probs, by each episode's own random numbers: as many of each as `logits` has lines."""
        ahead = range(len(logits) // len(ready))
        last = self.agent.max_tokens  # beyond it nothing is kept
        draws = [each.draws[min(len(each.episode.tokens.ids) + n, last)] for each in ready for n in ahead]
        return sample_tokens(logits, self._tensor(np.array(draws)), temperature)


def sample_tokens(logits: Tensor, draws: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Tokens and their log-probs, both (B,), from logits (B, V) and uniform draws (B,) in [0, 1).

    Inverse-CDF sampling: the draw alone decides, so an episode does not depend on its neighbours in the batch.
    Temperature 0 takes the largest logit and reports its log-prob at temperature 1.
    """
    logprobs = log_softmax(logits / temperature if temperature > 0 else logits, dim=-1)
    if temperature > 0:
        cumulative = logprobs.double().exp().cumsum(-1)
        tokens = torch.searchsorted(cumulative, draws.unsqueeze(-1) * cumulative[:, -1:]).squeeze(-1)
        tokens = tokens.clamp(max=logits.shape[-1] - 1)
    else:
        tokens = logits.argmax(-1)
    return tokens, logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
