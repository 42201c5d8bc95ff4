"""A calculator for chains of sums, as a tool of the policy.

A response that ends in a full stop asks it, whatever stands before: of "4 - 7 + 2 =" it makes
"-1 =". Any other response is the answer.
"""

import re


class Calculator:
    def step(self, messages, response, answer, metadata):
        """What the policy reads next, or None where it has answered."""
        if not response.endswith("."):
            return None
        chain = messages[0]["content"].replace(" ", "")
        return {"role": "tool", "content": f" {sum(map(int, re.findall(r'[-+]?[0-9]+', chain)))} ="}
