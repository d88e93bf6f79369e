# ruff: noqa: E501 - rows of tables
"""Mutations of everything that comes from outside, made by a seed: `make fuzz`, or this file with `--seed` and `--count`.

A *case* is a folder with one sound run in it and one mutation of one of its files: the document, config.json, the
weights, the tokenizer, the text, a GGUF file. The mutation says what must come of it: refused (exit code 2), does not
fit (3), or that it changes nothing a run looks at, and may pass. Judged for every case:

- no traceback, no assertion, no bare errno;
- no more than 20 seconds of processor time (a machine that does other work is slower by the clock), no more than some
  minutes by the clock, and not the end of the process;
- the exit code: where the mutation is known to make no sense, 0 is nonsense that was accepted.

Bodies of HTTP requests (`helpers/drawn_requests.py`) are read without a run; what is wrong with each is in its own words.

Cases run one after the other in a process of their own, which is replaced where one of them ends it. A failure is
printed with the seed and number that make it again (`--only N`).
"""

import argparse
import atexit
import faulthandler
import gzip
import json
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal, get_args, get_origin

REFUSED, MAY_PASS = (2,), (0, 2, 3)
BEYOND = (2, 3)
PATIENCE_SECONDS = 400.0
WALL_SECONDS = 80.0
"""Before the patience of the attacks' frame, which multiplies it."""
SLOW_SECONDS = 20.0
"""Of processor time."""
STDERR = Path(tempfile.gettempdir()) / f"fuzz-{os.getuid()}.stderr"
"""What a worker printed last."""

TRAIN = """\
model:
  type: llama
  max_seq_len: 32
  hidden_dim: 16
  intermediate_dim: 32
  num_layers: 1
  num_heads: 2
  num_kv_heads: 2
  rope: {{type: default, theta: 10000.0}}
data:
  tokenizer: {here}
  cache_dir: {here}/cache
  shuffle: false
  train_weights: {{a: 1.0}}
  components:
    a:
      source: {{type: url, train_urls: ['{here}/text.jsonl'], validation_urls: ['{here}/text.jsonl']}}
optimizer:
  type: adam
  learning_rate: 1e-3
  beta2: 0.95
  warmup: 0.1
trainer:
  seed: 1
  num_train_steps: 1
  train_batch_size: 8
  per_device_parallelism: -1
  log_dir: {here}/logs
  tracker: {{type: noop}}
  checkpointer: {{base_path: '{here}/checkpoints', save_interval: 15m, keep: [{{every: 10}}]}}
  mesh: {{axes: {{data: -1, model: 1}}}}
"""
EVALUATE = """\
hf_checkpoint: {here}
max_eval_length: 32
output_path: {here}/result.json
data:
  components:
    a:
      source: {{type: url, validation_urls: ['{here}/{text}']}}
trainer:
  log_dir: {here}/logs
  tracker: {{type: noop}}
  per_device_eval_parallelism: 2
"""


@dataclass(frozen=True)
class Case:
    """One mutation, laid out in a folder.

    Attributes:
        what: what was done, in words.
        command: the entry point.
        words: its command line.
        codes: the exit codes that are right.
        says: a text that must be said, where it is refused.
    """

    what: str
    command: str
    words: tuple[str, ...]
    codes: tuple[int, ...]
    says: str = ""


Mutation = Callable[[random.Random, Path], Case]


def sound(here: Path, *, text: str = "text.jsonl") -> None:
    """A folder with a tiny checkpoint, its tokenizer, a text, and documents that use them."""
    from helpers.hf_folder import write_folder

    write_folder(here)
    rows = [json.dumps({"text": f"the cat {n} sat on the mat, didn't it? " * 3}) for n in range(20)]
    (here / "text.jsonl").write_text("\n".join(rows) + "\n")
    (here / "train.yaml").write_text(TRAIN.format(here=here))
    (here / "eval.yaml").write_text(EVALUATE.format(here=here, text=text))


