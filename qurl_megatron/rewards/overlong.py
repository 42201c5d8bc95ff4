"""A soft penalty for responses that come near the length limit (DAPO, arXiv:2503.14476, Eq. 13)."""


def overlong_penalty(length: int, limit: int, fraction: float, penalty: float) -> float:
    """Return the reward that a response of ``length`` tokens adds: 0, or less.

    0 up to ``limit * (1 - fraction)`` tokens, from there on a straight line down to ``-penalty`` at
    ``limit`` and beyond. The paper's L_max is ``limit`` and its L_cache ``limit * fraction``. Its
    penalty is 1 where rewards are 1 and -1; ours are 1 and 0, so 0.5 gives the same advantages.

    Args:
        limit: longest response, in tokens.
        fraction: share of the limit, at its end, over which the reward falls; 0 turns it off.
    """
    if fraction == 0:
        return 0.0
    within = limit * fraction
    over = length - (limit - within)
    return -penalty * min(max(over / within, 0.0), 1.0)
