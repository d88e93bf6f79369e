"""`DecoderConfig`: what the configs of all decoder-only families share, and the hooks by which they differ.

A family is a frozen dataclass with upstream's field names and defaults that overrides a few of the hooks below (the
defaults are Llama's). The model, parameter and operation counts, and the kernels that can run follow from them.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from haliax import Axis
from jax.typing import DTypeLike

from haliax_ext.divisibility import divisors
from haliax_ext.errors import nearest
from levanter.config.validators import Epsilon, LayerCount, NonNegativeFloat, PositiveInt
from levanter.hardware import find_generation
from levanter.layers.activation import ACTIVATIONS
from levanter.layers.attention.backends import check_backend_name, choose_backend, named_backend
from levanter.layers.attention.grouped import AttentionSpec
from levanter.layers.layer import LayerSpec
from levanter.layers.mlp import MlpSpec
from levanter.layers.norm import NormSpec
from levanter.layers.protocols import FeedForward, Mixer
from levanter.layers.residual import PRE_NORMS, NormPlace, ResidualSpec
from levanter.layers.rotary import DefaultRotaryConfig, RotaryConfig
from levanter.models.decoder.scan_layout import Run, scan_runs
from levanter.models.registry import LmConfig
from levanter.models.stack import checkpoint_policy

C = TypeVar("C", bound="DecoderConfig")


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(LmConfig):
    """A decoder-only transformer.

    Attributes:
        hidden_dim: size of `embed`.
        intermediate_dim: size of `mlp`.
        num_layers: number of blocks.
        num_heads: query heads, `kv_head × q_heads_per_group`.
        num_kv_heads: size of `kv_head`.
        head_dim: size of `head_size`; None is `hidden_dim / num_heads`.
        activation_function: activation function of the gate.
        initializer_range: standard deviation of the initial weights.
        layer_norm_epsilon: added to the mean square in every norm.
        tie_word_embeddings: whether the output head shares the weights of the embedding table.
        rope: rotary embeddings, by `type:`.
        attn_backend: attention implementation (see `layers.attention.backends`); None chooses one.
        use_flash_attention: false selects the reference implementation; true or None sets no constraint.
        flash_attention_block_size: keys in a block of the blockwise backend.
        upcast_attn: computes attention in float32 regardless of the compute dtype.
        scan_layers: one compiled block, scanned over stacked weights; false unrolls (and names weights by layer).
        gradient_checkpointing: true, false, "offload", "recompute", "full", "save_all", "nested", or a mapping of
            Haliax's `ScanCheckpointPolicy` fields.
    """

    hidden_dim: PositiveInt = 4096
    intermediate_dim: PositiveInt = 11008
    num_layers: LayerCount = 32
    num_heads: PositiveInt = 32
    num_kv_heads: PositiveInt = 32
    head_dim: PositiveInt | None = None
    activation_function: str = "silu"
    initializer_range: NonNegativeFloat = 0.02
    layer_norm_epsilon: Epsilon = 1e-5
    tie_word_embeddings: bool = False
    rope: RotaryConfig = field(default_factory=DefaultRotaryConfig)
    attn_backend: str | None = None
    use_flash_attention: bool | None = True
    flash_attention_block_size: PositiveInt | None = None
    upcast_attn: bool = False
    scan_layers: bool = True
    # A mapping is not hashable, and configs are static fields of modules; so this one stays out of the hash.
    gradient_checkpointing: bool | str | dict[str, Any] = field(default=True, hash=False)

    # The hooks: what a family overrides.

    @property
    def norm(self) -> NormSpec:
        """The kind of norm on the residual stream."""
        return NormSpec(eps=self.layer_norm_epsilon)

    @property
    def norms(self) -> tuple[NormPlace, ...]:
        """The places of the norms in a block."""
        return PRE_NORMS

    @property
    def residual(self) -> ResidualSpec:
        """How the parts of a block join the residual stream."""
        return ResidualSpec(norm=self.norm, norms=self.norms)

    @property
    def captures(self) -> Mapping[str, int]:
        """The constants of a forward pass (`layers.context`): name → number of layers behind which it is taken.

        A constant is the residual stream there: 0 is the stream before the first layer. Scans end at each of them,
        which costs the compilation of a further scan. Parts that read a constant belong to layers behind it.
        """
        return {}

    @property
    def reads_token_ids(self) -> bool:
        """Whether some part reads the ids of the tokens (`ForwardContext.token_ids`)."""
        return False

    @property
    def earlier_token_ids(self) -> int:
        """How many ids before a token its parts read (`ForwardContext.ids_before`), kept while text is generated."""
        counts = [
            leaf.sized[0].size
            for mixer in dict.fromkeys(layer.mixer for layer in self.layers)
            for leaf in mixer.decode_state(np.float32).values()
            if leaf.kind == "token_ids"
        ]
        return max(counts, default=0)

    @property
    def reads_earlier_embedding(self) -> bool:
        """Whether the ends of the stream read the embedding of the token before each token.

        Such a config has at least one id in `earlier_token_ids`.
        """
        return False

    @property
    def attention(self) -> AttentionSpec:
        """The part of the attention spec that all layers share; `layer_attention` adds the rest."""
        return AttentionSpec(
            Embed=self.Embed,
            KVHead=self.KVHead,
            QHeadsPerGroup=self.QHeadsPerGroup,
            HeadSize=self.HeadSize,
            backend=named_backend(self.requested_backend, block_size=self.flash_attention_block_size),
            block_size=self.flash_attention_block_size,
            upcast=self.upcast_attn,
            init_std=self.initializer_range,
        )

    @property
    def mlp(self) -> FeedForward:
        """The feed-forward part."""
        return MlpSpec(
            Embed=self.Embed, Mlp=self.Mlp, activation=self.activation_function, scale=self.initializer_range
        )

    def window(self, layer: int) -> int | None:
        """How many keys a query of a layer sees, its own included; None for all up to its own."""
        del layer
        return None

    def rotary(self, layer: int) -> str | None:
        """The field of this config that holds a layer's rotary embeddings; None for a layer without."""
        del layer
        return "rope"

    def layer_attention(self, layer: int) -> AttentionSpec:
        """Attention of a layer."""
        return dataclasses.replace(self.attention, window=self.window(layer), rope=self.rotary(layer))

    def layer_mixer(self, layer: int) -> Mixer:
        """The part of a layer that mixes positions: attention, unless the family has another kind."""
        return self.layer_attention(layer)

    def layer_feed_forward(self, layer: int) -> FeedForward | None:
        """The feed-forward part of a layer; None for a layer without."""
        del layer
        return self.mlp

    @property
    def embedding_scale(self) -> float | None:
        """The factor of embedded tokens; None for 1."""
        return None

    @property
    def learned_positions(self) -> bool:
        """Whether there is a table of positions, whose rows are added to embedded tokens."""
        return False

    @property
    def normed_embedding(self) -> bool:
        """Whether embedded tokens are normalized before the first layer."""
        return False

    # Derived from the hooks.

    @cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        residual = self.residual
        # Equal specs are equal values (frozen dataclasses): `scan_runs` finds the repetitions by comparison.
        return tuple(
            LayerSpec(mixer=self.layer_mixer(n), feed_forward=self.layer_feed_forward(n), residual=residual)
            for n in range(self.num_layers)
        )

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """The layers as they are scanned."""
        return scan_runs(self.layers, cuts=self.captures.values())

    @property
    def bodies(self) -> int:
        # Compile time grows with this: a scan compiles each place of its period once, however many periods it has.
        return sum(len(run.places) for run in self.runs) if self.scan_layers else self.num_layers

    @property
    def stacking(self) -> str:
        if not self.scan_layers:
            return f"{self.num_layers} layers, not scanned"
        runs = [
            f"{run.periods} periods of {len(run.places)}" if len(run.places) > 1 else f"{run.periods}"
            for run in self.runs
        ]
        kinds = len(dict.fromkeys(self.layers))
        return f"{self.num_layers} layers of {kinds} kind{'s' if kinds > 1 else ''}, scanned as {', then '.join(runs)}"

    @property
    def ropes(self) -> Mapping[str, RotaryConfig]:
        """The rotary embeddings that some layer uses, by the name of their field."""
        # Layers may have rotary embeddings of different kinds (local
        # and global layers of Gemma 3), each in its own field.
        names = [layer.mixer.rope for layer in self.layers]
        return {name: getattr(self, name) for name in dict.fromkeys(names) if name is not None}

    @property
    def rotary_sizes(self) -> Mapping[str, Axis]:
        """The axis that each rotary table rotates, by the name of its field: `head_size` of the layers that read it."""
        sizes: dict[str, Axis] = {}
        for mixer in (layer.mixer for layer in self.layers):
            if mixer.rope is not None:
                size = getattr(mixer, "HeadSize", self.HeadSize)
                assert sizes.setdefault(mixer.rope, size) == size, (
                    f"layers with heads of {sizes[mixer.rope].size} and of {size.size} features both read "
                    f"{mixer.rope!r}; each size needs a rotary field of its own"
                )
        return sizes

    def reads_alike(self, length: int, other: int) -> bool:
        """Whether rotary embeddings are equal in rows of `length` and `other` positions (dynamic scaling differs)."""
        sizes = self.rotary_sizes
        return all(
            np.array_equal(rope.frequencies(sizes[name].size, length), rope.frequencies(sizes[name].size, other))
            for name, rope in self.ropes.items()
        )

    def __post_init__(self):
        super().__post_init__()
        if problems := self._problems():
            raise ValueError("\n".join(problems))

    def _problems(self) -> list[str]:
        # All problems are collected, so that one run of a config reports every one.
        problems = self._relations()
        if self.activation_function not in ACTIVATIONS:
            close = nearest(self.activation_function, ACTIVATIONS)
            hint = f" (did you mean {' or '.join(close)}?)" if close else ""
            problems.append(
                f"model.activation_function {self.activation_function!r} is not one of {sorted(ACTIVATIONS)}{hint}"
            )
        # `saved_names` builds the layers' specs, which fail on sizes
        # that do not fit; so it waits for the relations above.
        names = None if problems else self.saved_names
        for check in (
            lambda: checkpoint_policy(self.gradient_checkpointing, names=names),
            lambda: check_backend_name(self.attn_backend),
        ):
            try:
                check()
            except ValueError as error:
                problems.append(str(error))
        return problems

    def _relations(self) -> list[str]:
        problems = []
        if self.num_heads % self.KVHead.size:
            legal = list(divisors(self.num_heads))
            problems.append(
                f"model.num_kv_heads {self.KVHead.size} does not divide num_heads {self.num_heads}; legal: {legal}"
            )
        if self.head_dim is None and self.hidden_dim % self.num_heads:
            problems.append(
                f"model.hidden_dim {self.hidden_dim} is not a multiple of num_heads {self.num_heads}; "
                "set model.head_dim to the features of one head"
            )
        if not problems:
            # Rotary settings read `HeadSize`, which is meaningless
            # while one of the two divisions above has a remainder.
            try:
                for name, rope in self.ropes.items():
                    rope.rotated_size(self.rotary_sizes[name].size)
            except ValueError as error:
                problems.append(str(error))
        return problems

    @property
    def Embed(self) -> Axis:
        return Axis("embed", self.hidden_dim)

    @property
    def Mlp(self) -> Axis:
        """The axis between the two halves of the feed-forward part."""
        return Axis("mlp", self.intermediate_dim)

    @property
    def Layers(self) -> Axis:
        """The axis along which the first run is stacked: all layers, if they are alike."""
        return Axis("layers", self.runs[0].periods if self.scan_layers else self.num_layers)

    @property
    def KVHead(self) -> Axis:
        """The axis of key and value heads."""
        return Axis("kv_head", self.num_kv_heads)

    @property
    def QHeadsPerGroup(self) -> Axis:
        """The axis of query heads that share a key and value head."""
        return Axis("q_heads_per_group", self.num_heads // self.KVHead.size)

    @property
    def HeadSize(self) -> Axis:
        """The axis of features of one head."""
        return Axis("head_size", self.head_dim or self.hidden_dim // self.num_heads)

    @property
    def axes(self) -> Mapping[str, Axis]:
        return {"layers": self.Layers, **super().axes}

    @property
    def requested_backend(self) -> str | None:
        """The attention backend that `attn_backend` or upstream's older `use_flash_attention` selects."""
        if self.attn_backend is None and self.use_flash_attention is False:
            return "reference"
        return self.attn_backend

    def for_platform(
        self: C,
        platform: str,
        *,
        compute_dtype: DTypeLike,
        length: int | None = None,
        sequence_shards: int = 1,
        device_kind: str | None = None,
        packed: bool = True,
    ) -> "tuple[C, tuple[str, ...]]":
        # A model without attention (all recurrent layers) has no kernel to choose.
        if not self.windows:
            return self, ()
        # Kernels are chosen by the dtype that attention computes in.
        dtype = "float32" if self.upcast_attn else compute_dtype
        generation = None if device_kind is None else find_generation(device_kind)
        card = None if generation is None else generation.gpu
        choice = choose_backend(
            self.requested_backend,
            platform=platform,
            dtype=dtype,
            length=length or self.max_seq_len,
            sequence_shards=sequence_shards,
            head_size=self.HeadSize.size,
            block_size=self.flash_attention_block_size,
            soft_cap=self.attention.soft_cap,
            sinks=self.attention.sinks,
            capability=None if card is None else card.capability,
            packed=packed,
        )
        chosen = dataclasses.replace(self, attn_backend=choice.name, flash_attention_block_size=choice.block_size)
        reasons = (f"attention: {choice}",)
        if choice.name == "cudnn" and packed and any(window is not None for window, _ in self.windows):
            reasons += ("attention: blockwise in layers with a window, where a row holds several documents",)
        return chosen, reasons
