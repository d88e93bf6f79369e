"""`docs/errors.md`: one sample of each kind of refusal of a configuration and of a mesh mapping, with its fix.

The page is the only golden of their wording: every other test compares the type and the fields of the error. Each
sample is refused as written and accepted with its fix. `UPDATE_GOLDEN=1` writes the page anew.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from helpers.golden import updating

from haliax_ext.errors import ShardingError
from levanter.commands.train.config import TrainLmConfig
from levanter.config import ConfigError, parse, parse_text
from levanter.config.loader import parse_argv
from levanter.mesh import MeshConfig, ModelAxes, resolve

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"

HEAD = """# Configuration errors

Look up a refused configuration here: each section shows a document, the message and the fix. The exit code is 2. One
run reports every mistake of a configuration, so that you correct them together:

```bash
python -m levanter.main.plan train_lm --config_path config/train/my_run.yaml
```

In Python, `levanter.config.ConfigError` has a tuple `problems`. The fields of a `Problem` are `key` (dotted), `mark`
(file and line), `value`, `expected` and `nearest` (valid names of similar spelling), so that a program need not parse
the message. The errors of a mesh are subclasses of `haliax_ext.errors.ShardingError` with the fields `path`, `problem`
and `suggestion`; `ManyShardingErrors.errors` holds several of them.

A test generates this page from the code. The documents are complete configurations of `train_lm`; every key that is
absent has its default.
"""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A refused document, the one that is accepted, and what the first problem names."""

    title: str
    text: str
    fix: str
    why: str = ""
    key: str = ""
    nearest: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)


