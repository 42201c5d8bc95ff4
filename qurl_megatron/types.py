"""What travels between the parts: prompts in, samples out.

Everything here is plain data without tensors, so that the rollout side needs no Megatron and the
training side needs no engine.
"""

from dataclasses import dataclass, replace
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question with the reference answer its responses are checked against."""

    index: int  # position in the data order; seeds and the order of samples derive from it
    input_ids: tuple[int, ...]
    text: str
    answer: str


@dataclass(frozen=True, slots=True)
class Sample:
    """One response to a prompt, as the behaviour policy generated it."""

    prompt: Prompt
    response_ids: tuple[int, ...]
    behaviour_log_probs: tuple[float, ...]  # one per response token, at the sampling temperature
    finish_reason: FinishReason
    versions: tuple[int, ...]  # weight version that generated each response token
    text: str = ""  # the decoded response, without special tokens
    reward: float = 0.0

    def __post_init__(self) -> None:
        lengths = {
            len(self.response_ids),
            len(self.behaviour_log_probs),
            len(self.versions),
        }
        assert len(lengths) == 1, f"response, log-probs and versions differ in length: {lengths}"

    def rewarded(self, reward: float) -> "Sample":
        return replace(self, reward=reward)

    @property
    def truncated(self) -> bool:
        """True where the length limit, not the model, ended the response."""
        return self.finish_reason == "length"
