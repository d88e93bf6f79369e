"""Adapters merged into the files of their base: `export_lm_to_hf --hf_checkpoint BASE --adapter_path ADAPTER`."""

import json
import math
import os
import shutil
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import haliax as hax
import jax
import ml_dtypes
import numpy as np
import pytest
from helpers.adapted_models import TOKENS, write_adapter
from helpers.family_models import make_checkpoint
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from haliax_ext.abstract import abstract, leaves
from haliax_ext.sources import TensorInfo
from levanter.commands.export.config import ConvertLmConfig
from levanter.commands.export.export_lm_to_hf import describe, execute
from levanter.compat.hf.export import plan_export
from levanter.compat.hf.peft import PeftAdapter, PeftConfig
from levanter.compat.hf.peft.merge import MergedTensors, stored_leaves
from levanter.config import load
from levanter.models.adapters import target_groups
from levanter.models.llama.config import LlamaConfig
from levanter.runplan import RunRefused, Session, Target

CPU = Target(name="local", platform="cpu", kind="cpu", devices=8)
LAYERS = 3


def shapes(name: str) -> dict[str, tuple[int, int]]:
    """(in, out) of the adapted modules of a family, by the end of their name."""
    if name == "gpt2":
        return {"transformer.h.{}.attn.c_attn": (64, 192), "transformer.h.{}.mlp.c_proj": (96, 64)}
    return {"model.layers.{}.self_attn.qkv_proj": (64, 128), "model.layers.{}.mlp.down_proj": (96, 64)}


@pytest.fixture(scope="module", params=["phi3", "gpt2"])
def made(request, tmp_path_factory):
    """(family, folder of the base, folder of the adapter, its factors, scale)"""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp(request.param)
    make_checkpoint(request.param, folder / "base")
    rng, factors = np.random.default_rng(2), {}
    for module, (inner, outer) in shapes(request.param).items():
        for layer in range(LAYERS):
            name = module.format(layer)
            factors[f"{name}.lora_A"] = rng.standard_normal((4, inner)).astype(np.float32) * np.float32(0.1)
            factors[f"{name}.lora_B"] = rng.standard_normal((outer, 4)).astype(np.float32) * np.float32(0.1)
    write_adapter(folder / "adapter", factors, r=4, lora_alpha=6, base_model_name_or_path="somebody/else")
    return request.param, folder / "base", folder / "adapter", factors


def export(base: Path, adapter: Path, out: Path, *words: str) -> Path:
    named = ["--hf_checkpoint", str(base), "--adapter_path", str(adapter), "--output_dir", str(out)]
    config = load(ConvertLmConfig, [*named, "--save_tokenizer", "false", *words])
    plan = describe(config, CPU).check()
    return Path(execute(plan, None, Session(show=True)))


def expected(name: str, base: Path, factors) -> dict[str, np.ndarray]:
    """The merged tensors in float32, by NumPy."""
    found = load_file(base / "model.safetensors")
    for module in {each.rsplit(".", 1)[0] for each in factors}:
        product = np.float32(6 / 4) * (factors[f"{module}.lora_B"] @ factors[f"{module}.lora_A"])
        # GPT-2 stores its matrices [in, out].
        found[f"{module}.weight"] = found[f"{module}.weight"] + (product.T if name == "gpt2" else product)
    return found


def test_merged_weights_are_the_sums(made, tmp_path):
    name, base, adapter, factors = made
    merged = load_file(export(base, adapter, tmp_path / "out") / "model.safetensors")
    wanted = expected(name, base, factors)
    assert merged.keys() == wanted.keys()
    for tensor, x in wanted.items():
        np.testing.assert_allclose(merged[tensor], x, atol=1e-6, rtol=0, err_msg=tensor)
    _transformers_reads(tmp_path / "out", wanted)


