"""The Programs of generating text for the compile worker, from a few sizes: Llama 3.1 70B with some of its layers."""

from dataclasses import dataclass
from typing import Any

import haliax as hax
import jax
import numpy as np

from haliax_ext.abstract import abstract, cast, leaves
from haliax_ext.meshspec import MeshSpec
from haliax_ext.planner import plan_sharding
from haliax_ext.program import Program
from levanter.hardware.compiler import as_values, tuned_options
from levanter.inference.kv_cache import plan_cache
from levanter.inference.programs import ServedModel, generation_programs
from levanter.layers.quantized import with_int8
from levanter.mesh import resolve
from levanter.mesh.config import MeshConfig
from levanter.models import LlamaConfig, MixtralConfig
from levanter.models.axes import model_axes
from levanter.models.decoder import DecoderLmHeadModel
from levanter.models.precision import Precision
from levanter.runplan import Target

SEVENTY: dict[str, Any] = dict(
    hidden_dim=8192,
    intermediate_dim=28672,
    num_layers=4,
    num_heads=64,
    num_kv_heads=8,
    vocab_size=128256,
    max_seq_len=8192,
    gradient_checkpointing=False,
)


@dataclass(frozen=True)
class Described:
    mesh: MeshSpec
    programs: tuple[Program, ...]


def generation(payload: dict[str, Any], target: Target) -> Described:
    """All of them.

    Args:
        payload: `model` (LlamaConfig's fields over `SEVENTY`), `mesh` (MeshConfig's), `cache` (`plan_cache`'s), and
            `steps`, `prefill`, `int8` (whether projections are).
        target: what it is compiled for.
    """
    fields = SEVENTY | payload.get("model", {})
    config = MixtralConfig(**fields) if "n_routed_experts" in fields else LlamaConfig(**fields)
    assert config.vocab_size is not None
    precision = Precision.parse(payload.get("mp", "bfloat16"))
    Vocab = hax.Axis("vocab", config.vocab_size)
    resolved = resolve(
        MeshConfig(
            **{
                "axes": {"data": 1, "model": -1},
                "shared_mapping": {"mlp": "model", "heads": "model", "vocab": "model"},
                "param_mapping": {},
                **payload.get("mesh", {}),
            }
        ),
        model_axes(config.axes, vocab=Vocab.size, positions=config.max_seq_len),
        devices=target.devices,
        granules=target.granules,
    )
    module = cast(abstract(lambda: config.build(Vocab, key=jax.random.PRNGKey(0))), precision.compute)
    if payload.get("int8"):
        module = with_int8(module, lambda _: True)
    assert isinstance(module, DecoderLmHeadModel)
    cache = plan_cache(
        module,
        resolved.mappings,
        resolved.spec,
        batch_axis="batch",
        **{"rows": 32, "max_seq_len": 8192, "dtype": np.dtype(precision.compute)} | payload.get("cache", {}),
    )
    model = ServedModel(
        abstract=module,
        sharding=plan_sharding(leaves(module), resolved.mappings, resolved.spec).check(),
        matrix_unit=target.platform == "tpu",
        matmul_precision=precision.matmul,
        compiler_options=as_values(tuned_options(target.platform, target.kind, work="generate", layout="other")),
    )
    prefill = [tuple(bucket) for bucket in payload.get("prefill", [(1, 512)])]
    made = generation_programs(model, cache, prefill=prefill, steps=payload.get("steps", 1))
    return Described(resolved.spec, made.all)
