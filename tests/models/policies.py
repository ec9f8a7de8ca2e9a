"""A tiny policy and prompts for tests: real Qwen2.5-VL code, random weights, real tools."""

from __future__ import annotations

import random
from itertools import islice

from environments.base import Prompt
from environments.vsp.expert import Demonstration, Kind, demonstrate
from environments.vsp.hypotheses import failures
from environments.vsp.prompts import BASE_TOOLS, VSP, Task, map_of
from models.config import AgentConfig, PolicyConfig, RolloutConfig
from models.demonstrations import demonstration_text
from models.policy import Policy, build_policy
from models.tokenizer import train_tokenizer
from models.transformers_engine import TransformersEngine
from tools.cache import ToolResultCache
from tools.executor import ToolExecutor
from tools.vsp import VSP_TOOLS, vsp_registry

SMALL = PolicyConfig(
    hidden_size=48,
    layers=2,
    heads=3,
    kv_heads=3,
    intermediate_size=64,
    vision_hidden_size=32,
    vision_depth=1,
    vocab_size=520,
)


def some_prompts(count: int, seed: int = 0, size: int = 4) -> list[Prompt]:
    """Verification and navigation prompts in turn, with and without ASTAR."""
    environment, rng = VSP(), random.Random(seed)
    return [
        environment.sample(
            rng,
            Task.NAVIGATION if index % 2 else Task.VERIFICATION,
            size,
            f"p{seed}-{index}",
            tools=VSP_TOOLS if index % 4 > 1 else BASE_TOOLS,
        )
        for index in range(count)
    ]


def some_demonstrations(count: int, seed: int = 0) -> list[Demonstration]:
    """Clean expert trajectories on those of `some_prompts` whose maps allow it."""
    executor = ToolExecutor(vsp_registry(), ToolResultCache(1000), 5.0)
    rng = random.Random(seed)
    easy = (
        prompt
        for prompt in some_prompts(4 * count, seed)
        if prompt.task is Task.VERIFICATION or failures(map_of(prompt)) == 0
    )
    return [demonstrate(prompt, Kind.CLEAN, executor, VSP(), rng) for prompt in islice(easy, count)]


def small_policy(seed: int = 0, agent: AgentConfig | None = None, config: PolicyConfig = SMALL) -> Policy:
    """A policy of 100 thousand random weights with a tokenizer trained on a few demonstrations."""
    registry = vsp_registry()
    texts = [demonstration_text(d, registry, AgentConfig()) for d in some_demonstrations(16)]
    return build_policy(
        config, agent or AgentConfig(), registry, train_tokenizer(texts, config.vocab_size), seed
    )


def engine_for(policy: Policy, cached: bool = True, **settings: object) -> TransformersEngine:
    """A rollout engine with its own tool cache (or none)."""
    executor = ToolExecutor(policy.encoder.registry, ToolResultCache(1000) if cached else None, 5.0)
    return TransformersEngine(
        policy, executor, policy.encoder.agent, RolloutConfig.model_validate({"slots": 8, **settings})
    )
