"""The clipped GRPO objective on token log-probs (S1 §2.1), as pure functions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ObjectiveTerms:
    """Sums over tokens (scalars), to be divided by one global token count."""

    loss: Tensor  # with gradient
    policy: float
    kl: float
    clipped: float
    ratio_max: float


def grpo_objective(
    current: Tensor,
    behaviour: Tensor,
    old: Tensor,
    reference: Tensor,
    advantages: Tensor,
    *,
    clip_epsilon: float,
    kl_beta: float,
    is_cap: float,
) -> ObjectiveTerms:
    """Sum over tokens of −min(ρA, clip(ρ, 1−ε, 1+ε)A)·w + β·KL; all arguments have shape (tokens,).

    ρ = π/π_old is against the policy at the start of this update. w = min(π_old/μ, cap), without gradient, corrects
    for the behaviour policy μ that sampled a replayed trajectory (decoupled PPO; 1 for fresh ones). A token whose
    π_old/μ left [1/cap, cap] carries no policy gradient: importance weights alone do not keep stale data stable
    (tinker-cookbook#822).

    KL(π‖π_ref) uses the k2 estimator ½(log π − log π_ref)²: its gradient is that of the reverse KL on-policy, where
    k1 has none and k3 gives the forward KL (trl#4967, OpenRLHF#1309). Off-policy it is weighted by w too.
    """
    log_weight = (old - behaviour).detach()
    inside = (log_weight.abs() <= torch.log(torch.tensor(is_cap))).float()
    weight = log_weight.clamp(-20.0, 20.0).exp().clamp(max=is_cap)
    ratio = (current - old.detach()).clamp(-20.0, 20.0).exp()
    unclipped = ratio * advantages
    clipped = ratio.clamp(1.0 - clip_epsilon, 1.0 + clip_epsilon) * advantages
    policy = -(torch.minimum(unclipped, clipped) * weight * inside)
    kl = 0.5 * (current - reference.detach()) ** 2 * weight
    return ObjectiveTerms(
        loss=(policy + kl_beta * kl).sum(),
        policy=float(policy.detach().sum()),
        kl=float(kl.detach().sum()),
        clipped=float(((clipped < unclipped) & (advantages != 0)).float().sum()),
        ratio_max=float(ratio.detach().max()) if len(ratio) else 1.0,
    )