# --- documents ------------------------------------------------------------------------------------------------------

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
        return _evaluation(here, f"keys {words}", MAY_PASS, "", *words)
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
        if is_dataclass(bare):
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


# --- checkpoints ----------------------------------------------------------------------------------------------------


def _evaluation(here: Path, what: str, codes: tuple[int, ...], says: str = "", *more: str) -> Case:
    return Case(what, "eval_lm", ("--config_path", str(here / "eval.yaml"), *more), codes, says)


def config_json(dice: random.Random, here: Path) -> Case:
    path = here / "config.json"
    document = json.loads(path.read_text())
    sizes = [
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
        "rms_norm_eps",
        "num_key_value_heads",
    ]
    name = dice.choice(sizes)
    value = dice.choice([float("nan"), float("inf"), -1, 0, 10**30, "x", [1], True, {"a": 1}])
    document[name] = value
    path.write_text(json.dumps(document))
    return _evaluation(here, f"config.json {name}: {value!r:.30}", REFUSED, name)


def damaged_json(dice: random.Random, here: Path) -> Case:
    name = dice.choice(["config.json", "tokenizer.json"])
    content = bytearray((here / name).read_bytes())
    how = dice.choice(["cut", "empty", "list", "deep", "bytes", "number"])
    at = dice.randrange(1, len(content) - 2)
    if how == "cut":
        del content[at:]
    elif how == "empty":
        content.clear()
    elif how == "list":
        content = bytearray(b"[" + content + b"]")
    elif how == "deep":
        content = bytearray(b'{"model": ' + b"[" * 3000 + b"]" * 3000 + b"}")
    elif how == "number":
        content = bytearray(b'{"vocab_size": ' + b"9" * 6000 + b"}")
    else:
        content[at : at + 4] = b"\xff\xfe\x00\x01"
    (here / name).write_bytes(bytes(content))
    return _evaluation(here, f"{name}: {how}", REFUSED, name)


def tokenizer_json(dice: random.Random, here: Path) -> Case:
    path = here / "tokenizer.json"
    document = json.loads(path.read_text())
    key = dice.choice(sorted(document))
    value = dice.choice([None, 3, [], {}, "x", {"type": "Nonsense"}, [{"id": -1}], {"type": "BPE", "vocab": {"a": -5}}])
    document[key] = value
    path.write_text(json.dumps(document))
    return _evaluation(here, f"tokenizer.json {key}: {value!r}", MAY_PASS)


def weights(dice: random.Random, here: Path) -> Case:
    path = here / "model.safetensors"
    content = bytearray(path.read_bytes())
    length = int.from_bytes(content[:8], "little")
    how = dice.choice(["cut", "length", "grow", "offsets", "dtype", "header", "drop", "empty"])
    codes, header = REFUSED, bytes(content[8 : 8 + length])
    if how == "cut":
        del content[dice.randrange(len(content)) :]
    elif how == "length":
        content[:8] = dice.choice([2**60, 2**63, length + 1, length - 1, 0]).to_bytes(8, "little")
    elif how == "grow":
        content += bytes(dice.randrange(1, 100))
    elif how == "empty":
        content.clear()
    elif how == "header":
        # A name, a dtype, a size or a bracket: nothing of the header can change without consequence, but blanks.
        at = dice.randrange(8, 8 + len(header.rstrip()))
        content[at] ^= 1 << dice.randrange(7)
        codes = MAY_PASS if b"__metadata__" in header else REFUSED
    else:
        document = json.loads(header)
        name = dice.choice([key for key in document if key != "__metadata__"])
        if how == "drop":
            document[name + "x"] = document.pop(name)
        elif how == "dtype":
            document[name]["dtype"] = dice.choice(["F64", "X9", "I8", 7, None])
        else:
            document[name]["data_offsets"] = dice.choice([[0, 2**60], [-1, 5], [5, 1], "x", [0], [1.5, 2]])
        text = json.dumps(document).encode()
        content = bytearray(len(text).to_bytes(8, "little") + text + bytes(content[8 + length :]))
    path.write_bytes(bytes(content))
    return _evaluation(here, f"model.safetensors: {how}", codes)


