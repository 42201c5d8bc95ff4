"""The one reader of data files: layouts, keys, chats, numbers, and what is refused."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from qurl_megatron.config import DataConfig
from qurl_megatron.config.load import build
from qurl_megatron.data.questions import training_questions
from qurl_megatron.data.rows import Columns, changed_files, checksum_of, read_file
from qurl_megatron.evaluation.benchmarks import read_benchmarks
from qurl_megatron.kit.errors import ConfigError
from tests.support.datasets import SYSTEM, slime_lines, verl_table

SUMS = [("1 + 1 =", "2"), ("2 + 3 =", "5")]
TURN = {"role": "user", "content": "1 + 1 ="}


@pytest.fixture
def read(tmp_path):
    """Reads rows that were written as JSONL."""

    def read(*rows, **named):
        path = tmp_path / "a.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return read_file(path, "FILE", **named)

    return read


def test_verls_tables_are_read_as_they_are(tmp_path):
    file = read_file(verl_table(tmp_path / "a.parquet", SUMS), "FILE")
    first, second = file.questions
    assert first.turns == ({"role": "system", "content": SYSTEM}, TURN)
    assert first.text == f"system: {SYSTEM}\nuser: 1 + 1 ="
    assert (first.answer, second.answer) == ("2", "5")
    assert second.metadata == {
        "data_source": "sums/main",
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "5"},
        "extra_info": {"split": "train", "index": 1},
    }
    assert second.place == "FILE row 1"
    assert file.summary == (
        "FILE: 2 prompts in prompt (chats), answers in reward_model.ground_truth; "
        "kept as metadata: data_source, ability, reward_model, extra_info"
    )


def test_slimes_lines_are_read_as_they_are(tmp_path):
    file = read_file(slime_lines(tmp_path / "a.jsonl", SUMS), "FILE")
    assert [q.answer for q in file.questions] == ["2", "5"]
    assert file.questions[0].turns == (TURN,)
    assert file.questions[1].metadata == {"rm_type": "math", "index": 1}
    assert file.summary == (
        "FILE: 2 prompts in prompt (chats), answers in label; kept as metadata: rm_type, index"
    )


def test_training_and_evaluation_read_the_same(tmp_path):
    for path in (
        verl_table(tmp_path / "verl.parquet", SUMS),
        slime_lines(tmp_path / "slime.jsonl", SUMS),
    ):
        config = DataConfig(path=str(path))
        [benchmark] = read_benchmarks([path], config)
        trained_on = training_questions(config)
        assert [*benchmark.problems.values()] == trained_on
        assert benchmark.summary.startswith(f"{path}: 2 prompts in prompt (chats)")


def test_the_answer_is_where_the_layout_says_and_null_is_no_answer(read):
    both = {"prompt": "a", "answer": "step by step", "reward_model": {"ground_truth": "7"}}
    assert read(both).questions[0].answer == "7"
    assert read({"prompt": "a", "answer": "1", "label": "easy"}).questions[0].answer == "1"
    assert read({"prompt": "a", "answer": None, "label": "1"}).questions[0].answer == "1"
    assert read({"prompt": None, "question": "b", "label": "1"}).questions[0].text == "b"


def test_keys_are_dotted_paths_or_names_with_a_dot(read):
    row = {"prompt": "not this", "in": {"text": "a"}, "out.x": 3, "more": 1}
    file = read(row, columns=Columns("in.text", "out.x"))
    [question] = file.questions
    assert (question.text, question.answer) == ("a", "3")
    assert question.metadata == {"prompt": "not this", "in": {"text": "a"}, "more": 1}
    chat = {"prompt": [TURN, {"role": "user", "content": "b"}], "answers": ["3", "4"]}
    [question] = read(chat, columns=Columns("prompt.1.content", "answers.0")).questions
    assert (question.text, question.answer, question.turns) == ("b", "3", ())
    with pytest.raises(ConfigError, match="line 1 has no prompt.2.content; it has prompt, answers"):
        read(chat, columns=Columns("prompt.2.content", "answers.0"))
    with pytest.raises(ConfigError, match="line 1 has no in.txt; it has .*in data.prompt_key"):
        read(row, columns=Columns("in.txt", "out.x"))


@pytest.mark.parametrize(
    "value, text",
    [(12, "12"), (-0.5, "-0.5"), (72.0, "72"), (2**70, str(2**70)), (1e300, "1e+300")],
)
def test_answers_may_be_numbers(read, value, text):
    assert read({"prompt": "a", "answer": value}).questions[0].answer == text


def test_a_tables_dates_are_kept(tmp_path):
    columns = {"prompt": ["a"], "answer": [1.0], "when": pa.array([1], pa.date32())}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    [question] = read_file(tmp_path / "a.parquet", "FILE").questions
    assert question.metadata["when"].isoformat() == "1970-01-02"


@pytest.mark.parametrize("value", [True, float("nan"), None, ["2"]])
def test_other_answers_are_refused(read, value):
    with pytest.raises(ConfigError, match="FILE line 1: the answer must be text or a number, got"):
        read({"prompt": "a", "answer": value})


@pytest.mark.parametrize(
    "prompt, complaint",
    [
        ([], "the prompt is empty"),
        ([{**TURN, "content": " "}], "the prompt is empty"),
        (["1 + 1 ="], "turn 1 of the prompt must have role and content, both text"),
        ([TURN, {"role": "user"}], "turn 2 of the prompt must have role and content"),
        ([{**TURN, "content": [{"type": "text"}]}], "turn 1 of the prompt must have role and"),
        ([{**TURN, "content": "\ud83d"}], "the prompt or the answer has half a character"),
        ([TURN, {"role": "assistant", "content": "2"}], "the last turn .* is the assistant's"),
        ({"role": "user"}, "the prompt must be text or a list of turns"),
    ],
    ids=range(8),
)
def test_a_bad_chat_is_refused_with_its_line_and_turn(read, prompt, complaint):
    with pytest.raises(ConfigError, match=rf"FILE line 2: {complaint}"):
        read({"prompt": [TURN], "answer": "2"}, {"prompt": prompt, "answer": "2"})


def test_several_turns_are_kept_in_their_order(read):
    turns = [TURN, {"role": "assistant", "content": "2"}, {**TURN, "name": None}]
    [question] = read({"messages": turns, "answer": "2"}).questions
    assert question.turns == (TURN, turns[1], TURN)


def test_an_array_in_one_file_is_refused(tmp_path):
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "é"}]
    file = tmp_path / "a.json"
    file.write_text("\n".join(map(json.dumps, rows)))
    assert [q.text for q in read_file(file, "FILE").questions] == ["a", "b"]
    for text in (json.dumps(rows), json.dumps(rows, indent=1)):
        file.write_text("\n" + text)
        with pytest.raises(ConfigError, match=r"^FILE line 2 begins an array, .*docs/data.md"):
            read_file(file, "FILE")


def test_several_files_are_refused_with_the_way_out(tmp_path):
    said = "does not exist .* one file is read: join several first"
    for given in ("a.jsonl,b.jsonl", "*.parquet"):
        with pytest.raises(ConfigError, match=said):
            read_file(Path(given), "FILE")
    with pytest.raises(ConfigError, match="one file is read"):
        read_file(tmp_path, "FILE")
    with pytest.raises(ConfigError, match=r"^data.path must be one path, got \['a.jsonl'\]; one f"):
        build(DataConfig, {"path": ["a.jsonl"]}, "data.")


def test_slimes_metadata_column_becomes_the_metadata_where_it_holds_objects(read):
    row = {"prompt": "a", "label": "1"}
    objects = read({**row, "metadata": None}, {**row, "metadata": {"level": 3}}, row)
    assert [question.metadata for question in objects.questions] == [{}, {"level": 3}, {}]
    texts = read({**row, "metadata": '{"level": 3}'})
    assert texts.questions[0].metadata == {"metadata": '{"level": 3}'}


def test_a_changed_file_is_found_and_a_missing_one_passed_over(tmp_path):
    path = slime_lines(tmp_path / "a.jsonl", SUMS)
    config = DataConfig(path=str(path), eval_path=str(tmp_path / "gone.jsonl"))
    checksums = {"data.path": checksum_of(path), "data.eval_path": "0"}
    assert changed_files(config, checksums) == {}
    path.write_text(path.read_text() + "\n")  # the same questions
    assert changed_files(config, checksums) == {"data.path": f"data.path={path}"}
    assert changed_files(config, {}) == {}
