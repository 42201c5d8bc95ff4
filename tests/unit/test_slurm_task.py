"""What a rank does before it trains."""

import pytest

from qurl_megatron.cluster import task


@pytest.mark.parametrize(
    ("found", "left"),
    [
        ({"RANK": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "61007"}, {}),
        ({"MASTER_ADDR": "10.0.0.1"}, {"MASTER_ADDR": "10.0.0.1"}),
    ],
    ids=["enroot's hook", "the site"],
)
def test_ranks_of_srun_do_not_meet_where_enroots_hook_for_pytorch_says(found, left):
    env = {"PATH": "/bin", **found}
    task.forget_hook(env)
    assert env == {"PATH": "/bin", **left}
