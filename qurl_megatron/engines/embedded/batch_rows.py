"""What each running sequence needs at every step, as tensors: no Python per sequence and token."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qurl_megatron.engines.embedded.sampling import GREEDY, SamplingState

if TYPE_CHECKING:
    from qurl_megatron.engines.embedded.engine import Sequence


class Rows:
    """A number in each column for every row of the cache."""

    @torch.inference_mode()
    def __init__(self, rows: int, device: torch.device) -> None:
        def column(dtype: torch.dtype) -> Tensor:
            return torch.zeros(rows, dtype=dtype, device=device)

        self.row = torch.arange(rows, device=device)
        self.length = column(torch.int64)  # prompt and generated tokens
        self.start = column(torch.int64)  # prompt tokens
        self.limit = column(torch.int64)
        self.seed = column(torch.int64)
        self.temperature = column(torch.float32)
        self.greedy = column(torch.bool)
        self.top_p = column(torch.float32)
        self.top_k = column(torch.int64)
        self.stop_ids = torch.full((rows, 1), -1, device=device)

    def join(self, first_row: int, joining: "list[Sequence]", length: int, vocab: int) -> None:
        rows = slice(first_row, first_row + len(joining))
        columns: dict[str, list] = {
            "length": [len(s.prompt) + len(s.output_ids) for s in joining],
            "start": [len(s.prompt) for s in joining],
            "limit": [s.total for s in joining],
            "seed": [s.seed for s in joining],
            "temperature": [s.temperature if s.temperature >= GREEDY else 1.0 for s in joining],
            "greedy": [s.temperature < GREEDY for s in joining],
            "top_p": [s.top_p for s in joining],
            "top_k": [s.top_k if s.top_k > 0 else vocab for s in joining],
        }
        assert max(columns["limit"]) <= length, "a sequence is longer than its row"
        for name, values in columns.items():
            column = getattr(self, name)
            column[rows] = torch.tensor(values, dtype=column.dtype, device=column.device)
        width = max(len(s.stop_ids) for s in joining)
        if width > self.stop_ids.shape[1]:
            wider = self.stop_ids.new_full((len(self.row), width), -1)
            wider[:, : self.stop_ids.shape[1]] = self.stop_ids
            self.stop_ids = wider
        width = self.stop_ids.shape[1]
        padded = [[*sorted(s.stop_ids), *[-1] * (width - len(s.stop_ids))] for s in joining]
        self.stop_ids[rows] = torch.tensor(padded, device=self.stop_ids.device)
        self._vocab = vocab

    def move(self, source: int, target: int) -> None:
        for name, column in vars(self).items():
            if isinstance(column, Tensor) and name != "row":
                column[target] = column[source]

    def produced(self, row: int) -> int:
        return int(self.length[row] - self.start[row])

    def sampling(self, rows: slice) -> SamplingState:
        narrowed_B = (self.top_p[rows] < 1) | (self.top_k[rows] < self._vocab)
        return SamplingState(
            temperature_B=self.temperature[rows],
            greedy_B=self.greedy[rows],
            seed_B=self.seed[rows],
            position_B=self.length[rows] - self.start[rows],
            top_p_B=self.top_p[rows],
            top_k_B=self.top_k[rows],
            any_sampled=not bool(self.greedy[rows].all()),
            any_filtered=bool(narrowed_B.any()),
        )
