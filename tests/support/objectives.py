"""The objective's terms with its numbers spelled out; log-probs of a whole vocabulary."""

from dataclasses import fields

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
