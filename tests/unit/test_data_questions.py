"""Questions from files and tasks; what is wrong with them is said in a sentence."""

import json
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from qurl_megatron.config import DataConfig
from qurl_megatron.data.questions import held_out_questions, training_questions
from qurl_megatron.data.rows import Question
from qurl_megatron.kit.errors import ConfigError

ROWS = [{"prompt": "1 + 1 =", "answer": "2", "level": 3}, {"prompt": "x — y", "answer": "-7"}]
SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}


def write(path, text: str):
    path.write_text(text, encoding="utf-8")
    return DataConfig(path=str(path))


def table(path, **columns):
    pq.write_table(pa.table(columns), path)
    return DataConfig(path=str(path))


def test_jsonl_and_parquet_hold_the_same_questions(tmp_path):
    expected = [Question("1 + 1 =", "2", {"level": 3}), Question("x — y", "-7")]
    lines = "\ufeff" + "\n\n".join(json.dumps(row) for row in ROWS) + "\n"
    assert training_questions(write(tmp_path / "a.jsonl", lines)) == expected
    columns = {name: [row[name] for row in ROWS] for name in ("answer", "prompt")}
    expected = [replace(q, metadata={"extra": i}) for i, q in enumerate(expected)]
    assert training_questions(table(tmp_path / "a.parquet", **columns, extra=[0, 1])) == expected


GOOD = json.dumps(ROWS[0]) + "\n"


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("", "holds no prompts"),
        ("\n \n", "holds no prompts"),
        (GOOD + "\n{", "line 3 is not valid JSON: Expecting property name"),
        (GOOD + "3", "line 2 must be an object with prompt and answer, got 3"),
        (
            '{"prompt": "a",\n"answer": "1"}',
            "line 1 is not valid JSON: .*; write each object on one",
        ),
        (
            GOOD + '{"prompt": "a", "solution": "b"}',
            "line 2 has no reward_model.ground_truth or answer or label; it has prompt, solution: "
            "name the right one in data.answer_key",
        ),
        ('{"prompt": null, "answer": "b"}', "line 1: the prompt must be text or .*, got None"),
        ('{"prompt": " ", "answer": "b"}', "line 1: the prompt is empty"),
        (
            GOOD + '{"prompt": "a", "answer": "\\udc00"}',
            "line 2: the prompt or .* half a character",
        ),
        (GOOD + '{"a": ' + "[" * 100_000, "line 2 is not valid JSON: maximum recursion"),
    ],
    ids=range(10),
)
def test_a_bad_jsonl_file_is_refused_with_its_line(tmp_path, text, complaint):
    with pytest.raises(ConfigError, match=rf"data\.path=.*a\.jsonl.*{complaint}"):
        training_questions(write(tmp_path / "a.jsonl", text))


def test_bytes_that_are_not_utf8_are_refused_with_their_line(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(GOOD.encode() + b'{"prompt": "\xff"}')
    with pytest.raises(ConfigError, match="line 2 is not valid JSON: .* invalid start byte"):
        training_questions(DataConfig(path=str(tmp_path / "a.jsonl")))


def test_a_bad_parquet_file_is_refused_with_its_column_or_row(tmp_path):
    path = tmp_path / "a.parquet"
    for columns, complaint in [
        ({"prompt": ["a"]}, "row 0 has no .* or answer or label; it has prompt: name the right"),
        ({"prompt": ["a", "b"], "answer": [True, False]}, "row 0: the answer must be .*, got True"),
        ({"prompt": ["a", None], "answer": ["1", "2"]}, "row 1: the prompt must be .*, got None"),
        ({"prompt": pa.array([], pa.string()), "answer": pa.array([], pa.string())}, "no prompts"),
    ]:
        with pytest.raises(ConfigError, match=complaint):
            training_questions(table(path, **columns))
    path.write_text("no parquet")
    with pytest.raises(ConfigError, match="not a readable parquet file"):
        training_questions(DataConfig(path=str(path)))


def test_a_missing_or_unknown_file_is_named_with_its_key(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.path=nowhere\.jsonl does not exist"):
        training_questions(DataConfig(path="nowhere.jsonl"))
    with pytest.raises(ConfigError, match=r"must end in \.jsonl or \.parquet"):
        training_questions(write(tmp_path / "a.csv", "prompt,answer"))
    config = DataConfig(path="a.jsonl", eval_path="nowhere.parquet")
    with pytest.raises(ConfigError, match=r"data\.eval_path=nowhere\.parquet does not exist"):
        held_out_questions(config, 4)
    with pytest.raises(ConfigError, match=r"data\.eval_path is missing"):
        held_out_questions(DataConfig(path="a.jsonl"), 4)


def test_a_task_gives_the_same_questions_every_time_and_none_twice_over_the_split():
    config = DataConfig(task="chain_sum", task_args=SUMS, task_size=3000)
    training, held_out = training_questions(config), held_out_questions(config, 300)
    assert training == training_questions(config)
    assert held_out[:100] == held_out_questions(config, 100)
    assert len(training) == 3000 and len({q.text for q in held_out}) == 300
    assert not {q.text for q in training} & {q.text for q in held_out}
    for question in training[:50]:
        expression = question.text.rpartition(":")[2].rstrip("= ")
        assert str(eval(expression)) == question.answer


def test_held_out_questions_do_not_depend_on_how_many_are_trained_on():
    small, large = (DataConfig(task="chain_sum", task_size=n) for n in (10, 4000))
    assert held_out_questions(small, 64) == held_out_questions(large, 64)
    assert training_questions(small) == training_questions(large)[:10]


@pytest.mark.parametrize(
    "task, arguments, complaint",
    [
        ("chainsum", {}, "data.task=chainsum is not a reasoning-gym task; did you mean chain_sum"),
        ("zzz", {}, "known: .*chain_sum"),
        ("graph_color", {}, "graph_color has no single written answer"),
        ("chain_sum", {"terms": 2}, "chain_sum takes no terms; it takes .*max_terms"),
        ("chain_sum", {"seed": 2}, "chain_sum takes no seed"),
        ("chain_sum", {"min_terms": 3, "max_terms": 2}, "max_terms must be >= min_terms"),
        ("chain_sum", {"min_terms": "two"}, "does not suit data.task=chain_sum"),
    ],
)
def test_a_wrong_task_or_argument_is_named(task, arguments, complaint):
    with pytest.raises(ConfigError, match=complaint):
        training_questions(DataConfig(task=task, task_args=arguments))


def test_a_task_with_too_few_questions_to_hold_some_out_says_so():
    digits = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    with pytest.raises(
        ConfigError, match=r"gave \d+ distinct held-out questions .*64 are asked for"
    ):
        held_out_questions(DataConfig(task="chain_sum", task_args=digits), 64)


def test_our_own_task_sorts_as_many_digits_as_asked():
    config = DataConfig(task="sort_digits", task_args={"digits": 5}, task_size=3)
    for question in training_questions(config):
        digits = question.text.removeprefix("sort ").removesuffix(" =").split()
        assert len(digits) == 5 and " ".join(sorted(digits)) == question.answer
