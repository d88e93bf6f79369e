"""A tiny decoder whose positions are cut over devices: losses, log-probabilities and gradients, by any mapping."""

import dataclasses
from dataclasses import dataclass
from functools import cache

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from haliax_ext.abstract import abstract, cast, leaves, with_arrays
from haliax_ext.mapping import AxisMapping, Mappings
from haliax_ext.meshspec import MeshSpec
from haliax_ext.program import Input, Program
from levanter.data import next_tokens
from levanter.layers.attention.grouped import AttentionSpec
from levanter.models import LlamaConfig
from levanter.models.decoder import DecoderLmHeadModel
from levanter.models.scoring import token_logprobs
from levanter.trainer.loss import LmBatch, LmObjective
from levanter.trainer.objective import AtStep

VOCAB, ROWS, POSITIONS = 32, 2, 64
BATCH, POS = hax.Axis("batch", ROWS), hax.Axis("position", POSITIONS)
RNG = np.random.default_rng(11)
TOKENS = RNG.integers(0, VOCAB, (ROWS, POSITIONS)).astype(np.int32)


@dataclass(frozen=True, kw_only=True)
class Looking(LlamaConfig):
    """A Llama whose attention may have a window, sinks and a bound of its scores, and positions a table."""

    span: int | None = None
    cap: float | None = None
    has_sinks: bool = False
    table: bool = False

    @property
    def attention(self) -> AttentionSpec:
        return dataclasses.replace(super().attention, soft_cap=self.cap, sinks=self.has_sinks)

    def window(self, layer: int) -> int | None:
        return self.span

    @property
    def learned_positions(self) -> bool:
        return self.table


def config(**changes) -> Looking:
    """8 key/value heads of two query heads each, so that heads can be cut over 8 devices."""
    base = dict(
        max_seq_len=POSITIONS,
        hidden_dim=16,
        intermediate_dim=16,
        num_layers=1,
        num_heads=16,
        num_kv_heads=8,
        head_dim=4,
        vocab_size=VOCAB,
        initializer_range=0.3,
        cross_entropy_block_size=64,
    )
    return Looking(**(base | changes))


MASKS = {
    "causal": dict(),
    "window 5": dict(span=5),
    "window 48": dict(span=48),  # longer than a part of the positions
    "sinks and cap": dict(has_sinks=True, cap=2.0),
    "packed": dict(),
    "everything, packed": dict(span=48, has_sinks=True, cap=2.0, table=True),
}


def segments(mask: str) -> np.ndarray | None:
    """Documents of unequal lengths, the last one padding; another cut in each row."""
    if "packed" not in mask:
        return None
    ends = np.array([[3, 25, 26, 50, 64], [32, 33, 45, 60, 64]])
    return np.stack([np.searchsorted(row, np.arange(POSITIONS), side="right") for row in ends]).astype(np.int32)


EXCHANGES = {
    "gather": {},
    "heads": {"position": None, "kv_head": ["model", "context"]},
    "ring": {"key_position": "context"},
    "ring × heads": {"position": "ring", "key_position": "ring", "kv_head": ["model", "context"]},
}


