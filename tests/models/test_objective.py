"""The objective's gradients are those of the formulas."""

from __future__ import annotations

import torch

from models.objective import grpo_objective


def _terms(current, behaviour, old, reference, advantages, **settings):  # type: ignore[no-untyped-def]
    defaults = {"clip_epsilon": 0.2, "kl_beta": 0.0, "is_cap": 2.0}
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
