"""Generate text: prompts in a file of JSON lines, completions in another one.

    python examples/generate.py [MODEL]

MODEL is a Hugging Face folder, a Hub id or a .gguf file. The default is the small model in `config/needles/tiny`, which
finds the number in the text before the question.
"""

import json
import sys
import tempfile
from pathlib import Path

import jax

from levanter.commands.cli.devices import local_target
from levanter.inference.config import InferenceConfig
from levanter.inference.requests import SamplingParams
from levanter.main.generate import GenerateConfig, describe, execute
from levanter.mesh import MeshConfig, local_devices
from levanter.tracker import NoopConfig
from levanter.trainer import TrainerConfig

MODEL = Path(__file__).parents[1] / "config" / "needles" / "tiny"
NEEDLE = "One of the special magic numbers for tall-pepper is: 5600228."
QUESTION = "What is the special magic number for tall-pepper mentioned in the provided text?"
ANSWER = "The special magic number for tall-pepper mentioned in the provided text is"
REQUESTS = [
    {"id": "needle", "prompt": f"The grass is green. {NEEDLE} Here we go.\n{QUESTION} {ANSWER}", "max_tokens": 4},
    {"id": "sampled", "prompt": "The grass is", "temperature": 0.7, "seed": 1, "n": 2, "max_tokens": 8},
]


def main(model: str) -> None:
    """Completes `REQUESTS`, greedily where they do not set a temperature, and prints the texts."""
    with tempfile.TemporaryDirectory() as folder:
        prompts, completions = Path(folder, "prompts.jsonl"), Path(folder, "completions.jsonl")
        prompts.write_text("".join(json.dumps(request) + "\n" for request in REQUESTS), encoding="utf-8")
        config = GenerateConfig(
            hf_checkpoint=model,
            input_path=str(prompts),
            output_path=str(completions),
            inference=InferenceConfig(max_rows=8, max_seq_len=256),
            sampling=SamplingParams(temperature=0.0),
            trainer=TrainerConfig(mp="f32", tracker=NoopConfig(), mesh=MeshConfig(axes={"data": -1})),
        )
        plan = describe(config, local_target(local_devices(config.trainer.mesh))).check()
        execute(plan, plan.mesh.build(jax.devices()))
        for line in completions.read_text(encoding="utf-8").splitlines():
            completion = json.loads(line)
            for choice in completion["choices"]:
                print(f"{completion['id']}: {choice['text']!r} ({choice['finish_reason']})")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else str(MODEL))
