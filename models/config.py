"""Typed settings of everything that learns or samples. `tasks.params` reads them from params.yaml + profile."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Settings(BaseModel):
    """Base of every settings block: a key that is not declared is an error, values do not change later."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class PolicyConfig(Settings):
    """Which Qwen2.5-VL to train: a tiny one from these sizes, or a checkpoint by path or hub name."""

    checkpoint: str | None = Field(
        None, description="folder or hub name of a Qwen2.5-VL; null builds the tiny policy"
    )
    hidden_size: int = Field(128, ge=16, description="width of the language model")
    layers: int = Field(4, ge=1)
    heads: int = Field(4, ge=1)
    kv_heads: int = Field(2, ge=1)
    intermediate_size: int = Field(384, ge=16)
    vision_hidden_size: int = Field(64, ge=16)
    vision_depth: int = Field(2, ge=1)
    vocab_size: int = Field(1024, ge=320, description="size of the BPE vocabulary trained on the cold start")
    image_scale: float = Field(
        0.4375, gt=0, le=1, description="pictures are shrunk by this before patching; 28/64"
    )
    dtype: Literal["float32", "bfloat16"] = "float32"
    lora_rank: int = Field(0, ge=0, description="0 trains all weights, otherwise a LoRA adapter of this rank")

    @model_validator(mode="after")
    def _divisible(self) -> PolicyConfig:
        if self.hidden_size % self.heads or self.heads % self.kv_heads:
            raise ValueError(
                f"policy: hidden_size {self.hidden_size} must divide by heads {self.heads}, "
                f"and heads by kv_heads {self.kv_heads}"
            )
        return self


class AgentConfig(Settings):
    """The agent's limits and how tools are described to it."""

    tool_prompt: Literal["signature", "schema"] = Field(
        "signature", description="one line per tool, or JSON schema"
    )
    observation_pictures: tuple[str, ...] = Field(
        ("CROP",), description="tools whose picture enters the context"
    )
    max_turns: int = Field(12, ge=1)
    max_tokens: int = Field(768, ge=64, description="prompt and episode together")
    prune: Literal["never", "fatal", "strict"] = Field(
        "never", description="end an episode that its environment calls hopeless"
    )


class RolloutConfig(Settings):
    """How episodes are sampled."""

    engine: Literal["transformers", "vllm"] = "transformers"
    slots: int = Field(64, ge=1, description="sequences decoded together")
    cached_results: int = Field(
        50_000, ge=1, description="tool results kept, the least recently used leave first"
    )
    gpu_memory_utilization: float = Field(0.4, gt=0, lt=1, description="share of the GPU that vLLM takes")
    call_deadline_s: float = Field(5.0, gt=0)
    episode_deadline_s: float = Field(300.0, gt=0)
    overlap_tools: bool = Field(False, description="tool calls run beside the sampling")
    draft_tokens: int = Field(3, ge=0, description="tokens guessed ahead and read in the same pass; 0: none")


