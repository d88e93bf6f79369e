"""A checkpoint as a training run leaves it, made without training: a tiny Llama with random weights, padded rows."""

from pathlib import Path

import haliax as hax
import jax
import numpy as np
from helpers.hf_folder import TEXTS, byte_level_tokenizer
from helpers.llama_on_mesh import abstract_model, mappings_for, random_arrays, tiny_config
from jax.sharding import NamedSharding

from haliax_ext.abstract import leaves, with_arrays
from haliax_ext.meshspec import MeshSpec
from haliax_ext.planner import plan_sharding
from levanter.checkpoint import Checkpointer, used_shapes
from levanter.commands.model.saved_model import model_metadata
from levanter.models import LlamaConfig

IDS, ROWS = 301, 304
TEXT = "\n".join(TEXTS) * 6


def config_of() -> LlamaConfig:
    """An architecture whose ids no mesh divides."""
    return tiny_config(vocab_size=IDS, num_kv_heads=4)


def write_tokenizer(folder: Path) -> Path:
    """A tokenizer of 300 ids and one token for nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    byte_level_tokenizer(300).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}')
    return folder


def write_checkpoint(
    base: Path, tokenizer: Path, *, config: LlamaConfig | None = None, rows: int = ROWS, chunk_bytes: int = 4096
) -> Path:
    """Saves random parameters from a mesh of data 4 × model 2, and some optimizer statistics; returns the base."""
    config = config or config_of()
    values = random_arrays(config, vocab=rows)
    mesh = MeshSpec.of(data=4, model=2)
    module = abstract_model(config, rows)
    plan = plan_sharding(leaves(module), mappings_for(config, mesh, heads=("model",)), mesh).check()
    devices = mesh.build(jax.devices())
    arrays = {f"model.{p}": jax.device_put(x, NamedSharding(devices, plan.spec(p))) for p, x in values.items()}
    arrays["optimizer.1.count"] = jax.device_put(np.int32(7))
    used = used_shapes(
        (leaf for leaf in leaves(module)), {"vocab": IDS if config.vocab_size is None else config.vocab_size}
    )
    with Checkpointer(
        str(base),
        keep=[(1, None)],
        save_interval_seconds=None,
        used={f"model.{path}": shape for path, shape in used.items()},
        chunk_bytes=chunk_bytes,
    ) as checkpointer:
        checkpointer.save(7, arrays, {"run_id": "tiny", **model_metadata(config, tokenizer=str(tokenizer))})
    return base


def logits(config: LlamaConfig, values: dict[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
    """What our model computes on one device, without the rows that pad."""
    rows = values["embeddings.token_embeddings.weight"].shape[0]
    model = with_arrays(abstract_model(config, rows), {path: jax.numpy.asarray(x) for path, x in values.items()})
    hidden = model(hax.named(jax.numpy.asarray(ids, jax.numpy.int32), ("batch", "position"))).activations
    with jax.default_matmul_precision("highest"):
        found = model.head(hidden)
    return np.asarray(found.array)[..., : config.vocab_size]
