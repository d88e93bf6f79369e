"""Our Llama's own Programs for the compile worker, from a few sizes: a train step or a forward and backward pass."""

from dataclasses import dataclass
from typing import Any

import haliax as hax
import jax

from haliax_ext.meshspec import MeshSpec
from haliax_ext.program import Program
from levanter.hardware import compiler_options
from levanter.mesh import ModelAxes, resolve
from levanter.mesh.config import MeshConfig
from levanter.models import LlamaConfig
from levanter.models.axes import ALIASES, KNOWN_AXES
from levanter.models.precision import Precision
from levanter.optim import AdamConfig
from levanter.runplan import Target
from levanter.trainer.loss import LmObjective
from levanter.trainer.state import abstract_state, plan_state
from levanter.trainer.step import StepRecipe, step_program

SMALL: dict[str, Any] = dict(
    hidden_dim=1024,
    intermediate_dim=2048,
    num_layers=3,
    num_heads=8,
    num_kv_heads=4,
    head_dim=128,
    max_seq_len=2048,
    vocab_size=4096,
)


@dataclass(frozen=True)
class Described:
    mesh: MeshSpec
    programs: tuple[Program, ...]


def train_step(payload: dict[str, Any], target: Target) -> Described:
    """The train step, FSDP over `data`, heads, `mlp` and `vocab` over `model`.

    Args:
        payload: `model` (LlamaConfig's fields over `SMALL`), `batch`, `segments`, `mp`, `mesh` (MeshConfig's fields).
        target: what it is compiled for.
    """
    precision = Precision.parse(payload.get("mp", "p=f32,c=bfloat16"))
    config = LlamaConfig(**(SMALL | payload.get("model", {})))
    assert config.vocab_size is not None
    config, _ = config.for_platform(target.platform, compute_dtype=precision.compute)
    Vocab, Pos = hax.Axis("vocab", config.vocab_size), hax.Axis("position", config.max_seq_len)
    shared = {"mlp": "model", "heads": "model", "vocab": "model"}
    sizes = {axis.name: axis.size for axis in (*config.axes.values(), Vocab, Pos)}
    resolved = resolve(
        MeshConfig(**({"shared_mapping": shared} | payload.get("mesh", {}))),
        ModelAxes(sizes=sizes, known=KNOWN_AXES, aliases=ALIASES),
        devices=target.devices,
        granules=target.granules,
    )
    optimizer = AdamConfig()
    transformation = optimizer.build(100)
    state = abstract_state(lambda: config.build(Vocab, key=jax.random.PRNGKey(0)), transformation, precision)
    plan = plan_state(state, resolved.mappings, resolved.spec)
    objective = LmObjective(segments=payload.get("segments", True))
    program = step_program(
        StepRecipe(
            objective=objective,
            optimizer=transformation,
            schedule=optimizer.schedule(100),
            precision=precision,
            parameters=plan.parameters,
        ),
        state=state,
        plan=plan,
        batch=objective.abstract_batch(hax.Axis("batch", payload.get("batch", 8)), Pos),
        mappings=resolved.mappings,
        compiler_options=compiler_options(target.platform, target.kind),
    )
    return Described(resolved.spec, (program,))
