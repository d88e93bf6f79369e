"""`export_lm_to_hf` as a user runs it: transformers reads what it writes, and one clear error for what is wrong."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
import transformers
from helpers.llama_on_mesh import random_arrays
from helpers.saved_run import IDS, ROWS, config_of, logits, write_checkpoint, write_tokenizer
from safetensors.numpy import load_file

from levanter.commands.cli.errors import run_entry_point
from levanter.commands.export.export_lm_to_hf import ConvertLmConfig, describe, main
from levanter.config import load
from levanter.io.paths import filesystem
from levanter.plan.target_from_name import pod_target


@pytest.fixture(scope="module")
def saved(tmp_path_factory, devices):
    folder = tmp_path_factory.mktemp("saved")
    return write_checkpoint(folder / "run", write_tokenizer(folder / "tokenizer"))


def export(saved, out, *words):
    return run_entry_point(ConvertLmConfig, main, ["--checkpoint_path", str(saved), "--output_dir", str(out), *words])


def test_transformers_reads_it_and_computes_the_same(saved, tmp_path, capsys):
    out = tmp_path / "out"
    words = ("--max_shard_bytes", "60000", "--generation_eos_token_ids", "[2, 5]")
    assert export(saved, out, *words) == 0
    said = capsys.readouterr().out
    assert f"Hugging Face folder: {out}" in said and "step 7" in said and "the host holds one tensor at a time" in said
    assert len(list(out.glob("model-*.safetensors"))) > 3
    theirs, missing = transformers.AutoModelForCausalLM.from_pretrained(
        out, output_loading_info=True, attn_implementation="eager", dtype=torch.float32
    )
    assert not any(missing[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert theirs.config.vocab_size == IDS
    ids = np.random.default_rng(1).integers(0, IDS, (2, 40))
    with torch.no_grad():
        expected = theirs(torch.from_numpy(ids)).logits.numpy()
    config = config_of()
    np.testing.assert_allclose(logits(config, random_arrays(config, vocab=ROWS), ids), expected, atol=2e-4)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 0)
    generation = transformers.GenerationConfig.from_pretrained(out)
    assert (generation.bos_token_id, generation.eos_token_id) == (1, [2, 5])


def test_its_options(saved, tmp_path):
    out = tmp_path / "out"
    assert export(saved, out) == 0
    before = load_file(out / "model.safetensors")
    assert export(saved, out) == 2
    # Nothing but what is asked for changes.
    words = ("--overwrite", "true", "--dtype", "bfloat16", "--override_vocab_size", "300", "--save_tokenizer", "false")
    assert export(saved, out, *words, "--config_overrides", "{rope_theta: 1234.0, note: ours}") == 0
    after = load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    for name, value in after.items():
        expected = before[name][:300] if name in ("model.embed_tokens.weight", "lm_head.weight") else before[name]
        assert value.tobytes() == expected.astype(value.dtype).tobytes(), name
    document = json.loads((out / "config.json").read_text())
    assert (document["vocab_size"], document["dtype"], document["note"]) == (300, "bfloat16", "ours")
    assert document["rope_theta"] == 1234.0
    assert not (out / "tokenizer.json").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_behind_a_url(saved, tmp_path, capsys):
    """The same files as on a disk; a second one is refused, and replaced where that is asked for."""
    url = f"memory://exports-{tmp_path.name}/out"
    assert export(saved, tmp_path / "out", "--max_shard_bytes", "60000") == 0
    assert export(saved, url, "--max_shard_bytes", "60000") == 0
    assert f"Hugging Face folder: {url}" in capsys.readouterr().out
    files = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert content(url) == files and len(files) > 6
    assert export(saved, url) == 2
    assert f"{url}: it exists already" in capsys.readouterr().err and content(url) == files
    assert export(saved, url, "--overwrite", "true", "--save_tokenizer", "false") == 0
    assert sorted(content(url)) == ["config.json", "model.safetensors"]


def content(url: str) -> dict[str, bytes]:
    fs, root = filesystem(url)
    return {path.rpartition("/")[2]: fs.cat_file(path) for path in fs.find(root)}


def test_what_is_refused(saved, tmp_path, capsys):
    def refused(*words, path=saved, out=tmp_path / "out"):
        assert export(path, out, *words) == 2
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().err

    assert "no such folder" in refused(path=tmp_path / "nowhere")
    assert "no complete checkpoint" in refused(path=tmp_path)
    assert "model.hidden_dim is 128" in refused("--model", "{type: llama, hidden_dim: 128}")
    assert "override_vocab_size: 100, but the checkpoint has 301 ids, of which the tokenizer has 300" in refused(
        "--override_vocab_size", "100"
    )
    assert "dtype must be one of float32" in refused("--dtype", "int4")
    assert "upload_to_hf: not supported yet" in refused("--upload_to_hf", "me/model")
    # A checkpoint that is elsewhere, a tokenizer that is nowhere: nothing says how many ids there are.
    heads = "num_heads: 4, num_kv_heads: 4"
    block = f"{{type: llama, max_seq_len: 48, hidden_dim: 32, intermediate_dim: 48, num_layers: 2, {heads}}}"
    said = refused("--model", block, "--tokenizer", str(tmp_path / "no"), path=tmp_path / "nowhere")
    assert "the vocabulary size is unknown" in said and f"{tmp_path / 'no'}: there is no such" in said
    (tmp_path / "file").write_text("")
    assert "is a file, not a folder" in refused(out=tmp_path / "file/out")
    # Damaged: the folder does not appear under its name.
    copy = tmp_path / "copy"
    shutil.copytree(saved, copy)
    for file in copy.glob("step-7/arrays-*/d/*"):
        file.unlink()
    assert "cannot be read" in refused(path=copy)
    # Arrays that are not those of the model.
    shutil.rmtree(copy)
    shutil.copytree(saved, copy)
    metadata = copy / "step-7/metadata.json"
    document = json.loads(metadata.read_text())
    document["metadata"]["model"]["intermediate_dim"] = 80
    del document["leaves"]["model.transformer.norm.weight"]
    # As checkpoints were before they had digests.
    document["version"] = 1
    del document["digest"]
    metadata.write_text(json.dumps(document))
    message = refused(path=copy)
    assert "1 tensors missing" in message and "transformer.norm.weight" in message
    assert "3 of the wrong shape" in message and "mlp.up_proj.weight [2, 96, 64]: expected [2, 80, 64]" in message


def test_it_can_be_planned(saved, tmp_path):
    words = ["--output_dir", str(tmp_path / "out")]
    plan = describe(load(ConvertLmConfig, ["--checkpoint_path", str(saved), *words]), pod_target("v4-8"))
    assert plan.exit_code == 0 and not plan.missing
    # Where the checkpoint is not here, the architecture must be.
    block = "{type: llama, hidden_dim: 64, intermediate_dim: 96, num_layers: 2, num_heads: 8, num_kv_heads: 2}"
    absent = ["--checkpoint_path", "/not/here", "--model", block, "--model.vocab_size", "256", *words]
    plan = describe(load(ConvertLmConfig, absent), pod_target("v4-8"))
    assert plan.exit_code == 0 and {check.name for check in plan.checks if check.status == "unchecked"} >= {"weights"}
    assert len(plan.work.files.tensors) == 2 * 9 + 3


LARGE = """
import sys
import numpy as np, jax
sys.path.insert(0, sys.argv[1])
from helpers.saved_run import write_checkpoint
from helpers.llama_on_mesh import tiny_config
from pathlib import Path
config = tiny_config(hidden_dim=512, intermediate_dim=2048, num_layers=48, num_kv_heads=8, vocab_size=256)
write_checkpoint(Path(sys.argv[2]), Path("passthrough"), config=config, rows=256, chunk_bytes=16 << 20)
"""
PEAK = """
import resource, sys
from levanter.config import load
from levanter.commands.export.export_lm_to_hf import ConvertLmConfig, main
import tensorstore, levanter.checkpoint.orbax_io
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
words = ["--checkpoint_path", sys.argv[1], "--output_dir", sys.argv[2], "--save_tokenizer", "false"]
main(load(ConvertLmConfig, words))
print("grown", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_memory_is_bounded(tmp_path, request):
    """Nearly 800 MiB of weights through a host that holds one tensor and the cache of pieces (256 MiB)."""
    tests = str(request.config.rootpath / "tests")
    subprocess.run([sys.executable, "-c", LARGE, tests, str(tmp_path / "run")], check=True, timeout=250)
    command = [sys.executable, "-c", PEAK, str(tmp_path / "run"), str(tmp_path / "out")]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=250)
    grown = 1024 * int(done.stdout.split("grown ")[1])
    written = (tmp_path / "out/model.safetensors").stat().st_size
    assert written > 750 << 20
    assert grown < 400 << 20, grown
