"""What of a model is trained, and what is frozen.

A training run carries a *trained* tree from step to step. What it needs beside that to be a model, the *frozen* tree,
goes into every step and comes out of none. Inside the differentiated function, a *binding* makes the model of the two:

    bind(trained, frozen) → model

So no gradient of a frozen leaf exists, nor a statistic, and no checkpoint holds one. Here the trained tree is a *part*
of the model: its leaves are the model's, and where a leaf is frozen there is None; the frozen tree is what is left, and
None where everything is trained. Adapters (`models.adapters`) are a tree of their own, bound to a whole frozen model.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import jax

from haliax_ext.abstract import Leaf, array_leaf, leaves
from haliax_ext.errors import nearest
from haliax_ext.mapping import path_matches
from haliax_ext.pytree import KeyPath, PyTree, is_named, path_string
from levanter.models.adapters.tree import Adapters
from levanter.models.param_groups import PARAMETER_GROUPS, parameter_group

M = TypeVar("M")

KEY = "trainer.trainable"


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Which leaves of a model are trained.

    Attributes:
        patterns: a leaf is trained where one of them matches: a group of parameters (`norm`, `embedding`, …; see
            `models.groups`), or a path pattern as mappings have them (`**.self_attn`, `lm_head`). None for everything.
    """

    patterns: tuple[str, ...] | None = None

    @staticmethod
    def of(patterns: Sequence[str] | None, module: PyTree) -> "Partition":
        """The partition that a config means, for a model without memory.

        Raises:
            ValueError: a pattern matches nothing, or there is none; lists all.
        """
        if patterns is None:
            return Partition()
        known = leaves(module)
        problems = [
            f"{KEY}[{n}] {pattern!r} matches no parameter; {_hint(pattern, known)}"
            for n, pattern in enumerate(patterns)
            if not any(_matches(pattern, leaf) for leaf in known)
        ]
        if not patterns:
            problems.append(f"{KEY} is empty, so nothing would be trained; leave it out to train all parameters")
        if problems:
            raise ValueError("\n".join(problems))
        return Partition(patterns=tuple(patterns))

    def trains(self, leaf: Leaf) -> bool:
        """Whether a leaf of a model is trained."""
        return self.patterns is None or any(_matches(pattern, leaf) for pattern in self.patterns)

    def split(self, model: M) -> tuple[M, M | None]:
        """The trained part of a model and the frozen one, of the model's structure; see `bind`."""
        if all(self.trains(leaf) for leaf in leaves(model)):
            return model, None
        return self._part(model, trained=True), self._part(model, trained=False)

    def _part(self, model: M, *, trained: bool) -> M:
        def visit(keys: KeyPath, x: PyTree) -> PyTree:
            return x if self.trains(array_leaf(path_string(keys), x)) == trained else None

        return jax.tree_util.tree_map_with_path(visit, model, is_leaf=is_named)


EVERYTHING = Partition()
"""Nothing is frozen."""


def bind(trained: M, frozen: M | None, *, key: jax.Array | None = None) -> M:
    """The model of which `Partition.split` made two parts, or that adapters are bound to; nothing is computed.

    Args:
        trained: what is trained.
        frozen: the rest, or what adapters are of.
        key: of the dropout of adapters; None for none.
    """
    if isinstance(trained, Adapters):
        assert frozen is not None, "adapters are of a model"
        return trained.bound_to(frozen, key)
    if frozen is None:
        return trained
    return jax.tree.map(lambda a, b: b if a is None else a, trained, frozen, is_leaf=_is_leaf)


def all_parameters(trained: PyTree, frozen: PyTree) -> tuple[Leaf, ...]:
    """Every parameter, trained or frozen, under its path in its own tree; of two parts of a model, in its order."""
    if isinstance(trained, Adapters):
        return (*leaves(trained), *leaves(frozen))
    return leaves(bind(trained, frozen))


def _is_leaf(x: object) -> bool:
    return x is None or is_named(x)


def _matches(pattern: str, leaf: Leaf) -> bool:
    return parameter_group(leaf) == pattern if pattern in PARAMETER_GROUPS else path_matches(pattern, leaf.path)


def _hint(pattern: str, known: Iterable[Leaf]) -> str:
    """What a pattern may have meant."""
    if pattern in PARAMETER_GROUPS:
        groups = sorted({parameter_group(leaf) for leaf in known})
        return f"the groups of this model are {', '.join(groups)}"
    names = list(dict.fromkeys([*PARAMETER_GROUPS, *(name for leaf in known for name in _names(leaf))]))
    close = nearest(pattern, names)
    return f"did you mean {' or '.join(close)}?" if close else f"its paths are like {next(iter(known)).path}"


def _names(leaf: Leaf) -> Iterator[str]:
    """Patterns that match a leaf: its path, and its modules wherever they are."""
    yield leaf.path
    for name in leaf.path.split(".")[:-1]:
        yield f"**.{name}"