KEYS = (
    Sample(
        title="Misspelt key",
        text="trainer:\n  num_train_stps: 10\n",
        fix="trainer:\n  num_train_steps: 10\n",
        key="trainer.num_train_stps",
        nearest=("num_train_steps",),
    ),
    Sample(
        title="Key in the wrong block",
        text="num_train_steps: 10\n",
        fix="trainer:\n  num_train_steps: 10\n",
        key="num_train_steps",
    ),
    Sample(
        title="Key that no block has",
        text="trainer:\n  mesh:\n    colour: red\n",
        fix="trainer:\n  mesh: {}\n",
        key="trainer.mesh.colour",
        why="The message lists the keys of the block.",
    ),
    Sample(
        title="Option of upstream that is not supported",
        text="hf_upload: me/model\n",
        fix="{}\n",
        key="hf_upload",
        why="The message says what to do instead. `null` and `false` are accepted, because they request nothing.",
    ),
    Sample(
        title="Old key that contradicts the current key",
        text="trainer:\n  fsdp_axis: embed\n  mesh:\n    param_mapping: {embed: model}\n",
        fix="trainer:\n  mesh:\n    param_mapping: {embed: model}\n",
        key="trainer.fsdp_axis",
        why="Old keys are translated. Where both keys are present, they must mean the same.",
    ),
)
VALUES = (
    Sample(
        title="Wrong type",
        text="trainer:\n  num_train_steps: many\n",
        fix="trainer:\n  num_train_steps: 10\n",
        key="trainer.num_train_steps",
    ),
    Sample(
        title="`null` where a value is required",
        text="trainer:\n  seed: null\n",
        fix="trainer:\n  seed: 0\n",
        key="trainer.seed",
    ),
    Sample(
        title="Number out of range",
        text="trainer:\n  num_train_steps: -5\n",
        fix="trainer:\n  num_train_steps: 5\n",
        key="trainer.num_train_steps",
    ),
    Sample(
        title="Duration without a unit",
        text="trainer:\n  checkpointer:\n    save_interval: 15\n",
        fix="trainer:\n  checkpointer:\n    save_interval: 15m\n",
        key="trainer.checkpointer.save_interval",
        why="Units are `w`, `d`, `h`, `m`, `s`, `ms` and `us`; they can be combined: `1h30m`.",
    ),
    Sample(
        title="Word that is not one of the choices",
        text="trainer:\n  mesh:\n    on_conflict: frist_wins\n",
        fix="trainer:\n  mesh:\n    on_conflict: first_wins\n",
        key="trainer.mesh.on_conflict",
        nearest=("first_wins",),
    ),
    Sample(
        title="List where a mapping is expected",
        text="trainer:\n  mesh: [data]\n",
        fix="trainer:\n  mesh:\n    axes: {data: -1}\n",
        key="trainer.mesh",
    ),
    Sample(
        title="Unknown `type:`",
        text="model:\n  type: lama\n",
        fix="model:\n  type: llama\n",
        key="model.type",
        nearest=("llama",),
    ),
    Sample(
        title="Missing `type:`",
        text="model:\n  num_layers: 2\n",
        fix="model:\n  type: llama\n  num_layers: 2\n",
        key="model",
    ),
    Sample(title="Name of a type without its key", text="model: llama\n", fix="model: {type: llama}\n", key="model"),
    Sample(
        title="Values that contradict each other",
        text="model:\n  type: llama\n  num_heads: 6\n  num_kv_heads: 4\n",
        fix="model:\n  type: llama\n  num_heads: 8\n  num_kv_heads: 4\n",
        key="model",
        why="The configuration class checks such rules, so the mark is the block.",
    ),
)
DOCUMENTS = (
    Sample(title="Syntax", text="trainer: {seed: 1\n", fix="trainer: {seed: 1}\n"),
    Sample(title="Duplicate key", text="trainer:\n  seed: 1\n  seed: 2\n", fix="trainer:\n  seed: 2\n"),
    Sample(
        title="Unknown tag",
        text="trainer:\n  id: !secret x\n",
        fix="trainer:\n  id: x\n",
    ),
    Sample(
        title="Base file that does not exist",
        text="extends: bse.yaml\ntrainer:\n  seed: 1\n",
        fix="extends: base.yaml\ntrainer:\n  seed: 1\n",
        files={"base.yaml": "trainer:\n  num_train_steps: 10\n"},
    ),
    Sample(
        title="File that includes itself",
        text="trainer: !include train.yaml\n",
        fix="trainer: !include trainer.yaml\n",
        files={"trainer.yaml": "seed: 1\n"},
    ),
)
COMMAND_LINES = (
    ("Word that is no key", ["trainer.seed", "1"], ["--trainer.seed", "1"]),
    ("Key without a value", ["--trainer.seed"], ["--trainer.seed", "1"]),
    ("Malformed key", ["--trainer..seed", "1"], ["--trainer.seed", "1"]),
    ("Several files", ["--config_path", "a.yaml", "--config", "b.yaml"], ["--configs", "a.yaml", "b.yaml"]),
)
SMALL = ModelAxes(
    sizes=dict(vocab=1024, embed=64, mlp=128, kv_head=4, q_heads_per_group=2, head_size=16, layers=2, position=32),
    known=("vocab", "embed", "mlp", "kv_head", "q_heads_per_group", "head_size", "layers", "position", "expert"),
    aliases={"kv_heads": "kv_head"},
)
MESHES = (
    (
        "Sizes that do not multiply to the devices",
        {"axes": {"data": 2, "model": 2}},
        {"axes": {"data": -1, "model": 2}},
    ),
    ("Fixed sizes that do not divide the devices", {"axes": {"model": 3}}, {"axes": {"model": 4}}),
    ("Two axes of size -1", {"axes": {"data": -1, "model": -1}}, {"axes": {"data": -1, "model": 2}}),
    ("Axis in both groups", {"dcn_axes": {"data": 1}}, {"dcn_axes": {"data_dcn": 1}}),
    ("Misspelt logical axis", {"param_mapping": {"embd": "data"}}, {"param_mapping": {"embed": "data"}}),
    ("Misspelt mesh axis", {"param_mapping": {"embed": "dta"}}, {"param_mapping": {"embed": "data"}}),
    (
        "Two spellings of one logical axis",
        {"shared_mapping": {"kv_heads": "data", "kv_head": "model"}},
        {"shared_mapping": {"kv_head": "model"}},
    ),
    (
        "Mesh axis that shards nothing",
        {"axes": {"context": 8}},
        {"axes": {"context": 8}, "compute_mapping": {"position": "context"}, "attention_mapping": "auto"},
    ),
    ("Heads that the mesh axis does not divide", {"axes": {"model": 16}}, {"axes": {"model": 4}}),
)


