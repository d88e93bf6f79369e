"""Score text: the loss of a pretrained model on documents of yours, one figure for each set of documents.

    python examples/score.py [MODEL]

MODEL is a Hugging Face folder, a Hub id or a .gguf file. The default is the small model in `config/needles/tiny`, which
has learned sentences such as the ones below; the same words in another order have a higher loss.
"""

import sys
from pathlib import Path

import jax

from levanter.commands.cli.devices import local_target
from levanter.data import DirectDatasetComponent, LmDataConfig
from levanter.main.eval_lm import EvalLmConfig, describe, execute
from levanter.mesh import MeshConfig, local_devices
from levanter.tracker import NoopConfig
from levanter.trainer import TrainerConfig

MODEL = Path(__file__).parents[1] / "config" / "needles" / "tiny"
SENTENCES = ["The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again."]
TEXTS = {
    "sentences": [" ".join(SENTENCES * 4)],
    "reversed": [" ".join(reversed(" ".join(SENTENCES * 4).split()))],
}


def main(model: str) -> None:
    """Evaluates `model` on `TEXTS` with all available devices and prints the loss of each set."""
    config = EvalLmConfig(
        hf_checkpoint=model,
        max_eval_length=64,
        data=LmDataConfig(
            components={name: DirectDatasetComponent(datasets={"validation": texts}) for name, texts in TEXTS.items()}
        ),
        trainer=TrainerConfig(mp="f32", tracker=NoopConfig(), mesh=MeshConfig(axes={"data": -1})),
    )
    # The plan holds everything that will run: shardings, bytes to read, compiled functions. No weight is read yet.
    plan = describe(config, local_target(local_devices(config.trainer.mesh))).check()
    print(f"{plan.mesh}: {plan.sharding.bytes_per_device / 2**20:.1f} MiB of weights on each device")
    run = execute(plan, plan.mesh.build(jax.devices()))
    for name, value in run.result.metrics().items():
        if name.endswith("/loss"):
            print(f"{name} {value:.3f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else str(MODEL))
