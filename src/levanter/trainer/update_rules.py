"""Parameters that a rule updates and no gradient moves, such as the balance biases of a router.

An objective declares *statistics*, sums over the batch that are neither weighted nor logged, and *rules*. After the
gradient step, each array that a rule names is replaced:

    new = rule(old, sums)        sums: of the global batch, by name; terms are divided by the normalizer, statistics not

These arrays are parameters of the trained tree like all others: they have the same paths in states, checkpoints and
exports, they are donated and averaged. But the step takes them out of the tree that it differentiates, so they have no
gradient, no share in norms and no optimizer state.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import jax

from haliax_ext.abstract import Leaf, leaves, map_arrays
from haliax_ext.mapping import path_matches
from levanter.trainer.trainable import select

M = TypeVar("M")

Update: TypeAlias = Callable[[jax.Array, Mapping[str, jax.Array]], jax.Array]
"""(the old array, sums of the step by name) → the new array, of the same shape."""


@dataclass(frozen=True, kw_only=True)
class UpdateRule:
    """The update of some parameters.

    Attributes:
        pattern: the paths of these parameters in the model, as in mappings: `**.balance_bias`.
        update: called once for each of them; axes are those of the parameter.
    """

    pattern: str
    update: Update

    def applies_to(self, leaf: Leaf) -> bool:
        """Whether the rule updates this parameter."""
        return path_matches(self.pattern, leaf.path)


def split_by_rules(rules: Sequence[UpdateRule], model: M) -> tuple[M, M | None]:
    """The parameters that gradients move, and those that rules update; `trainer.trainable.bind` joins both again.

    The second part is None without rules.

    Raises:
        ValueError: a rule names no parameter that is trained, or two rules name the same one.
    """
    if not rules:
        return model, None
    trained = leaves(model)
    problems = [
        f"update rule {rule.pattern!r} matches no trained parameter; their paths are like {trained[0].path}"
        for rule in rules
        if not any(rule.applies_to(leaf) for leaf in trained)
    ]
    for leaf in trained:
        patterns = [rule.pattern for rule in rules if rule.applies_to(leaf)]
        if len(patterns) > 1:
            problems.append(f"{leaf.path} has {len(patterns)} update rules: {', '.join(patterns)}; one may match")
    if problems:
        raise ValueError("\n".join(problems))

    def ruled(leaf: Leaf) -> bool:
        return any(rule.applies_to(leaf) for rule in rules)

    return select(model, lambda leaf: not ruled(leaf)), select(model, ruled)


def updated_by_rules(rules: Sequence[UpdateRule], parameters: M, sums: Mapping[str, jax.Array]) -> M:
    """The second part of `split_by_rules` after a step."""

    def new(leaf: Leaf, old: jax.Array) -> jax.Array:
        (rule,) = (rule for rule in rules if rule.applies_to(leaf))
        # The state keeps its dtype whatever the rule computes in: the donated buffer becomes the new array.
        result = rule.update(old, sums).astype(old.dtype)
        assert result.shape == old.shape, f"rule {rule.pattern!r} changes the shape of {leaf.path}"
        return result

    return map_arrays(new, parameters)
