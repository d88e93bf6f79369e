"""Full copies: float32 copies of parameters that are trained in full beside adapters (`modules_to_save`).

The copies form a tree with the model's structure, with None for every parameter that is not copied. So a copy has the
path, role and sharding that the parameter has in the model (a norm, a table, the head).
"""

from collections.abc import Iterable, Sequence
from typing import TypeVar

import jax

from haliax_ext.abstract import Leaf, array_leaf, leaves
from haliax_ext.errors import nearest
from haliax_ext.mapping import path_matches
from haliax_ext.pytree import KeyPath, PyTree, is_named, path_string
from haliax_ext.rules import WeightRules
from levanter.models.adapters.config import LoraConfig
from levanter.models.adapters.lora_targets import KEY, AdapterError, TargetGroup, no_projection
from levanter.models.param_groups import EMBEDDING, HEAD, NORM, parameter_group

M = TypeVar("M")

WHOLE = "whole"
"""The field of `Adapters` that holds the copies; the prefix of their paths."""
_KEY = f"{KEY}.modules_to_save"


def select_leaves(model: M, paths: Iterable[str]) -> M | None:
    """The leaves of a model at some paths, in its structure; None for the others, and None for no paths."""
    selected = frozenset(paths)
    if not selected:
        return None

    def visit(keys: KeyPath, x: PyTree) -> PyTree:
        return x if path_string(keys) in selected else None

    return jax.tree_util.tree_map_with_path(visit, model, is_leaf=is_named)


def leaf_paths(part: PyTree) -> tuple[str, ...]:
    """The paths of the leaves that `select_leaves` kept."""
    return tuple(leaf.path for leaf in leaves(part))


def copy_path(path: str) -> str:
    """The path, in the adapters' tree, of the copy of a model's leaf."""
    return f"{WHOLE}.{path}"


def find_whole(
    model_leaves: Sequence[Leaf], rules: WeightRules | None, config: LoraConfig, targets: Sequence[TargetGroup]
) -> tuple[str, ...]:
    """The paths of the parameters to copy.

    Args:
        model_leaves: the model's leaves.
        rules: their sources in a checkpoint; None without a checkpoint.
        config: the user's settings.
        targets: the projections that get adapters.

    Raises:
        AdapterError: a name matches nothing, something other than a norm, table or head, or a parameter with an
            adapter; lists all problems.
    """
    sources = {} if rules is None else {rule.target: rule.source for rule in rules.rules}
    adapted = {f"{member.path}.weight" for group in targets for member in group.members}
    problems: list[str] = []
    copied: dict[str, None] = {}
    for pattern in config.modules_to_save or ():
        matched = [leaf for leaf in model_leaves if _is_named(pattern, leaf, sources)]
        if not matched:
            problems.append(f"{_KEY}: {pattern!r} {_hint(pattern, model_leaves, sources)}")
        for leaf in matched:
            if leaf.path in adapted:
                problems.append(
                    f"{_KEY}: {pattern!r} is trained whole, and {KEY}.target_modules gives it an adapter; leave one out"
                )
            elif parameter_group(leaf) not in (NORM, EMBEDDING, HEAD):
                problems.append(
                    f"{_KEY}: {pattern!r} means {leaf.path}, and only norms, tables and the output head are trained "
                    f"whole beside adapters; name it in {KEY}.target_modules, or train it alone (trainer.trainable)"
                )
                # One message for each pattern: a pattern such as `mlp` would match every projection.
                break
        # A dict keeps the order and drops duplicates, since patterns may overlap.
        copied |= dict.fromkeys(leaf.path for leaf in matched)
    if problems:
        raise AdapterError("\n".join(problems))
    # In the order of the model's leaves, not of the patterns, so that all processes and restarts agree.
    return tuple(leaf.path for leaf in model_leaves if leaf.path in copied)


def _is_named(pattern: str, leaf: Leaf, sources: dict[str, str]) -> bool:
    names = [leaf.path, *([sources[leaf.path]] if leaf.path in sources else [])]
    # The last part is the array's name; patterns name modules.
    modules = [name.rsplit(".", 1)[0] for name in names]
    return any(path_matches(pattern, name) or path_matches(f"**.{pattern}", name) for name in modules)


def _hint(pattern: str, model_leaves: Sequence[Leaf], sources: dict[str, str]) -> str:
    if parameter_group(leaf_named(pattern)) == HEAD and not any(parameter_group(leaf) == HEAD for leaf in model_leaves):
        return no_projection(pattern, tied=True)
    copyable = [leaf for leaf in model_leaves if parameter_group(leaf) in (NORM, EMBEDDING, HEAD)]
    known = sorted(
        {name.split(".")[-2] for leaf in copyable for name in (leaf.path, sources.get(leaf.path, leaf.path))}
    )
    close = nearest(pattern, known)
    return "names no module" + (
        f"; did you mean {' or '.join(close)}?" if close else f"; norms, tables and heads are {', '.join(known)}"
    )


def leaf_named(name: str) -> Leaf:
    """A placeholder leaf for a module's name, to look up its parameter group."""
    return array_leaf(f"{name}.weight", jax.ShapeDtypeStruct((), "float32"))