class SFTConfig(Settings):
    """Supervised fine-tuning on the cold start (S1 §5.2: lr 1e-5, batch 2, 3 epochs, context 512→8192)."""

    lr: float = Field(..., gt=0)
    warmup_ratio: float = Field(0.05, ge=0, le=1)
    weight_decay: float = Field(0.01, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    epochs: float = Field(1.0, gt=0, description="passes over the cold start, may be a fraction")
    token_budget: int | None = Field(
        None, ge=1, description="stop after this many tokens, if sooner than epochs"
    )
    micro_batch_tokens: int = Field(8192, ge=64, description="tokens of one micro-batch")
    gradient_accumulation: int = Field(1, ge=1)
    context_schedule: tuple[int, ...] = Field(
        (256, 512), description="context windows, equal shares of the steps"
    )
    zero_stage: Literal[0, 1, 2, 3] = 0
    processes: int = Field(1, ge=1, description="training processes, one per GPU")
    train_on_mistakes: bool = Field(False, description="whether tokens of steps corrected later carry loss")
    checkpoint_every: int = Field(100, ge=1, description="optimizer steps between resumable checkpoints")
    eval_every: int = Field(100, ge=1)


class RewardConfig(Settings):
    """Weights of the reward components (S1 §2.2, §5.3; S2 §3.2); see `models.rewards`.

    R = R_format · (λ_tool·R_tool + λ_acc·R_acc), scaled to [0, 1]; the other components are shares of that.
    """

    lambda_tool: float = Field(2.0, ge=0)
    lambda_acc: float = Field(1.0, ge=0)
    utilisation: float = Field(0.0, ge=0, le=0.5, description="bonus where results of calls are used later")
    turning_points: float = Field(0.0, ge=0, le=0.5, description="bonus for the call that settles the answer")
    exploration: float = Field(0.0, ge=0, le=0.5, description="bonus for using different tools")
    shaping: float = Field(
        0.0, ge=0, le=1, description="weight of the potential between turns; acts with advantage: gae only"
    )
    repeats: float = Field(0.0, ge=0, le=0.5, description="cost of identical calls, growing with each one")
    step_cost: float = Field(0.0, ge=0, le=0.05, description="cost of each tool call")
    cost_on_failures: bool = Field(
        False, description="whether costs also lower the reward of episodes that failed"
    )
    adaptive: bool = Field(False, description="whether weights follow the rules of models.adaptive_weights")

    @model_validator(mode="after")
    def _some_weight(self) -> RewardConfig:
        if self.lambda_tool + self.lambda_acc <= 0:
            raise ValueError("reward: lambda_tool and lambda_acc are both 0, so every reward would be 0")
        return self


class Schedule(Settings):
    """A value that moves linearly from start to end over the run (S1 §2.1, curriculum)."""

    start: float
    end: float

    def at(self, progress: float) -> float:
        """Value at `progress` in [0, 1]."""
        return self.start + (self.end - self.start) * min(max(progress, 0.0), 1.0)


class KLConfig(Settings):
    """How β follows the KL to the reference; see `models.kl_control`."""

    control: Literal["schedule", "target"] = Field(
        "schedule", description="schedule: β = kl_beta; target: β moves so that the KL stays at the target"
    )
    target: float = Field(0.05, gt=0, description="KL per token that the controller aims at")
    floor: float = Field(0.001, ge=0, description="β never falls below this")
    threshold: float = Field(
        0.0, ge=0, description="while the KL per token is below this, β is the floor (S1 §5.3: 0.05)"
    )
    cross_tool: float = Field(
        0.0, ge=0, description="extra weight of the KL on turns that join results of several tools (S1 §4.2)"
    )


class ReplayConfig(Settings):
    """The rollout cache (S2 §3.1, §4.2); see `models.replay`."""

    capacity: int = Field(2000, ge=0, description="trajectories kept")
    memory_mb: int = Field(300, ge=1, description="groups beyond this much memory are kept on disk")
    warmup: int = Field(0, ge=0, description="trajectories stored before any is replayed")
    update_frequency: int = Field(1, ge=1, description="steps from one replay to the next")
    replayed_groups: int = Field(2, ge=0, description="groups replayed beside the fresh ones")
    priority_exponent: float = Field(0.6, ge=0, le=1)
    importance_exponent: float = Field(
        0.4, ge=0, le=1, description="how far priority sampling is corrected by weights; 1 is wholly"
    )
    max_age: int = Field(8, ge=0, description="policy versions after which a group is dropped")
    max_divergence: float = Field(
        1.0, gt=0, description="mean |log-ratio| per token to the policy above which a group is dropped"
    )
    importance_weights: bool = Field(True, description="false: stale tokens count as if fresh (ablation)")
    success_capacity: int = Field(500, ge=0, description="solved trajectories kept for prompts asked again")
    revisit_share: float = Field(0.0, ge=0, le=1, description="share of prompts that were not solved before")
    exploration_every: int = Field(0, ge=0, description="steps between exploration rollouts; 0: never")
    exploration_groups: int = Field(2, ge=0, description="prompts of such a step that are explored")
    exploration_temperature: float = Field(1.3, gt=0)
    prefill: str | None = Field(
        None, description="rollouts of an earlier run to begin with: a folder, or null"
    )
    prefill_demonstrations: int = Field(0, ge=0, description="expert trajectories to begin with")


class CurriculumConfig(Settings):
    """What N, ε, β and the map sizes follow."""

    by: Literal["steps", "success"] = Field(
        "steps", description="steps: the share of steps done; success: grows while prompts are solved"
    )
    success: float = Field(0.7, gt=0, le=1, description="share of solved rollouts from which it moves on")
    hardest_of: Schedule = Field(
        Schedule(start=1, end=1),
        description="maps drawn for a question without ASTAR, of which the one with the longest search is asked",
    )


class GuardConfig(Settings):
    """When a run counts as diverged and what then happens (S1 §5.3, S2 §5.1); see `models.guards`."""

    rollback: bool = Field(True, description="go back to the best checkpoint on divergence, and end with it")
    max_drop: float = Field(0.1, gt=0, le=1, description="fall of validation success below its best")
    max_kl: float = Field(1.0, gt=0, description="KL per token")
    lr_factor: float = Field(
        0.5, gt=0, le=1, description="learning rate after a rollback, relative to before"
    )
    policy_pool: int = Field(1, ge=1, description="earlier policies that serve as KL reference, SFT included")
    pool_every: int = Field(20, ge=1, description="steps between policies that enter the pool")
    diversity_prompts: int = Field(16, ge=0, description="validation prompts on which plans are compared")
    diversity_samples: int = Field(4, ge=2, description="sampled plans of each")


class CriticConfig(Settings):
    """The value head of `advantage: gae` (S1 §5.2: critic lr 1e-5; S2 §4.2: γ 0.99, λ 0.95, clip 0.2)."""

    lr: float = Field(1e-3, gt=0)
    gamma: float = Field(0.99, gt=0, le=1, description="discount per turn")
    lam: float = Field(0.95, ge=0, le=1, description="λ of the generalised advantage estimate")
    value_clip: float = Field(0.2, gt=0)
    weight: float = Field(0.5, gt=0, description="of the value loss in the whole loss")


class GRPOConfig(Settings):
    """The online loop (S1 §2.1, §5.2; S2 §3, §4)."""

    steps: int = Field(..., ge=1)
    prompts_per_step: int = Field(12, ge=1)
    advantage: Literal["group", "global", "dynamic", "turn", "gae"] = Field(
        "group", description="what a reward is compared with; see models.advantages"
    )
    group_size: Schedule = Field(Schedule(start=5, end=32), description="N, trajectories per prompt")
    clip_epsilon: Schedule = Schedule(start=0.3, end=0.1)
    clip_high: float = Field(1.0, ge=1, description="upper ε as a multiple of the lower (DAPO: 1.4)")
    dual_clip: float | None = Field(
        None, gt=1, description="bound of the ratio for bad tokens (dual-clip PPO: 3)"
    )
    kl_beta: Schedule = Schedule(start=0.1, end=0.5)
    kl: KLConfig = KLConfig()
    entropy_bonus: float = Field(0.0, ge=0)
    lr: float = Field(..., gt=0)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    passes: int = Field(1, ge=1, description="optimizer passes over each step's trajectories")
    minibatches: int = Field(1, ge=1, description="optimizer steps per pass")
    temperature: float = Field(1.0, gt=0)
    std_floor: float = Field(
        0.05, gt=0, description="floor under the group's reward std, in units of the largest reward"
    )
    is_cap: float = Field(
        2.0, ge=1, description="cap of the token-level importance weight of replayed tokens"
    )
    micro_batch_tokens: int = Field(8192, ge=64)
    zero_stage: Literal[0, 1, 2, 3] = 0
    replay: ReplayConfig = ReplayConfig()
    curriculum: CurriculumConfig = CurriculumConfig()
    guards: GuardConfig = GuardConfig()
    critic: CriticConfig = CriticConfig()
    sizes: tuple[int, ...] = (4, 6, 8)
    navigation_share: float = Field(0.7, ge=0, le=1)
    astar_share: float = Field(0.25, ge=0, le=1, description="share of navigation prompts that offer ASTAR")
    validation_items: int = Field(120, ge=1)
    eval_every: int = Field(10, ge=1)
    checkpoint_every: int = Field(5, ge=1)
    validation_traces: int = Field(4, ge=0, description="validation episodes stored as traces at evaluations")
