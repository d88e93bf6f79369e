# ruff: noqa: E501 - rows of tables
"""Mutations of documents and command lines: senseless values, misspelt keys, damaged YAML, values drawn for any key."""

import random
from dataclasses import is_dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal, get_args, get_origin

from helpers.mutations.cases import BEYOND, MAY_PASS, REFUSED, Case, evaluation

NUMBERS = {
    "max_seq_len": "model.max_seq_len", "hidden_dim": "model.hidden_dim", "intermediate_dim": "model.intermediate_dim",
    "num_layers": "model.num_layers", "num_heads": "model.num_heads", "num_kv_heads": "model.num_kv_heads",
    "learning_rate": "optimizer.learning_rate", "beta2": "optimizer.beta2", "warmup": "optimizer.warmup",
    "seed": "trainer.seed", "num_train_steps": "trainer.num_train_steps", "train_batch_size": "trainer.train_batch_size",
    "per_device_parallelism": "trainer.per_device_parallelism",
}  # fmt: skip


def senseless_number(dice: random.Random, here: Path) -> Case:
    name = dice.choice(sorted(NUMBERS))
    value = dice.choice(
        [".nan", ".inf", "-.inf", "1e30", "-1e30", "1e999", "-7", "1" + "0" * dice.randint(25, 5000), "true"]
    )
    return _line(here, name, value, REFUSED, NUMBERS[name])


def other_type(dice: random.Random, here: Path) -> Case:
    name = dice.choice(sorted(NUMBERS))
    value = dice.choice(["[1, 2]", "{a: 1}", "many", "'3", "null", "1.5.2", "0x", "2024-01-01", "[[[[]]]]"])
    return _line(here, name, value, REFUSED, "" if value == "'3" else name)


def huge_size(dice: random.Random, here: Path) -> Case:
    name = dice.choice(["hidden_dim", "intermediate_dim", "train_batch_size", "max_seq_len"])
    # Sizes that no machine of today holds, and that are within the ranges.
    value = str(2 * dice.randint(2**28, 2**30 - 1))
    return _line(here, name, value, BEYOND if name != "intermediate_dim" else MAY_PASS, "")


def _line(here: Path, name: str, value: str, codes: tuple[int, ...], says: str) -> Case:
    lines = (here / "train.yaml").read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if line.strip().startswith(f"{name}:"))
    indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
    lines[at] = f"{indent}{name}: {value}"
    (here / "train.yaml").write_text("\n".join(lines) + "\n")
    return Case(f"{name}: {value:.40}", "train_lm", ("--config_path", str(here / "train.yaml")), codes, says)


_SIZES = (1, 2, 3, 5, 8, 64)
_LEFT_ALONE = ("jax_config", "distributed", "num_train_steps", "profile_options", "perfetto_link", "auto_build_caches")
"""Keys that change the process, or how long it takes, and not what is asked."""


def any_key(dice: random.Random, here: Path) -> Case:
    """A value that a key may have, whatever it makes of the run: it may be refused, and must not end in a traceback."""
    from levanter.commands.evaluate.config import EvalLmConfig
    from levanter.commands.train.config import TrainLmConfig

    trains = dice.random() < 0.7
    words: list[str] = []
    for _ in range(dice.choice([1, 1, 2, 3])):
        key, value = _drawn(dice, TrainLmConfig if trains else EvalLmConfig, ())
        words += [f"--{key}", value]
    if not trains:
        return evaluation(here, f"keys {words}", MAY_PASS, "", *words)
    path = str(here / "train.yaml")
    return Case(
        f"keys {words}",
        "plan",
        ("train_lm", "--config_path", path, *words, "--target", "v6e-4", "--no-compile"),
        MAY_PASS,
    )


def _drawn(dice: random.Random, cls: type, path: tuple[str, ...]) -> tuple[str, str]:
    """A random key below a configuration class, and text for it."""
    from levanter.config.schema import annotated_members, config_fields, is_choice, strip

    while True:
        name, one = dice.choice([(n, f) for n, f in config_fields(cls).items() if n not in _LEFT_ALONE])
        member = dice.choice(annotated_members(one.type))
        bare = strip(member)
        if is_choice(bare):
            bare = {"model": "llama", "optimizer": "adam", "rope": "default"}.get(name)
            if bare is None:
                continue
            chosen = strip(annotated_members(one.type)[0]).get_choice_class(bare)
            return _drawn(dice, chosen, (*path, name))
        if isinstance(bare, type) and is_dataclass(bare):
            return _drawn(dice, bare, (*path, name))
        value = _value(dice, name, member)
        if value is not None:
            return ".".join((*path, name)), value


