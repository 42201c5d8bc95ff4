"""A recipe is data: checked where it is defined, and every mistake names its key."""

from pathlib import Path

import pytest

from qurl_megatron.config import changes, load, refused, to_toml
from qurl_megatron.kit.errors import ConfigError

RECIPE = '[model]\npath = "m"\n[data]\ntask = "chain_sum"\n[rollout]\nsamples_per_prompt = 8\n'


def other_run(before, now) -> list[str]:
    """What keeps a run of ``before`` from going on as ``now``."""
    return [str(change) for change in refused(changes(before, now))]


@pytest.fixture
def recipe(tmp_path) -> Path:
    path = tmp_path / "r.toml"
    path.write_text(RECIPE)
    return path


def test_overrides_win_and_bare_words_are_strings(recipe):
    config = load(recipe, ["quant.scheme=fp8", "optimizer.lr=1", "rollout.urls=['http://a']"])
    assert config.quant.scheme == "fp8"
    assert config.optimizer.lr == 1.0 and isinstance(config.optimizer.lr, float)
    assert config.rollout.urls == ("http://a",)


def test_a_resolved_recipe_reads_back_equal(recipe, tmp_path):
    config = load(recipe, ["data.task_args={min_terms=2, note='a \"quoted\" word'}"])
    again = tmp_path / "again.toml"
    again.write_text(to_toml(config))
    assert load(again) == config


@pytest.mark.parametrize(
    "override, message",
    [
        ("quant.scheme=false", "one of none, int8, fp8, fp8_block, int6, int5, int4, got False"),
        ("quant.scheme=INT8", "int5, int4, got 'INT8'; did you mean 'int8'?"),
        ("algo.name=GRPO", "cispo, got 'GRPO'; did you mean 'grpo'?"),
        ("algo.xyz=1", "unknown key algo.xyz; `qurl show RECIPE` prints the 26 keys of algo"),
        ("quant.rounding=up", "must be one of nearest, stochastic, dithered, got 'up'"),
        ("quant.uaq_scale=0.5", "quant.uaq_scale must be 1.0 or more, got 0.5"),
        ("train.steps=many", "train.steps must be of type int, got 'many'"),
        ("rollout.urls=x", "rollout.urls must be a list, got 'x'"),
        ("rollout.temperature=0", "rollout.temperature must be 0.001 or more, got 0.0; engines"),
        ("rollout.temperature=inf", "rollout.temperature must be a number of at most 10000000"),
        ("optimizer.lr=inf", "optimizer.lr must be a number of at most 1000000000 in size, got i"),
        ("train.run_dir=-x", "train.run_dir must not begin with -, as an option does, got '-x'"),
        ("optimizer.beta1=2", "optimizer.beta1 must lie in [0, 1), got 2"),
        ("train.steps=99999999999999999999", "train.steps must be a number of at most 9007199254"),
        ("rollout.health_timeout_s=-1", "rollout.health_timeout_s must be 0 or more"),
        ("rollout.engine_tensor=2", "set rollout.backend=sglang"),
        ("rollout.urls=['localhost:1']", "like http://host:30000, got 'localhost:1'"),
        ("rollout.urls=['http://h:99999']", "rollout.urls must be like http://host:30000, got"),
        ("rollout.urls=['http://me:pw@h:1']", "rollout.urls has a user name or a password, which"),
        ("reward.url=me:pw@a", "reward.url has a user name or a password, which recipes"),
        ("optimizer.clip_grad=nan", "optimizer.clip_grad must be positive, got nan"),
        ("correction.veto=1", "correction.veto must lie in [0, 1), got 1.0"),
        ("warmstart.target=0", "warmstart.target must lie in (0, 1], got 0.0"),
        ("algo.name=gpro", "algo.name must be one of grpo, ppo, dapo, rloo, dr_grpo, reinforce_pp"),
        ("data.answer_key=a", "data.answer_key is for files"),
        ("data.path=x.jsonl", "exactly one of data.path"),
        ("rollout.samples_per_prompt=1", "must be 2 or more for algo.advantage=grpo"),
        ("reward.function=score", "must look like package.module:name or file.py:name, got 'sco"),
        ("reward.function='a:b c'", "must look like package.module:name or file.py:name, got 'a:"),
        ("reward.key_env=KEY", "reward.key_env is for reward.url; set that, or leave it out"),
        ("reward.url=localhost:80", "reward.url must be like https://host:port/path, got 'localh"),
        ("reward.url=http://a:b/", "reward.url must be like https://host:port/path, got 'http://a"),
        ("reward.failed=nan", "reward.failed must be a number of at most 1000000 in size, got nan"),
        ("reward.memory_gb=0", "reward.memory_gb must be positive, got 0.0"),
    ],
)
def test_mistakes_name_key_value_and_fix(recipe, override, message):
    with pytest.raises(ConfigError) as error:
        load(recipe, [override])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


