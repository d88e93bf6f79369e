"""Train with an objective of your own: the focal loss instead of the cross-entropy of the next token.

    python examples/train_objective.py [STEPS]

Data, mesh, optimizer, evaluation and metrics come from the configuration; only the sums over a batch are written here.
They are added over microbatches and devices, so the objective holds for every mesh and every gradient accumulation.
"""

import sys
from dataclasses import dataclass

import haliax as hax
import jax

from levanter.commands.cli.devices import local_target
from levanter.config import parse_text
from levanter.layers.outputs import Sums
from levanter.main.train_lm import TrainLmConfig, describe, execute
from levanter.mesh import local_devices
from levanter.trainer.loss import LmObjective
from levanter.trainer.objective import LOSS, Term

TEXT = " ".join(str(3 * n % 16) for n in range(2048))
CONFIG = f"""
data:
  tokenizer: passthrough  # the texts are token ids
  vocab_size: 16
  cache_dir: null
  components: {{threes: {{type: direct, datasets: {{train: ["{TEXT}"], validation: ["{TEXT}"]}}}}}}
model:
  {{type: llama, max_seq_len: 32, hidden_dim: 32, intermediate_dim: 64, num_layers: 1, num_heads: 4, num_kv_heads: 2}}
optimizer: {{learning_rate: 1.0e-2, warmup: 2}}
trainer:
  {{mp: f32, num_train_steps: STEPS, train_batch_size: 8, tracker: {{type: noop}}, watch: {{interval: 0}},
   checkpointer: {{base_path: logs/examples/focal}}}}
"""


@dataclass(frozen=True, kw_only=True)
class FocalObjective(LmObjective):
    """−(1 − p)^γ log p of the next token (Lin et al., arXiv:1708.02002); −log p is logged but not minimized."""

    gamma: float = 2.0

    @property
    def terms(self) -> tuple[Term, ...]:
        return (Term(name=LOSS), Term(name="nll", weight=None))

    def sums(self, model, batch, at) -> Sums:  # noqa: ARG002
        logprobs, counts = self.logprobs(model, batch), batch.counts()
        focal = (1 - hax.exp(logprobs)) ** self.gamma * logprobs
        return Sums({LOSS: -hax.sum(counts * focal).scalar(), "nll": -hax.sum(counts * logprobs).scalar()})


def main(steps: str) -> None:
    """Trains a small Llama to count in threes and prints the focal loss and the plain one."""
    config = parse_text(TrainLmConfig, CONFIG.replace("STEPS", steps))
    plan = describe(config, local_target(local_devices(config.trainer.mesh)), objective=FocalObjective()).check()
    run = execute(plan, plan.mesh.build(jax.devices()))
    print(f"after {run.taken} steps: focal loss {run.loss:.3f}, validation loss {run.summary['eval/loss']:.3f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "20")