def _value(dice: random.Random, name: str, annotation: object) -> str | None:
    """Text for a key of this type; None for types whose values are not drawn."""
    from levanter.config.schema import strip
    from levanter.config.validators import Range, declared_range

    bare, limits = strip(annotation), declared_range(annotation)
    if bare is bool:
        return dice.choice(["true", "false"])
    if bare is type(None):
        return "null"
    if get_origin(bare) is Literal:
        return str(dice.choice([*get_args(bare), "nonsense"]))
    if bare is timedelta:
        return dice.choice(["1s", "1ms", "100d"])
    if bare is str:
        return dice.choice(["x", "''", "null", "a/b", "f32"])
    if bare is int and isinstance(limits, Range):
        most = [] if name == "num_layers" else [int(limits.high)]
        return str(dice.choice([int(limits.low), *_SIZES, *limits.also, *most]))
    if bare is float and isinstance(limits, Range):
        low = limits.low + 1e-9 if limits.above else limits.low
        return repr(float(dice.choice([low, min(limits.high, 1.0) * 0.5, 1e-3, limits.high * 0.999])))
    return None


def misspelt_key(dice: random.Random, here: Path) -> Case:
    text = (here / "train.yaml").read_text()
    name = dice.choice(sorted(NUMBERS))
    at = dice.randrange(len(name))
    wrong = dice.choice([name[:at] + name[at + 1 :], name[:at] + "q" + name[at:], name + "_", name.upper()])
    (here / "train.yaml").write_text(text.replace(f"  {name}:", f"  {wrong}:"))
    return Case(f"key {wrong}", "train_lm", ("--config_path", str(here / "train.yaml")), REFUSED, wrong)


def unknown_choice(dice: random.Random, here: Path) -> Case:
    text = (here / "train.yaml").read_text()
    name = dice.choice(["type: llama", "type: adam", "type: noop", "type: url", "type: default"])
    wrong = "type: " + dice.choice(["lama", "", "null", "[x]", "x" * 3000, "Llama", "../../x", "\\u0000"])
    (here / "train.yaml").write_text(text.replace(name, wrong))
    return Case(f"{name} → {wrong:.40}", "train_lm", ("--config_path", str(here / "train.yaml")), REFUSED, "type")


def damaged_document(dice: random.Random, here: Path) -> Case:
    content = bytearray((here / "train.yaml").read_bytes())
    how = dice.choice(["byte", "cut", "insert", "swap"])
    at = dice.randrange(len(content))
    if how == "byte":
        content[at] ^= 1 << dice.randrange(8)
    elif how == "cut":
        del content[at:]
    elif how == "insert":
        content[at:at] = dice.choice(
            [b"\x00", b"\xff\xfe", b"{", b"]", b"&a *a", b"!!python/object:os.system x", b"\t", b"<<: "]
        )
    else:
        lines = bytes(content).split(b"\n")
        dice.shuffle(lines)
        content = bytearray(b"\n".join(lines))
    (here / "train.yaml").write_bytes(bytes(content))
    words = (
        "--config_path",
        str(here / "train.yaml"),
        "--trainer.num_train_steps",
        "1",
        "--trainer.train_batch_size",
        "8",
    )
    return Case(
        f"document: {how} at {at}", "train_lm", (*words, "--trainer.log_dir", str(here / "logs")), (0, 2, 3), ""
    )


def command_line(dice: random.Random, here: Path) -> Case:
    wrong = dice.choice([
        ("--trainer.num_train_steps",), ("stray",), ("--",), ("--trainer..seed", "1"), ("--model", "3"),
        ("--trainer.mesh.axes", "{model: 0}"), ("--trainer.mesh.axes", "{'': 2}"), ("--trainer.id", "../x"),
        ("--optimizer.epsilon", "0"), ("--data.train_weights", "{a: .nan}"), ("--data.train_weights", "{a: 0}"),
        ("--epoch", "-1"), ("--trainer.mp", "p=f99"), ("--trainer.mesh.hbm_gib", "-1"),
        ("--trainer.checkpointer.base_path", "''"), ("--config", "/dev/null/x"), ("--train_seq_len", "1"),
        ("--trainer.checkpointer.save_interval", "-1m"), ("--model.activation_function", "x" * 500),
    ])  # fmt: skip
    return Case(f"words {wrong}", "train_lm", ("--config_path", str(here / "train.yaml"), *wrong), REFUSED)
