"""A calculator as a tool of the policy, from the command line to the checkpoint."""

from itertools import groupby
from pathlib import Path

import pytest

from qurl_megatron.data.rows import Question
from qurl_megatron.data.tokenizer import Tokenizer
from tests.support.runs import LEARNING, as_if_killed_after, metrics, qurl, rollouts

CALCULATOR = Path(__file__).parents[2] / "launch/environments/calculator.py"
WRONG = """
from calculator import Calculator

class Moody(Calculator):
    def step(self, messages, response, answer, metadata):
        if int(answer) % 3 == 0:
            raise ValueError("not in the mood")
        return super().step(messages, response, answer, metadata)
"""
TURNS = """environment = "moody.py:Moody"
max_turns = 3
samples_per_prompt = 8
max_new_tokens = 20
"""
SUMS = "min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 2"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("turns")
    (root / "calculator.py").write_text(CALCULATOR.read_text())
    (root / "moody.py").write_text(WRONG)
    text = LEARNING.format(root=root).replace('kind = "exact"', 'kind = "last_number"')
    path = root / "recipe.toml"
    text = text.replace("samples_per_prompt = 8\nmax_new_tokens = 8\n", TURNS)
    path.write_text(text.replace('"sort_digits"', '"chain_sum"').replace("digits = 4", SUMS))
    return path


def train(recipe: Path, name: str, *options: str):
    common = ("train.steps=3", "train.save_rollouts=true", "train.eval_prompts=8")
    done = qurl("train", recipe, *common, f"train.run_dir={recipe.parent / name}", *options)
    return done


@pytest.fixture(scope="module")
def whole(recipe):
    done = train(recipe, "whole", "checkpoint.every=1")
    return recipe.parent / "whole", done.stdout


def test_the_policy_trains_on_what_it_wrote_around_the_calculators_words(recipe, whole):
    run_dir, said = whole
    tokenizer, seen = Tokenizer(recipe.parent / "model"), metrics(run_dir)
    calculator: dict[str, type] = {}
    exec(CALCULATOR.read_text(), calculator)
    for step in (1, 2, 3):
        samples, turns, written, told, failed = rollouts(run_dir, step), 0, 0, 0, 0
        for sample in samples:
            ids = sample["response_ids"]
            mask = sample.get("loss_mask", [1] * len(ids))
            parts = [
                (mine, [i for _, i in part])
                for mine, part in groupby(zip(mask, ids, strict=True), key=lambda one: one[0])
            ]
            assert parts[0][0] == parts[-1][0] == 1
            messages = [{"role": "user", "content": sample["prompt"]["text"]}]
            for (_, turn), (_, tool) in zip(parts[::2], parts[1::2], strict=False):
                reply = calculator["Calculator"]().step(messages, tokenizer.decode(turn), "", {})
                [ids_of_reply] = tokenizer.read([Question(reply["content"], "")], chat=False)
                assert tool == list(ids_of_reply)
                messages.append(reply)
            assert [v is not None for v in sample["versions"]] == [bool(m) for m in mask]
            if sample.get("failure"):
                assert int(sample["prompt"]["answer"]) % 3 == 0 and sample["reward"] == 0.0
                failed += 1
            turns, written = turns + len(parts[::2]), written + sum(mask)
            told += len(mask) - sum(mask)
        count, step_metrics = len(samples), seen[step]
        assert step_metrics["environment/turns"] == pytest.approx(turns / count) and turns > count
        assert step_metrics["environment/tokens"] == pytest.approx(told / count)
        assert step_metrics["response/length"] == pytest.approx(written / count)
        for name in ("environment/exceptions", "reward/environment"):
            assert step_metrics[name] == failed
        assert abs(step_metrics["rollout/kl_k3"]) < 0.05  # the trainer scores the same tokens
        assert step_metrics["optimizer/grad_norm"] > 0
    assert sum(seen[step]["environment/exceptions"] for step in (1, 2, 3)) > 0
    assert (
        "failed in the environment (raised: ValueError: not in the mood (moody.py, line 7))" in said
    )


def test_a_run_that_was_interrupted_has_the_conversations_of_one_that_was_not(recipe, whole):
    parts = as_if_killed_after(2, whole[0])
    (parts / "rollouts/step_000003.jsonl").unlink()
    train(recipe, parts.name, "rollout.turn_timeout_s=20", "rollout.environment_workers=1")
    assert rollouts(parts, 3) == rollouts(whole[0], 3)
    assert metrics(parts)[3] == metrics(whole[0])[3]
