"""Did the correction of the loss do anything in a run? One sentence, for terminal and report.

At 8 bits an importance weight above the cap C is rare: most runs under ACR train as they would
without it, and nobody should take their success for its merit.
"""

from collections.abc import Mapping
from typing import Any

from qurl_megatron.observe.history import History
from qurl_megatron.observe.text import number, percent


def what_acted(history: History, algo: Mapping[str, Any]) -> str:
    """What ``algo.objective`` did to tokens; "" where nothing compared the policies.

    Args:
        algo: this section of the recipe, resolved.
    """
    objective, cap = algo.get("objective"), algo.get("cap", 0)
    if "rollout/rho_max" not in history:
        return ""
    ratio = history.series("rollout/rho_max")[1].max()
    largest = f"largest {number(ratio)}"
    if algo.get("function"):
        return f"the loss is algo.function={algo['function']} (probability ratio: {largest})"
    if objective == "acr":
        if active := _mean(history, "acr/active_fraction"):
            rescued = percent(_mean(history, "acr/rescued_fraction"))
            return (
                f"ACR acted: a wider clip range for {percent(active)} of the tokens, {rescued} "
                f"rescued from TIS's (C = {cap:g}, largest importance weight {number(ratio)})"
            )
        if ratio <= cap:
            return f"ACR never acted: no importance weight above C = {cap:g} ({largest})"
        return (
            "ACR never acted: no token of a positive advantage had an importance weight above "
            f"C = {cap:g} ({largest})"
        )
    if objective == "tis":
        if cut := _mean(history, "rollout/truncated_weight_fraction"):
            return f"TIS acted: {percent(cut)} of the importance weights cut to {cap:g} ({largest})"
        return f"TIS never acted: no importance weight above C = {cap:g} ({largest})"
    if objective == "icepop":
        if left_out := _mean(history, "correction/banded_fraction"):
            return f"IcePop acted: {percent(left_out)} of the tokens left out ({largest})"
        return f"IcePop never acted: no importance weight outside its band ({largest})"
    if objective == "decoupled":
        return f"every token is weighted by its probability ratio, without a cap ({largest})"
    if objective in ("naive", "proximal"):
        return f"algo.objective={objective} corrects nothing (probability ratio: {largest})"
    return ""


def _mean(history: History, name: str) -> float:
    return float(history.series(name)[1].mean()) if name in history else 0.0
