"""The objective's terms with its numbers spelled out, as tests like to write them."""

from dataclasses import fields

from qurl_megatron.algo.objective import Limits, ObjectiveTerms, objective_terms

NUMBERS = {field.name for field in fields(Limits)}


def terms_of(*policies, **options) -> ObjectiveTerms:
    """``objective_terms``, where ``cap=2.5`` and the like go into its ``Limits``."""
    limits = Limits(**{name: options.pop(name) for name in NUMBERS & options.keys()})
    return objective_terms(*policies, limits=limits, **options)
