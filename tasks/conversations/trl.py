"""What TRL's SFTTrainer reads for a vision-language model: columns messages, images and tools.

Calls are written out as text in the agent's format. For pictures SFTTrainer renders messages without the `tools`
column, and Qwen2.5-VL's chat template shows neither `tool_calls` nor tools: structured calls would vanish from
the training text without an error. So the tools stand in the system message. Content is plain text: the trainer
itself puts the picture before the question.
"""

from __future__ import annotations

import json

import pyarrow as pa

from environments.vsp.expert import Demonstration
from models.agent_format import OBS_CLOSE, OBS_OPEN, write_call
from models.config import AgentConfig
from models.encoding import system_text
from tasks.conversations.conversation import Record, response_text
from tools.registry import ToolRegistry

# The feature types in the words of the `datasets` library: with them load_dataset gives PIL images.
_TEXT = {"dtype": "string", "_type": "Value"}
_FEATURES = {
    "messages": {"feature": {"role": _TEXT, "content": _TEXT}, "_type": "List"},
    "images": {"feature": {"_type": "Image"}, "_type": "List"},
    "tools": _TEXT,
}
_MESSAGE = pa.struct([pa.field("role", pa.string()), pa.field("content", pa.string())])
_IMAGE = pa.struct([pa.field("bytes", pa.binary()), pa.field("path", pa.string())])
SCHEMA = pa.schema(
    [
        pa.field("messages", pa.list_(_MESSAGE)),
        pa.field("images", pa.list_(_IMAGE)),
        pa.field("tools", pa.string()),  # JSON: SFTTrainer parses it (its schemas have no common columns)
    ],
    metadata={"huggingface": json.dumps({"info": {"features": _FEATURES}})},
)


def write(demonstration: Demonstration, registry: ToolRegistry, agent: AgentConfig) -> Record:
    """A row of SCHEMA. Pictures in observations are left out: SFTTrainer fills no picture into a tool message."""
    prompt = demonstration.prompt
    system = system_text(registry, agent.model_copy(update={"tool_prompt": "schema"}), prompt.tools)
    messages = [{"role": "system", "content": system}, {"role": "user", "content": prompt.question}]
    for step in demonstration.steps:
        turn, observation = step.turn, step.observation
        if turn.call is None or observation is None:
            text = response_text(turn.think, turn.response or "")
            messages.append({"role": "assistant", "content": text})
            continue
        messages.append({"role": "assistant", "content": write_call(turn.think, turn.call)})
        messages.append({"role": "tool", "content": f"{OBS_OPEN}{observation.to_json()}{OBS_CLOSE}"})
    return {
        "messages": messages,
        "images": [{"bytes": picture.png, "path": None} for picture in prompt.pictures],
        "tools": json.dumps(registry.json_schemas(prompt.tools), ensure_ascii=False),
    }