def _config_error(text: str, files: Mapping[str, str]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        _load(text, files)
    return caught.value


def _load(text: str, files: Mapping[str, str]) -> None:
    if not files:
        parse_text(TrainLmConfig, text, source="train.yaml")
        return
    for name, content in {**files, "train.yaml": text}.items():
        Path(name).write_text(content, encoding="utf-8")
    parse(TrainLmConfig, paths=["train.yaml"])


def _mesh(config: Mapping[str, object], devices: int) -> None:
    resolve(MeshConfig(**config), SMALL, devices=devices)  # type: ignore[arg-type]


def _devices(title: str) -> int:
    return 16 if title.startswith("Heads") else 8


def _mesh_error(title: str, config: Mapping[str, object]) -> ShardingError:
    with pytest.raises(ShardingError) as caught:
        _mesh(config, _devices(title))
    return caught.value


def _argv_error(argv: list[str]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse_argv(argv)
    return caught.value


def _block(language: str, text: str) -> str:
    return f"```{language}\n{text.rstrip()}\n```\n"


def _section(title: str, language: str, text: str, message: str, fix: str, why: str = "") -> str:
    # The name of the error is not in the message that a user sees, so only the message is shown.
    parts = [f"### {title}\n", *([why + "\n"] if why else []), _block(language, text), _block("text", message)]
    return "\n".join([*parts, "Fix:\n", _block(language, fix)])


def _yaml(config: Mapping[str, object]) -> str:
    def inline(value: object) -> str:
        if isinstance(value, Mapping):
            return "{" + ", ".join(f"{key}: {inline(item)}" for key, item in value.items()) + "}"
        return str(value)

    return "trainer:\n  mesh:\n" + "".join(f"    {key}: {inline(value)}\n" for key, value in config.items())


def page() -> str:
    """The page's text, from what the code refuses now."""
    parts = [HEAD]
    for heading, samples in (("Keys", KEYS), ("Values", VALUES), ("Files and YAML", DOCUMENTS)):
        parts.append(f"## {heading}\n")
        for sample in samples:
            files = "".join(f"# {name}:\n#   {text.splitlines()[0]} …\n" for name, text in sample.files.items())
            message = str(_config_error(sample.text, sample.files))
            parts.append(_section(sample.title, "yaml", files + sample.text, message, sample.fix, sample.why))
    parts.append("## Command line\n")
    parts += [
        _section(title, "text", " ".join(argv), str(_argv_error(argv)), " ".join(fix))
        for title, argv, fix in COMMAND_LINES
    ]
    parts.append(
        "## Mesh and axis mappings\n\nThe samples use a model with 4 key-value heads on 8 devices (16 in the last "
        "sample). [Sharding](sharding.md) explains the keys.\n"
    )
    parts += [
        _section(title, "yaml", _yaml(config), str(_mesh_error(title, config)), _yaml(fix))
        for title, config, fix in MESHES
    ]
    return "\n".join(parts)


def test_the_page_shows_what_the_code_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = page()
    if updating():
        PAGE.write_text(text, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == text, "docs/errors.md differs; UPDATE_GOLDEN=1 writes it anew"


@pytest.mark.parametrize("sample", [*KEYS, *VALUES, *DOCUMENTS], ids=lambda sample: sample.title)
def test_a_config_error_has_its_parts_as_fields(sample, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = _config_error(sample.text, sample.files).problems[0]
    assert first.mark is not None and first.mark.line is not None
    assert first.nearest == sample.nearest
    if sample.key:
        assert first.key == sample.key
    _load(sample.fix, sample.files)


def test_a_wrong_value_is_a_field():
    text = "trainer:\n  num_train_steps: many\n  mesh:\n    on_conflict: frist_wins\n  seed: -1\n"
    problems = {problem.key: problem for problem in _config_error(text, {}).problems}
    keys = ("num_train_steps", "mesh.on_conflict", "seed")
    integer, word, seed = (problems[f"trainer.{key}"] for key in keys)
    assert (integer.value, integer.expected) == ('"many"', "an integer")
    assert (word.value, word.nearest) == ('"frist_wins"', ("first_wins",))
    assert seed.value == "-1 (an integer)" and seed.expected == "from 0 to 4294967295"


@pytest.mark.parametrize(("title", "argv", "fix"), COMMAND_LINES)
def test_a_command_line_is_accepted_with_its_fix(title, argv, fix):
    assert str(_argv_error(argv).problems[0].mark) == "command line"
    parse_argv(fix)


@pytest.mark.parametrize(("title", "config", "fix"), MESHES)
def test_a_mesh_is_accepted_with_its_fix(title, config, fix):
    error = _mesh_error(title, config)
    assert error.problem and str(error).startswith(error.problem)
    _mesh(fix, _devices(title))
