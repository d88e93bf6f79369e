"""The partition of a model's parameters into trained and frozen ones.

A training run carries a *trained* tree from step to step. The rest of the model, the *frozen* tree, is an input of
every step and an output of none. Inside the differentiated function, a *binding* combines the two:

    bind(trained, frozen) → model

Rules update some of the trained leaves in place of gradients (`trainer.update_rules`).

Frozen leaves have no gradients, no statistics, and no place in checkpoints. Here the trained tree has the structure
of the model, with None in place of frozen leaves; the frozen tree is the complement, and None if everything is trained.
Adapters (`models.adapters`) are a separate tree that is bound to a whole frozen model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import jax

from haliax_ext.abstract import Leaf, array_leaf, leaves
from haliax_ext.pytree import KeyPath, PyTree, is_named, path_string
from levanter.models.adapters.lora import Adapters
from levanter.models.param_groups import hint, selects

M = TypeVar("M")

KEY = "trainer.trainable"


@dataclass(frozen=True, kw_only=True)
class Partition:
    """The trained leaves of a model.

    Attributes:
        patterns: a leaf is trained if one of them matches: a group of parameters (`norm`, `embedding`, …; see
            `models.param_groups`), or a path pattern as in mappings (`**.self_attn`, `lm_head`). None for everything.
    """

    patterns: tuple[str, ...] | None = None

    @staticmethod
    def of(patterns: Sequence[str] | None, module: PyTree) -> "Partition":
        """The partition by patterns of a config, for an abstract model.

        Raises:
            ValueError: a pattern matches nothing, or there are no patterns; lists all problems.
        """
        if patterns is None:
            return Partition()
        # A pattern that matches nothing is a typing error; it would silently freeze what it was meant to train.
        known = leaves(module)
        problems = [
            f"{KEY}[{n}] {pattern!r} matches no parameter; {hint(pattern, known)}"
            for n, pattern in enumerate(patterns)
            if not any(selects(pattern, leaf) for leaf in known)
        ]
        if not patterns:
            problems.append(f"{KEY} is empty, so nothing would be trained; leave it out to train all parameters")
        if problems:
            raise ValueError("\n".join(problems))
        return Partition(patterns=tuple(patterns))

    def trains(self, leaf: Leaf) -> bool:
        """Whether a leaf of a model is trained."""
        return self.patterns is None or any(selects(pattern, leaf) for pattern in self.patterns)

    def split(self, model: M) -> tuple[M, M | None]:
        """The trained and the frozen part of a model, each with the structure of the model; see `bind`."""
        # None for the frozen part, not a tree of None: Programs then have no input of that name with leaves.
        if all(self.trains(leaf) for leaf in leaves(model)):
            return model, None
        return select(model, self.trains), select(model, lambda leaf: not self.trains(leaf))


EVERYTHING = Partition()
"""The partition in which all parameters are trained."""


def select(model: M, chosen: Callable[[Leaf], bool]) -> M:
    """The chosen leaves of a model, in its structure, with None in place of the others."""

    def visit(keys: KeyPath, x: PyTree) -> PyTree:
        return x if chosen(array_leaf(path_string(keys), x)) else None

    return jax.tree_util.tree_map_with_path(visit, model, is_leaf=is_named)


def bind(trained: M, frozen: M | None, *, key: jax.Array | None = None) -> M:
    """Combines trained and frozen parameters into the model, without any computation.

    Args:
        trained: the trained part from `Partition.split`, or adapters.
        frozen: the frozen part from `Partition.split`, or the model of the adapters.
        key: random key for the dropout of adapters; None for no dropout.
    """
    if isinstance(trained, Adapters):
        # Factors alone are no model: they are operands that wrap the base's matrices.
        assert frozen is not None, "adapters need the model that they adapt"
        return trained.bound_to(frozen, key)
    if frozen is None:
        return trained
    # None counts as a leaf here, so each leaf comes from the tree that has it.
    return jax.tree.map(lambda a, b: b if a is None else a, trained, frozen, is_leaf=_is_leaf)


def all_parameters(trained: PyTree, frozen: PyTree) -> tuple[Leaf, ...]:
    """All parameters, trained and frozen, with their paths in the model; those of adapters with their own paths."""
    if isinstance(trained, Adapters):
        return (*leaves(trained), *leaves(frozen))
    return leaves(bind(trained, frozen))


def _is_leaf(x: object) -> bool:
    return x is None or is_named(x)
