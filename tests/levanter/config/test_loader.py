"""Loading end to end: files, overrides and old spellings into one configuration, or one error with everything."""

import logging
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import draccus
import pytest

from levanter.commands.train.config import TrainLmConfig
from levanter.config import ConfigError, HelpRequested, load, main, parse, parse_text, read

pytestmark = pytest.mark.quick


@dataclass(frozen=True, kw_only=True)
class ModelChoice(draccus.ChoiceRegistry):
    pass


@ModelChoice.register_subclass("small")
@dataclass(frozen=True, kw_only=True)
class SmallModel(ModelChoice):
    """A small model.

    Attributes:
        hidden: its width.
    """

    hidden: int = 8
    max_seq_len: int = 16


@dataclass(frozen=True, kw_only=True)
class MeshPart:
    axes: dict[str, int] = field(default_factory=dict)
    param_mapping: dict[str, str | list[str] | None] = field(default_factory=lambda: {"embed": "data"})
    dcn_axes: dict[str, int] = field(default_factory=dict)
    compute_mapping: dict[str, str | list[str] | None] = field(default_factory=dict)
    shared_mapping: dict[str, str | list[str] | None] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TrainerPart:
    """How it runs.

    Attributes:
        seed: the key that everything random
            is derived from.
        mp: the precision policy.
    """

    seed: int = 0
    mp: str = "f32"
    tags: list[str] = field(default_factory=list, metadata={"help": "free words"})
    mesh: MeshPart = field(default_factory=MeshPart)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Runs something.

    More about it.
    """

    name: str
    trainer: TrainerPart = field(default_factory=TrainerPart)
    model: ModelChoice = field(default_factory=SmallModel)


@dataclass(frozen=True, kw_only=True)
class Choices:
    main: ModelChoice | None = None
    named: dict[str, ModelChoice] = field(default_factory=dict)


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], str]:
    monkeypatch.chdir(tmp_path)

    def writer(name: str, text: str) -> str:
        Path(name).write_text(text)
        return name

    return writer


def test_files_then_overrides(write: Callable[[str, str], str]):
    write("base.yaml", "name: base\ntrainer: {seed: 1, mesh: {axes: {model: 2}}}\n")
    write("run.yaml", "extends: base.yaml\nname: run\n")
    argv = [
        "--config_path",
        "run",
        "--trainer.mesh.axes",
        '{"data": 4}',
        "--trainer.tags=[a, 'b c']",
        "--model.type",
        "small",
    ]
    config = load(RunConfig, [*argv, "--model.hidden", "32"])
    assert config == RunConfig(
        name="run",
        trainer=TrainerPart(seed=1, tags=["a", "b c"], mesh=MeshPart(axes={"model": 2, "data": 4})),
        model=SmallModel(hidden=32),
    )


def test_configs_merge_deeply_and_later_ones_win(write: Callable[[str, str], str]):
    write("a.yaml", "name: a\ntrainer: {seed: 1, mp: bf16}\n")
    write("b.yaml", "trainer: {seed: 2}\n")
    assert load(RunConfig, ["--configs", "a.yaml", "b.yaml"]).trainer == TrainerPart(seed=2, mp="bf16")


def test_parse_takes_texts_and_values():
    config = parse(RunConfig, overrides={"name": "x", "trainer.seed": 5, "trainer.mesh": {"axes": {"model": 2}}})
    assert config.trainer == TrainerPart(seed=5, mesh=MeshPart(axes={"model": 2}))
    assert parse(RunConfig, overrides=[("name", "x"), ("trainer.mesh.axes.model", "2")]).trainer.mesh.axes == {
        "model": 2
    }


def test_mapping_fields_take_one_line_of_yaml_without_braces():
    assert parse(RunConfig, overrides={"name": "x", "trainer.mesh.axes": "model: 2"}).trainer.mesh.axes == {"model": 2}


def test_text_fields_take_the_text_of_an_override_as_it_stands():
    config = parse(RunConfig, overrides={"name": "[a, b]", "trainer.mp": "p=f32,c=bf16"})
    assert (config.name, config.trainer.mp) == ("[a, b]", "p=f32,c=bf16")


def test_errors_of_files_and_command_line_come_together(write: Callable[[str, str], str]):
    write("run.yaml", "trainer:\n  sed: 1\n  mesh: !include nowhere.yaml\nmodel:\n  type: big\n")
    with pytest.raises(ConfigError) as caught:
        load(RunConfig, ["--config", "run.yaml", "--trainer.mq", "f32", "--trainer.seed", "one"])
    assert str(caught.value) == "\n".join(
        [
            "6 problems in the configuration:",
            "[1] run.yaml:3: no such file: nowhere.yaml (paths are relative to the file that names them)",
            "[2] run.yaml:2: trainer.sed: unknown key; did you mean `seed`?",
            "[3] command line: trainer.mq: unknown key; did you mean `mp`?",
            '[4] command line: trainer.seed: expected an integer, got "one"',
            "[5] run.yaml:5: model.type: unknown type `big` (known: small)",
            "[6] run.yaml:1: name: required key is missing (text)",
        ]
    )


def test_model_overrides_without_a_type():
    with pytest.raises(ConfigError) as caught:
        load(RunConfig, ["--name", "x", "--model.hidden", "4"])
    assert str(caught.value) == "command line: model: needs `type:` with one of small; add --model.type"


@dataclass(frozen=True, kw_only=True)
class Heads:
    heads: int = 4
    groups: int = 4
    width: int = 8

    def __post_init__(self) -> None:
        problems = []
        if self.heads % self.groups:
            problems.append(f"groups {self.groups} does not divide heads {self.heads}\n  legal: 1 or {self.heads}")
        if self.width % 2:
            problems.append(f"width {self.width} is odd")
        if problems:
            raise ValueError("\n".join(problems))


@dataclass(frozen=True, kw_only=True)
class HoldsHeads:
    attention: Heads = field(default_factory=Heads)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], ["run.yaml:2: attention: groups 4 does not divide heads 6", "      legal: 1 or 6", "    width 7 is odd"]),
        # What an override brought about is said of the override, and the rest of the file.
        (
            ["--attention.groups", "5", "--attention.heads", "8"],
            [
                "2 problems in the configuration:",
                "[1] command line: attention: groups 5 does not divide heads 8",
                "      legal: 1 or 8",
                "[2] run.yaml:2: attention: width 7 is odd",
            ],
        ),
        (
            ["--attention.width", "9"],
            [
                "2 problems in the configuration:",
                "[1] run.yaml:2: attention: groups 4 does not divide heads 6",
                "      legal: 1 or 6",
                "[2] command line: attention: width 9 is odd",
            ],
        ),
    ],
)
def test_what_a_class_refuses_of_an_override_is_said_of_the_command_line(write, words, expected):
    write("run.yaml", "attention:\n  heads: 6\n  width: 7\n")
    with pytest.raises(ConfigError) as caught:
        load(HoldsHeads, ["--config", "run.yaml", *words])
    assert str(caught.value).splitlines() == expected


def test_a_key_of_another_block_is_told_its_place_and_nothing_that_looks_like_it():
    """`train_weights` at the top was answered with `max_train_length`."""
    with pytest.raises(ConfigError, match=r":1: train_weights: unknown key; it belongs at `data\.train_weights`$"):
        parse_text(TrainLmConfig, "train_weights: {a: 1}\n")
    with pytest.raises(ConfigError, match=r"audio_key: unknown key; valid keys here are tokenizer, "):
        parse_text(TrainLmConfig, "data: {audio_key: audio}\n")


def test_a_misspelt_old_key_suggests_the_old_key():
    with pytest.raises(ConfigError) as caught:
        parse_text(RunConfig, "name: x\ntrainer:\n  tensor_parallel_axis: [mlp]\n", source="r.yaml")
    assert str(caught.value) == (
        "r.yaml:3: trainer.tensor_parallel_axis: unknown key; did you mean `tensor_parallel_axes`?"
    )


def test_old_keys_are_translated_and_each_is_logged_once(
    write: Callable[[str, str], str], caplog: pytest.LogCaptureFixture
):
    write("old.yaml", "name: x\ntrainer:\n  replica_dcn_axis_size: -1\nmodel: {type: small, seq_len: 7}\n")
    with caplog.at_level(logging.WARNING, logger="levanter.config"):
        config = load(RunConfig, ["--config_path", "old.yaml"])
    assert config.model == SmallModel(max_seq_len=7)
    assert caplog.messages == [
        "old.yaml:3: trainer.replica_dcn_axis_size: -1 → trainer.mesh.dcn_axes: {replica_dcn: -1} "
        "(a mesh size; `data` spans the other slices)",
        "trainer.fsdp_axis: (absent, embed) → trainer.mesh.param_mapping: {embed: data} "
        "(the default of the generation this file was written for)",
        "old.yaml:4: model.seq_len: 7 → model.max_seq_len: 7 "
        "(it is the longest sequence that the model accepts; each run chooses its own length)",
    ]
    assert len(read(RunConfig, paths=["old.yaml"]).changes) == 3


def test_text_cannot_name_files():
    with pytest.raises(ConfigError) as caught:
        parse_text(RunConfig, "extends: a.yaml\nname: x\ntrainer: !include b.yaml\n", source="t")
    assert [str(p) for p in caught.value.problems] == [
        "t:3: !include b.yaml: only a document in a file may include others",
        "t:1: extends: only a document in a file may extend others",
    ]


def test_help_shows_keys_types_defaults_and_meanings():
    with pytest.raises(HelpRequested) as caught:
        load(RunConfig, ["--help"])
    text = str(caught.value)
    assert text == (
        f"usage: python -m {RunConfig.__module__} --config_path FILE [--key value …]\n"
        "\n"
        "Runs something.\n"
        "\n"
        "  --name  str  (required)\n"
        "  --trainer  mapping\n"
        "    --trainer.seed  int  = 0\n"
        "        the key that everything random is derived from.\n"
        "    --trainer.mp  str  = f32\n"
        "        the precision policy.\n"
        "    --trainer.tags  list of str  = []\n"
        "        free words\n"
        "    --trainer.mesh  mapping\n"
        "      --trainer.mesh.axes  mapping  = {}\n"
        "      --trainer.mesh.param_mapping  mapping  = {embed: data}\n"
        "      --trainer.mesh.dcn_axes  mapping  = {}\n"
        "      --trainer.mesh.compute_mapping  mapping  = {}\n"
        "      --trainer.mesh.shared_mapping  mapping  = {}\n"
        "  --model  {type: …}: small  = {type: small, …}\n"
        "    (keys of type: small)\n"
        "    --model.hidden  int  = 8\n"
        "        its width.\n"
        "    --model.max_seq_len  int  = 16\n"
    )


def test_help_of_one_block():
    with pytest.raises(HelpRequested) as caught:
        load(RunConfig, ["--help", "trainer.mesh"])
    assert [line.split()[0] for line in str(caught.value).splitlines()[4:]] == [
        "--trainer.mesh",
        *(f"--trainer.mesh.{name}" for name in MeshPart.__dataclass_fields__),
    ]
    with pytest.raises(HelpRequested) as caught:
        load(Choices, ["--help", "main"])
    assert "hidden" not in str(caught.value)
    with pytest.raises(HelpRequested) as caught:
        load(Choices, ["--main.type", "small", "--help", "main"])
    assert "    --main.hidden  int  = 8\n        its width." in str(caught.value)
    with pytest.raises(HelpRequested) as caught:
        load(Choices, ["--named.<name>.type", "small", "--help", "named"])
    assert "--named.<name>.hidden  int  = 8" in str(caught.value)
    with pytest.raises(HelpRequested, match="No key begins with `trainr`"):
        load(RunConfig, ["--help", "trainr"])


def test_main_runs_a_function_of_a_configuration(capsys: pytest.CaptureFixture[str]):
    def run(config: RunConfig) -> str:
        return config.name

    assert main(run, args=["--name", "x"])() == "x"  # type: ignore[operator]
    with pytest.raises(SystemExit) as caught:
        main(run, args=["--nam", "x"])()  # type: ignore[operator]
    assert caught.value.code == 2
    assert capsys.readouterr().err == (
        "2 problems in the configuration:\n"
        "[1] command line: nam: unknown key; did you mean `name`?\n"
        "[2] command line: name: required key is missing (text)\n"
    )
    with pytest.raises(SystemExit) as caught:
        main(run, args=["--help"])()  # type: ignore[operator]
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("usage: ")


def test_the_config_room_imports_no_jax():
    code = (
        "import sys, levanter.config; sys.exit(any(m.split('.')[0] in ('jax', 'haliax', 'numpy') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
