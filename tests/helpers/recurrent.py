"""A decoder whose layers remember different things: a recurrence, attention with two sizes of heads, earlier token ids.

`RecurrentConfig` is a Llama with four kinds of layers: F, its attention; W, attention with fewer and wider heads; R, a
gated linear recurrence with a matrix for each head (`S_t = a_t S_{t-1} + k_t v_tᵀ`, `y_t = q_t S_t`); and feed-forward
parts that add rows of a table for the two ids before each token. Whole sequences use the quadratic formula of the
recurrence, and calls that continue a text use a loop over its positions: each judges the other.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from helpers.llama_on_mesh import VOCAB, abstract_model, mappings_for

from haliax_ext.abstract import leaves, with_arrays
from haliax_ext.mapping import Mappings
from haliax_ext.meshspec import MeshSpec
from haliax_ext.planner import plan_sharding
from levanter.inference.engine import DeviceRunner, Engine, make_schedule
from levanter.inference.kv_cache import CachePlan, plan_cache
from levanter.inference.programs import GenerationPrograms, ServedModel, generation_programs
from levanter.inference.requests import Request, SamplingParams
from levanter.layers.context import ForwardContext
from levanter.layers.decode_state import LayerState, StateLeaf
from levanter.layers.embedding import Embedding
from levanter.layers.linear import Linear
from levanter.layers.mlp import GatedMlp, MlpSpec
from levanter.layers.protocols import FeedForward, Mixer, Shapes
from levanter.layers.rotary import DefaultRotaryConfig, RotaryConfig
from levanter.models.decoder import DecoderLmHeadModel, PatternedConfig
from levanter.models.llama.config import LlamaConfig

MEMORY_AXES = ("memory_head", "key_size", "value_size")


@dataclass(frozen=True, kw_only=True)
class RecurrenceSpec:
    """The configuration of a gated linear recurrence."""

    Embed: Axis
    MemoryHead: Axis
    KeySize: Axis
    ValueSize: Axis
    init_std: float

    attribute = "mixer"
    rope = None

    @property
    def axes(self) -> tuple[Axis, ...]:
        return (self.Embed, self.MemoryHead, self.KeySize, self.ValueSize)

    @property
    def tensor_axes(self) -> tuple[tuple[str, ...], ...]:
        return (("memory_head",),)

    @property
    def activations(self) -> Shapes:
        return {}

    @property
    def saved(self) -> Shapes:
        return {}

    @property
    def matmul_parameters(self) -> int:
        return self.Embed.size * self.MemoryHead.size * (2 * self.KeySize.size + 2 * self.ValueSize.size + 1)

    def sequence_flops(self, length: int, *, attention: str) -> int:
        return 5 * length * self.MemoryHead.size * self.KeySize.size * self.ValueSize.size

    def decode_state(self, dtype: Any) -> Mapping[str, StateLeaf]:
        # Float32 whatever the dtype of keys and values: the sum of a long text loses what it adds otherwise.
        return {"memory": StateLeaf(axes=("batch", self.MemoryHead, self.KeySize, self.ValueSize))}

    def init(self, *, key: jax.Array) -> "Recurrence":
        keys = jax.random.split(key, 5)
        outputs = ((self.KeySize,), (self.KeySize,), (self.ValueSize,), ())
        project = [
            Linear.init((self.Embed,), (self.MemoryHead, *out), scale=self.init_std, use_bias=False, key=keys[n])
            for n, out in enumerate(outputs)
        ]
        back = (self.MemoryHead, self.ValueSize)
        out = Linear.init(back, (self.Embed,), scale=self.init_std, use_bias=False, key=keys[4])
        return Recurrence(*project, out_proj=out)


class Recurrence(eqx.Module):
    """The module of a `RecurrenceSpec`."""

    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    gate_proj: Linear
    out_proj: Linear

    def __call__(
        self, x: NamedArray, context: ForwardContext, state: LayerState | None = None
    ) -> tuple[NamedArray, LayerState | None]:
        q, k, v, gate = (
            hax.auto_sharded(linear(x)).astype(jnp.float32)
            for linear in (self.q_proj, self.k_proj, self.v_proj, self.gate_proj)
        )
        log_decay = hax.nn.log_sigmoid(gate)
        if state is None:
            assert context.segments is None
            mixed = quadratic(q, k, v, log_decay)
        else:
            assert context.new is not None
            valid = context.new.valid
            # Padding neither decays the memory nor adds to it.
            log_decay, k = hax.where(valid, log_decay, 0.0), hax.where(valid, k, 0.0)
            mixed, memory = recurrent(q, k, v, log_decay, state.read("memory"))
            state = state.write(memory=memory)
        return self.out_proj(hax.auto_sharded(mixed.astype(x.dtype))), state


def quadratic(q: NamedArray, k: NamedArray, v: NamedArray, log_decay: NamedArray) -> NamedArray:
    """`y_t = Σ_{s ≤ t} exp(Σ_{s < r ≤ t} log a_r) (q_t · k_s) v_s`."""
    Pos = q.resolve_axis("position")
    Source = Pos.alias("source")
    total = hax.cumsum(log_decay, Pos)
    k, v, before = (y.rename({"position": "source"}) for y in (k, v, total))
    visible = hax.arange(Source) <= hax.arange(Pos).broadcast_axis(Source)
    weights = hax.where(visible, hax.exp(hax.where(visible, total.broadcast_axis(Source) - before, 0.0)), 0.0)
    return hax.dot(hax.dot(q, k, axis="key_size") * weights, v, axis="source")


def recurrent(
    q: NamedArray, k: NamedArray, v: NamedArray, log_decay: NamedArray, memory: NamedArray
) -> tuple[NamedArray, NamedArray]:
    """The same position by position, from a memory `[batch, …]`; also the memory at the end."""

    def step(memory: NamedArray, q: NamedArray, k: NamedArray, v: NamedArray, log_decay: NamedArray):
        memory = (hax.exp(log_decay) * memory + hax.dot(k, v, axis=())).rearrange(memory.axes)
        return memory, hax.dot(q, memory, axis="key_size")

    memory, mixed = hax.scan(step, "position")(memory, q, k, v, log_decay)
    return mixed, memory


class EarlierMlp(eqx.Module):
    """A gated MLP, plus rows of a table for the two ids before a token."""

    mlp: GatedMlp
    table: Embedding

    def __call__(self, x: NamedArray, context: ForwardContext) -> NamedArray:
        result = self.mlp(x)
        for distance in (1, 2):
            ids = context.ids_before(distance)
            rows = self.table(hax.where(ids < 0, 0, ids))
            # Different factors, so that the order of the two ids matters.
            result = result + hax.where(ids < 0, 0.0, rows / distance).rearrange(x.axes)
        return result


@dataclass(frozen=True, kw_only=True)
class EarlierMlpSpec(MlpSpec):
    """The configuration of an `EarlierMlp`."""

    Vocab: Axis

    def init(self, *, key: jax.Array) -> EarlierMlp:
        mlp = MlpSpec.init(self, key=key)
        table = Embedding.init(self.Vocab, self.Embed, scale=self.scale, key=jax.random.fold_in(key, 1))
        return EarlierMlp(mlp=mlp, table=table)


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig(PatternedConfig, LlamaConfig):
    """A Llama with recurrent layers, wide attention and earlier ids.

    Attributes:
        wide_rope: rotary embeddings of wide heads.
        reads_earlier: whether the feed-forward parts behind recurrences read the two ids before a token.
    """

    wide_rope: RotaryConfig = DefaultRotaryConfig()
    reads_earlier: bool = True

    def build(self, Vocab: Axis, *, key: jax.Array) -> DecoderLmHeadModel:
        # No family is registered: nothing here reads or writes checkpoints.
        return DecoderLmHeadModel.init(Vocab, self, key=key)

    @property
    def kinds(self) -> Mapping[str, str]:
        return {"F": "full_attention", "W": "wide_attention", "R": "recurrence"}

    def default_layer_type(self, layer: int) -> str:
        return "full_attention"

    @property
    def reads_token_ids(self) -> bool:
        return self.reads_earlier

    @property
    def earlier_token_ids(self) -> int:
        return 2 if self.reads_earlier else 0

    def layer_mixer(self, layer: int) -> Mixer:
        kind, attention = self.layer_type(layer), self.layer_attention(layer)
        if kind == "full_attention":
            return attention
        if kind == "wide_attention":
            # Half the heads of keys and values, and twice the features.
            wide = Axis("kv_head", self.KVHead.size // 2), Axis("head_size", 2 * self.HeadSize.size)
            return replace(attention, KVHead=wide[0], HeadSize=wide[1], rope="wide_rope")
        sizes = [Axis(name, size) for name, size in zip(MEMORY_AXES, (4, 6, 10), strict=True)]
        return RecurrenceSpec(
            Embed=self.Embed,
            MemoryHead=sizes[0],
            KeySize=sizes[1],
            ValueSize=sizes[2],
            init_std=self.initializer_range,
        )

    def layer_feed_forward(self, layer: int) -> FeedForward:
        if not self.reads_earlier or self.layer_type(layer) != "recurrence":
            return self.mlp
        fields = {name: getattr(self.mlp, name) for name in ("Embed", "Mlp", "activation", "scale")}
        return EarlierMlpSpec(**fields, Vocab=Axis("vocab", VOCAB))


def recurrent_config(**changes: Any) -> RecurrentConfig:
    """Five small layers: a scan over two recurrences, each with attention behind it, and wide attention."""
    base: dict[str, Any] = dict(
        max_seq_len=64, hidden_dim=32, intermediate_dim=48, num_layers=5, num_heads=8, num_kv_heads=4,
        layer_types=(*("recurrence", "full_attention") * 2, "wide_attention"), vocab_size=VOCAB,
        initializer_range=0.3, gradient_checkpointing=False, attn_backend="reference",
    )  # fmt: skip
    return RecurrentConfig(**(base | changes))


def mappings_of(config: RecurrentConfig, spec: MeshSpec) -> Mappings:
    """Heads of attention and of memories over `model`, rows over `data`."""
    shards = {"memory_head": "model"}
    return mappings_for(config, spec, params=shards, compute=shards)


@dataclass(frozen=True, kw_only=True)
class RecurrentEngine:
    """What to build; see `helpers.tiny_engine.TinyEngine`."""

    config: RecurrentConfig
    spec: MeshSpec
    rows: int = 8
    max_seq_len: int = 48
    page_size: int = 4
    pages: int | None = None
    prefill: tuple[tuple[int, int], ...] = ((1, 8),)
    steps: int = 1
    dtype: str = "float32"
    allocation: Any = "paged"
    share_prefixes: bool = True
    snapshots: int = 1
    behind: int = 2

    @functools.cached_property
    def model(self) -> Any:
        """The model, with weights drawn by a seed, on the host's first device."""
        rng = np.random.default_rng(1)
        template = abstract_model(self.config)
        arrays = {}
        for leaf in leaves(template):
            noise = rng.standard_normal(leaf.shape).astype(np.float32)
            scale = self.config.initializer_range
            arrays[leaf.path] = 1 + 0.1 * noise if leaf.path.endswith("norm.weight") else scale * noise
        return with_arrays(template, {path: jnp.asarray(x) for path, x in arrays.items()})

    @functools.cached_property
    def cache(self) -> CachePlan:
        """The plan of its state."""
        return plan_cache(
            abstract_model(self.config),
            mappings_of(self.config, self.spec),
            self.spec,
            batch_axis="batch",
            rows=self.rows,
            max_seq_len=self.max_seq_len,
            dtype=jnp.dtype(self.dtype),
            allocation=self.allocation,
            page_size=self.page_size,
            pages=self.pages,
            snapshots_per_row=self.snapshots,
        )

    @functools.cached_property
    def programs(self) -> GenerationPrograms:
        """The Programs of a run."""
        abstract = abstract_model(self.config)
        sharding = plan_sharding(leaves(abstract), mappings_of(self.config, self.spec), self.spec)
        served = ServedModel(abstract=abstract, sharding=sharding, counts_tokens=False)
        return generation_programs(served, self.cache, prefill=self.prefill, steps=self.steps)

    @functools.cached_property
    def runner(self) -> DeviceRunner:
        """Runs them; engines of several tests may use it one after another."""
        mesh = self.spec.build(jax.devices()[: self.spec.size])
        sharding = self.programs.decode.input("model").placement
        placed = {
            leaf_plan.leaf.path: jax.device_put(array, jax.sharding.NamedSharding(mesh, leaf_plan.spec))
            for leaf_plan, array in zip(sharding.leaves, jax.tree.leaves(self.model), strict=True)
        }
        return DeviceRunner(self.programs, mesh, with_arrays(abstract_model(self.config), placed))

    def engine(self) -> Engine:
        """An engine without requests."""
        schedule = make_schedule(self.programs, share_prefixes=self.share_prefixes)
        return Engine(self.runner, schedule, max_inflight=self.behind)

    def check(self, prompt: list[int], text: list[int], gap: float = 1e-3) -> int:
        """Asserts that a greedy text is that of the forward pass; the number of positions that it decides."""
        length = self.max_seq_len
        ids = np.zeros((1, length), np.int32)
        ids[0, : len(prompt) + len(text)] = [*prompt, *text]
        # One shape for all texts: what follows a position does not change it.
        logits = np.asarray(self._logits(hax.named(jnp.asarray(ids), ("batch", "position"))))[0]
        at = logits[len(prompt) - 1 : len(prompt) + len(text) - 1]
        best = np.sort(at, axis=-1)[:, -2:]
        decided = best[:, 1] - best[:, 0] > gap
        np.testing.assert_array_equal(np.asarray(text)[decided], at.argmax(-1)[decided])
        return int(decided.sum())

    @functools.cached_property
    def _logits(self) -> Any:
        return functools.partial(
            eqx.filter_jit(lambda model, ids: model.logits(model(ids).activations).rearrange((..., "vocab")).array),
            self.model,
        )


def recurrent_over_eight(spec: MeshSpec) -> RecurrentEngine:
    """Two kinds of layers under a scan, two steps in a decode call, two snapshots for each row, and too few pages."""
    config = recurrent_config(num_layers=4, layer_types=None, pattern="RF")
    return RecurrentEngine(spec=spec, config=config, rows=8, pages=4 * 12, steps=2, snapshots=2)


def greedy_requests(seed: int, count: int, *, n: int = 1, new: int = 14) -> list[Request]:
    """Requests with prompts of 1 to 30 random ids."""
    rng = np.random.default_rng(seed)
    params = SamplingParams(temperature=0.0, max_tokens=new, logprobs=1, n=n)
    lengths = [int(length) for length in rng.integers(1, 31, count)]
    return [
        Request(id=str(number), tokens=tuple(rng.integers(0, VOCAB, length).tolist()), params=params, seed=number)
        for number, length in enumerate(lengths)
    ]
