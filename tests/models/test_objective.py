"""The objective's gradients are those of the formulas."""

from __future__ import annotations

import torch

from models.objective import Clip, grpo_objective, value_loss


def _terms(current, behaviour, old, reference, advantages, **settings):  # type: ignore[no-untyped-def]
    defaults = {"clip": Clip(0.2, 0.2), "kl_beta": 0.0, "is_cap": 2.0}
    return grpo_objective(current, behaviour, old, reference, advantages, **{**defaults, **settings})


def test_kl_gradient_is_that_of_the_exact_reverse_kl() -> None:
    """trl#4967, OpenRLHF#1309: k1 has no expected gradient, k3 that of the forward KL."""
    logits = torch.tensor([0.5, -0.3, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-0.2, 0.4, 0.3], dtype=torch.float64).log_softmax(-1)
    exact = (logits.softmax(-1) * (logits.log_softmax(-1) - reference)).sum()
    (wanted,) = torch.autograd.grad(exact, logits)
    expected = torch.zeros(3, dtype=torch.float64)
    for token, probability in enumerate(logits.softmax(-1).tolist()):
        logprob = logits.log_softmax(-1)[token : token + 1]
        same = logprob.detach()
        terms = _terms(logprob, same, same, reference[token : token + 1], torch.zeros(1), kl_beta=1.0)
        expected += probability * torch.autograd.grad(terms.loss, logits)[0]
    torch.testing.assert_close(expected, wanted)


def test_ratio_is_one_for_identical_policies() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -0.1])
    terms = _terms(logprobs, logprobs, logprobs, logprobs, torch.tensor([1.0, -1.0, 2.0]))
    assert terms.ratio_max == 1.0
    assert terms.clipped == 0.0
    torch.testing.assert_close(terms.loss, torch.tensor(-2.0))


def test_replay_of_age_zero_equals_on_policy() -> None:
    current = torch.tensor([-1.0, -2.0], requires_grad=True)
    same = current.detach().clone()
    advantages = torch.tensor([1.0, -0.5])
    fresh = torch.autograd.grad(_terms(current, same, same, same, advantages).loss, current)[0]
    torch.testing.assert_close(fresh, -advantages)


def test_stale_tokens_outside_the_trust_region_do_not_push() -> None:
    """tinker-cookbook#822: unclipped importance weights on stale data blew up."""
    current = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    old = current.detach()
    behaviour = torch.tensor([-1.0, -6.0, -1.5])  # weight 1, 148 and 1.65
    terms = _terms(current, behaviour, old, old, torch.ones(3))
    gradient = torch.autograd.grad(terms.loss, current)[0]
    torch.testing.assert_close(gradient, torch.tensor([-1.0, 0.0, -1.6487]), atol=1e-3, rtol=0)


def test_clipping_stops_the_gradient_on_the_side_of_the_advantage_only() -> None:
    old = torch.zeros(2) - 1.0
    current = (old + 0.5).requires_grad_()  # ratio 1.65
    terms = _terms(current, old, old, old, torch.tensor([1.0, -1.0]))
    gradient = torch.autograd.grad(terms.loss, current)[0]
    assert gradient[0] == 0
    assert gradient[1] > 1
    assert terms.clipped == 1


def test_a_dual_clip_bounds_what_one_bad_token_can_do() -> None:
    """arXiv 1912.09729: with A < 0 the clipped objective has no bound as the ratio grows."""
    old = torch.zeros(2) - 3.0
    current = (old + 2.0).requires_grad_()  # ratio 7.4
    plain = _terms(current, old, old, old, torch.tensor([-1.0, 1.0]))
    bounded = _terms(current, old, old, old, torch.tensor([-1.0, 1.0]), clip=Clip(0.2, 0.2, dual=3.0))
    assert plain.policy > 5
    assert abs(bounded.policy - (3.0 - 1.2)) < 1e-5
    gradient = torch.autograd.grad(bounded.loss, current)[0]
    assert gradient.tolist() == [0.0, 0.0]


def test_a_higher_upper_bound_lets_rare_good_tokens_grow() -> None:
    """DAPO's clip-higher: only the side of positive advantages changes."""
    old = torch.zeros(2) - 1.0
    current = old + torch.tensor([0.25, -0.25])  # ratios 1.28 and 0.78
    advantages = torch.tensor([1.0, -1.0])
    symmetric = _terms(current, old, old, old, advantages, clip=Clip(0.2, 0.2))
    higher = _terms(current, old, old, old, advantages, clip=Clip(0.2, 0.3))
    assert symmetric.clipped == 2
    assert higher.clipped == 1


def test_kl_weights_act_on_the_loss_and_not_on_the_reported_kl() -> None:
    current, reference = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    zero = torch.zeros(2)
    plain = _terms(current, current, current, reference, zero, kl_beta=1.0)
    weighted = _terms(
        current, current, current, reference, zero, kl_beta=1.0, kl_weights=torch.tensor([1.0, 3.0])
    )
    assert plain.kl == weighted.kl
    torch.testing.assert_close(weighted.loss - plain.loss, torch.tensor(2 * 0.5))


def test_value_clip_holds_the_critic_back() -> None:
    returns, old = torch.tensor([1.0]), torch.tensor([0.0])
    values = torch.tensor([0.9], requires_grad=True)
    loss = value_loss(values, old, returns, value_clip=0.2)
    torch.testing.assert_close(loss, torch.tensor(0.5 * 0.8**2))
    assert torch.autograd.grad(loss, values)[0].tolist() == [0.0]


def test_a_dead_sample_adds_nothing() -> None:
    """miles#2796: four tokens and one masked sample scaled gradients by 4/5."""
    current = torch.tensor([-1.0, -2.0], requires_grad=True)
    same, advantages = current.detach(), torch.tensor([1.0, 2.0])
    alone = torch.autograd.grad(_terms(current, same, same, same, advantages).loss, current)[0]
    empty = _terms(*[torch.zeros(0)] * 5)
    assert float(empty.loss) == 0.0
    joined = _terms(current, same, same, same, advantages).loss + empty.loss
    torch.testing.assert_close(torch.autograd.grad(joined, current)[0], alone)