def _transformers_reads(folder: Path, wanted) -> None:
    import torch
    import transformers

    model, said = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32
    )
    assert not any(said[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), said
    for tensor, x in model.state_dict().items():
        if tensor in wanted:
            np.testing.assert_allclose(x.numpy(), wanted[tensor], atol=1e-6, rtol=0)
    assert np.isfinite(model(torch.from_numpy(TOKENS.astype(np.int64))).logits.detach().numpy()).all()


def test_what_rounding_takes_is_said(made, tmp_path, capsys):
    """In bfloat16: one rounding of the float32 sum, and the loss of precision is NumPy's."""
    name, base, _adapter, factors = made
    narrow = tmp_path / "narrow"
    shutil.copytree(base, narrow)
    tensors = {key: x.astype(ml_dtypes.bfloat16) for key, x in load_file(base / "model.safetensors").items()}
    save_file(tensors, narrow / "model.safetensors", metadata={"format": "pt"})
    document = json.loads((base / "config.json").read_text())
    for key in ("dtype", "torch_dtype"):
        document |= {key: "bfloat16"} if key in document else {}
    (narrow / "config.json").write_text(json.dumps(document))
    small = {key: x * np.float32(0.03) for key, x in factors.items()}
    write_adapter(tmp_path / "small", small, r=4, lora_alpha=6)
    capsys.readouterr()
    export(narrow, tmp_path / "small", tmp_path / "out")
    said = capsys.readouterr().out
    merged = load_file(tmp_path / "out" / "model.safetensors")
    wanted = expected(name, narrow, small)
    lost = {}
    for tensor, exact in wanted.items():
        if tensors[tensor].dtype != exact.dtype:
            rounded = exact.astype(ml_dtypes.bfloat16)
            assert merged[tensor].tobytes() == rounded.tobytes(), tensor
            added = exact - tensors[tensor].astype(np.float32)
            kind = next(each for each in shapes(name) if tensor.endswith(each.rsplit(".", 1)[-1] + ".weight"))
            sums = lost.setdefault(kind, [0.0, 0.0, 0, 0])
            sums[0] += np.square(rounded.astype(np.float32) - exact, dtype=np.float64).sum()
            sums[1] += np.square(added, dtype=np.float64).sum()
            sums[2] += (rounded == tensors[tensor]).sum()
            sums[3] += exact.size
    assert len(lost) == 2
    for kind, (error, added, still, count) in lost.items():
        share = f"{np.sqrt(error / added):.2%} lost in rounding, {still / count:.1%} of the weights did not move"
        assert f"merged {kind.replace('{}', '{layers}')}: {share}" in said
    assert "warning: rounding loses more than 5% of some adapters" in said
    # In float32 nothing is lost that is worth saying.
    export(narrow, tmp_path / "small", tmp_path / "wide", "--dtype", "float32")
    assert "warning" not in capsys.readouterr().out


def messages(base, adapter, out, *words):
    config = load(
        ConvertLmConfig,
        ["--hf_checkpoint", str(base), "--adapter_path", str(adapter), "--output_dir", str(out), *words],
    )
    try:
        return "\n".join(check.message for check in describe(config, CPU).checks)
    except RunRefused as error:
        return str(error)


def test_adapters_of_other_models_are_refused_before_anything_is_written(made, tmp_path):
    _name, base, adapter, factors = made
    said = messages(base, adapter, tmp_path / "out")
    assert "the adapter's config names the base somebody/else" in said and "2 kinds of modules, rank 4" in said
    other = {key.replace("attn", "attention"): x for key, x in factors.items()}
    write_adapter(tmp_path / "other", other, r=4)
    assert "does not go with the model" in messages(base, tmp_path / "other", tmp_path / "out")
    assert "there is no adapter_config.json" in messages(base, tmp_path, tmp_path / "out") or "no files" in messages(
        base, tmp_path, tmp_path / "out"
    )
    wrong = dict(factors)
    key = next(iter(wrong))
    wrong[key] = wrong[key].copy()
    wrong[key][0, 0] = np.inf
    write_adapter(tmp_path / "infinite", wrong, r=4)
    with pytest.raises(ValueError, match="numbers are not finite"):
        export(base, tmp_path / "infinite", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--adapter_path", "a", "--checkpoint_path", "c"], "adapter_path: needs hf_checkpoint"),
        (["--hf_checkpoint", "b"], "hf_checkpoint: needs adapter_path"),
        (["--hf_checkpoint", "b", "--adapter_path", "a", "--checkpoint_path", "c"], "one of them is exported"),
        (["--hf_checkpoint", "b", "--adapter_path", "a", "--int8", "true"], "int8: not implemented for merged"),
        ([], "checkpoint_path: missing; or hf_checkpoint and adapter_path"),
    ],
)
def test_keys_that_do_not_go_together(words, says):
    with pytest.raises(ValueError, match=says):
        load(ConvertLmConfig, [*words, "--output_dir", "x"])


