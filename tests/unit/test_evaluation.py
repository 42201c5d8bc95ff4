"""``qurl eval`` on paper, on files, and against scripted engines."""

import argparse
import dataclasses
import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from qurl_megatron.cli import main
from qurl_megatron.config import DataConfig, load, to_toml
from qurl_megatron.data.rows import Question
from qurl_megatron.data.tokenizer import Tokenizer as Words
from qurl_megatron.evaluation import results
from qurl_megatron.evaluation.benchmarks import (
    AnswerFile,
    Benchmark,
    GradedAnswer,
    read_benchmarks,
    with_prompts,
)
from qurl_megatron.evaluation.eval_plan import EvaluationPlan, add_options, make_plans
from qurl_megatron.evaluation.results import interval, pass_at, resampled_means
from qurl_megatron.fleet.collect import NEUTRAL, sample_seed
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.quant.export import quantization_config
from tests.support.fake_engine import FakeEngine, token_at

USUAL = DataConfig(path="-")  # with prompts and answers under their usual names


def test_pass_at_k_counts_the_sets_of_responses_with_a_right_one():
    # Of 4 responses one is right: 3 of the 6 pairs have it. Of the other problem none is.
    assert pass_at([1, 0], 4, 2) == pytest.approx((3 / 6 + 0) / 2)
    assert pass_at([1, 3], 4, 1) == pytest.approx((1 / 4 + 3 / 4) / 2)
    assert pass_at([1, 0, 4], 4, 4) == pytest.approx(2 / 3)
    assert pass_at([2], 4, 3) == 1.0  # any three have a right one


def test_resampling_two_problems_gives_their_three_means_as_often_as_it_should():
    means = resampled_means(np.array([0.0, 1.0]), [1], draws=40_000)
    values, counts = np.unique(means, return_counts=True)
    assert values.tolist() == [0.0, 0.5, 1.0]
    np.testing.assert_allclose(counts / 40_000, [0.25, 0.5, 0.25], atol=0.01)
    assert np.array_equal(means, resampled_means(np.array([0.0, 1.0]), [1], draws=40_000))
    assert not np.array_equal(means, resampled_means(np.array([0.0, 1.0]), [2], draws=40_000))


def test_an_interval_ends_at_percentiles_and_there_is_none_where_all_problems_are_alike():
    assert interval(resampled_means(np.zeros(30), [0])) is None
    assert interval(np.arange(1001) / 1000) == pytest.approx((0.025, 0.975))


def test_intervals_cover_the_true_accuracy_about_as_often_as_they_say():
    """Problems of any difficulty, binomial responses: both draws have to be in the interval."""
    generator = np.random.default_rng(5)
    problems, covered = 60, 0
    for trial in range(300):
        difficulty_P = generator.beta(1.0, 2.0, problems)  # mean 1/3
        low, high = interval(
            resampled_means(generator.binomial(4, difficulty_P) / 4, [trial], draws=500)
        )
        covered += low <= 1 / 3 <= high
    assert 0.91 <= covered / 300 <= 0.98


def answers_of(rewards: dict[str, list[list[float]]]) -> dict:
    answers: dict = {}
    for mode, rows in rewards.items():
        for problem, row in enumerate(rows):
            of_problem = answers[mode, problem] = []
            for sample, reward in enumerate(row):
                finish, tokens = ("stop", 10) if reward else ("length", 20)
                place = {"mode": mode, "problem": problem, "id": str(problem), "sample": sample}
                rest = {"tokens": tokens, "seconds": 0.5, "version": -1, "text": ""}
                of_problem.append(GradedAnswer(**place, reward=reward, finish=finish, **rest))
    return answers


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")[1:-1]]


def benchmark_of(name: str, problems: int) -> Benchmark:
    made = {str(i): Question("?", "1") for i in range(problems)}
    return Benchmark(name, Path(f"{name}.jsonl"), made)


