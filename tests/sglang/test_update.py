"""Updates of real SGLang servers: what they hold afterwards is what a fresh start would hold."""

import pytest

from tests.sglang.engines import Case, Server, checkpoints, difference, publish, servers

IN_SLICE = ("int8", "fp8-tp2")
CASES = {
    "int8": Case("qwen2", "int8"),
    "fp8": Case("qwen2", "fp8", changes={"tie_word_embeddings": True}),
    "bf16": Case("llama", "none", dtype="bfloat16"),
    # One KV head for two ranks: each holds a copy.
    "fp8-tp2": Case(
        "qwen3",
        "fp8",
        "compressed-tensors",
        tensor=2,
        changes={"num_key_value_heads": 1, "num_attention_heads": 2},
    ),
    # A vocabulary that is padded before it is split.
    "int8-tp2": Case("llama", "int8", "compressed-tensors", tensor=2, changes={"vocab_size": 100}),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[pytest.mark.slice] if name in IN_SLICE else [])
        for name, case in CASES.items()
    ],
)
def test_an_updated_server_answers_as_one_started_from_that_checkpoint(case, tmp_path):
    first, second = checkpoints(case, tmp_path, ["first", "second"])
    with servers(
        lambda: Server(first.folder, case, tmp_path / "one"),
        lambda: Server(second.folder, case, tmp_path / "two"),
    ) as (one, two):
        from_first, from_second = one.answers(), two.answers()
        assert difference(from_first, from_second) > 0.01

        pointers = set()
        for version, (checkpoint, expected) in enumerate(
            [(second, from_second), (first, from_first), (second, from_second)]
        ):
            receipts = publish(one, checkpoint.tensors, version, tmp_path / "sync")
            assert [receipt.error for receipt in receipts] == [None] * case.tensor
            assert difference(one.answers(), expected) <= 1e-6
            assert one.client.weight_version() == str(version)
            pointers.add(tuple(receipt.pointers for receipt in receipts))
        assert len(pointers) == 1
