"""What a run may change where it goes on: each key says it, and the page tells the same."""

from dataclasses import fields
from pathlib import Path

import pytest

from qurl_megatron.config import RunConfig, changes, load, refused
from qurl_megatron.config.keys import OnResume, rules_of

RULES: tuple[OnResume, ...] = ("free", "change", "fork", "never")
PAGE = Path(__file__).parents[2] / "docs/recipes.md"
RECIPE = '[model]\npath = "m"\n[data]\ntask = "chain_sum"\n'


@pytest.fixture
def changed(tmp_path):
    """The changes that overrides of a recipe are."""
    (tmp_path / "r.toml").write_text(RECIPE)
    before = load(tmp_path / "r.toml")
    return lambda *overrides: changes(before, load(tmp_path / "r.toml", overrides))


def test_messages_name_sections_as_recipes_do():
    for section in fields(RunConfig):
        assert section.type.section == section.name


def page_table() -> str:
    """The rules by section, as the table of docs/recipes.md."""
    rows = [
        "| section | may change, and computes the same | may change | only in a fork | never |",
        "|---|---|---|---|---|",
    ]
    for section in fields(RunConfig):
        keys = rules_of(section.type)
        cells = [_named(rule, list(keys.values()), keys) for rule in RULES]
        rows.append(f"| `{section.name}` | {' | '.join(cells)} |")
    return "\n".join(rows)


def _named(rule: OnResume, all_rules: list[OnResume], keys: dict[str, OnResume]) -> str:
    """The keys of a rule; of the rule that most keys of the section have, no names."""
    if rule == max(RULES, key=all_rules.count):
        return "all" if len(set(all_rules)) == 1 else "all others"
    return " ".join(f"`{key}`" for key, key_rule in keys.items() if key_rule == rule)


def test_the_page_tells_the_rules():
    assert page_table() in PAGE.read_text(encoding="utf-8"), page_table()


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("rollout.urls=['http://a']", "free"),
        ("optimizer.lr=1e-3", "change"),
        ("quant.scheme=fp8", "fork"),
        ("model.dtype=float32", "never"),
    ],
)
def test_a_change_is_refused_by_the_rule_of_its_key(changed, override, rule):
    (one,) = changed(override)
    assert (one.key, one.rule) == (override.partition("=")[0], rule)
    assert refused([one]) == ([one] if rule in ("fork", "never") else [])
    assert refused([one], fork=True) == ([one] if rule == "never" else [])


def test_a_folder_that_was_moved_is_no_change(changed):
    assert changed("train.run_dir=elsewhere") == []


def test_changes_read_as_a_refusal_and_as_an_event(changed):
    (one,) = changed("model.path=other")
    assert str(one) == "model.path m -> other"
    (empty,) = changed("sync.dir=/shared")
    assert str(empty) == "sync.dir '' -> /shared"
    (table,) = changed("data.task_args={min_terms=2, max_terms=3}")
    assert str(table) == "data.task_args {} -> {min_terms: 2, max_terms: 3}"