def test_scores_of_a_benchmark_and_their_mean_add_up_by_hand():
    modes = {"greedy": 1, "sampled": 2}
    first = answers_of({"greedy": [[1.0], [0.0]], "sampled": [[1.0, 0.0], [0.0, 0.0]]})
    second = answers_of({"greedy": [[1.0]], "sampled": [[1.0, 1.0]]})
    scores = [
        results.score(benchmark_of("a", 2), first, modes, 0),
        results.score(benchmark_of("b", 1), second, modes, 0),
    ]
    a, b = (score["sampled"] for score in scores)
    assert (a.accuracy, b.accuracy) == (0.25, 1.0)
    assert a.pass_at == {1: 0.25, 2: 0.5} and b.pass_at == {1: 1.0, 2: 1.0}
    assert (a.truncated, a.tokens) == (0.75, 17.5)
    assert scores[0]["greedy"].accuracy == 0.5 and scores[0]["greedy"].pass_at == {}
    average = results.mean(scores)
    assert average["sampled"].accuracy == 0.625  # not weighted by the number of problems
    assert average["sampled"].pass_at == {1: 0.625, 2: 0.75}
    assert average["greedy"].accuracy == 0.75
    assert results.tokens_per_second([*second["greedy", 0], *second["sampled", 0]]) == 20.0
    assert results.rows(benchmark_of("a", 2), first) == [
        {"id": "0", "greedy": 1.0, "sampled": 0.5},
        {"id": "1", "greedy": 0.0, "sampled": 0.0},
    ]
    table = results.table([("a", "2", scores[0], "20"), ("mean", "", average, "")])
    header, _, line, mean_line = map(cells_of, table.splitlines())
    heads = ["Avg@1, %", "Avg@2, %", "pass@2, %", "truncated, %", "tokens", "tokens/s"]
    assert header == ["benchmark", "problems", *heads]
    assert line == ["a", "2", "50.0 [0.0, 100.0]", "25.0 [0.0, 50.0]", "50.0", "75.0", "18", "20"]
    means = ["75.0 [50.0, 100.0]", "62.5 [50.0, 75.0]", "75.0", "37.5", "14", ""]
    assert mean_line == ["mean", "", *means]
    plain = results.table([("a", "2", scores[0], "20")], right_or_wrong=False)  # scores of any size
    assert "| Avg@1 | Avg@2 | pass@2, % |" in " ".join(plain.split())


def test_what_two_models_differ_by_is_paired_problem_by_problem():
    before = {"greedy": [[1.0], [0.0], [0.0]], "sampled": [[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]]}
    # Each problem is sampled 50 points better, whatever it was before: nothing is left to chance.
    after = {"greedy": [[1.0], [1.0], [0.0]], "sampled": [[1.0, 1.0], [0.0, 1.0], [1.0, 1.0]]}
    scores = []
    for rewards in (before, after):
        modes = {"greedy": 1, "sampled": 2}
        scores.append(results.score(benchmark_of("a", 3), answers_of(rewards), modes, 0))
    found = results.pairs("a", *scores, 0)
    assert found["sampled"].change == 0.5 and np.all(found["sampled"].resampled_D == 0.5)
    assert set(np.round(3 * found["greedy"].resampled_D)) == {0, 1, 2, 3}  # never worse
    assert results.as_json(found)["greedy"]["ci95"] == [0.0, 1.0]
    header, _, greedy, sampled = map(cells_of, results.pair_table([("a", 3, found)]).splitlines())
    assert header == ["benchmark", "problems", "score", "before", "after", "change"]
    assert greedy[:3] == ["a", "3", "Avg@1, %"] and greedy[-1] == "+33.3 [+0.0, +100.0]"
    assert sampled[2:] == ["Avg@2, %", "33.3 [0.0, 50.0]", "83.3 [50.0, 100.0]", "+50.0"]
    plain = results.pair_table([("a", 3, found)], right_or_wrong=False)  # scores of any size
    assert "| Avg@2 | 0.333 [0.000, 0.500] | 0.833 [0.500, 1.000] |" in plain


