"""Watching a step from inside: norms, and histograms where asked for, of what a train step has in its hands.

Targets are gradients, parameters, updates, and the optimizer's statistics. A parameter of a stack of layers is watched
layer by layer. Norms cost next to nothing, since every step adds up the squares of gradients and parameters anyway;
they are a part of every step's Program, one vector for each target, and are fetched every so many steps. Histograms
read everything again: a run that wants them has a second Program of its step, which runs every so many steps.

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
    """Histograms of some arrays, one a row.

    Attributes:
        least: float32 `[arrays]`, the smallest value of each.
        most: float32 `[arrays]`, the largest.
        counts: int32 `[arrays, BINS]`, values in each of `BINS` bins of equal width.
    """

    least: jax.Array
    most: jax.Array
    counts: jax.Array


class Watched(eqx.Module):
    """What one step saw, by target.

    Attributes:
        norms: float32, one for each name of `names`.
        histograms: likewise; empty where the step's Program has none.
    """

    norms: dict[str, jax.Array]
    histograms: dict[str, Histograms]


@dataclass(frozen=True, kw_only=True)
class Watch:
    """What is watched.

    Attributes:
        targets: `grads`, `params`, `updates`, `opt_state`.
        norms: whether the norm of each parameter is.
        histograms: whether histograms are.
        split: whether the layers of a stack are watched one by one.
        every: steps between two times that it is fetched.
    """

    targets: tuple[str, ...]
    norms: bool
    histograms: bool
    split: bool
    every: int

    @classmethod
    def of(cls, config: WatchConfig) -> "Watch | None":
        """What a config asks for; None for nothing beyond the totals that every step has."""
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
        """What of it every step's Program has: all but histograms."""
        return replace(self, histograms=False) if self.norms else None

    def due(self, step: int) -> bool:
        """Whether a step is one whose numbers are fetched."""
        return step % self.every == 0

    def outputs(self) -> tuple[str, ...]:
        """The paths of everything that `see` returns, within `Watched`."""
        norms = [f"norms.{target}" for target in self.targets if self.norms]
        fields = ("least", "most", "counts")
        hists = [f"histograms.{target}.{name}" for target in self.targets for name in fields if self.histograms]
        return (*norms, *hists)

    def see(self, **trees: PyTree) -> Watched:
        """Looks at trees, one for each target, inside a step.

        Args:
            trees: by target; those that are not watched are left alone.
        """
        norms: dict[str, jax.Array] = {}
        histograms: dict[str, Histograms] = {}
        for target in self.targets:
            with jax.named_scope(f"watch_{target}"):
                pieces = [_Rows.of(x, split=self.split) for _, x in _arrays(trees[target])]
                if self.norms:
                    norms[target] = jnp.concatenate([rows.norms() for rows in pieces])
                if self.histograms:
                    piece_histograms = [rows.histograms() for rows in pieces]
                    histograms[target] = jax.tree.map(lambda *xs: jnp.concatenate(xs), *piece_histograms)
        return Watched(norms=norms, histograms=histograms)

    def names(self, **trees: PyTree) -> dict[str, tuple[str, ...]]:
        """What piece_histograms number of `see` is of, from the same trees without memory."""
        return {target: tuple(_names(trees[target], self.split)) for target in self.targets}


def tracker_metrics(watched: Watched, names: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """What was seen under the names that trackers know, from arrays on the host."""
    metrics: dict[str, Any] = {}
    for target, values in watched.norms.items():
        for name, value in zip(names[target], np.asarray(values), strict=True):
            metrics[f"{PREFIXES[target]}/norm/{name}"] = float(value)
    for target, histograms in watched.histograms.items():
        for n, name in enumerate(names[target]):
            least, most = float(histograms.least[n]), float(histograms.most[n])
            metrics[f"{PREFIXES[target]}/hist/{name}"] = {
                "counts": np.asarray(histograms.counts[n]).tolist(),
                "edges": np.linspace(least, most, BINS + 1).tolist(),
            }
    return metrics


def _arrays(tree: PyTree) -> Iterator[tuple[str, hax.NamedArray]]:
    """The named arrays with floating-point numbers, by path; counters and keys have no norm worth a name."""
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
            before, _, behind = path.partition(".stacked.")
            yield f"{before}.{n}.{behind}" if behind else f"{path}.{n}"


@dataclass(frozen=True)
class _Rows:
    """An array as rows: its layers where they are watched one by one, else one row.

    Reductions keep the array's own axes, since merging axes that are sharded over devices would gather them.
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
        """`[rows]` from values of the array's shape."""
        others = tuple(n for n in range(self.array.ndim) if n != self.layers)
        return reduce(values, axis=others).reshape(self.count)

    def spread(self, rows: jax.Array) -> jax.Array:
        """A value a row, to be compared with the array."""
        shape = [1] * self.array.ndim
        if self.layers is not None:
            shape[self.layers] = self.count
        return rows.reshape(shape)

    def norms(self) -> jax.Array:
        return jnp.sqrt(self.reduced(jnp.sum, jnp.square(self.array)))

    def histograms(self) -> Histograms:
        """An edge at a time: nothing of the array's size is made beside it."""
        least, most = self.reduced(jnp.min, self.array), self.reduced(jnp.max, self.array)
        width = (most - least) / BINS

        def at_least(n: jax.Array) -> jax.Array:
            return self.reduced(jnp.sum, (self.array >= self.spread(least + width * n)).astype(jnp.int32))

        above = jax.lax.map(at_least, jnp.arange(1, BINS, dtype=jnp.float32)).T
        whole = jnp.full((self.count, 1), self.array.size // self.count, jnp.int32)
        counts = jnp.concatenate([whole, above], axis=1) - jnp.concatenate([above, jnp.zeros_like(whole)], axis=1)
        return Histograms(least=least, most=most, counts=counts)