SGLANG = ["rollout.backend=sglang"]
FP32_HEAD = "rollout.engine_args=['--enable-fp32-lm-head']"
FALLING = ["train.steps=5", "optimizer.schedule=linear"]  # of 2 updates each
TOOL = "rollout.environment=tool.py:Tool"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            [*SGLANG, "rollout.colocate=true", "sync.transport=group"],
            "sync.transport=group needs engines on GPUs of their own.*set sync.transport=auto",
        ),
        (
            ["quant.scheme=none", "quant.rounding=dithered"],
            "quant.rounding=dithered has no codes to choose from with quant.scheme=none; leave it",
        ),
        (["model.fp32_output=true", "model.dtype=bfloat16"], "embedded engines round logits"),
        ([*SGLANG, FP32_HEAD], "model.fp32_output and --enable-fp32-lm-head"),
        ([*SGLANG, "model.fp32_output=true"], "model.fp32_output and --enable-fp32-lm-head"),
        (
            ["train.align=weights", "quant.scheme=none"],
            "train.align=weights computes as engines .* quant.scheme=none leaves them as they",
        ),
        (
            ["train.align=full", "quant.rounding=dithered"],
            "train.align=full computes with the nearest codes, and quant.rounding=dithered publ",
        ),
        (
            [*SGLANG, "rollout.engine_tensor=2", "train.align=full"],
            "train.align=full needs parallel.tensor=1 to be a multiple of rollout.engine_tensor=2",
        ),
        (
            [*FALLING, "optimizer.warmup_steps=10"],
            r"optimizer.warmup_steps=10 must be below the 10 updates .*schedule=linear.*; lower",
        ),
        (
            [*FALLING, "algo.advantage=gae", "critic.warmup_steps=10"],
            "critic.warmup_steps=10 must be below the 10 updates",
        ),
        (
            ["algo.deal=groups", "algo.minibatches=64", "train.micro_batch=4"],
            r"data\.prompts_per_step=32 .* algo\.minibatches=64 for algo.deal=groups",
        ),
        (["rollout.urls=['http://a:1']", "rollout.rendezvous=f"], "both name engines"),
        (["algo.reference=ref"], "algo.reference=ref needs a penalty, but algo.kl_coef is 0"),
        (["reward.url=http://a/score?token=secret"], "reward.url has a query, .*key_env"),
        (
            ["reward.url=http://a", "reward.function=own:score"],
            "reward needs one of function and url, not both",
        ),
        (
            ["reward.function=own:score", "reward.kind=exact"],
            "reward.kind=exact would not be used beside reward.function",
        ),
        (["parallel.expert_dispatcher=deepep"], "with parallel.expert=1 none travels; leave it"),
        (
            ["parallel.expert=2", "parallel.data=2", "parallel.expert_dispatcher=deepep"]
            + ["model.dtype=float32"],
            "deepep carries tokens in BF16 alone, and model.dtype=float32; leave it out",
        ),
        (
            ["parallel.expert=4", "parallel.data=4", "parallel.expert_dispatcher=hybridep"]
            + ["model.dtype=bfloat16", "train.max_tokens=64"],
            r"those of data ranks differ; set deepep, or .* parallel.context = \d at most",
        ),
        ([TOOL, "reward.kind=exact"], "exact compares all that the policy wrote, and a con"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(recipe, settings, message):
    with pytest.raises(ConfigError, match=message):
        load(recipe, settings)


@pytest.mark.parametrize(
    "settings",
    [
        [*SGLANG, "rollout.colocate=true", "sync.transport=auto"],
        [*SGLANG, FP32_HEAD, "model.fp32_output=true"],
        [*SGLANG, "rollout.engine_tensor=2", "train.align=full", "parallel.tensor=4"],
        [*SGLANG, "rollout.engine_tensor=2", "train.align=weights", "parallel.tensor=1"],
        [*FALLING, "optimizer.warmup_steps=9"],
        ["train.steps=5", "optimizer.warmup_steps=10"],  # constant behind it
        ["algo.reference=ref", "algo.kl_coef=0.1"],
        [TOOL, "reward.kind=last_number"],
    ],
)
def test_their_neighbours_are_not(recipe, settings):
    load(recipe, settings)


def test_a_kind_that_nothing_would_use_is_empty(recipe):
    assert load(recipe).reward.kind == "math"
    for own in ("reward.function=own:score", "reward.url=http://a"):
        assert load(recipe, [own]).reward == load(recipe, [own, "reward.kind="]).reward
        assert load(recipe, [own]).reward.kind == ""


def test_files_that_are_no_recipe(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        load(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[model\n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load(tmp_path / "bad.toml")
    (tmp_path / "empty.toml").write_text("")
    with pytest.raises(ConfigError, match=r"model.path is missing"):
        load(tmp_path / "empty.toml")


def test_the_run_directory_follows_from_recipe_and_overrides(recipe):
    assert load(recipe, ["quant.scheme=fp8"], named_by=()).train.run_dir == "runs/r"
    assert load(recipe).train.run_dir == "runs/r"
    variant = load(recipe, ["quant.scheme=fp8", "train.steps=7", "model.path=a/b"])
    assert variant.train.run_dir == "runs/r--model.path-a_b--quant.scheme-fp8"
    assert load(recipe, ["train.run_dir=x"]).train.run_dir == "x"


def test_a_variants_folder_has_a_plain_name_whatever_it_is_a_variant_of(recipe):
    def named(*overrides):
        return load(recipe, overrides).train.run_dir.removeprefix("runs/r")

    assert named("optimizer.lr=1e-3") == named("optimizer.lr = 0.0010") == "--optimizer.lr-0.001"
    assert named("optimizer.lr=1e-3", "optimizer.lr=2e-3") == "--optimizer.lr-0.002"
    assert (
        named("data.task_args={min_terms=2, note='a b'}") == "--data.task_args-min_terms_2_note_a_b"
    )
    assert named("parallel.tensor=2", "data.chat=true") == "--data.chat-true--parallel.tensor-2"
    long = [named(f"model.path={'x' * 300}{end}") for end in "ab"]
    assert len(set(long)) == 2 and all(len(name) < 210 for name in long)


@pytest.mark.parametrize(
    "override",
    [
        *("train.steps=7", "train.save_rollouts=true", "train.eval_every=5", "train.micro_batch=2"),
        *("checkpoint.every=3", "sync.bucket_mb=3", "rollout.engines=2", "rollout.timeout_s=60"),
        *("guard.kl_above=0.1", "reward.workers=3", "model.recompute=true"),
    ],
)
def test_what_changes_no_number_of_a_run_makes_no_other_folder(recipe, override):
    assert load(recipe, [override]).train.run_dir == "runs/r"


def test_the_first_minibatch_is_scored_early_where_something_needs_that(recipe):
    for overrides, needed in (
        ([], False),
        (["algo.epochs=2"], True),
        (["algo.kl_coef=0.1"], False),
        (["algo.kl_coef=0.1", "algo.kl_in=reward"], True),
        (["correction.veto=1e-4"], True),
        (["train.save_rollouts=true"], True),
    ):
        assert load(recipe, overrides).scores_first_minibatch == needed, overrides


def test_an_override_reaches_into_tables(recipe):
    config = load(recipe, ["data.task_args.min_terms=3"])
    assert config.data.task_args == {"min_terms": 3}
    for override, message in (
        ("model.path.x=2", "model.path is not a table, so there is no model.path.x; it is 'm'"),
        ("reward..weight=2", "must look like section.key=value"),
    ):
        with pytest.raises(ConfigError) as error:
            load(recipe, [override])
        assert message in str(error.value)


def test_the_engines_tensor_size_is_part_of_what_a_fully_aligned_run_computes(recipe):
    sglang = ["rollout.backend=sglang", "sync.transport=files", "parallel.tensor=2"]
    for align, expected in (("weights", []), ("full", ["rollout.engine_tensor 1 -> 2"])):
        one, two = (
            load(recipe, [*sglang, f"train.align={align}", f"rollout.engine_tensor={size}"])
            for size in (1, 2)
        )
        assert other_run(one, two) == expected


def test_a_schedule_that_falls_takes_all_updates_of_the_run_or_as_many_as_it_names(recipe):
    run = ["train.steps=10", "algo.minibatches=4", "algo.epochs=2", "optimizer.schedule=cosine"]
    assert load(recipe, run).policy_optimizer.decay_steps == 80
    assert load(recipe, [*run, "optimizer.decay_steps=60"]).policy_optimizer.decay_steps == 60
    critic = ["algo.advantage=gae", "critic.ahead_steps=3", "critic.lr=1e-3"]
    both = load(recipe, [*run, *critic])
    assert (both.policy_optimizer.decay_steps, both.critic_optimizer.decay_steps) == (56, 80)
    assert both.critic_optimizer.lr == 1e-3


def test_a_file_of_rewards_lies_beside_its_recipe_wherever_the_resolved_one_is_put(
    recipe, tmp_path
):
    config = load(recipe, ["reward.function=own.py:score"])
    assert config.reward.function == f"{tmp_path}/own.py:score"
    assert load(recipe, ["reward.function=/a/own.py:score"]).reward.function == "/a/own.py:score"
    assert load(recipe, ["reward.function=own:score"]).reward.function == "own:score"

    copy = tmp_path / "elsewhere" / "resolved.toml"
    copy.parent.mkdir()
    copy.write_text(to_toml(config))
    assert load(copy) == config


def test_scores_of_a_kind_are_an_accuracy_unless_others_stand_for_those_that_fail(recipe):
    assert load(recipe).reward.right_or_wrong
    assert not load(recipe, ["reward.failed=-0.5"]).reward.right_or_wrong
    assert not load(recipe, ["reward.function=own:score"]).reward.right_or_wrong


def test_a_server_may_move_and_another_reward_is_another_run(recipe):
    before = load(recipe, ["reward.url=http://a"])
    moved = ["reward.url=https://b:1/c", "reward.key_env=KEY", "reward.on_failure=stop"]
    assert other_run(before, load(recipe, moved)) == []
    assert other_run(load(recipe), before) == [
        "reward.kind math -> ''",
        "reward.url '' -> http://a",
    ]
    told = other_run(load(recipe), load(recipe, ["reward.function=own:score"]))
    assert told == ["reward.kind math -> ''", "reward.function '' -> own:score"]
