"""The objective's terms with its numbers spelled out; its formulas, and log-probs, as written."""

from dataclasses import fields

import torch

from qurl_megatron.algo.objective import Limits, ObjectiveTerms, objective_terms

NUMBERS = {field.name for field in fields(Limits)}


def terms_of(*policies, **options) -> ObjectiveTerms:
    """``objective_terms``, where ``cap=2.5`` and the like go into its ``Limits``."""
    limits = Limits(**{name: options.pop(name) for name in NUMBERS & options.keys()})
    return objective_terms(*policies, limits=limits, **options)


def dense(logits, targets, temperature=1.0):
    """Log-probs and entropies of the whole vocabulary, from a float64 copy of its logits."""
    log_p = (logits.double() / temperature).log_softmax(-1)
    return log_p.gather(-1, targets[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def written(current, proximal, behaviour, A, *, kind, surrogate, dual_clip, cap=2.0):
    """The formulas of the page as they are written, for autograd to differentiate."""
    rho = (proximal - behaviour).exp()
    other = behaviour if kind == "naive" else proximal
    R, r = (current - other).exp(), torch.minimum(torch.ones_like(rho), cap / rho)
    w = {
        "naive": torch.ones_like(rho),
        "proximal": torch.ones_like(rho),
        "decoupled": rho,
        "tis": torch.minimum(rho, torch.full_like(rho, cap)),
        "acr": torch.minimum(rho, torch.full_like(rho, cap)),
        "icepop": rho * ((rho >= 0.5) & (rho <= 5)),
    }[kind]
    upper = torch.where((A > 0) & (kind == "acr"), 1.28 / r, 1.28)
    clipped = torch.maximum(torch.minimum(R, upper), torch.full_like(R, 0.8))
    if surrogate == "cispo":
        J = clipped.detach() * A * current
    else:
        J = torch.minimum(R * A, clipped * A)
    if dual_clip:
        J = torch.where(A < 0, torch.maximum(J, dual_clip * A), J)
    return w * J
