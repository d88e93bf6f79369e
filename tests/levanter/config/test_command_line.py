"""The command line: files, overrides in every spelling, and what is refused."""

import pytest

from levanter.config.errors import ConfigError
from levanter.config.loader import CommandLine, load, overrides_document, parse_argv
from levanter.config.yaml_nodes import to_plain

pytestmark = pytest.mark.quick


def refused(*argv: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_argv(argv)
    return [str(problem) for problem in caught.value.problems]


def test_files_and_overrides():
    argv = ["--config_path", "a.yaml", "--trainer.seed", "3", "--trainer.mp=p=f32,c=bf16", "--x", "-1"]
    assert parse_argv(argv) == CommandLine(
        paths=("a.yaml",), overrides=(("trainer.seed", "3"), ("trainer.mp", "p=f32,c=bf16"), ("x", "-1"))
    )


@pytest.mark.parametrize(
    ("argv", "paths"),
    [
        (["--config", "a"], ("a",)),
        (["--configs", "a", "b", "--x", "1"], ("a", "b")),
        (["--configs", "a", "--configs", "b"], ("a", "b")),
        (["--configs=a"], ("a",)),
        ([], ()),
    ],
)
def test_the_three_ways_to_name_files(argv: list[str], paths: tuple[str, ...]):
    assert parse_argv(argv).paths == paths


ONE_OF = (
    "command line: give one of --config_path X, --config X and --configs A B … (to merge several files, list them "
    "after --configs)"
)


@pytest.mark.parametrize(
    ("argv", "problems"),
    [
        (["--config", "a", "--config_path", "b"], [ONE_OF]),
        (["--config_path", "a", "--config_path", "b"], [ONE_OF]),
        (["run.yaml"], ["command line: expected --key value, got 'run.yaml'; did you mean --config_path run.yaml?"]),
        (["--a", "1", "2"], ["command line: expected --key value, got '2'"]),
        (["--a"], ["command line: --a needs a value"]),
        (["--a", "--b", "1"], ["command line: --a needs a value"]),
        (["--a..b", "1"], ["command line: --a..b is not a key such as --trainer.seed"]),
        (["-x", "--y"], ["command line: expected --key value, got '-x'", "command line: --y needs a value"]),
    ],
)
def test_what_is_refused(argv: list[str], problems: list[str]):
    assert refused(*argv) == problems


@pytest.mark.parametrize(
    ("argv", "prefix"),
    [(["--help"], ""), (["-h"], ""), (["--help", "trainer.mesh"], "trainer.mesh"), (["--x", "1"], None)],
)
def test_help(argv: list[str], prefix: str | None):
    assert parse_argv(argv).help == prefix


@pytest.mark.parametrize(
    ("pairs", "document"),
    [
        ([("a.b", "1"), ("a.c", "x y")], {"a": {"b": 1, "c": "x y"}}),
        ([("a", "1"), ("a", "2")], {"a": 2}),
        ([("a.axes", '{"model": 2}'), ("a.axes.data", "4")], {"a": {"axes": {"model": 2, "data": 4}}}),
        ([("a", "[x, [1, 2]]")], {"a": ["x", [1, 2]]}),
        ([("a", '"5"')], {"a": "5"}),
        ([("a", "[not closed")], {"a": "[not closed"}),
        ([("a", "key: value # no comment")], {"a": "key: value # no comment"}),
        ([("a", "null")], {"a": None}),
        ([("a", "")], {"a": None}),
    ],
)
def test_overrides_are_one_document(pairs: list[tuple[str, str]], document: dict):
    assert to_plain(overrides_document(pairs)) == document


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["train.yaml"], "did you mean --config_path train.yaml?"),
        (["--confg_path", "a.yaml"], "did you mean `config_path`?"),
        (["--optimizer.lr", "1e-3"], "optimizer.lr: unknown key; here it is `learning_rate`"),
        (["--model", "org/name"], "a checkpoint is hf_checkpoint: org/name"),
        (["--data", "a.jsonl"], "data.components.NAME.source.train_urls: [a.jsonl]"),
    ],
)
def test_what_people_type_first_has_a_hint(words, hint):
    from levanter.commands.train.config import TrainLmConfig

    with pytest.raises(ConfigError) as caught:
        load(TrainLmConfig, words)
    assert hint in str(caught.value)
