"""A decoder that goes on where a cache ends: `advance` takes some new tokens of each row and the cache before them.

The cache of a model is one array of keys and values for each of its runs of layers, since a run is scanned by itself
(`models.decoder.spec`). What an array is, says `layers.attention.cached`.
"""

import equinox as eqx
import jax.numpy as jnp
from haliax import Axis, NamedArray, zeros
from jax.typing import DTypeLike

from levanter.layers.attention.cache_int8 import SCALE_DTYPE
from levanter.layers.attention.kv_cache import CachedLayers, NewPositions, page_axes, scale_axes
from levanter.models.decoder.config import DecoderConfig
from levanter.models.decoder.model import DecoderLmHeadModel

_OF_ATTENTION = frozenset({"key", "value"})


class KvCache(eqx.Module):
    """Keys and values of running rows.

    Attributes:
        pages: `[layers, page, kv_head, kv, slot, head_size]` of each run of layers.
        scales: where those are integers, what each vector of them is multiplied by, `[layers, kv_head, kv, page,
            slot]` of each run of layers; otherwise none.
    """

    pages: tuple[NamedArray, ...]
    scales: tuple[NamedArray, ...] = ()

    @staticmethod
    def zeros(config: DecoderConfig, *, pages: int, slots: int, dtype: DTypeLike) -> "KvCache":
        """An empty one; call it inside `jit` or `eval_shape`.

        Args:
            config: the architecture.
            pages: how many pages there are, over all shards.
            slots: positions in a page.
            dtype: of keys and values; int8 for integers with scales.

        Raises:
            ValueError: the model has layers that remember something else than keys and values.
        """
        axes, dtype = cache_axes(config, pages, slots), jnp.dtype(dtype)
        of_integers = axes if dtype == jnp.int8 else ()
        return KvCache(
            pages=tuple(zeros(run_axes, dtype=dtype) for run_axes in axes),
            scales=tuple(zeros(scale_axes(run_axes), dtype=SCALE_DTYPE) for run_axes in of_integers),
        )

    @property
    def Slot(self) -> Axis:
        """The axis of positions in a page."""
        return self.pages[0].resolve_axis("slot")


def cache_axes(config: DecoderConfig, pages: int, slots: int) -> tuple[tuple[Axis, ...], ...]:
    """The axes of a model's cache: of each run of layers.

    Args:
        config: the architecture.
        pages: how many pages there are, over all shards.
        slots: positions in a page.

    Raises:
        ValueError: the model has layers that remember something else than keys and values.
    """
    for number, layer in enumerate(config.layers):
        if strange := sorted(set(layer.state_axes) - _OF_ATTENTION) or not layer.state_axes:
            kept = ", ".join(strange) if isinstance(strange, list) else "nothing"
            raise ValueError(
                f"text cannot be generated with this model yet: its layer {number} (a {type(layer.mixer).__name__}) "
                f"remembers {kept}, and the cache holds keys and values of attention only"
            )
    runs = [run.layers for run in config.runs] if config.scan_layers else [config.num_layers]
    of_one = {"pages": pages, "slots": slots, "KVHead": config.KVHead, "HeadSize": config.HeadSize}
    return tuple(page_axes(layers=layers, **of_one) for layers in runs)


def advance(
    model: DecoderLmHeadModel, tokens: NamedArray, cache: KvCache, at: NewPositions, *, length: int | None = None
) -> tuple[NamedArray, KvCache]:
    """Maps new tokens of rows to activations, and adds their keys and values to the cache.

    Args:
        model: its weights in the compute dtype.
        tokens: ids, `[batch, position]`.
        cache: of the positions before.
        at: where the tokens belong.
        length: positions that a row may have; what the cache has room for by default. Rotary embeddings of kinds
            `dynamic` and `longrope` depend on it, so that all calls for a row must agree.

    Returns:
        Activations after the final norm, `[batch, position, embed]`, and the cache.
    """
    embedded = model.embeddings(tokens, at.positions)
    length = at.capacity(cache.Slot) if length is None else length
    scales = cache.scales or (None,) * len(cache.pages)
    at = at.with_cache_indices(cache.pages[0], scales[0])
    states = [CachedLayers.entering(*run_cache) for run_cache in zip(cache.pages, scales, strict=True)]
    activations, new_states = model.transformer.advance(embedded, at, states, length=length)
    new_scales = tuple(state.scales for state in new_states if state.scales is not None)
    return activations, KvCache(pages=tuple(state.pages for state in new_states), scales=new_scales)
