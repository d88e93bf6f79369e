"""Mutations of checkpoints: config.json, weights, GGUF files, and checkpoints of training runs."""

import atexit
import json
import random
import shutil
import tempfile
from pathlib import Path

from helpers.mutations.cases import MAY_PASS, REFUSED, Case, evaluation, sound


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
    return evaluation(here, f"config.json {name}: {value!r:.30}", REFUSED, name)


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
    return evaluation(here, f"{name}: {how}", REFUSED, name)


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
    return evaluation(here, f"model.safetensors: {how}", codes)


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
    return evaluation(here, f"gguf: {how}", codes, "", "--hf_checkpoint", str(path), "--data.tokenizer", str(here))


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
    return evaluation(here, f"checkpoint {path.relative_to(folder)}: {how}", codes, "", *more)
