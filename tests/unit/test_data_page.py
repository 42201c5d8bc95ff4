"""What docs/data.md shows is as it says."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from qurl_megatron.data.rows import Question, read_file
from qurl_megatron.data.tokenizer import Tokenizer
from qurl_megatron.training.warmstart import build_tokenizer

PAGE = (Path(__file__).parents[2] / "docs/data.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    return re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)[1]


def test_its_commands_make_one_file_of_several_a_part_and_lines_of_an_array(tmp_path):
    rows = [{"prompt": text, "answer": "1"} for text in "abcd"]
    for name, part in (("a", rows[:2]), ("b", rows[2:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
        pq.write_table(pa.Table.from_pylist(part), tmp_path / f"{name}.parquet")
    (tmp_path / "a.json").write_text(json.dumps(rows[::-1]))
    commands = block("sh").replace("python -c", f"{sys.executable} -c").replace("1000", "3")
    subprocess.run(["sh", "-ec", commands], cwd=tmp_path, check=True)

    def texts(name: str) -> str:
        return "".join(one.text for one in read_file(tmp_path / name, name).questions)

    made = ("all.jsonl", "part.jsonl", "a.jsonl", "all.parquet", "part.parquet")
    assert [texts(name) for name in made] == ["abcd", "abc", "dcba", "abcd", "abc"]


def test_its_chat_becomes_the_text_it_says_by_its_template(tmp_path):
    (tmp_path / "chats.jsonl").write_text(block("json"))
    [question] = read_file(tmp_path / "chats.jsonl", "FILE").questions
    text = "system: Answer with a number.\nuser: 17 + 25 = ?\nassistant:"
    build_tokenizer([Question(text, question.answer)]).save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(block("jinja"))
    tokenizer = Tokenizer(tmp_path)
    [ids] = tokenizer.read([question], chat=False)
    assert tokenizer.decode(ids) == text
    for part in text.split("\n"):
        assert f"`{part}`" in PAGE
