"""`plan … --compare full`: a run with adapters beside the same run without them."""

import json

import pytest

from levanter.commands.plan_options import PlanUsageError, parse_plan_request
from levanter.main.plan import main

MODEL = {
    "type": "llama",
    "hidden_dim": 64,
    "intermediate_dim": 128,
    "num_layers": 2,
    "num_heads": 8,
    "num_kv_heads": 4,
    "vocab_size": 512,
    "max_seq_len": 32,
}
LORA = {"r": 4, "zero_init_b": True, "a_init_mode": "peft"}


def written(tmp_path, **keys) -> str:
    document = {
        "model": MODEL,
        "train_seq_len": 32,
        "data": {"tokenizer": "passthrough"},
        "trainer": {"mp": "p=f32,c=bfloat16", "train_batch_size": 16, "mesh": {"param_mapping": {"embed": "data"}}},
        **keys,
    }
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(document))
    return str(path)


@pytest.mark.parametrize("entry_point", ["train_lm", "lora_lm"])
def test_both_runs_side_by_side(entry_point, tmp_path, capsys):
    own = {"initialize_from_hf": "acme/llama"}
    own |= {"lora": LORA} if entry_point == "lora_lm" else {"adapter": {"type": "lora", **LORA}}
    out = tmp_path / "found.json"
    words = ("--target", "v5e-16", "--no-compile", "--compare", "full", "--json", str(out))
    assert main([entry_point, "--config_path", written(tmp_path, **own), *words]) == 0
    (found,) = json.loads(out.read_text())["comparisons"]
    mine, full = found["this"], found["full"]
    assert found["problem"] is None and mine["entry_point"] == full["entry_point"] == entry_point
    assert "adapters" in mine["resident_bytes"] and "frozen mlp" in mine["resident_bytes"]
    assert "mlp" in full["resident_bytes"] and "adapters" not in full["resident_bytes"]
    # One more array of float32 than optimizer statistics have: none is frozen there.
    parameters = sum(full["resident_bytes"][name] for name in ("embedding", "attention", "mlp", "head", "norm"))
    assert full["resident_bytes"]["gradients"] == parameters
    assert full["resident_bytes"]["optimizer"] == pytest.approx(2 * parameters, abs=64)
    assert set(mine["received"]) == {"frozen weights, gathered", "adapters, gathered", "gradients, summed"}
    shown = capsys.readouterr().out
    table = shown[shown.index("compared with full fine-tuning on v5litepod-16") :].splitlines()
    assert table[1].split() == ["this", "run", "full", "full", "/", "this"]
    rows = {line[:33].strip(): line[33:].split() for line in table[2:]}
    assert rows["frozen mlp"][-1] == "–" and rows["verdict"] == ["not", "compiled", "not", "compiled"]
    assert any(line.startswith("  received over ICI") for line in table)
    assert not any("DCN" in line for line in table[2:-3]), "one slice"


def test_a_run_without_adapters_has_nothing_beside_it(tmp_path, capsys):
    path = written(tmp_path)
    assert main(["train_lm", "--config_path", path, "--target", "v5e-16", "--no-compile", "--compare", "full"]) == 0
    assert "full fine-tuning cannot be planned: adapter: not set" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train_lm", "--target", "v5e-16", "--compare", "half"], "--compare half"),
        (["train_lm", "--target", "v5e-16", "--compare"], "--compare needs a value"),
        (["train_lm", "--target", "v5e-16", "--compare", "full", "--compare", "full"], "given 2 times"),
    ],
)
def test_what_it_does_not_take(words, said):
    with pytest.raises(PlanUsageError, match=said):
        parse_plan_request(words)


def test_entry_points_without_adapters_are_refused(tmp_path, capsys):
    path = tmp_path / "eval.yaml"
    path.write_text(json.dumps({"hf_checkpoint": "acme/llama", "model": MODEL}))
    words = ["--config_path", str(path), "--target", "v5e-16", "--no-compile", "--compare", "full"]
    assert main(["eval_lm", *words]) == 2
    assert "eval_lm trains no adapters" in capsys.readouterr().err
