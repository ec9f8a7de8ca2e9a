"""From prompts, turns and observations to token ids: one encoder for SFT, rollouts and evaluation.

Every piece is tokenised on its own and appended, so the ids that the sampler saw are an exact prefix of the ids
that the trainer sees (trl#5224, verl#6501); nothing is decoded and tokenised again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import cv2
import numpy as np
from transformers import PreTrainedTokenizerBase

from environments.base import Prompt
from models.agent_format import OBS_CLOSE, OBS_OPEN, write_call, write_response
from models.config import AgentConfig
from models.tokenizer import IM_END, IM_START, IMAGE_PAD, VIDEO_PAD, VISION_END, VISION_START
from tools.base import Observation, Picture, ToolCall
from tools.registry import ToolRegistry

PATCH, MERGE, TEMPORAL = 14, 2, 2  # Qwen2.5-VL's vision patching
_MEAN = np.array([0.48145466, 0.4578275, 0.40821073], dtype=np.float32)
_STD = np.array([0.26862954, 0.26130258, 0.27577711], dtype=np.float32)


@dataclass
class Tokens:
    """A growing sequence: ids, which of them the agent wrote, their behaviour log-probs, and the pictures.

    `len(ids) == len(mask) == len(logprobs)` after every append, and each picture's placeholders are appended
    together with the picture (verl#4050: one without the other breaks the next step).
    """

    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)

    def append(self, ids: list[int], agent: bool, pictures: tuple[Picture, ...] = ()) -> None:
        """Append ids that all have the same author; log-probs are 0 where nothing was sampled."""
        self.ids += ids
        self.mask += [agent] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.pictures += pictures

    def append_sampled(self, token: int, logprob: float) -> None:
        self.ids.append(token)
        self.mask.append(True)
        self.logprobs.append(logprob)


class Encoder:
    """Turns the agent's texts and pictures into ids for one tokenizer."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        registry: ToolRegistry,
        agent: AgentConfig,
        image_scale: float,
    ) -> None:
        self.tokenizer = tokenizer
        self.registry = registry
        self.agent = agent
        self.image_scale = image_scale
        self.image_pad = token_id(tokenizer, IMAGE_PAD)
        self.vision_start, self.vision_end = (
            token_id(tokenizer, VISION_START),
            token_id(tokenizer, VISION_END),
        )
        self.im_end = token_id(tokenizer, IM_END)
        # Tokens that only the environment may write: a policy that samples one would break the image contract
        # or forge a role (multimodal-search-r1#20).
        self.forbidden = [self.image_pad, token_id(tokenizer, VIDEO_PAD), token_id(tokenizer, IM_START)]
        self.forbidden += [self.vision_start, self.vision_end]
        self._prompt_text: dict[tuple[str, ...], list[int]] = {}

    def text(self, text: str) -> list[int]:
        """Ids of a piece of text that this encoder's own markers may appear in."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: list[int]) -> str:
        """The text of ids, special tokens included."""
        text = self.tokenizer.decode(ids, skip_special_tokens=False)
        assert isinstance(text, str)  # one sequence in, one text out
        return text

    def picture_ids(self, picture: Picture) -> list[int]:
        """Placeholder ids of one picture, start and end markers included."""
        _, rows, columns = picture_grid(picture, self.image_scale)
        count = rows * columns // MERGE**2
        return [self.vision_start, *[self.image_pad] * count, self.vision_end]

    def prompt(self, prompt: Prompt) -> Tokens:
        """The conversation up to where the agent starts to write."""
        if prompt.tools not in self._prompt_text:
            head = f"{IM_START}system\n{system_text(self.registry, self.agent, prompt.tools)}{IM_END}\n{IM_START}user\n"
            self._prompt_text[prompt.tools] = self.text(head)
        tokens = Tokens()
        tokens.append(list(self._prompt_text[prompt.tools]), agent=False)
        for picture in prompt.pictures:
            tokens.append(self.picture_ids(picture), agent=False, pictures=(picture,))
        if "<" in prompt.question:
            raise ValueError(f"prompt {prompt.prompt_id}: the question holds '<', which could forge a marker")
        tokens.append(self.text(f"{prompt.question}{IM_END}\n{IM_START}assistant\n"), agent=False)
        return tokens

    def call(self, think: str, call: ToolCall) -> list[int]:
        return self.text(write_call(think, call))

    def response(self, think: str, response: str) -> list[int]:
        return [*self.text(write_response(think, response)), self.im_end]

    def observation(self, tool: str, observation: Observation) -> tuple[list[int], tuple[Picture, ...]]:
        """Ids of `<obs>…</obs>` and the pictures they hold (only of tools in `agent.observation_pictures`)."""
        # An error message may echo what the policy wrote: escaped, it can neither close the tag nor forge a token.
        payload = observation.to_json().replace("<", "\\u003c")
        if observation.picture is None or tool not in self.agent.observation_pictures:
            return self.text(f"{OBS_OPEN}{payload}{OBS_CLOSE}"), ()
        ids = self.text(f"{OBS_OPEN}{payload}")
        ids += [*self.picture_ids(observation.picture), *self.text(OBS_CLOSE)]
        return ids, (observation.picture,)


def token_id(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    """The id of a token that must be in the vocabulary. Raises ValueError."""
    token = tokenizer.convert_tokens_to_ids(text)
    if not isinstance(token, int) or token == tokenizer.unk_token_id:
        raise ValueError(f"the tokenizer has no token {text!r}: a Qwen2.5-VL tokenizer is needed")
    return token


def system_text(registry: ToolRegistry, agent: AgentConfig, tools: tuple[str, ...]) -> str:
    """The system message: the format and the offered tools, as signatures or as JSON schema."""
    if not tools:
        return "Answer in response tags."
    if agent.tool_prompt == "signature":
        return f"Think, call a tool, or answer. Tools:\n{registry.signatures(tools)}"
    schemas = "\n".join(json.dumps(schema) for schema in registry.json_schemas(tools))
    return (
        "You plan with tools. In each turn write <think>your reasoning</think>, then either one call "
        '<tool_call>{"name": ..., "params": {...}}</tool_call> or <response>the answer</response>. '
        "The result of a call follows in obs tags. Coordinates are pixels, origin top left. "
        f"Paths are words of the moves L, R, U and D. Tools:\n{schemas}"
    )


def picture_size(picture: Picture, scale: float) -> tuple[int, int]:
    """(height, width) in pixels after scaling, each a multiple of 28 and at least 28."""
    width, height = picture.size
    unit = PATCH * MERGE
    return max(unit, round(height * scale / unit) * unit), max(unit, round(width * scale / unit) * unit)


def picture_grid(picture: Picture, scale: float) -> tuple[int, int, int]:
    """(1, rows, columns) of 14-pixel patches: one row of Qwen2.5-VL's `image_grid_thw`."""
    height, width = picture_size(picture, scale)
    return 1, height // PATCH, width // PATCH