def test_benchmarks_of_one_size_are_resampled_independently():
    rewards = answers_of({"greedy": [[float(i % 2)] for i in range(50)]})
    scores = [results.score(benchmark_of(name, 50), rewards, {"greedy": 1}, 0) for name in "ab"]
    one, both = scores[0]["greedy"], results.mean(scores)["greedy"]
    # The variance of a mean of two independent ones is half of that of one.
    assert both.resampled_D.std() == pytest.approx(one.resampled_D.std() / math.sqrt(2), rel=0.05)


def test_a_benchmark_is_read_under_any_of_its_usual_names(tmp_path):
    path = tmp_path / "mixed.jsonl"
    path.write_text(
        '{"id": "x", "prompt": "1 + 1", "answer": "2", "source": "me"}\n\n'
        '{"problem": "1 + 2", "answer": 3}\n'
        '{"question": "half", "answer": 0.5, "id": 7}\n'
    )
    [found] = read_benchmarks([path], USUAL)
    assert found.name == "mixed"
    asked = [(name, q.text, q.answer) for name, q in found.problems.items()]
    assert asked == [("x", "1 + 1", "2"), ("2", "1 + 2", "3"), ("7", "half", "0.5")]


def test_problems_and_benchmarks_of_one_name_are_refused(tmp_path):
    path, good = tmp_path / "bench.jsonl", {"prompt": "1 + 1", "answer": "2"}
    path.write_text("\n".join(json.dumps(good | {"id": id}) for id in (4, "4")))
    with pytest.raises(ConfigError, match="bench.jsonl line 2 has the id '4' of .* line 1; ids"):
        read_benchmarks([path], USUAL)
    (tmp_path / "a").mkdir()
    path.write_text(json.dumps(good))
    same_name = shutil.copy(path, tmp_path / "a/bench.jsonl")
    with pytest.raises(ConfigError, match="both named bench"):
        read_benchmarks([path, Path(same_name)], USUAL)


def test_a_suffix_ends_a_text_and_the_last_turn_of_a_chat(tmp_path):
    class Shown:
        def read(self, questions, *, chat):
            return [(json.dumps(one.turns or one.text), chat) for one in questions]

    path = tmp_path / "bench.jsonl"
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "1 + 1"}]
    rows = [{"prompt": prompt, "answer": 2, "level": 1} for prompt in ("1 + 1", turns)]
    path.write_text("\n".join(map(json.dumps, rows)))
    [benchmark] = read_benchmarks([path], USUAL)
    text, chat = with_prompts(benchmark, Shown(), chat=False, suffix="Think.").prompts
    assert json.loads(text.input_ids[0]) == text.text == "1 + 1\nThink."
    ended = {"role": "user", "content": "1 + 1\nThink."}
    assert json.loads(chat.input_ids[0]) == [turns[0], ended]
    assert (chat.answer, chat.metadata) == ("2", {"level": 1})
    assert chat.text == "system: s\nuser: 1 + 1\nThink."


def test_the_benchmarks_that_ship_are_whole():
    shipped = Path(__file__).parents[2] / "launch/benchmarks"
    sums, toy = read_benchmarks(sorted(shipped.glob("*.jsonl")), USUAL)
    assert (sums.name, toy.name) == ("sums", "toy_math")
    for question in sums.problems.values():
        terms = question.text.rpartition(": ")[2].removesuffix(" =")
        assert re.fullmatch(r"\d [+-] \d [+-] \d", terms)
        numbers = map(int, re.findall(r"[+-]?\d", terms.replace(" ", "")))
        assert sum(numbers) == int(question.answer)


