"""The clipped GRPO objective on token log-probs (S1 §2.1), as pure functions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Clip:
    """Bounds of the update: ratios in [1 − low, 1 + high]; `dual` bounds the loss of bad tokens from below."""

    low: float
    high: float
    dual: float | None = None


@dataclass(frozen=True)
class ObjectiveTerms:
    """Sums over tokens (scalars), to be divided by one global token count."""

    loss: Tensor  # with gradient
    policy: float
    kl: float
    clipped: float
    masked: float  # tokens outside the trust region
    weight: float  # sum of importance weights
    ratio_max: float


def grpo_objective(
    current: Tensor,
    behaviour: Tensor,
    old: Tensor,
    reference: Tensor,
    advantages: Tensor,
    *,
    clip: Clip,
    kl_beta: float,
    is_cap: float,
    kl_weights: Tensor | None = None,
) -> ObjectiveTerms:
    """Sum over tokens of −min(ρA, clip(ρ, 1−ε, 1+ε)A)·w + β·v·KL; all arguments have shape (tokens,).

    ρ = π/π_old is against the policy at the start of this update. w = min(π_old/μ, cap), without gradient, corrects
    for the behaviour policy μ that sampled a replayed trajectory (decoupled PPO; 1 for fresh ones). A token whose
    π_old/μ left [1/cap, cap] carries no policy gradient: importance weights alone do not keep stale data stable
    (tinker-cookbook#822). For A < 0 a dual clip keeps min(…) ≥ cA, so that one bad token with a large ratio cannot
    dominate (dual-clip PPO, arXiv 1912.09729).

    KL(π‖π_ref) uses the k2 estimator ½(log π − log π_ref)²: its gradient is that of the reverse KL on-policy, where
    k1 has none and k3 gives the forward KL (trl#4967, OpenRLHF#1309). Off-policy it is weighted by w too. v are
    optional weights of the KL per token (`kl_weights`, 1 where absent).
    """
    log_weight = (old - behaviour).detach()
    inside = (log_weight.abs() <= torch.log(torch.tensor(is_cap))).float()
    weight = log_weight.clamp(-20.0, 20.0).exp().clamp(max=is_cap)
    ratio = (current - old.detach()).clamp(-20.0, 20.0).exp()
    unclipped = ratio * advantages
    clipped = ratio.clamp(1.0 - clip.low, 1.0 + clip.high) * advantages
    surrogate = torch.minimum(unclipped, clipped)
    if clip.dual is not None:
        surrogate = torch.where(advantages < 0, torch.maximum(surrogate, clip.dual * advantages), surrogate)
    policy = -(surrogate * weight * inside)
    kl = 0.5 * (current - reference.detach()) ** 2 * weight
    weighted_kl = kl if kl_weights is None else kl * kl_weights
    return ObjectiveTerms(
        loss=(policy + kl_beta * weighted_kl).sum(),
        policy=float(policy.detach().sum()),
        kl=float(kl.detach().sum()),
        clipped=float(((clipped < unclipped) & (advantages != 0)).float().sum()),
        masked=float((1.0 - inside).sum()),
        weight=float(weight.sum()),
        ratio_max=float(ratio.detach().max()) if len(ratio) else 1.0,
    )


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, value_clip: float) -> Tensor:
    """Sum over tokens of ½·max((V − R)², (clip(V, V_old ± ε_v) − R)²); all arguments of shape (tokens,).

    The clipped value loss of PPO (S2 §4.2, value_clip_range): the critic moves at most ε_v per update.
    """
    near = old_values + (values - old_values).clamp(-value_clip, value_clip)
    return 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2).sum()