def test_the_config_of_the_base_is_kept(made, tmp_path):
    _, base, adapter, _ = made
    out = export(base, adapter, tmp_path / "out")
    mine, theirs = (json.loads((folder / "config.json").read_text()) for folder in (out, base))
    for key in ("model_type", "vocab_size", "architectures"):
        assert mine[key] == theirs[key]


class Made:
    """A source whose tensors are made when they are read."""

    def __init__(self, shapes, value):
        self.tensors = {
            name: TensorInfo(name, shape, np.dtype(np.float32), 4 * math.prod(shape)) for name, shape in shapes.items()
        }
        self.value = value

    def byte_ranges(self, name, index):
        return ()

    def read(self, name, index, out=None):
        assert out is None
        return np.full([each.stop - each.start for each in index], self.value, np.float32)


def test_no_tensor_is_ever_whole_in_memory():
    """Of matrices of 32 MiB, sums of 256 KiB are made at a time: what NumPy holds for that is a small part of one."""
    config = LlamaConfig(
        hidden_dim=1024, intermediate_dim=8192, num_layers=1, num_heads=8, num_kv_heads=8, vocab_size=64
    )
    Vocab = hax.Axis("vocab", 64)
    model = abstract(lambda: config.build(Vocab, key=jax.random.PRNGKey(0)))
    rules = config.weight_rules(Vocab)
    every = target_groups(model, rules)
    shapes, name = {"down": (1024, 8192), "up": (8192, 1024)}, "model.layers.0.mlp.{}_proj"
    base = Made({f"{name.format(kind)}.weight": shape for kind, shape in shapes.items()}, 1.0)
    factors = {}
    for kind, (rows, columns) in shapes.items():
        module = f"base_model.model.{name.format(kind)}"
        factors |= {f"{module}.lora_A.weight": (4, columns), f"{module}.lora_B.weight": (rows, 4)}
    adapter = PeftAdapter(where="made", config=PeftConfig(r=4, alpha=8), source=Made(factors, 0.5))
    targets = adapter.targets(every, rules)
    assert len(targets) == 2
    merged = MergedTensors(source=base, rules=rules, adapter=adapter, targets=targets, block_bytes=256 << 10)
    files = plan_export(stored_leaves(leaves(model), rules, base, np.dtype(np.float32)), config, Vocab)
    wanted = [tensor for tensor in files.tensors if tensor.name in base.tensors]
    assert [tensor.nbytes for tensor in wanted] == [32 << 20] * 2
    tracemalloc.start()
    try:
        for tensor in wanted:
            count = 0
            for rows in merged.rows(tensor):
                assert (rows == 1 + 2 * 4 * 0.25).all()
                count += len(rows)
            assert count == tensor.shape[0]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20, peak


LARGE = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    hidden_size=16384,
    intermediate_size=53248,
    num_attention_heads=128,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=256,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    max_position_embeddings=131072,
    tie_word_embeddings=False,
    dtype="bfloat16",
)
"""Llama 3.1 405B, but for its vocabulary, and `num_hidden_layers`."""
MATRICES = {
    "self_attn.q_proj": (16384, 16384),
    "self_attn.k_proj": (1024, 16384),
    "self_attn.v_proj": (1024, 16384),
    "self_attn.o_proj": (16384, 16384),
    "mlp.gate_proj": (53248, 16384),
    "mlp.up_proj": (53248, 16384),
    "mlp.down_proj": (16384, 53248),
}


def sparse(file: Path, tensors: dict[str, tuple[int, ...]], dtype: str, size: int) -> None:
    """A safetensors file of zeros, of which the disk holds the header alone."""
    at, header = 0, {}
    for name, shape in tensors.items():
        nbytes = size * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        out.truncate(8 + len(text) + at)