def test_answers_on_disk_survive_a_cut_line_and_refuse_other_settings(tmp_path):
    path = tmp_path / "aime.samples.jsonl"
    given = answers_of({"greedy": [[1.0], [0.0]], "sampled": [[1.0, 0.0], [0.0, 0.0]]})
    modes = {"greedy": 1, "sampled": 2}
    file = AnswerFile(path, {"limit": 2}, modes)
    for found in given.values():
        file.add(found)
    assert AnswerFile(path, {"limit": 2}, modes).answers == given

    whole = path.read_bytes()
    path.write_bytes(whole[:-20])  # in the middle of the last response
    again = AnswerFile(path, {"limit": 2}, modes)
    assert again.answers == {key: given[key] for key in given if key != ("sampled", 1)}
    again.add(given["sampled", 1])
    assert path.read_bytes() == whole
    again.forget(set(given))
    assert not path.exists()

    path.write_bytes(whole)
    with pytest.raises(ConfigError, match=r"other settings \(limit: 2 there, 3 here; new: None th"):
        AnswerFile(path, {"limit": 3, "new": 1}, modes)
    path.write_bytes(whole.replace(b'"mode"', b'"mode', 1))
    with pytest.raises(ConfigError, match=r"aime\.samples\.jsonl line 2 is damaged"):
        AnswerFile(path, {"limit": 2}, modes)


