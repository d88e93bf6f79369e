"""`Architecture`: the description of a causal language model, without its arrays.

It holds the axes of the weights, the sizes, the number of operations a token, and the kernels that can run the model.
Models (`models.base`) hold the arrays, and a family (`models.family`) builds a model from an architecture.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

from levanter.config.validators import PositiveInt, Ranged

if TYPE_CHECKING:
    from haliax import Axis
    from jax.typing import DTypeLike

    from levanter.layers.layer import LayerSpec

A = TypeVar("A", bound="Architecture")


@dataclass(frozen=True, kw_only=True)
class Architecture(Ranged, ABC):
    """A causal language model's architecture.

    Attributes:
        max_seq_len: the longest sequence the model supports.
        vocab_size: rows of the embedding table; None leaves it to the tokenizer.
        tokenizer: the tokenizer of the model, if it is not the data's.
        reference_checkpoint: a Hugging Face checkpoint of this architecture.
        cross_entropy_block_size: positions whose logits are computed at a time; None for the default of scoring.
    """

    range_prefix: ClassVar[str] = "model."

    max_seq_len: PositiveInt = 2048
    vocab_size: PositiveInt | None = None
    tokenizer: str | None = None
    reference_checkpoint: str | None = None
    cross_entropy_block_size: PositiveInt | None = None

    @property
    @abstractmethod
    def layers(self) -> "tuple[LayerSpec, ...]":
        """The specs of the layers, first to last."""

    @property
    def bodies(self) -> int:
        """How many layer bodies are compiled; layers that are alike share one, which is scanned."""
        return len(dict.fromkeys(self.layers))

    @property
    def stacking(self) -> str:
        """How the layers are scanned, as a phrase for reports."""
        return f"{len(self.layers)} layers"

    @property
    def axes(self) -> "Mapping[str, Axis]":
        """The axes of the model's weights by name, without `vocab`; see `merged_axes` for one in several sizes."""
        from levanter.layers.protocols import merged_axes

        # dict.fromkeys keeps the order of first use, which a set would lose: axes and reports stay deterministic.
        kinds = dict.fromkeys(self.layers)
        return merged_axes((self.Embed, *(axis for kind in kinds for axis in kind.axes.values())))

    @property
    def tensor_axes(self) -> tuple[tuple[str, ...], ...]:
        """The axes that tensor parallelism shards in the layers; see `Part`."""
        return tuple(dict.fromkeys(cut for kind in dict.fromkeys(self.layers) for cut in kind.tensor_axes))

    @property
    def saved_names(self) -> tuple[str, ...]:
        """The names that gradient checkpointing may use to keep activations of some layer."""
        return tuple(dict.fromkeys(name for kind in dict.fromkeys(self.layers) for name in kind.saved))

    @property
    def auxiliary_weights(self) -> Mapping[str, float]:
        """Weights of the layers' auxiliary sums in a training loss, by name; sums not named here are not computed."""
        return {}

    @property
    def max_Pos(self) -> "Axis":
        """The axis of positions at full length."""
        from haliax import Axis

        return Axis("position", self.max_seq_len)

    @property
    def learned_positions(self) -> bool:
        """Whether positions are rows of a table, so that there are `max_seq_len` of them and no more."""
        return False

    @property
    @abstractmethod
    def Embed(self) -> "Axis":
        """The axis of the residual stream."""

    def matmul_parameters(self, vocab_size: int) -> int:
        """Weights that multiply each token once in a forward pass, the output head included."""
        # The head multiplies every token even when tied to the
        # embedding table; the lookup of the table multiplies nothing.
        return sum(layer.matmul_parameters for layer in self.layers) + vocab_size * self.Embed.size

    def sequence_flops(self, length: int, *, attention: Literal["causal", "full"]) -> int:
        """FLOPs of a forward pass over one sequence beyond the products with weights; see `layers.protocols.Part`."""
        # Layers that are alike cost the same, so each kind is computed once.
        kinds = Counter(self.layers)
        return sum(count * kind.sequence_flops(length, attention=attention) for kind, count in kinds.items())

    @property
    def windows(self) -> tuple[tuple[int | None, int], ...]:
        """The windows of attention (None: all keys before a query), and the query features of the layers with each.

        Empty if no layer has attention.
        """
        from levanter.layers.protocols import WindowedAttention

        features: dict[int | None, int] = {}
        for mixer in (layer.mixer for layer in self.layers):
            if isinstance(mixer, WindowedAttention):
                features[mixer.window] = features.get(mixer.window, 0) + mixer.query_features
        return tuple(features.items())

    @property
    def logit_soft_cap(self) -> float | None:
        """Bound of the head's logits, `bound · tanh(logit / bound)`; None for none."""
        return None

    def reads_alike(self, length: int, other: int) -> bool:
        """Whether a token's activations are equal in rows of `length` and `other` positions, for the same tokens."""
        # Conservative: learned positions, or rotary scaling by length, would make rows of other lengths differ.
        return length == other

    @abstractmethod
    def for_platform(
        self: A,
        platform: str,
        *,
        compute_dtype: "DTypeLike",
        length: int | None = None,
        sequence_shards: int = 1,
        device_kind: str | None = None,
        packed: bool = True,
    ) -> tuple[A, tuple[str, ...]]:
        """This architecture with its open choices resolved for a platform and a mesh, and one line of reason for each.

        The choices are final: tracing the model makes no further ones.

        Args:
            platform: `cpu`, `gpu` or `tpu`.
            compute_dtype: of activations.
            length: tokens in a sequence; default `max_seq_len`.
            sequence_shards: shards of the positions of a sequence.
            device_kind: the vendor's name of a device; None if unknown.
            packed: whether rows may hold several documents that do not see each other.
        """
