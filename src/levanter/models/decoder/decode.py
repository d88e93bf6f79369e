"""Decoding with a key/value cache: `advance` runs a decoder on a few new tokens of each row.

The cache is one array of keys and values for each run of layers, since each run is scanned by itself
(`models.decoder.scan_layout`). `layers.attention.kv_cache` describes the array.
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
    """Keys and values of the sequences being decoded.

    Attributes:
        pages: `[layers, page, kv_head, kv, slot, head_size]` of each run of layers.
        scales: for int8 pages, the factor of each stored vector, `[layers, kv_head, kv, page, slot]` of each run of
            layers; otherwise empty.
    """

    pages: tuple[NamedArray, ...]
    scales: tuple[NamedArray, ...] = ()

    @staticmethod
    def zeros(config: DecoderConfig, *, pages: int, slots: int, dtype: DTypeLike) -> "KvCache":
        """An empty cache; call it inside `jit` or `eval_shape`, so that it is allocated in its shards.

        Args:
            config: the architecture.
            pages: how many pages there are, over all shards.
            slots: positions in a page.
            dtype: of keys and values; int8 for integers with scales.

        Raises:
            ValueError: the model has layers whose decode state is not keys and values.
        """
        axes, dtype = cache_axes(config, pages, slots), jnp.dtype(dtype)
        # Only int8 pages have scales; floating-point pages store the vectors themselves.
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
    """The axes of a model's cache, for each run of layers.

    Args:
        config: the architecture.
        pages: how many pages there are, over all shards.
        slots: positions in a page.

    Raises:
        ValueError: the model has layers whose decode state is not keys and values.
    """
    for number, layer in enumerate(config.layers):
        # A layer without any state is refused, too: its output would depend on tokens that the cache does not hold.
        if unsupported := sorted(set(layer.state_axes) - _OF_ATTENTION) or not layer.state_axes:
            state_names = ", ".join(unsupported) if isinstance(unsupported, list) else "nothing"
            raise ValueError(
                f"text cannot be generated with this model yet: its layer {number} (a {type(layer.mixer).__name__}) "
                f"remembers {state_names}, and the cache holds keys and values of attention only"
            )
    # Unrolled layers are one BlockSeq and share one array; scanned ones have an array for each run.
    runs = [run.layers for run in config.runs] if config.scan_layers else [config.num_layers]
    of_one = {"pages": pages, "slots": slots, "KVHead": config.KVHead, "HeadSize": config.HeadSize}
    return tuple(page_axes(layers=layers, **of_one) for layers in runs)


def advance(
    model: DecoderLmHeadModel, tokens: NamedArray, cache: KvCache, at: NewPositions, *, length: int | None = None
) -> tuple[NamedArray, KvCache]:
    """Maps new tokens to activations, and adds their keys and values to the cache.

    Args:
        model: its weights in the compute dtype.
        tokens: ids, `[batch, position]`.
        cache: of the positions before.
        at: the positions of the tokens, in their sequences and in the cache.
        length: positions that a row may have; by default the capacity of the cache. Rotary embeddings of kinds
            `dynamic` and `longrope` depend on it, so all calls for a row must pass the same.

    Returns:
        Activations after the final norm, `[batch, position, embed]`, and the cache.
    """
    # Learned position embeddings need true positions, not indices into the block of new tokens.
    embedded = model.embeddings(tokens, at.positions)
    length = at.capacity(cache.Slot) if length is None else length
    scales = cache.scales or (None,) * len(cache.pages)
    # Which page and slot each new token goes to is the same for
    # all layers, so it is computed once, outside the scans.
    at = at.with_cache_indices(cache.pages[0], scales[0])
    states = [CachedLayers.entering(*run_cache) for run_cache in zip(cache.pages, scales, strict=True)]
    activations, new_states = model.transformer.advance(embedded, at, states, length=length, token_ids=tokens)
    new_scales = tuple(state.scales for state in new_states if state.scales is not None)
    return activations, KvCache(pages=tuple(state.pages for state in new_states), scales=new_scales)
