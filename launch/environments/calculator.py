"""A calculator for chains of sums, as a tool of the policy.

A response that ends in a full stop asks it: "4 - 7 + 2 =" comes back as "-3 + 2 =", with the first
operation carried out, then as "-1 =". Any other response is the answer.
"""

import re


class Calculator:
    def step(self, messages, response, answer, metadata):
        """What the policy reads next, or None where it has answered."""
        if not response.endswith("."):
            return None
        first, *others = self.terms(messages[-1]["content"])
        if others:
            first += others.pop(0)
        signs = (f" {'-' if term < 0 else '+'} {abs(term)}" for term in others)
        return {"role": "tool", "content": f" {first}{''.join(signs)} ="}

    def terms(self, text):
        """Of the question, or of what the calculator said last: 4, -7 and 2."""
        return [int(term) for term in re.findall(r"[-+]?\d+", text.replace(" ", ""))]
