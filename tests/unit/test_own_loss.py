"""algo.function: a user's loss equals ours where it says the same, and is not believed."""

from pathlib import Path

import pytest
import torch

from qurl_megatron.config import AlgoConfig, load
from qurl_megatron.data.pack import TokenBatch
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.observe.catalogue import known
from qurl_megatron.training.inputs import check_own_loss
from qurl_megatron.training.losses import PolicyLoss

RECIPES = Path(__file__).parents[2] / "launch/recipes"

ACR = """
import torch

def acr(tokens):
    rho = (tokens.proximal - tokens.behaviour).exp()
    ratio = (tokens.current - tokens.proximal).exp()
    cap, low, high = tokens.limits.cap, tokens.limits.clip_low, tokens.limits.clip_high
    bound = (1 + high) * (rho / cap).clamp(min=1)
    clipped = torch.minimum(ratio.clamp(min=1 - low), bound) * tokens.advantages
    value = rho.clamp(max=cap) * torch.minimum(ratio * tokens.advantages, clipped)
    return value, {"truncated": (rho > cap).float()}
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "losses.py"
    path.write_text(ACR)
    return path


def tokens(kept: torch.Tensor | None = None) -> TokenBatch:
    """Two responses of three tokens; the importance ratio of the second token is 4, beyond C."""
    ids = torch.zeros(1, 6, dtype=torch.int64)
    owners = torch.tensor([0, 0, 0, 1, 1, 1])
    behaviour = torch.tensor([-1.0, -2.0, -0.5, -1.5, -0.2, -3.0])
    proximal = behaviour + torch.tensor([0.1, 4.0, -0.3, 0.0, 0.05, -0.7])
    proximal[1] = behaviour[1] + torch.log(torch.tensor(4.0))
    return TokenBatch(
        *(ids, ids, ids == 0, ids, ids == 0, (0, 1), (3, 3), owners),
        behaviour=behaviour,
        weights=torch.tensor([0.3, 0.3, 0.3, 0.5, 0.5, 0.5]),
        proximal=proximal,
        reference=torch.zeros(6),
        advantages=torch.tensor([1.0, 1.0, 1.0, -0.5, -0.5, -0.5]),
        kept=kept,
    )


def loss_of(algo: AlgoConfig, batch: TokenBatch):
    moves = torch.tensor([0.05, 0.9, -0.4, 0.1, -0.3, 0.02])
    current = (batch.proximal + moves).requires_grad_()
    loss = PolicyLoss(lambda logits, _: (logits, torch.full((6,), 0.25)), algo)
    total, metrics = loss(current, batch)
    total.backward()
    return total, current.grad, metrics


@pytest.mark.parametrize("rejected", [False, True])
@pytest.mark.parametrize("other", [{}, {"kl_coef": 0.1, "entropy_coef": 0.01}])
def test_acr_in_a_file_of_ones_own_is_our_acr(file, rejected, other):
    kept = torch.tensor([True] * 3 + [False] * 3) if rejected else None
    batch = tokens(kept)
    own = AlgoConfig(function=f"{file}:acr", **other)
    total, gradient, metrics = loss_of(own, batch)
    expected, expected_gradient, expected_metrics = loss_of(AlgoConfig(**other), batch)
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(gradient, expected_gradient)
    assert metrics["loss/truncated"].value == pytest.approx(1 / 6)
    assert metrics["policy/entropy"] == expected_metrics["policy/entropy"]
    assert known("loss/truncated").says == "mean over tokens of this value of yours"
    assert not {"policy/clip_fraction", "acr/active_fraction"} & metrics.keys()


def test_an_error_in_the_middle_of_a_run_names_the_line(tmp_path):
    path = tmp_path / "late.py"
    path.write_text("def loss(tokens):\n    assert tokens.responses > 2, 'too few'\n")
    message = r"late.py:loss raised AssertionError: too few \(late.py, line 2\)"
    with pytest.raises(ConfigError, match=message):
        loss_of(AlgoConfig(function=f"{path}:loss"), tokens())


BROKEN = """
import torch

def raises(tokens): return 1 / 0
def nothing(tokens): pass
def a_mean(tokens): return tokens.current.mean()
def detached(tokens): return tokens.current.detach()
def logs_a_number(tokens): return tokens.current, {"x": 1.0}
def logs_a_list(tokens): return tokens.current, [1]
def infinite(tokens): return tokens.current / (tokens.advantages - 1)
def two(tokens, more): return tokens.current
class Loss: ...
async def later(tokens): ...
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", r"raised ZeroDivisionError: division by zero \(broken.py, line 4\)"),
        ("nothing", "returned None; it must return the objective of each of the 5 tokens"),
        ("a_mean", r"returned a tensor of shape \[\]; it must return the objective of each"),
        ("detached", "returned values without a gradient; compute them from inputs.current"),
        ("logs_a_number", "returned a value of type float as x; values to log must be tensors"),
        ("logs_a_list", "returned a value of type list as values to log; return a dict"),
        ("infinite", "gives values or gradients that are not finite for ordinary log-probs"),
        ("two", r"raised TypeError: two\(\) missing 1 required positional argument"),
        ("Loss", "is a class; name a function"),
        ("later", "returned a value of type coroutine"),
        ("raise", "has no raise; did you mean raises"),
    ],
)
@pytest.mark.filterwarnings("ignore:coroutine")
def test_a_loss_that_is_wrong_is_refused_before_models_load(tmp_path, name, message):
    path = tmp_path / "broken.py"
    path.write_text(BROKEN)
    config = load(RECIPES / "quickstart.toml", [f"algo.function={path}:{name}"])
    with pytest.raises(ConfigError, match=rf"algo\.function=.*broken\.py:{name}.*{message}"):
        check_own_loss(config.algo, config.correction)


def test_the_file_is_beside_the_recipe(file):
    recipe = file.parent / "recipe.toml"
    recipe.write_text((RECIPES / "quickstart.toml").read_text())
    config = load(recipe, ["algo.function=losses.py:acr"])
    assert config.algo.function == f"{file}:acr"
    check_own_loss(config.algo, config.correction)
