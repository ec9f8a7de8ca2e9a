"""The agent's format told to TRL: a processor whose template, stop tokens and parser give the very ids of our encoder.

TRL's tool loop cuts what follows a call at the tokenizer's end-of-sequence token. Here a turn ends with its closing
tag and no further token, so `</tool_call>` is that token.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from transformers import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from environments.base import Prompt
from models.agent_format import CALL_CLOSE, CALL_OPEN, OBS_CLOSE, OBS_OPEN, RESPONSE_CLOSE, RESPONSE_OPEN
from models.encoding import Encoder, picture_size, system_text
from tools.base import Picture

TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'assistant' -%}"
    "{%- if loop.index0 == 0 or messages[loop.index0 - 1].role in ('system', 'user') -%}"
    "{{ '<|im_start|>assistant\n' }}{%- endif -%}{{ body(message) }}"
    "{%- for call in message.tool_calls or [] -%}"
    + CALL_OPEN
    + "{{ call.function | tojson }}"
    + CALL_CLOSE
    + ""
    "{%- endfor -%}"
    "{%- elif message.role == 'tool' -%}" + OBS_OPEN + "{{ body(message) }}" + OBS_CLOSE + ""
    "{%- else -%}{{ '<|im_start|>' ~ message.role ~ '\n' ~ body(message) ~ '<|im_end|>\n' }}"
    "{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt and messages[-1].role == 'user' -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
BODY = (
    "{%- macro body(message) -%}{%- if message.content is string -%}{{ message.content }}{%- else -%}"
    "{%- for part in message.content or [] -%}"
    "{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>"
    "{%- else -%}{{ part.text }}{%- endif -%}{%- endfor -%}{%- endif -%}{%- endmacro -%}"
)
RESPONSE_TEMPLATE: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor_pattern": r"<\|im_start\|>assistant\n|</obs>",  # a turn starts behind what the tool said
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open": CALL_OPEN,
            "close": CALL_CLOSE,
            "repeats": True,
            "content": "json",
            "transform": {
                "type": "function",
                "function": {"name": "{content.name}", "arguments": "{content.params}"},
            },
        },
        "content": {"open": RESPONSE_OPEN, "close": RESPONSE_CLOSE, "content": "text"},
    },
}


class PictureProcessor(Qwen2_5_VLProcessor):
    """The library's processor without its video half, which needs torchvision.

    TRL 1.16 splits pictures by their grid and takes tensors for granted there, which the torchvision backend returns
    and the PIL one does not.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = super().__call__(*args, **kwargs)
        for name in ("pixel_values", "image_grid_thw"):
            if isinstance(output.get(name), np.ndarray):
                output[name] = torch.from_numpy(output[name])
        return output

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        return None if argument is None else super().check_argument_for_proper_class(argument_name, argument)


def processor(encoder: Encoder) -> PictureProcessor:
    """Tokenizer and picture processor as TRL wants them. Pictures must come in their final size."""
    tokenizer = copy.deepcopy(encoder.tokenizer)
    tokenizer.padding_side = "left"  # as TRL loads one itself
    tokenizer.eos_token = CALL_CLOSE
    tokenizer.response_template = RESPONSE_TEMPLATE
    return PictureProcessor(
        image_processor=Qwen2VLImageProcessorPil(
            size={"shortest_edge": 28 * 28, "longest_edge": 1024 * 28 * 28}
        ),
        tokenizer=tokenizer,
        video_processor=None,
        chat_template=BODY + TEMPLATE,
    )


def turn_ends(encoder: Encoder) -> list[int]:
    """Tokens that end a turn."""
    return [*encoder.text(CALL_CLOSE), *encoder.text(RESPONSE_CLOSE), encoder.im_end]


def messages(encoder: Encoder, prompt: Prompt) -> list[dict[str, str]]:
    """The prompt as a conversation; its picture travels beside it."""
    return [
        {"role": "system", "content": system_text(encoder.registry, encoder.agent, prompt.tools)},
        {"role": "user", "content": prompt.question},
    ]


def scaled(picture: Picture, scale: float) -> Any:
    """The picture as a PIL image in the size that the policy sees, shrunk as `models.encoding` does."""
    import cv2
    from PIL import Image

    height, width = picture_size(picture, scale)
    return Image.fromarray(cv2.resize(picture.decode(), (width, height), interpolation=cv2.INTER_AREA))