def picture_patches(picture: Picture, scale: float) -> np.ndarray:
    """Patches as Qwen2VLImageProcessor makes them: float32 of shape (rows * columns, 3 * 2 * 14 * 14).

    Written in numpy because the library's processor needs torchvision or 20 times the time for small pictures;
    `tests/models/test_encoding.py` holds it equal to the library's PIL processor.
    """
    height, width = picture_size(picture, scale)
    rgb = picture.decode()
    if rgb.shape[:2] != (height, width):
        rgb = cv2.resize(rgb, (width, height), interpolation=cv2.INTER_AREA)
    pixels = (rgb.astype(np.float32) / 255.0 - _MEAN) / _STD
    rows, columns = height // PATCH, width // PATCH
    blocks = pixels.reshape(rows // MERGE, MERGE, PATCH, columns // MERGE, MERGE, PATCH, 3)
    blocks = blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, 3, 1, PATCH, PATCH)
    return np.repeat(blocks, TEMPORAL, axis=2).reshape(rows * columns, -1)


def rope_positions(ids: np.ndarray, grids: list[tuple[int, int, int]], image_pad: int) -> np.ndarray:
    """Qwen2.5-VL's three position rows (time, height, width) for one unpadded sequence: int64 (3, len(ids)).

    Text advances all rows by one; a picture of r×c merged patches takes a grid from the current position and
    advances by max(r, c). Raises ValueError when placeholders and grids disagree (verl#3708, #3469).
    """
    positions = np.zeros((3, len(ids)), dtype=np.int64)
    is_pad = ids == image_pad
    current, index, grid_index = 0, 0, 0
    while index < len(ids):
        if not is_pad[index]:
            following = np.flatnonzero(is_pad[index:])
            end = index + (int(following[0]) if len(following) else len(ids) - index)
            positions[:, index:end] = np.arange(end - index) + current
            current += end - index
            index = end
            continue
        if grid_index == len(grids):
            raise ValueError(
                f"image placeholders at token {index} have no picture: {len(grids)} pictures given"
            )
        _, rows, columns = grids[grid_index]
        rows, columns = rows // MERGE, columns // MERGE
        end = index + rows * columns
        if end > len(ids) or not is_pad[index:end].all():
            raise ValueError(f"picture {grid_index} needs {rows * columns} placeholders at token {index}")
        positions[0, index:end] = current
        positions[1, index:end] = current + np.repeat(np.arange(rows), columns)
        positions[2, index:end] = current + np.tile(np.arange(columns), rows)
        current += max(rows, columns)
        index = end
        grid_index += 1
    if grid_index != len(grids):
        raise ValueError(f"{len(grids)} pictures but placeholders for {grid_index}")
    return positions
