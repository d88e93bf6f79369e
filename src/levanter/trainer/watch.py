"""Norms, and optionally histograms, of the arrays of a train step, computed inside the step.

Targets are gradients, parameters, updates, and the optimizer's statistics. Parameters of stacked layers are watched
layer by layer. Norms cost almost nothing, since every step sums the squares of gradients and parameters anyway; they
are part of every step's Program, one vector per target, and are fetched every `interval` steps. Histograms read all
arrays again: a run with histograms has a second Program of its step, which runs every `interval` steps.

Names are upstream's: `grad/norm/transformer.layers.3.mlp.up_proj.weight`, `params/hist/lm_head.weight`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np

from haliax_ext.pytree import PyTree, path_string
from levanter.trainer.config_blocks import WatchConfig

PREFIXES = {"grads": "grad", "params": "params", "updates": "updates", "opt_state": "opt_state"}
LAYERS = "layers"
BINS = 64


class Histograms(eqx.Module):
    """Histograms of several arrays, one per row.

    Attributes:
        least: float32 `[arrays]`, the smallest value of each.
        most: float32 `[arrays]`, the largest.
        counts: int32 `[arrays, BINS]`, values in each of `BINS` bins of equal width.
    """

    least: jax.Array
    most: jax.Array
    counts: jax.Array


class Watched(eqx.Module):
    """The watched numbers of one step, by target.

    Attributes:
        norms: float32 vectors, one entry per name in `Watch.names`.
        histograms: with one row per name; empty if the step's Program has no histograms.
    """

    norms: dict[str, jax.Array]
    histograms: dict[str, Histograms]


@dataclass(frozen=True, kw_only=True)
class Watch:
    """The configuration of watching.

    Attributes:
        targets: `grads`, `params`, `updates`, `opt_state`.
        norms: whether norms are computed, per parameter.
        histograms: whether histograms are computed.
        split: whether the layers of a stack are watched one by one.
        every: interval of fetching, in steps.
    """

    targets: tuple[str, ...]
    norms: bool
    histograms: bool
    split: bool
    every: int

    @classmethod
    def of(cls, config: WatchConfig) -> "Watch | None":
        """From a config; None if it requests nothing beyond the total norms that every step has."""
        # The total norms of `include_norms` are part of every step; only per-parameter norms and histograms are
        # watched.
        targets = (config.watch_targets,) if isinstance(config.watch_targets, str) else tuple(config.watch_targets)
        norms = config.include_norms and config.include_per_parameter_norms
        if config.interval == 0 or not targets or not (norms or config.include_histograms):
            return None
        return cls(
            targets=tuple(dict.fromkeys(targets)),
            norms=norms,
            histograms=config.include_histograms,
            split=config.split_scan_layers,
            every=config.interval,
        )

    @property
    def cheap(self) -> "Watch | None":
        """The part that every step's Program computes: all except histograms."""
        # Norms are fetched at the interval as well, but stay in each step's Program: a second compilation costs more
        # than they do.
        return replace(self, histograms=False) if self.norms else None

    def due(self, step: int) -> bool:
        """Whether the numbers of a step are fetched."""
        return step % self.every == 0

    def outputs(self) -> tuple[str, ...]:
        """The paths, within `Watched`, of all arrays that `see` returns."""
        # The plan of the step's outputs needs the paths before the step is traced.
        norms = [f"norms.{target}" for target in self.targets if self.norms]
        fields = ("least", "most", "counts")
        hists = [f"histograms.{target}.{name}" for target in self.targets for name in fields if self.histograms]
        return (*norms, *hists)

    def see(self, **trees: PyTree) -> Watched:
        """Computes the watched numbers, inside a step.

        Args:
            trees: by target; those that are not watched are ignored.
        """
        norms: dict[str, jax.Array] = {}
        histograms: dict[str, Histograms] = {}
        for target in self.targets:
            with jax.named_scope(f"watch_{target}"):
                pieces = [_Rows.of(x, split=self.split) for _, x in _arrays(trees[target])]
                # One vector per target instead of one scalar per parameter: one transfer to the host.
                if self.norms:
                    norms[target] = jnp.concatenate([rows.norms() for rows in pieces])
                if self.histograms:
                    piece_histograms = [rows.histograms() for rows in pieces]
                    histograms[target] = jax.tree.map(lambda *xs: jnp.concatenate(xs), *piece_histograms)
        return Watched(norms=norms, histograms=histograms)

    def names(self, **trees: PyTree) -> dict[str, tuple[str, ...]]:
        """The names of the numbers that `see` returns, by target, from the same trees without memory."""
        return {target: tuple(_names(trees[target], self.split)) for target in self.targets}