def large(folder: Path, layers: int) -> tuple[Path, Path]:
    """(a base of zeros, an adapter of rank 16 of zeros)"""
    for each in ("base", "adapter"):
        (folder / each).mkdir(parents=True)
    (folder / "base" / "config.json").write_text(json.dumps(LARGE | {"num_hidden_layers": layers}))
    table = {"model.embed_tokens.weight": (256, 16384), "lm_head.weight": (256, 16384), "model.norm.weight": (16384,)}
    factors = {}
    for n in range(layers):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            table[f"model.layers.{n}.{norm}.weight"] = (16384,)
        for name, (rows, columns) in MATRICES.items():
            table[f"model.layers.{n}.{name}.weight"] = (rows, columns)
            module = f"base_model.model.model.layers.{n}.{name}"
            factors |= {f"{module}.lora_A.weight": (16, columns), f"{module}.lora_B.weight": (rows, 16)}
    sparse(folder / "base" / "model.safetensors", table, "BF16", 2)
    sparse(folder / "adapter" / "adapter_model.safetensors", factors, "F32", 4)
    document = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "r": 16, "lora_alpha": 16}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(document))
    return folder / "base", folder / "adapter"


def filled(file: Path) -> dict[str, np.ndarray]:
    """Random numbers in every tensor of a file of zeros, in place, some rows at a time; the first two rows of each."""
    rng, first = np.random.default_rng(0), {}
    with file.open("r+b") as out:
        (length,) = struct.unpack("<Q", out.read(8))
        header = json.loads(out.read(length))
        for name, each in header.items():
            dtype = np.dtype(ml_dtypes.bfloat16 if each["dtype"] == "BF16" else np.float32)
            rows, *rest = each["shape"]
            # One block of random rows, again and again: making all of them would take minutes.
            block = (0.02 * rng.standard_normal((min(rows, 256), *rest), dtype=np.float32)).astype(dtype)
            out.seek(8 + length + each["data_offsets"][0])
            for start in range(0, rows, 256):
                out.write(block[: rows - start].tobytes())
            first[name] = block[:2].astype(np.float32)
    return first


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_one_layer_of_405b(tmp_path):
    """6.4 GB merged by the command, in a process of its own that never has more than its largest tensor and 256 MiB."""
    base, adapter = large(tmp_path, 1)
    own, factors = filled(base / "model.safetensors"), filled(adapter / "adapter_model.safetensors")
    out = tmp_path / "out"
    words = ["--hf_checkpoint", base, "--adapter_path", adapter, "--output_dir", out, "--save_tokenizer", "false"]
    command = [sys.executable, "-m", "levanter.main.export_lm_to_hf", *map(str, words)]
    with (tmp_path / "said").open("w+") as said:
        process = subprocess.Popen(
            command, stdout=said, stderr=subprocess.STDOUT, env=os.environ | {"JAX_PLATFORMS": "cpu"}
        )
        _, status, used = os.wait4(process.pid, 0)
    text = (tmp_path / "said").read_text()
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, text[-4000:]
    assert "lost in rounding" in text
    largest, peak = 2 * 53248 * 16384, 1024 * used.ru_maxrss
    assert peak < largest + (256 << 20), f"{peak / 2**20:,.0f} MiB; its largest tensor has {largest / 2**20:,.0f}"
    (tmp_path / "peak").write_text(f"{peak / 2**20:,.0f} MiB")
    (folder,) = {path.parent for path in out.rglob("config.json")}
    index = folder / "model.safetensors.index.json"
    where = json.loads(index.read_text())["weight_map"] if index.exists() else {}
    for name in MATRICES:
        tensor = f"model.layers.0.{name}.weight"
        module = f"base_model.model.{tensor.removesuffix('.weight')}"
        with safe_open(folder / where.get(tensor, "model.safetensors"), "np") as file:
            found = file.get_slice(tensor)[0:2]
        with safe_open(adapter / "adapter_model.safetensors", "np") as file:
            a = file.get_tensor(f"{module}.lora_A.weight")
        wanted = (own[tensor] + factors[f"{module}.lora_B.weight"] @ a).astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(found, wanted)


def test_all_of_405b_is_planned_from_headers(tmp_path):
    """126 layers, 810 GB: files of which there are headers alone."""
    base, adapter = large(tmp_path, 126)
    words = ["--hf_checkpoint", base, "--adapter_path", adapter, "--output_dir", tmp_path / "out"]
    config = load(ConvertLmConfig, [*map(str, words), "--save_tokenizer", "false"])
    plan = describe(config, CPU).check()
    said = "\n".join(check.message for check in plan.checks)
    assert "7 kinds of modules, rank 16" in said and "the largest 1.62 GiB" in said, said
    assert plan.work.files.nbytes > 800e9
