"""Adapters merged into the files of their base: `export_lm_to_hf --hf_checkpoint BASE --adapter_path ADAPTER`."""

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from helpers.adapted_models import TOKENS, write_adapter
from helpers.family_models import make_checkpoint
from safetensors.numpy import load_file, save_file

from levanter.commands.export.config import ConvertLmConfig
from levanter.commands.export.export_lm_to_hf import describe, execute
from levanter.config import load
from levanter.run import RunRefused, Session, Target

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
    assert "warning: of some adapters more than 5% is lost in rounding; --dtype float32 keeps all" in said
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
    assert "the adapter says that it is of somebody/else" in said and "2 kinds of modules, rank 4" in said
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