def tracker_metrics(watched: Watched, names: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """The watched numbers under their metric names, from arrays on the host."""
    metrics: dict[str, Any] = {}
    for target, values in watched.norms.items():
        for name, value in zip(names[target], np.asarray(values), strict=True):
            metrics[f"{PREFIXES[target]}/norm/{name}"] = float(value)
    for target, histograms in watched.histograms.items():
        for n, name in enumerate(names[target]):
            # Bins have equal width, so the range and the counts determine the edges.
            least, most = float(histograms.least[n]), float(histograms.most[n])
            metrics[f"{PREFIXES[target]}/hist/{name}"] = {
                "counts": np.asarray(histograms.counts[n]).tolist(),
                "edges": np.linspace(least, most, BINS + 1).tolist(),
            }
    return metrics


def _arrays(tree: PyTree) -> Iterator[tuple[str, hax.NamedArray]]:
    """The floating-point named arrays, by path; norms of counters and keys are meaningless."""
    is_named = lambda x: isinstance(x, hax.NamedArray)  # noqa: E731
    for keys, x in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_named)[0]:
        if is_named(x) and jnp.issubdtype(x.dtype, jnp.floating):
            yield path_string(keys), x


def _names(tree: PyTree, split: bool) -> Iterator[str]:
    for path, x in _arrays(tree):
        layers = [axis.size for axis in x.axes if axis.name == LAYERS and split]
        if not layers:
            yield path
        for n in range(layers[0] if layers else 0):
            # Upstream's names have the layer's number in place of `stacked`: `transformer.layers.3.mlp.…`.
            before, _, behind = path.partition(".stacked.")
            yield f"{before}.{n}.{behind}" if behind else f"{path}.{n}"


@dataclass(frozen=True)
class _Rows:
    """An array as rows: one per layer if layers are watched one by one, else a single row.

    Reductions keep the array's axes, since reshaping would merge sharded axes and gather the array.
    """

    array: jax.Array
    layers: int | None

    @classmethod
    def of(cls, x: hax.NamedArray, *, split: bool) -> "_Rows":
        names = [axis.name for axis in x.axes]
        return cls(x.array.astype(jnp.float32), names.index(LAYERS) if split and LAYERS in names else None)

    @property
    def count(self) -> int:
        return 1 if self.layers is None else self.array.shape[self.layers]

    def reduced(self, reduce: Callable[..., jax.Array], values: jax.Array) -> jax.Array:
        """Reduces values of the array's shape to `[rows]`."""
        # All axes except that of the layers; sharded ones are reduced on each device first.
        others = tuple(n for n in range(self.array.ndim) if n != self.layers)
        return reduce(values, axis=others).reshape(self.count)

    def spread(self, rows: jax.Array) -> jax.Array:
        """Reshapes a value per row to broadcast against the array."""
        shape = [1] * self.array.ndim
        if self.layers is not None:
            shape[self.layers] = self.count
        return rows.reshape(shape)

    def norms(self) -> jax.Array:
        return jnp.sqrt(self.reduced(jnp.sum, jnp.square(self.array)))

    def histograms(self) -> Histograms:
        """Counts one bin edge at a time, so that no array of the same size is allocated."""
        least, most = self.reduced(jnp.min, self.array), self.reduced(jnp.max, self.array)
        width = (most - least) / BINS

        def at_least(n: jax.Array) -> jax.Array:
            return self.reduced(jnp.sum, (self.array >= self.spread(least + width * n)).astype(jnp.int32))

        # `[rows, BINS − 1]`: values at or above each inner edge. All values are above the first edge, and none counts
        # above the last, so the differences of neighbours are the counts per bin; the maximum is in the last bin.
        above = jax.lax.map(at_least, jnp.arange(1, BINS, dtype=jnp.float32)).T
        whole = jnp.full((self.count, 1), self.array.size // self.count, jnp.int32)
        counts = jnp.concatenate([whole, above], axis=1) - jnp.concatenate([above, jnp.zeros_like(whole)], axis=1)
        return Histograms(least=least, most=most, counts=counts)
