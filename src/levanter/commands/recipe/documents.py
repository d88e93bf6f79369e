"""The YAML documents of a recipe: the base model, and supervised fine-tuning on conversations."""

from levanter.commands.recipe.miniseries import FINAL_LR, MOMENTUM, MOMENTUM_STEPS, WARMDOWN, WARMUP_STEPS, Miniseries
from levanter.hardware import Accelerator

DEVICE_ROWS = 8
"""The most rows of a device at once; more are accumulated."""
STATE_SHARE = 0.6
"""The share of a device's memory that the whole state may take before it is sharded."""


def state_bytes(series: Miniseries) -> int:
    """Bytes of parameters, gradients and optimizer in float32, without sharding."""
    counts = series.counts
    # Muon has one moment of each matrix, AdamW two of everything else.
    matrices = counts["transformer_matrices"]
    return 4 * (2 * counts["total"] + matrices + 2 * (counts["total"] - matrices))


def replicated(series: Miniseries, pod: Accelerator) -> bool:
    """Whether every device has the whole state, so that weights are never gathered."""
    return state_bytes(series) <= STATE_SHARE * pod.hbm_bytes


def rows_on_device(series: Miniseries, pod: Accelerator) -> int:
    """Rows of a device at once: the largest power of two that divides its rows of a step, at most `DEVICE_ROWS`.

    Raises:
        ValueError: the rows of a step do not divide over the devices.
    """
    if series.rows % pod.devices:
        lower = series.rows // pod.devices * pod.devices
        nearest = [rows * series.length for rows in (lower, lower + pod.devices) if rows]
        raise ValueError(
            f"batch: {series.step_tokens:,} tokens are {series.rows:,} rows of {series.length:,}, which {pod.devices} "
            f"devices of {pod} do not share equally; nearest: {' or '.join(f'{n:,}' for n in nearest)} tokens"
        )
    share = series.rows // pod.devices
    # Its lowest set bit is the largest power of two that divides it.
    return min(share & -share, DEVICE_ROWS)


def base_document(series: Miniseries, pod: Accelerator, *, name: str) -> str:
    """The document of the base model: `train_lm` and `train_tokenizer` read it.

    Args:
        series: the numbers.
        pod: the pod that the layout is for.
        name: the name of the model, such as `nanochat_d24`.
    """
    model = series.model
    whole = replicated(series, pod)
    axes = "{replica: -1, data: 1, model: 1}" if whole else "{data: -1, model: 1}"
    state = state_bytes(series) / 2**30
    why = (
        f"every device of {pod.name} has the whole state ({state:.1f} GiB), so no weight is gathered"
        if whole
        else f"the state ({state:.1f} GiB) is sharded over the devices of {pod.name}"
    )
    return f"""\
# nanochat of depth {series.depth}, {series.counts["total"]:,} parameters: {series.steps:,} steps of \
{series.step_tokens:,} tokens ({_ratio(series)}).
# Written by `levanter recipe --depth {series.depth}`, which prints the reason of every number.
#   python -m levanter.main.train_tokenizer --config_path config/recipes/{name}.yaml --output_path tokenizers/nanochat
#   python -m levanter.main.plan train_lm --config_path config/recipes/{name}.yaml --target {pod.name}
#   python -m levanter.main.train_lm --config_path config/recipes/{name}.yaml
data:
  tokenizer: tokenizers/nanochat
  cache_dir: cache/nanochat
  # A document begins with <|bos|> and has no end token; documents of a row see each other.
  enforce_eos: false
  block_cross_document_attention: false
  # The shards are shuffled already.
  shuffle: false
  components:
    web:
      # Parquet files with a column `text`; the held-out file is named, not the last one of a folder.
      source:
        train_urls: ["data/nanochat/shard_{{00000..{series.shards - 1:05d}}}.parquet"]
        validation_urls: [data/nanochat/shard_06542.parquet]
      pack: best_fit_cropped

model:
  type: nanochat
  max_seq_len: {series.length}
  vocab_size: {series.vocab_size}
  hidden_dim: {model.hidden_dim}
  intermediate_dim: {model.intermediate_dim}
  num_layers: {model.num_layers}
  num_heads: {model.num_heads}
  num_kv_heads: {model.num_kv_heads}
  gradient_checkpointing: true

{_optimizer(series)}
trainer:
  mp: p=f32,c=bfloat16
  train_batch_size: {series.rows}
  per_device_parallelism: {rows_on_device(series, pod)}
  num_train_steps: {series.steps}
  steps_per_eval: 250
  tracker: {{type: json_file, output_path: logs/{name}}}
  checkpointer: {{base_path: checkpoints/{name}}}
  mesh:
    # {why[0].upper()}{why[1:]}.
    axes: {axes}
"""


def _ratio(series: Miniseries) -> str:
    return f"{series.horizon / series.scaling_parameters:.3g} a parameter of matrices and head"


def _optimizer(series: Miniseries) -> str:
    rate = series.learning_rates
    # nanochat's groups of AdamW: pattern, learning rate, weight decay, betas. Smear's gate is a matrix, but no Muon's.
    groups = (
        ("**.lm_head.weight", rate["head"], 0.01, 0.8, 0.96),
        ("**.token_embeddings.weight", rate["embedding"], 0.001, 0.8, 0.995),
        ("**.value_embedding.table", rate["value tables"], 0.01, 0.8, 0.995),
        ("**.stream_scale", rate["r"], 0.05, 0.8, 0.95),
        ("**.x0_scale", rate["s"], 0.0, 0.96, 0.95),
        ("**.smear.**", rate["smear, backout"], 0.0, 0.8, 0.95),
        ("**.backout_scale", rate["smear, backout"], 0.0, 0.8, 0.95),
    )
    lines = [
        f'    "{key}": {{rule: adam, learning_rate: {lr:.6g}, weight_decay: {decay:g}, beta1: {beta1:g}, '
        f"beta2: {beta2:g}}}"
        for key, lr, decay, beta1, beta2 in groups
    ]
    return f"""\
optimizer:
  type: muon
  learning_rate: {rate["matrices"]:.6g}
  polar: polar_express
  average_momentum: true
  momentum: {MOMENTUM[1]:g}
  momentum_schedule: {{start: {MOMENTUM[0]:g}, warmup: {MOMENTUM_STEPS}, final: {MOMENTUM[2]:g}}}
  row_equalize: true
  renormalize: true
  second_moment: 0.9
  cautious_decay: true
  weight_decay: {series.weight_decay:.6g}
  weight_decay_schedule: cosine
  epsilon: 1.0e-10
  max_grad_norm: null
  warmup: {WARMUP_STEPS}
  warm_first_step: true
  decay: {WARMDOWN}
  lr_schedule: linear
  min_lr_ratio: {FINAL_LR}
  groups:
""" + "\n".join([*lines, ""])
