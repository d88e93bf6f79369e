"""Fine-tune a pretrained model with low-rank adapters (LoRA), then evaluate it without and with them.

    python examples/finetune_adapters.py [FOLDER]

FOLDER (default `logs/examples/colors`) receives the adapters, in the format of the package `peft`. The base is the
small model in `config/needles/tiny`, which expects green grass and a blue sky; the adapters teach it other colors.
"""

import sys
from pathlib import Path

import jax

from levanter.commands.cli.devices import local_target
from levanter.config import parse_text
from levanter.main import eval_lm, train_lm
from levanter.mesh import local_devices

MODEL = Path(__file__).parents[1] / "config" / "needles" / "tiny"
TEXT = "The grass is yellow. The sky is green. The sun is blue. " * 20
SHARED = f"""
hf_checkpoint: {MODEL}
data:
  cache_dir: null
  components: {{colors: {{type: direct, datasets: {{train: ["{TEXT}"], validation: ["{TEXT}"]}}}}}}
"""
TRAINING = """
adapter: {type: lora, r: 4, alpha: 8, zero_init_b: true, a_init_mode: peft}
peft_save_path: FOLDER
train_seq_len: 64
optimizer: {learning_rate: 2.0e-2, warmup: 2, weight_decay: 0.0}
trainer:
  {mp: f32, num_train_steps: 10, train_batch_size: 8, tracker: {type: noop}, watch: {interval: 0},
   checkpointer: {base_path: FOLDER/checkpoints}}
"""
EVALUATION = """
adapter_path: ADAPTERS
max_eval_length: 64
trainer: {mp: f32, tracker: {type: noop}}
"""


def run(command, config):
    """Runs a command (a module of `levanter.main`) on the available devices and returns what `execute` returns."""
    plan = command.describe(config, local_target(local_devices(config.trainer.mesh))).check()
    return command.execute(plan, plan.mesh.build(jax.devices()))


def main(folder: str) -> None:
    """Trains adapters of all projections and prints the loss of the base and of the adapted model."""
    trained = run(train_lm, parse_text(train_lm.TrainLmConfig, SHARED + TRAINING.replace("FOLDER", folder)))
    print(f"{trained.taken} steps; adapters in {trained.exported}")
    for name, adapters in {"base": "null", "with adapters": str(trained.exported)}.items():
        config = parse_text(eval_lm.EvalLmConfig, SHARED + EVALUATION.replace("ADAPTERS", adapters))
        print(f"{name}: {run(eval_lm, config).result.overall.micro.loss:.3f} nats per token")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "logs/examples/colors")
