"""Checks of a response against the reference answer, 1.0 or 0.0, and the penalty for overlong ones.

``math`` may run long and must be called in the main thread of a process (math-verify stops itself
by SIGALRM), so it runs in workers. The others take microseconds.

Users' code and servers give scores, too. All of these go through ``as_score``, so no NaN gets to
the policy.
"""

import logging
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from qurl_megatron.config.sections import LARGEST_SCORE
from qurl_megatron.kit.errors import Unscored, unscored

Score = float | Unscored
"""A finite number, or the reason why there is none."""

# [0-9], because \d takes digits of every script. A sign after a word stands between two numbers.
NUMBER = re.compile(r"(?:(?<![\w)])[-+])?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)")
THOUSANDS = re.compile(r"[-+]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")

# math-verify reads the last expression; text before this many characters is not an answer.
MATH_TAIL = 20_000


def score_exact(text: str, answer: str) -> float:
    """Return 1 if the whole text equals the answer, blanks around them aside."""
    return float(text.strip() == answer.strip())


def score_last_number(text: str, answer: str) -> float:
    """Return 1 if the last number in the text equals the answer's, as numbers: 12 = 12.0 = +12."""
    expected, number = last_number(answer), last_number(text)
    return float(expected is not None and number == expected)


def last_number(text: str) -> Decimal | None:
    """Return the last number a text mentions, exactly; None where there is none.

    >>> last_number("first 7, then $1,234.50.")
    Decimal('1234.50')
    """
    numbers = NUMBER.findall(text.replace("$", "").replace("\u2212", "-"))
    if not numbers:
        return None
    digits = numbers[-1].rstrip(",")
    if THOUSANDS.fullmatch(digits):
        return Decimal(digits.replace(",", ""))
    return Decimal(digits.rpartition(",")[2])  # "1,2,3" is a list


def score_math(text: str, answer: str) -> float:
    """Return 1 if the boxed, else the last expression equals the answer, as math-verify judges."""
    from math_verify import parse, verify  # sympy takes seconds to import
    from math_verify.errors import TimeoutException

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns of every bad answer
    try:
        # A bare answer is an expression; math-verify wants LaTeX marked as such.
        expected = parse(answer if "$" in answer or "\\boxed" in answer else f"${answer}$")
        expected = expected or parse(answer)
        return float(verify(expected, parse(text[-MATH_TAIL:])))
    # Model output breaks sympy in every way there is. The timeout is a BaseException, so that
    # sympy's own handlers do not swallow it.
    except (Exception, TimeoutException):
        return 0.0


KINDS: dict[str, Callable[[str, str], float]] = {
    "math": score_math,
    "last_number": score_last_number,
    "exact": score_exact,
}


def overlong_penalty(length: int, limit: int, fraction: float, penalty: float) -> float:
    """Return the reward that a response of ``length`` tokens adds: 0, or less.

    DAPO's soft penalty (arXiv:2503.14476, Eq. 13): 0 up to ``limit * (1 - fraction)`` tokens, from
    there a straight line down to ``-penalty`` at ``limit`` and beyond. The paper's L_max is
    ``limit`` and its L_cache ``limit * fraction``. Its penalty is 1 where rewards are 1 and -1;
    ours are 1 and 0, so 0.5 gives the same advantages.

    Args:
        limit: longest response, in tokens.
        fraction: share of the limit, at its end, over which the reward falls; 0 turns it off.
    """
    if fraction == 0:
        return 0.0
    within = limit * fraction
    over = length - (limit - within)
    return -penalty * min(max(over / within, 0.0), 1.0)


def as_score(value: Any) -> Score:
    """Return any real number as a float; booleans are 1.0 and 0.0, text is no number."""
    try:
        score = None if isinstance(value, str | bytes | bytearray) else float(value)
    except Exception:  # __float__ may be anybody's
        score = None
    if score is None:
        description = "null" if value is None else f"a value of type {type(value).__name__}"
        return unscored("invalid", description)
    if not abs(score) <= LARGEST_SCORE:  # NaN is not, either
        return Unscored("invalid", f"{score:g}")
    return score
