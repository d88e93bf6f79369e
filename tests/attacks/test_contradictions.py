"""Checkpoints whose files contradict each other: the model is the one that transformers reads, or is refused.

A seed draws what config.json says and what the files hold: tied or not, with a head or without, dtypes, one file or
shards, an index of these files or of others, names with the model's prefix or without. Judge: the logits of
`AutoModelForCausalLM` in float32; where it makes up weights that the files lack, the folder must be refused.
"""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from helpers.adapted_models import TOKENS, described_logits
from helpers.family_models import make_checkpoint
from safetensors.numpy import load_file, save_file

torch = pytest.importorskip("torch")

SEED = 20261128
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
HEADS = {"llama": "lm_head.weight", "gpt2": "lm_head.weight", "gpt_neox": "embed_out.weight", "qwen3": "lm_head.weight"}
TABLES = {
    "llama": "model.embed_tokens.weight",
    "gpt2": "transformer.wte.weight",
    "gpt_neox": "gpt_neox.embed_in.weight",
    "qwen3": "model.embed_tokens.weight",
}
DTYPES = ("float32", "bfloat16", "float16")


@pytest.fixture(name="bases", scope="module")
def bases_fixture(tmp_path_factory):
    """A folder of each family that is needed, written once."""
    folders: dict[str, Path] = {}

    def base(name: str) -> Path:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name)
            make_checkpoint(name, folders[name])
        return folders[name]

    return base


def contradicting(draw: random.Random, base: Path, name: str, folder: Path) -> list[str]:
    """Writes a folder whose files contradict each other; returns what was drawn."""
    import ml_dtypes

    weights, config = load_file(base / SINGLE), json.loads((base / "config.json").read_text())
    table, head = weights[TABLES[name]], HEADS[name]
    tied, stored = draw.random() < 0.6, draw.choice(["absent", "equal", "one number", "another", "alone"])
    weights.pop(head, None)
    if stored != "absent":
        weights[head] = table.copy()
    if stored == "one number":
        weights[head][draw.randrange(len(table)), draw.randrange(table.shape[1])] += 0.5
    elif stored == "another":
        weights[head] = weights[head][::-1].copy()
    elif stored == "alone":
        del weights[TABLES[name]]
    dtypes = [draw.choice(DTYPES)] * 3 if draw.random() < 0.5 else draw.choices(DTYPES, k=3)
    for at, tensor in enumerate(sorted(weights)):
        dtype = dtypes[at % 3]
        weights[tensor] = weights[tensor].astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    is_bare = draw.random() < 0.3
    if is_bare:
        prefix = TABLES[name].partition(".")[0] + "."
        weights = {tensor.removeprefix(prefix): x for tensor, x in weights.items()}
    stated = draw.choice([None, *DTYPES])
    config |= {"tie_word_embeddings": tied, "dtype": stated, "torch_dtype": None}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({key: x for key, x in config.items() if x is not None}))
    layout = draw.choice(["whole", "whole, old index", "shards", "shards, not all named", "shards, misplaced"])
    _write(draw, weights, folder, layout)
    for file in base.glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return [name, f"tied {tied}", f"head {stored}", "/".join(dtypes), f"config {stated}", layout, f"bare {is_bare}"]


def _write(draw: random.Random, weights: dict[str, np.ndarray], folder: Path, layout: str) -> None:
    names = sorted(weights)
    draw.shuffle(names)
    files = [f"model-0000{n + 1}-of-00002.safetensors" for n in range(2)]
    parts = (names[::2], names[1::2])
    placed = {tensor: file for file, part in zip(files, parts, strict=True) for tensor in part}
    if layout == "shards, not all named":
        placed = {tensor: file for tensor, file in placed.items() if tensor not in (parts[0][0], parts[1][-1])}
    elif layout == "shards, misplaced":
        placed |= {parts[0][0]: files[1]}
    if layout != "whole":
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    if layout.startswith("whole"):
        save_file(weights, folder / SINGLE, metadata={"format": "pt"})
        return
    for file, part in zip(files, parts, strict=True):
        save_file({tensor: weights[tensor] for tensor in part}, folder / file, metadata={"format": "pt"})


def their_answer(folder: Path) -> tuple[np.ndarray, set[str]]:
    """Logits of transformers, and the names of the weights that it made up."""
    import transformers

    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    with torch.no_grad():
        return model.eval()(torch.from_numpy(TOKENS.astype(np.int64))).logits.numpy(), set(report["missing_keys"])


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(n, marks=pytest.mark.slow) for n in range(3, 60))])
@pytest.mark.filterwarnings("ignore")
def test_files_that_contradict_each_other(bases, seed, tmp_path):
    draw = random.Random(SEED + seed)
    name = draw.choice(sorted(HEADS))
    drawn = contradicting(draw, bases(name), name, tmp_path / "folder")
    expected, made_up = their_answer(tmp_path / "folder")
    actual = described_logits(tmp_path / "folder")
    if made_up:
        assert isinstance(actual, str), f"{drawn}: read, and the files lack {made_up}"
        assert "→" in actual, actual
        return
    assert not isinstance(actual, str), f"{drawn}: refused: {actual}"
    np.testing.assert_allclose(actual, expected, atol=2e-4 * np.abs(expected).max(), rtol=0, err_msg=str(drawn))
