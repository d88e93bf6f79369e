"""`eval_sliding_lm` as a user runs it: prepared rows of every format, scored as each would be alone."""

import gzip
import json

import numpy as np
import pytest
import torch
import transformers
from helpers.hf_folder import TEXTS, write_folder
from tokenizers import Tokenizer

from levanter.commands.cli.errors import run_entry_point
from levanter.commands.memorize.eval_sliding_lm import EvalSlidingLmConfig, main
from levanter.memorization.results import FULL, BookResult

PAIRS = [(text[:n], text[n : n + m]) for text in TEXTS for n, m in ((9, 12), (14, 6), (5, 20))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(folder):
    """log p_z of each pair by torch, one row at a time."""
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found = []
    for prompt, rest in PAIRS:
        first, second = (tokenizer.encode(text, add_special_tokens=False).ids for text in (prompt, rest))
        ids = torch.tensor([first + second])
        with torch.no_grad():
            logprobs = model(ids).logits.double().log_softmax(-1)[0]
        found.append(sum(float(logprobs[t - 1, ids[0, t]]) for t in range(len(first), ids.shape[1])))
    return np.array(found)


def records(kind, folder):
    if kind == "chat":
        return [
            {"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]} for a, b in PAIRS
        ], {"type": "chat", "single_turn": True}
    if kind == "supervised":
        return [{"q": a, "a": b} for a, b in PAIRS], {"type": "supervised", "input_key": "q", "target_key": "a"}
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    rows = []
    for pair in PAIRS:
        first, second = (tokenizer.encode(text, add_special_tokens=False).ids for text in pair)
        rows.append({"input_ids": first + second, "sources_len": len(first)})
    return rows, {"type": "prebuilt"}


def run(tmp_path, folder, rows, format, **changes):
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    document = {
        "hf_checkpoint": str(folder),
        # The old shape of the block, as upstream's documents have it.
        "data": {"validation_urls": [str(path)], "format": format, "shuffle": False},
        "output_base_path": str(tmp_path / "out"),
        "eval_batch_size": 4,
        "trainer": {"mp": "f32", "tracker": {"type": "noop"}, "mesh": {"axes": {"data": 4, "model": 2}}},
        **changes,
    }
    (tmp_path / "config.json").write_text(json.dumps(document))
    return run_entry_point(EvalSlidingLmConfig, main, ["--config_path", str(tmp_path / "config.json")])


@pytest.mark.parametrize("kind", ["chat", "supervised", "prebuilt"])
def test_rows_score_as_alone(tmp_path, folder, expected, kind):
    assert run(tmp_path, folder, *records(kind, folder)) == 0
    found = BookResult.read(str(tmp_path / "out" / "train"))
    assert len(found) == len(PAIRS)
    np.testing.assert_allclose(found.log_pz(FULL), expected, atol=2e-3, rtol=0)
    names = {path.name for path in (tmp_path / "out" / "train").iterdir()}
    assert {"windows.parquet", "summary.json", "report.html", ".success"} <= names


def test_max_batches_takes_the_first_rows(tmp_path, folder, expected, capsys):
    assert run(tmp_path, folder, *records("chat", folder), max_batches=1) == 0
    found = BookResult.read(str(tmp_path / "out" / "train"))
    np.testing.assert_allclose(found.log_pz(FULL), expected[:4], atol=2e-3, rtol=0)
    capsys.readouterr()
    assert run(tmp_path, folder, *records("chat", folder), max_batches=1) == 0
    assert "train: nothing to do" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rows", "format", "message"),
    [
        ([{"text": "a"}], {"type": "text"}, "text has no prompts"),
        ([{"messages": []}], {"type": "chat"}, "single_turn: true"),
        (
            [{"messages": [{"role": "user", "content": "a"}]}],
            {"type": "chat", "single_turn": True},
            "no message of assistant",
        ),
        ([{"input": "a"}], {"type": "supervised"}, "no key 'prompt'; it has 'input'"),
        ([{"input_ids": [1, "a"], "sources_len": 1}], {"type": "prebuilt"}, "is not a list of ids"),
        ([{"input_ids": [1, 2], "sources_len": 2}], {"type": "prebuilt"}, "row 0: 2 tokens, prompt 2"),
        (["text"], {"type": "prebuilt"}, "expected an object, found str"),
    ],
)
def test_rows_that_cannot_be_scored_are_said_before_a_weight_is_read(tmp_path, folder, capsys, rows, format, message):
    assert run(tmp_path, folder, rows, format) == 2
    shown = capsys.readouterr().err
    assert message in shown and "loading weights" not in shown and "Traceback" not in shown


def test_the_old_document_is_read(tmp_path):
    """Upstream's own keys for this script; the folders are other ones."""
    from levanter.config import parse_text

    config = parse_text(
        EvalSlidingLmConfig,
        """
data:
  validation_urls: ["gs://bucket/rows.jsonl.gz"]
  format: {type: chat, single_turn: true}
  tokenizer: meta-llama/Llama-3.1-8B
  cache_dir: gs://bucket/cache
  shuffle: false
model: {type: llama, seq_len: 100, hidden_dim: 8192, num_layers: 80, num_heads: 64, num_kv_heads: 8}
trainer:
  mp: p=f32,c=bfloat16
  per_device_eval_parallelism: -1
  tensor_parallel_axes: [mlp, heads]
  fsdp_axis: embed
  batch_axis: batch
initialize_from_hf: /models/Llama-3-1-8B
use_hf_model_config: False
""",
    )
    assert list(config.data.components) == ["train"] and config.split == "validation"
