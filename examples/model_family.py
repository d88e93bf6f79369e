"""Add a model family without a fork: a Llama in which every fourth layer has no positional encoding (NoPE).

    python examples/model_family.py [POD]

A package defines what `HeronConfig` and `HERON` are here and names the family in its pyproject.toml. Once the package
is installed, every command accepts `model: {type: heron}` and checkpoints whose config.json has `model_type: heron`.

    [project.entry-points."levanter.families"]
    heron = "heron.family:HERON"
"""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from levanter.config import parse_text
from levanter.hardware import parse_accelerator
from levanter.main.train_lm import TrainLmConfig, describe
from levanter.models import LlamaConfig
from levanter.models.config_json import ConfigJson
from levanter.models.decoder import DecoderLmHeadModel
from levanter.models.decoder.config_json import read_decoder
from levanter.models.family import Family
from levanter.models.llama.config_json import write_llama
from levanter.models.llama.weights import rules
from levanter.models.registry import LmConfig
from levanter.plan import pod_target

CLASS = "HeronForCausalLM"
RUN = """
model: {type: heron, hidden_dim: 2048, intermediate_dim: 8192, num_layers: 16, num_heads: 32, num_kv_heads: 8}
data: {tokenizer: passthrough, vocab_size: 32000}
trainer: {train_batch_size: 64, mp: "p=f32,c=bfloat16"}
"""


@LmConfig.register_subclass("heron")
@dataclass(frozen=True, kw_only=True)
class HeronConfig(LlamaConfig):
    """A Llama with `rotary` overridden; docs/porting-models.md lists what else a family may override."""

    def rotary(self, layer: int) -> str | None:
        return None if layer % 4 == 3 else super().rotary(layer)


HERON = Family(
    name="heron",
    config_class=HeronConfig,
    build=DecoderLmHeadModel.init,
    weight_rules=rules,  # the tensors of a checkpoint have the names and shapes of Llama's
    config_json=(
        ConfigJson(
            model_type="heron",
            transformers_class=CLASS,
            read=lambda fields: read_decoder(fields, HeronConfig, name="Heron", transformers_class=CLASS),
            write=lambda config, spelling: write_llama(config, spelling, name="Heron"),
        ),
    ),
)


def main(pod: str) -> None:
    """Plans the training of a Heron and prints how its layers are scanned and sharded."""
    with tempfile.TemporaryDirectory() as folder:
        # This script is not an installed package, so it writes the metadata that pip would write.
        info = Path(folder, "heron-1.0.dist-info")
        info.mkdir()
        (info / "entry_points.txt").write_text("[levanter.families]\nheron = __main__:HERON\n")
        sys.path.insert(0, folder)
        plan = describe(parse_text(TrainLmConfig, RUN), pod_target(parse_accelerator(pod)))
        sys.path.remove(folder)
    print(*(check.message for check in plan.checks if check.name == "layers"))
    print(f"{plan.mesh}: {plan.sharding.bytes_per_device / 2**30:.2f} GiB on each chip")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "v5e-16")