# The command, against scripted engines. A response begins where the prompt ends: the fake's token
# at position p is ``token_at(p)``, and every token of its model reads as its own number.


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.WordLevel({str(i): i for i in range(100)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text('{"max_position_embeddings": 64}')
    return folder


class Ladder:
    """Six prompts of 2 to 7 tokens; every other answer is the last of four tokens."""

    def __init__(self, root: Path, model: Path) -> None:
        self.root, self.model, self.path = root, model, root / "ladder.jsonl"
        rows = []
        for length in range(2, 8):
            last = token_at(length + 3)
            answer = str(last if length % 2 else last + 1)
            rows.append({"id": f"n{length}", "prompt": " ".join(["7"] * length), "answer": answer})
        self.path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def evaluated(self, *words: object, out: str = "out") -> int:
        """The exit code of ``qurl eval``; ``words`` win over what is short."""
        settings = ["rollout.max_new_tokens=4", "reward.kind=last_number", "--k", "1"]
        given = ["--model", self.model, "--out", self.root / out, *settings, *words]
        return main(["eval", str(self.path), *map(str, given)])

    def results(self, out: str = "out") -> dict:
        return json.loads((self.root / out / "results.json").read_text())

    def score(self, out: str = "out") -> dict:
        """The results of the benchmark itself, but for its speed."""
        score = self.results(out)["benchmarks"]["ladder"]
        del score["tokens_per_s"]
        return score

    def responses(self, out: str = "out") -> list[dict]:
        lines = (self.root / out / "ladder.samples.jsonl").read_text().splitlines()
        found = [json.loads(line) for line in lines[1:]]
        for answer in found:
            answer.pop("seconds")
        return sorted(found, key=lambda a: (a["mode"], a["problem"], a["sample"]))


@pytest.fixture
def ladder(model, tmp_path) -> Ladder:
    return Ladder(tmp_path, model)


@pytest.fixture
def trained(model, tmp_path) -> Path:
    """A run of step 4, whose settings are for SGLang engines that share its GPU."""
    recipe = f'[model]\npath = "{model}"\n[data]\ntask = "chain_sum"\n'
    (tmp_path / "recipe.toml").write_text(recipe)
    settings = ("rollout.backend=sglang", "rollout.colocate=true", "rollout.temperature=0.7")
    settings += ("rollout.samples_per_prompt=16", "reward.function=a:b")
    (tmp_path / "run").mkdir()
    text = to_toml(load(tmp_path / "recipe.toml", settings))
    (tmp_path / "run/config.toml").write_text(text)
    checkpoint = tmp_path / "run/checkpoints/step_000004"
    shutil.copytree(model, checkpoint)
    (checkpoint / "state.json").write_text("{}")
    return tmp_path / "run"


def planned(*words: str) -> list[EvaluationPlan]:
    parser = argparse.ArgumentParser()
    add_options(parser)
    arguments, overrides = parser.parse_known_args(["bench.jsonl", *words])
    return make_plans(arguments, overrides)


def urls(*engines: FakeEngine) -> str:
    return f"rollout.urls={json.dumps([engine.url for engine in engines])}"


@pytest.mark.parametrize("kind", ["embedded", "sglang"])
def test_every_problem_is_asked_greedily_and_k_times_and_the_results_say_so(kind, ladder, capsys):
    embedded = kind == "embedded"
    with FakeEngine(embedded=embedded) as one, FakeEngine(embedded=embedded) as two:
        sampled = ["--k", 3, "rollout.temperature=0.6", "--top-p", 0.95, "--seed", 5]
        assert ladder.evaluated(urls(one, two), *sampled) == 0
        asked = [
            (len(ids), params)
            for engine in (one, two)
            for body in engine.bodies("/generate")
            for ids, params in zip(body["input_ids"], body["sampling_params"], strict=True)
        ]
    assert sorted(length for length, _ in asked) == sorted([*range(2, 8)] * 4)
    drawn = [params for _, params in asked if params["temperature"] == 0.6]
    greedy = [params for _, params in asked if params not in drawn]
    assert greedy == [{**NEUTRAL, "temperature": 0.0, "max_new_tokens": 4}] * 6
    assert all(p["top_p"] == 0.95 and p["max_new_tokens"] == 4 for p in drawn)
    assert {p["sampling_seed"] for p in drawn} == {
        sample_seed(5, 0, problem, sample) for problem in range(6) for sample in range(3)
    }

    score, found = ladder.score(), ladder.results()
    assert score["problems"] == 6 and score["weight_versions"] == [-1]
    assert score["greedy"]["accuracy"] == score["sampled"]["accuracy"] == 0.5
    assert score["sampled"]["k"] == 3 and set(score["sampled"]["pass_at"]) == {"1", "2", "3"}
    assert score["sampled"]["truncated"] == 1.0 and score["sampled"]["tokens"] == 4.0
    assert score["rows"][1] == {"id": "n3", "greedy": 1.0, "sampled": 1.0}
    low, high = score["greedy"]["ci95"]
    assert low < 0.5 < high
    assert found["settings"]["served"] == ["fake @ default"]
    assert [engine["kind"] for engine in found["engines"]] == [kind] * 2
    assert found["versions"].keys() >= {"qurl", "python", "torch", "math-verify"}
    assert ladder.responses()[0]["text"] == " ".join(str(token_at(2 + i)) for i in range(4))
    table = (ladder.root / "out/results.md").read_text()
    assert table in capsys.readouterr().out
    assert re.search(r"^\| ladder +\| +6 \| 50\.0 \[.+\] \| 50\.0 \[.+\] \| +50\.0 \|", table, re.M)


@pytest.mark.parametrize("embedded", [True, False])
def test_an_evaluation_that_lost_its_engine_goes_on_and_ends_as_if_it_had_not(
    embedded, ladder, capsys
):
    # As many responses as make a batch of an embedded engine of two problems; an SGLang engine
    # takes one at a time.
    with FakeEngine(embedded=embedded) as engine:
        words = [urls(engine), "--k", 128 if embedded else 300]
        assert ladder.evaluated(*words, out="whole") == 0
        requests = len(engine.bodies("/generate"))
        engine.faults = [""] * (requests - 2) + ["500"] * 50
        assert ladder.evaluated(*words) == 2
        [line] = [x for x in capsys.readouterr().err.splitlines() if x.startswith("qurl:")]
        assert "answered 500" in line or "no engine is serving" in line
        assert line.endswith("; the answers so far are kept, and the same command goes on")
        assert 0 < len(ladder.responses()) < len(ladder.responses("whole"))

        engine.faults = []
        for asked in (2, 0):  # the second time all is there
            engine.calls.clear()
            assert ladder.evaluated(*words) == 0
            assert len(engine.bodies("/generate")) == asked
        assert ladder.responses() == ladder.responses("whole")
        assert ladder.score() == ladder.score("whole")
        assert ladder.evaluated(*words, "--seed", 9) == 2
        assert "other settings (seed: 0 there, 9 here)" in capsys.readouterr().err


def test_an_engine_that_failed_once_is_asked_again_and_benchmarks_have_a_mean(ladder, capsys):
    other = ladder.root / "other.jsonl"
    other.write_text(json.dumps({"prompt": "7 7", "answer": str(token_at(5))}) + "\n")
    with FakeEngine() as engine:
        engine.faults = ["500"]
        assert ladder.evaluated(other, urls(engine), "--suffix", "8 8 8") == 0
        assert min(len(b["input_ids"][0]) for b in engine.bodies("/generate")) == 5
        assert {b["input_ids"][0][-1] for b in engine.bodies("/generate")} == {8}
    # Three more tokens of prompt: every last token is another, so no answer is right any more.
    assert ladder.results()["mean"]["greedy"]["accuracy"] == 0.0
    assert ladder.results()["benchmarks"]["other"]["greedy"]["ci95"] is None
    assert "| mean " in capsys.readouterr().out


OWN = """
def score(prompt, response, **others):
    if prompt == '7 7':
        raise ValueError('too short')
    return len(response.split()) / (4 if prompt == '7 7 7 7' else 8)

def fails(response, **others):
    raise KeyError('unit')
"""


def test_a_function_of_ones_own_scores_and_what_it_cannot_is_told(ladder, capsys):
    own = ladder.root / "own.py"
    own.write_text(OWN)
    with FakeEngine() as engine:
        words = [urls(engine), "reward.kind=", f"reward.function={own}:score"]
        lost = (
            "1 response could not be scored and got 0: 1 raised (ValueError: too short "
            "(own.py, line 4))\n"
        )
        for _ in range(2):  # again, when all is there already
            assert ladder.evaluated(*words) == 0
            assert lost in capsys.readouterr().out
        score, samples = ladder.score(), ladder.responses()
        assert ladder.results()["settings"]["reward"] == f"{own}:score"
        assert score["greedy"]["accuracy"] == pytest.approx((4 * 0.5 + 1) / 6)
        assert score["unscored"] == 1
        own.write_text(OWN.replace("/ (", "/ 2 / ("))
        assert ladder.evaluated(*words) == 2
        edited = rf"other settings \(code of {own}:score: [0-9a-f]+ there, [0-9a-f]+ here\)"
        assert re.search(edited, capsys.readouterr().err)
        assert ladder.responses() == samples


def test_a_function_may_do_without_answers_and_one_that_scores_nothing_is_refused(ladder, capsys):
    ladder.path.write_text('{"prompt": "7 7 7"}\n{"prompt": "7 7 7 7", "answer": ""}\n')
    own = ladder.root / "own.py"
    own.write_text(OWN)
    with FakeEngine() as engine:
        assert ladder.evaluated(urls(engine)) == 2
        assert "line 1 has no reward_model.ground_truth or" in capsys.readouterr().err
        words = [urls(engine), "reward.kind="]
        assert ladder.evaluated(*words, f"reward.function={own}:score") == 0
        assert "ladder.jsonl: 2 prompts in prompt, no answers\n" in capsys.readouterr().out
        for _ in range(2):  # nothing is kept of answers without a score, nor said to be 0 % right
            assert ladder.evaluated(*words, f"reward.function={own}:fails", out="bad") == 2
            error = capsys.readouterr().err.splitlines()[-1]
            none = f"qurl: reward.function={own}:fails scored none of 2 responses: 2 raised (K"
            assert error.startswith(none)
            assert {path.name for path in (ladder.root / "bad").iterdir()} <= {".lock", "logs"}
    assert ladder.score()["greedy"]["accuracy"] == 0.75


def test_conversations_that_ended_early_are_counted_and_noted(ladder, capsys):
    own = ladder.root / "own.py"
    own.write_text(
        "class Asks:\n    def step(self, **given):\n"
        "        return {'role': 'user', 'content': '7 7 7'}\n"
    )
    with FakeEngine() as engine:
        engine.stop_every = 5
        turns = [f"rollout.environment={own}:Asks", "rollout.max_turns=2"]
        for _ in range(2):  # again, when all is there already
            assert ladder.evaluated(urls(engine), *turns) == 0
            # Turns of 1 to 5 tokens: one of 5 is cut off, and nothing is said to it.
            said = capsys.readouterr().out
            assert "\n\n5 of 6 responses ended early: what the environment said next did" in said
            assert (ladder.root / "out/results.md").read_text() in said
    assert ladder.score()["left_out"] == 5
    assert sum("left_out" in one for one in ladder.responses()) == 5


def test_a_default_length_leaves_room_for_the_longest_prompt(ladder, capsys):
    with FakeEngine() as engine:
        given = ["--out", str(ladder.root / "out"), "--k", "1", "reward.kind=exact", urls(engine)]
        assert main(["eval", str(ladder.path), "--model", str(ladder.model), *given]) == 0
        bodies = engine.bodies("/generate")
    asked = [params["max_new_tokens"] for body in bodies for params in body["sampling_params"]]
    assert {*asked} == {57}  # of 64, beside 7
    assert "responses end at 57 tokens, which the model's context leaves" in capsys.readouterr().out


def test_before_and_after_are_two_plans_of_the_settings_of_a_run(model, trained, tmp_path):
    words = ["--run", str(trained), "rollout.backend=embedded", "--k", "2"]
    first, second = planned(*words, "--before", "--step", "4")
    assert (first.model, second.model) == (model, trained / "checkpoints/step_000004")
    assert (first.out, second.out) == (trained / "eval/start", trained / "eval/step_000004")
    assert dataclasses.replace(first, model=second.model, out=second.out) == second
    assert planned(*words) == [second]
    rollout = second.config.rollout
    assert (rollout.backend, rollout.temperature, rollout.colocate) == ("embedded", 0.7, False)
    assert (second.scheme, second.top_p, second.responses["sampled"]) == ("int8", 1.0, 2)
    assert second.config.reward.function == "a:b"  # another takes its place, as in a recipe
    [exact] = planned(*words, "reward.function=", "reward.kind=exact")
    assert exact.config.reward.described == "exact"
    with pytest.raises(ConfigError, match="--before evaluates two models of --run; leave --model"):
        planned(*words, "--before", "--model", str(model))
    with pytest.raises(ConfigError, match="--step names a checkpoint of --run, and --model"):
        planned(*words, "--step", "4", "--model", str(model))
    text = (trained / "config.toml").read_text()
    (trained / "config.toml").write_text(text.replace(str(model), "gone"))
    with pytest.raises(ConfigError, match="the run began with model.path=gone, which is not a"):
        planned(*words, "--before")


def test_a_quantized_folder_is_evaluated_as_it_is(model, trained, tmp_path):
    folder = tmp_path / "out-int8"
    shutil.copytree(model, folder)
    stored = {"quantization_config": quantization_config("int8", ["lm_head"])}
    (folder / "config.json").write_text(json.dumps(stored))
    fp8 = ["--run", str(trained), "rollout.backend=embedded"]
    (trained / "config.toml").write_text(
        (trained / "config.toml").read_text().replace("int8", "fp8")
    )
    for options in ([], ["quant.scheme=int8"], fp8):
        [plan] = planned("--model", str(folder), *options)
        assert plan.scheme == "int8" and plan.out == Path("runs/eval/out-int8")
    with pytest.raises(ConfigError, match="out-int8 holds weights of scheme int8, not fp8; give"):
        planned("--model", str(folder), "quant.scheme=fp8")


def test_sglang_wants_a_runs_checkpoint_converted(trained):
    for name in (".metadata", "metadata.json"):
        (trained / "checkpoints/step_000004" / name).touch()
    refusal = "SGLang cannot load the Megatron .* with `qurl quantize --scheme int8 --model"
    with pytest.raises(ConfigError, match=refusal):
        planned("--run", str(trained))


def test_answers_made_otherwise_are_refused_before_an_engine_starts(ladder, trained, capsys):
    words = ["--run", str(trained), "--before", "--k", "2", "rollout.backend=embedded"]
    words += ["reward.function=", "rollout.max_new_tokens=4"]
    before, _ = planned(*words)
    before.out.mkdir(parents=True)
    [benchmark] = read_benchmarks([ladder.path], USUAL)
    problems = with_prompts(benchmark, Words(ladder.model), chat=False, suffix="").fingerprint
    for settings, change in (
        ({"problems": "", **before.settings}, r"problems:  there, \w+ here"),
        ({"problems": problems, **before.settings, "dtype": "x"}, "dtype: x there, bfloat16 here"),
    ):
        path = before.out / "ladder.samples.jsonl"
        path.write_text(json.dumps({"settings": settings}) + "\n")
        assert main(["eval", str(ladder.path), *words]) == 2
        output = capsys.readouterr()
        assert re.search(rf"start/ladder.* other settings \({change}.*delete that", output.err)
        assert "evaluating" not in output.out


@pytest.mark.parametrize(
    "options, message",
    [
        (["--k", "0"], "rollout.samples_per_prompt must be 1 or more, got 0"),
        (["--top-p", "0"], r"--top-p must lie in \(0, 1\], got 0"),
        (["--seed", "-1"], "--seed must be 0 or more"),
        (["algo.cap=2"], "unknown section algo; known: model, data, quant, rollout, reward"),
        (
            ['rollout.urls=["http://127.0.0.1:9"]', "quant.scheme=int8"],
            "quant.scheme is for engines that are started here; leave it or rollout.urls out",
        ),
        (["rollout.backend=sglang", "quant.scheme=int4"], "int4 is simulated by embedded engines"),
        (["rollout.backend=sglang", "quant.scheme=int8"], "none, not int8; convert it with"),
        (["--model", "nowhere"], "--model nowhere is not a folder"),
        (["--run", "nowhere"], "--run nowhere does not exist; name the folder of a run, its tra"),
        (["--run", "."], r"--run \. holds no checkpoint of a run; name the train.run_dir of one"),
        (["--before"], "--before is for the checkpoints of a run; name it with --run RUN_DIR"),
        (["--step", "3"], "--step is for the checkpoints of a run"),
        (
            ["reward.kind=", "reward.function=nowhere.py:score"],
            "reward.function=/.*/nowhere.py:score: .* does not exist; a relative path begins at",
        ),
    ],
)
def test_a_mistake_is_one_sentence(options, message, ladder, capsys):
    assert ladder.evaluated(*options) == 2
    error = capsys.readouterr().err
    assert re.search(message, error) and error.count("\n") == 1, error


@pytest.mark.parametrize(
    "stated, limit, fix",
    [
        ({"max_total_num_tokens": 9}, 9, "give at most 2"),
        ({"max_total_num_tokens": 99, "context_length": 5}, 5, "leave it out"),
        ({}, 64, "give at most 57"),  # what the model's config says
    ],
)
def test_a_prompt_that_no_engine_takes_is_named_before_any_is_asked(
    stated, limit, fix, ladder, capsys
):
    with FakeEngine() as engine:
        info = engine.server_info() | stated
        engine.server_info = lambda: info
        new = f"rollout.max_new_tokens={58 if limit == 64 else 4}"
        assert ladder.evaluated(urls(engine), new) == 2
        assert engine.bodies("/generate") == []
    error = capsys.readouterr().err
    assert "ladder.jsonl line 6: the longest prompt, 7 tokens, and rollout.max_new_tokens=" in error
    assert f"exceed the {limit} tokens that the engine takes" in error
    assert fix in error and error.count("\n") == 1
