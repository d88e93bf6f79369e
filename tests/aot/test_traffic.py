"""HBM traffic as read from compiled Programs, against hand arithmetic: five kinds of Program on one chip.

All of them touch so few tokens that weights (and for decoding the cache) are nearly all that moves.
"""

from pathlib import Path

import pytest

from levanter.plan.aot import Compiled, compile_programs

pytestmark = [
    pytest.mark.aot,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not __import__("importlib.util").util.find_spec("libtpu"), reason="libtpu is not installed (the `plan` extra)"
    ),
]
EMBED, MLP, LAYERS, HEADS, KV, HEAD, VOCAB = 2048, 8192, 16, 16, 4, 128, 32_000
LAYER = 2 * EMBED * HEADS * HEAD + 2 * EMBED * KV * HEAD + 3 * EMBED * MLP
STACK, TABLE = LAYERS * LAYER, VOCAB * EMBED
MODEL = f"""
model:
  type: llama
  hidden_dim: {EMBED}
  intermediate_dim: {MLP}
  num_layers: {LAYERS}
  num_heads: {HEADS}
  num_kv_heads: {KV}
  vocab_size: {VOCAB}
  tie_word_embeddings: false
"""
TARGET = "v6e-1"


def compiled(folder, entry_point: str, document: str, *programs: str) -> dict[str, Compiled]:
    """The Programs of a run of this document on one chip."""
    path = folder / "run.yaml"
    path.write_text(document)
    found = compile_programs(
        "levanter.main.plan:describe",
        {"entry_point": entry_point, "argv": ["--config_path", str(path)]},
        target=TARGET,
        programs=programs,
    )
    assert all(isinstance(one, Compiled) for one in found)
    return {one.name: one for one in found}


@pytest.mark.ci
def test_scoring_reads_every_weight_once(tmp_path):
    document = f"""{MODEL}
  max_seq_len: 128
hf_checkpoint: no-such/model
data: {{components: {{a: {{source: {{type: url, validation_urls: [no-such.txt]}}}}}}}}
trainer: {{mp: bfloat16, per_device_eval_parallelism: 1}}
"""
    (score,) = compiled(tmp_path, "eval_lm", document, "score").values()
    weights = 2 * (STACK + TABLE)
    # The embedding may be brought into chip memory whole, its rows are so few.
    assert weights <= score.figures.hbm_bytes <= 1.03 * (weights + 2 * TABLE)


def test_windows_read_every_weight_once(tmp_path):
    document = f"""{MODEL}
  max_seq_len: 128
hf_checkpoint: no-such/model
txt_path: no-such.txt
output_base_path: results
chunk_size: 100
prompt_tokens: 50
eval_batch_size: 8
trainer: {{mp: bfloat16}}
"""
    (windows,) = compiled(tmp_path, "eval_careless_lm", document).values()
    weights, logits = 2 * (STACK + TABLE), 4 * 8 * 100 * VOCAB
    # Logits are written once, and read for their sum, for the target's and for the likeliest.
    assert weights <= windows.figures.hbm_bytes <= 1.03 * (weights + 2 * TABLE + 6 * logits)


@pytest.mark.parametrize("program", ["train_step", "evaluate"])
def test_a_training_run_moves_parameters_gradients_and_moments(tmp_path, program):
    layers, embed, mlp, heads, kv, vocab = 8, 1024, 4096, 8, 4, 1024
    document = f"""
model:
  type: llama
  hidden_dim: {embed}
  intermediate_dim: {mlp}
  num_layers: {layers}
  num_heads: {heads}
  num_kv_heads: {kv}
  vocab_size: {vocab}
  max_seq_len: 256
  gradient_checkpointing: true
data:
  tokenizer: no-such/tokenizer
  components: {{a: {{source: {{type: url, train_urls: [a.txt], validation_urls: [b.txt]}}}}}}
trainer: {{mp: "p=f32,c=bfloat16", train_batch_size: 1, per_device_eval_parallelism: 1, num_train_steps: 10}}
"""
    (one,) = compiled(tmp_path, "train_lm", document, program).values()
    parameters = layers * (2 * embed * heads * HEAD + 2 * embed * kv * HEAD + 3 * embed * mlp)
    moved = one.figures.hbm_bytes / parameters
    if program == "evaluate":
        # Read in float32; what is cast first is written and read once more in bfloat16, as far as it is not kept on
        # the chip.
        assert 4 <= moved <= 8 * 1.1
        return
    cast_and_used = 4 + 2 + 3 * 2  # forward, recomputed, backward
    gradients = 4 + 4 + 4  # cleared, written, read for their norm
    moments = 3 * 4 + 2 * 4  # gradient and moments read, moments written
    update = 3 * 4 + 4  # moments and parameters read, parameters written
    assert moved == pytest.approx(cast_and_used + gradients + moments + update, rel=0.15)


@pytest.mark.ci
def test_decoding_reads_every_weight_and_every_cached_position_once():
    rows, context = 8, 4096
    sizes = dict(layers=LAYERS, embed=EMBED, mlp=MLP, kv_heads=KV, head_size=HEAD, rows=rows, context=context)
    (decode,) = compile_programs(f"{Path(__file__).parent / 'decode_programs.py'}:decode", sizes, target=TARGET)
    assert isinstance(decode, Compiled) and decode.figures is not None
    weights = 2 * LAYERS * (2 * EMBED * EMBED + 2 * EMBED * KV * HEAD + 2 * EMBED * MLP)
    cache = 2 * 2 * LAYERS * rows * context * KV * HEAD
    assert weights + cache <= decode.figures.hbm_bytes <= 1.01 * (weights + cache)