def mesh_of(data: int, context: int, model: int, exchange: str) -> MeshSpec:
    """Data × context × model; for a ring of heads half of `context` is `ring`."""
    ring = 2 if exchange == "ring × heads" else 1
    return MeshSpec.of(data=data, ring=ring, context=context // ring, model=model)


def mappings_of(exchange: str, order: str, **compute) -> Mappings:
    """Positions over `ring` and `context`, heads and features over `model`."""
    cut = {"position": ("ring", "context"), "mlp": "model", "kv_head": "model", "vocab": "model", "batch": "data"}
    attention = EXCHANGES[exchange]
    if exchange == "ring":
        attention = {"key_position": ("ring", "context")}
    return Mappings(
        params=AxisMapping({"mlp": "model", "kv_head": "model", "vocab": "model", "embed": "data"}),
        compute=AxisMapping({**cut, **compute}),
        attention=AxisMapping(attention),
        zigzag=("position",) if order == "zigzag" else (),
    )


@cache
def arrays(model: Looking, seed: int = 0) -> dict[str, np.ndarray]:
    """Random values of every leaf, by path."""
    rng = np.random.default_rng(seed)
    return {
        leaf.path: (0.3 * rng.standard_normal(leaf.shape) + leaf.path.endswith("norm.weight")).astype(np.float32)
        for leaf in leaves(template(model))
    }


def template(model: Looking) -> DecoderLmHeadModel:
    """The model without memory."""
    return abstract(lambda: DecoderLmHeadModel.init(hax.Axis("vocab", VOCAB), model, key=jax.random.key(0)))


def program(model: Looking, mask: str, mappings: Mappings, dtype: str = "float32") -> Program:
    """Model, batch → the training loss, log-probabilities in their own order, and every gradient."""
    objective = LmObjective(weights=False, segments=segments(mask) is not None)

    def function(model: DecoderLmHeadModel, batch: LmBatch) -> tuple:
        scale = 1 / objective.normalizer(batch)
        grad = jax.value_and_grad(lambda model: objective.total(model, batch, AtStep(step=jnp.int32(0)), scale)[0])
        loss, gradient = grad(model)
        found = token_logprobs(model, batch.tokens, batch.targets, segment_ids=batch.segment_ids)
        return loss, found, gradient

    batch = objective.abstract_batch(BATCH, POS)
    return Program(
        name="exchanged",
        function=function,
        inputs=(
            Input(name="model", value=cast(template(model), np.dtype(dtype)), placement=mappings),
            Input(name="batch", value=batch, placement=mappings.compute),
        ),
        mappings=mappings,
        matmul_precision="highest",
    )


Rows = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Tokens, targets and segments, `[batch, position]`."""


def batch_on(mask: str, mappings: Mappings, mesh: jax.sharding.Mesh, rows: Rows | None = None) -> LmBatch:
    """The batch on the devices of a mesh; it does not know of any order."""
    ids = segments(mask)

    def placed(values: np.ndarray) -> hax.NamedArray:
        sharding = NamedSharding(mesh, mappings.compute.spec(("batch", "position")))
        return hax.NamedArray(jax.device_put(values, sharding), (BATCH, POS))

    if rows is not None:
        tokens, targets, ids = (placed(values) for values in rows)
        return LmBatch(tokens=tokens, targets=targets, segment_ids=ids)
    targets = next_tokens(TOKENS) if ids is None else next_tokens(TOKENS, ids)
    if ids is not None:
        targets = np.where(ids == ids.max(), -1, targets).astype(np.int32)  # Padding predicts nothing.
    return LmBatch(tokens=placed(TOKENS), targets=placed(targets), segment_ids=None if ids is None else placed(ids))


def documents_alone_and_packed() -> tuple[Rows, Rows, list[slice]]:
    """A document a row: by itself, padding behind it; and among others. And where it is in the packed rows."""
    where = [slice(26, 50), slice(33, 60)]
    tokens, ids = TOKENS.copy(), np.ones((ROWS, POSITIONS), np.int32)
    targets = np.full((ROWS, POSITIONS), -1, np.int32)
    packed = TOKENS.copy(), targets.copy(), np.zeros((ROWS, POSITIONS), np.int32)
    for row, place in enumerate(where):
        length = place.stop - place.start
        tokens[row, :length], ids[row, :length] = TOKENS[row, place], 0
        targets[row, : length - 1] = TOKENS[row, place][1:]
        packed[1][row, place] = targets[row, :length]
        packed[2][row, place.start :] += 1
        packed[2][row, place.stop :] += 1
    return (tokens, targets, ids), packed, where


def run(
    model: Looking,
    mask: str,
    spec: MeshSpec,
    mappings: Mappings,
    devices: list[jax.Device],
    rows: Rows | None = None,
    *,
    dtype: str = "float32",
    weights: str = "float32",
    seed: int = 0,
):
    """Loss, log-probabilities and gradients by path, on the host.

    Computed in a dtype, with weights of a seed that were rounded to a dtype before.
    """
    mesh = spec.build(devices[: spec.size])
    values = {path: value.astype(weights).astype(dtype) for path, value in arrays(model, seed).items()}
    placed = {
        leaf.path: jax.device_put(
            values[leaf.path], NamedSharding(mesh, mappings.params_at(leaf.path).spec(leaf.names))
        )
        for leaf in leaves(template(model))
    }
    given = with_arrays(cast(template(model), np.dtype(dtype)), placed), batch_on(mask, mappings, mesh, rows)
    loss, found, gradient = program(model, mask, mappings, dtype).jit(mesh)(*given)
    by_path = {leaf.path: None for leaf in leaves(template(model))}
    flat = jax.tree.leaves(gradient)
    assert len(flat) == len(by_path)
    return float(loss), np.asarray(found.array), dict(zip(by_path, map(np.asarray, flat), strict=True))
