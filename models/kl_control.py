"""The coefficient β of the KL to the reference: a schedule or a controller, never below a floor."""

from __future__ import annotations

from models.config import KLConfig

_STEP = 0.2  # largest relative change of the controlled factor in one step


def next_factor(factor: float, kl: float, config: KLConfig) -> float:
    """The controller's factor on the scheduled β after a step with this KL per token.

    β is multiplied by 1 + clip(KL/target − 1, ±0.2): the proportional controller of Ziegler et al. (2019). verl's has
    no lower bound, so a long quiet phase drives β to 0; here the factor stays within [1e-3, 1e3] and `kl_beta` below
    keeps β above its floor. With `control: schedule` the factor stays 1.
    """
    if config.control == "schedule":
        return 1.0
    error = min(max(kl / config.target - 1.0, -_STEP), _STEP)
    return min(max(factor * (1.0 + error), 1e-3), 1e3)


def kl_beta(scheduled: float, factor: float, last_kl: float, config: KLConfig) -> float:
    """β of the next step. While the policy is within `threshold` of the reference, β is the floor.

    That is how S1 §5.3 ("a minimal KL threshold, such as 0.05") is read: a policy that has hardly moved needs no pull
    back, which would only keep it from improving; from the threshold on, the scheduled pull sets in.
    """
    if last_kl < config.threshold:
        return config.floor
    return max(scheduled * factor, config.floor)
