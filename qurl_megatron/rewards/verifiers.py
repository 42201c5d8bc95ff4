"""Checks of a response against the reference answer, 1.0 or 0.0, and the penalty for overlong ones.

``math`` may run long and must be called in the main thread of a process (math-verify stops itself
by SIGALRM), so ``rewards.scoring`` runs it in workers. The others take microseconds.
"""

import re
from collections.abc import Callable
from decimal import Decimal

Check = Callable[[str, str], float]

# [0-9], because \d takes digits of every script. A sign after a word stands between two numbers.
NUMBER = re.compile(r"(?:(?<![\w)])[-+])?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)")
THOUSANDS = re.compile(r"[-+]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")

# math-verify reads the last expression; text before this many characters is not an answer.
MATH_TAIL = 20_000


def score_exact(text: str, answer: str) -> float:
    """The whole text equals the answer, blanks around them aside."""
    return float(text.strip() == answer.strip())


def score_last_number(text: str, answer: str) -> float:
    """The last number in the text equals the number in the answer, as numbers: 12 = 12.0 = +12."""
    expected, number = last_number(answer), last_number(text)
    return float(expected is not None and number == expected)


def last_number(text: str) -> Decimal | None:
    """The last number a text mentions, exactly; None where there is none.

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
    """The boxed, else the last expression equals the answer, as math-verify judges."""
    from math_verify import parse, verify  # sympy takes seconds to import

    # A bare answer is an expression; math-verify wants LaTeX marked as such.
    expected = parse(answer if "$" in answer or "\\boxed" in answer else f"${answer}$")
    expected = expected or parse(answer)
    return float(verify(expected, parse(text[-MATH_TAIL:])))


KINDS: dict[str, Check] = {
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