def gguf_file(dice: random.Random, here: Path) -> Case:
    from helpers.gguf_file import write_gguf

    path = write_gguf(here / "model.gguf")
    content = bytearray(path.read_bytes())
    how = dice.choice(["cut", "count", "byte", "byte", "byte"])
    codes = REFUSED
    if how == "cut":
        del content[dice.randrange(4, len(content)) :]
    elif how == "count":
        at = dice.choice([8, 16])
        content[at : at + 8] = dice.choice([2**60, 2**63, 10**6, 2**32 + 1]).to_bytes(8, "little")
    else:
        content[dice.randrange(min(len(content), 2000))] ^= 1 << dice.randrange(8)
        codes = MAY_PASS
    path.write_bytes(bytes(content))
    # A number of the metadata may be another one, which nobody can know; then the weights do not fit it, or it fits.
    return _evaluation(here, f"gguf: {how}", codes, "", "--hf_checkpoint", str(path), "--data.tokenizer", str(here))


# --- text -----------------------------------------------------------------------------------------------------------


def text(dice: random.Random, here: Path) -> Case:
    rows = (here / "text.jsonl").read_bytes().splitlines()
    at = dice.randrange(len(rows))
    wrong = dice.choice([
        b'{"text": "the cat', b'{"txt": "x"}', b'{"text": null}', b'{"text": 3}', b"[1]", b"3", b'{"text": "\xff"}',
        b'{"text": "\\ud800"}', b"{" * 3000, b'{"text": ' + b"9" * 6000 + b"}", b"\x00", b"NaN",
        b'{"text": ' + b"[" * 900 + b"]" * 900 + b"}",
    ])  # fmt: skip
    rows[at] = wrong
    content = b"\n".join(rows) + b"\n"
    name = dice.choice(["text.jsonl", "text.jsonl.gz"])
    (here / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    (here / "eval.yaml").write_text(EVALUATE.format(here=here, text=name))
    return _evaluation(here, f"{name}:{at + 1}: {wrong!r:.30}", REFUSED, name)


def files(dice: random.Random, here: Path) -> Case:
    content = (here / "text.jsonl").read_bytes()
    packed = gzip.compress(content)
    name, content, says = dice.choice([
        ("text.jsonl.gz", packed[: dice.randrange(1, len(packed))], "gz"), ("text.jsonl.zst", packed, "zst"),
        ("text.parquet", content, "parquet"), ("text.parquet", b"PAR1" + content + b"PAR1", "parquet"),
        ("text.exe", content, "text.exe"), ("text.json", content, "text.json"), ("a{0..99999999999}.txt", b"", "bound"),
        ("missing/*.txt", b"", "missing"), ("a{b", b"", "braces"), ("text.jsonl.gz", content, "gz"),
    ])  # fmt: skip
    if "/" not in name and "{" not in name:
        (here / name).write_bytes(content)
    (here / "eval.yaml").write_text(EVALUATE.format(here=here, text=name))
    return _evaluation(here, f"text file {name}", REFUSED, says)


def path_of(dice: random.Random, here: Path) -> Case:
    kind = dice.choice(["hf_checkpoint", "output_path", "hf_checkpoint", "checkpoint_path"])
    value = dice.choice(["/dev/null", "/dev/zero", str(here / "text.jsonl"), str(here / "nowhere"), "''", "gs:/", "\x01" * 9,
                         "a" * 5000, str(here / "eval.yaml" / "x"), "org/name@@@", "file://", "~nobody/x"])  # fmt: skip
    if kind == "output_path":
        value = dice.choice([str(here / "eval.yaml" / "x.json"), str(here), "''", "/proc/nothing/x.json"])
    more = ("--hf_checkpoint", "null") if kind == "checkpoint_path" else ()
    return _evaluation(here, f"{kind} {value:.40}", REFUSED, "", f"--{kind}", value, *more)


_saved: list[Path] = []


def _trained(dice: random.Random, here: Path) -> Path:
    """A checkpoint of our own, trained once for all cases of a process."""
    from helpers.attacks import Attack, strike

    if not _saved:
        home = Path(tempfile.mkdtemp(prefix="fuzz-saved-"))
        atexit.register(shutil.rmtree, home, ignore_errors=True)
        sound(home)
        words = ("--config_path", str(home / "train.yaml"), "--trainer.id", "run")
        made = strike(Attack(name="train", command="train_lm", words=words, code=0), home)
        assert made.code == 0, made.text
        _saved.append(next((home / "checkpoints").rglob("metadata.json")).parent)
    shutil.copytree(_saved[0], here / "saved")
    return here / "saved"


def checkpoint(dice: random.Random, here: Path) -> Case:
    folder = _trained(dice, here)
    stored = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    how = dice.choice(["cut", "flip", "missing", "metadata", "empty"])
    codes, path = MAY_PASS, dice.choice(stored)
    if how == "metadata":
        path = folder / "metadata.json"
        document = json.loads(path.read_text())
        key = dice.choice(sorted(document))
        document[key] = dice.choice([None, -1, "x", [], {}, 10**30, float("nan"), [[[]]]])
        path.write_text(json.dumps(document))
        how += f" {key}: {document[key]!r}"
    elif how == "missing":
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    else:
        content = bytearray(path.read_bytes())
        at = dice.randrange(len(content))
        if how == "cut":
            del content[at:]
        else:
            content[at] ^= 1 << dice.randrange(8)
        path.write_bytes(bytes(content))
    more = ("--hf_checkpoint", "null", "--checkpoint_path", str(folder), "--data.tokenizer", str(here))
    return _evaluation(here, f"checkpoint {path.relative_to(folder)}: {how}", codes, "", *more)


REQUESTS = 12
"""Bodies of a case of requests."""


def requests(dice: random.Random, here: Path) -> Case:
    """Bodies of HTTP requests, read as the server reads them; nothing is run."""
    return Case("requests", "", (str(dice.randrange(2**32)),), (0,))


def _judge_requests(seed: str, here: Path) -> list[str]:
    from helpers.drawn_requests import drawn_body, judge, service

    dice, wrong = random.Random(seed), list[str]()
    served = service(here)
    for _ in range(REQUESTS):
        path, raw = drawn_body(dice)
        wrong += [f"{path} {raw!r:.300}: {what}" for what in judge(path, raw, served, dice)]
    return wrong


def unchanged(dice: random.Random, here: Path) -> Case:
    """A run that is sound: it must go through, or the others are refused for another reason than their mutation."""
    if dice.random() < 0.5:
        return Case("sound training", "train_lm", ("--config_path", str(here / "train.yaml")), (0,))
    return _evaluation(here, "sound evaluation", (0,))


MUTATIONS: tuple[tuple[Mutation, int], ...] = (
    (senseless_number, 4), (other_type, 3), (huge_size, 2), (misspelt_key, 2), (unknown_choice, 2), (damaged_document, 4),
    (command_line, 3), (any_key, 8), (checkpoint, 6), (config_json, 4), (damaged_json, 3), (tokenizer_json, 4), (weights, 5), (gguf_file, 4), (text, 4),
    (files, 2), (path_of, 3), (requests, 6), (unchanged, 1),
)  # fmt: skip
"""Every mutation, and how often it is drawn."""


def make(seed: int, number: int, here: Path) -> Case:
    """Lays out a case."""
    dice = random.Random(f"{seed}/{number}")
    sound(here)
    mutations, shares = zip(*MUTATIONS, strict=True)
    return dice.choices(mutations, shares)[0](dice, here)


def run(seed: int, number: int) -> dict:
    """Makes a case, runs it and judges it."""
    from helpers.attacks import NEVER, Attack, Hang, strike

    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        before = os.getcwd()
        os.chdir(folder)
        try:
            case = make(seed, number, Path(folder))
            if not case.command:
                begun, wrong = time.process_time(), _judge_requests(case.words[0], Path(folder))
                used = time.process_time() - begun
                return {"number": number, "what": case.what, "wrong": wrong, "text": "", "code": 0, "seconds": used}
            attack = Attack(
                name=case.what, command=case.command, words=case.words, code=case.codes[0], seconds=WALL_SECONDS
            )
            begun = time.process_time()
            try:
                outcome = strike(attack, Path(folder))
            except Hang as hang:
                return {
                    "number": number,
                    "what": case.what,
                    "wrong": [str(hang)],
                    "text": "",
                    "code": None,
                    "seconds": WALL_SECONDS,
                }
        finally:
            os.chdir(before)
    used = time.process_time() - begun
    wrong = [f"says {text!r}" for text in NEVER if text in outcome.text]
    if used > SLOW_SECONDS:
        wrong.append(f"took {used:.0f} s of processor time")
    if outcome.code not in case.codes:
        wrong.append(f"exit code {outcome.code}, right would be {' or '.join(map(str, case.codes))}")
    elif outcome.code == 2 and case.says and case.says not in outcome.text:
        wrong.append(f"{case.says!r} is not said")
    return {"number": number, "what": case.what, "wrong": wrong, "text": outcome.text, "code": outcome.code,
            "seconds": used}  # fmt: skip


def _work(connection: Connection, seed: int) -> None:
    """Runs the cases whose numbers come through the connection."""
    # What libraries print beside what the run prints is not for here; what a process dies of is.
    os.dup2(os.open(STDERR, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    faulthandler.enable()
    while True:
        number = connection.recv()
        if number is None:
            return
        connection.send(run(seed, number))


def main() -> int:
    """Runs a round and prints what was wrong; 0 where nothing was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--only", type=int, default=None, help="one case, with everything that it prints")
    asked = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.update(HF_HUB_OFFLINE="1", HF_ENDPOINT="http://127.0.0.1:9", RUN_ID="fuzz")
    if asked.only is not None:
        found = run(asked.seed, asked.only)
        print(
            json.dumps({key: value for key, value in found.items() if key != "text"}, indent=1), found["text"], sep="\n"
        )
        return bool(found["wrong"])
    context = multiprocessing.get_context("spawn")
    codes: Counter[int | None] = Counter()
    failures, slowest, began = [], 0.0, time.monotonic()
    worker, mine = None, None
    for number in range(asked.count):
        if worker is None or not worker.is_alive():
            mine, theirs = context.Pipe()
            worker = context.Process(target=_work, args=(theirs, asked.seed), daemon=True)
            worker.start()
            theirs.close()
        assert mine is not None
        mine.send(number)
        try:
            if not mine.poll(PATIENCE_SECONDS):
                raise EOFError
            found = mine.recv()
        except (EOFError, OSError):
            worker.kill()
            worker.join()
            found = {"number": number, "what": "?", "wrong": [f"the process hung or died ({worker.exitcode})"], "code": None,
                     "seconds": PATIENCE_SECONDS, "text": STDERR.read_text(errors="replace")[-3000:]}  # fmt: skip
        codes[found["code"]] += 1
        slowest = max(slowest, found["seconds"])
        if found["wrong"]:
            failures.append(found)
            print(
                f"{number}: {found['what']}: {'; '.join(found['wrong'])}\n    {found['text'].strip()[-300:]!r}",
                flush=True,
            )
    if worker is not None and mine is not None and worker.is_alive():
        mine.send(None)
    told = ", ".join(f"{count} × {code}" for code, count in sorted(codes.items(), key=str))
    print(f"seed {asked.seed}: {asked.count} mutations in {time.monotonic() - began:.0f} s, the most took {slowest:.0f} s of the processor; "
          f"exit codes {told}; {len(failures)} wrong")  # fmt: skip
    return bool(failures)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    sys.exit(main())
