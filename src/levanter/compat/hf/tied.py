"""Whether weights that config.json ties are stored as one table or as two.

With `tie_word_embeddings: true` the output head is the embedding table, and a checkpoint needs only one of them. Some
hold both. If their values are equal, either may be read. If they differ, the head was trained by itself and config.json
is wrong: transformers then does not tie them, and neither does this project, since what is stored is what was trained.
"""

import dataclasses
from collections.abc import Iterator

import haliax as hax
import numpy as np

from haliax_ext.rules import WeightRules
from haliax_ext.sources import Index, TensorInfo, TensorSource
from levanter.compat.hf.errors import ConfigMismatchError
from levanter.models.config_json import FieldFinding
from levanter.models.registry import LmConfig

TIED = "tie_word_embeddings"
COMPARED_BYTES = 8 << 20
"""Bytes of a tensor that are compared at a time."""


def as_stored(config: LmConfig, source: TensorSource, *, where: object) -> tuple[LmConfig, FieldFinding | None]:
    """A model's config, untied if the checkpoint has an output head that differs from the embedding table.

    Only the two tables are read, and only if both are stored.

    Args:
        config: the architecture that config.json describes.
        source: the checkpoint's tensors, whose shapes fit it.
        where: the name of config.json in messages.

    Returns:
        The config, and a note if it was changed.

    Raises:
        ConfigMismatchError: the head differs, and models of this family cannot have one of their own; or it is
            missing, and config.json does not say that it is the table.
    """
    if config.vocab_size is None:
        return config, None
    rules = _rules(config)
    if not getattr(config, TIED, False):
        _require_head(rules, source, where=where)
        return config, None
    table = next((rule.source for rule in rules.rules if rule.axes[:1] == (("vocab",),)), None)
    stored = None if table is None else _stored_name(rules, table, source)
    heads = [name for name in rules.ignored if "*" not in name and name in source.tensors and name != stored]
    # Several names of a head may be stored (GPT-NeoX has two): each of them must equal the table.
    different = [head for head in heads if stored is not None and not same_values(source, stored, source, head)]
    if not different:
        return config, None
    assert stored is not None
    untied = dataclasses.replace(config, **{TIED: False})
    # The untied model must read the head that differs, and not another tensor of that meaning.
    if any(_is_ignored(_rules(untied), head) for head in different):
        raise ConfigMismatchError(
            where,
            f"{TIED} is true, but {different[0]!r} and {stored!r} have different values",
            suggestion=f"remove {different[0]!r} from the file if the model is tied",
        )
    message = f"{different[0]!r} differs from {stored!r}, so the output head is read as a matrix of its own"
    return untied, FieldFinding(TIED, True, message)


def _require_head(rules: WeightRules, source: TensorSource, *, where: object) -> None:
    """Refuses a model without its head, as folders of the bare transformer (`LlamaModel`) are."""
    head = next((rule.source for rule in rules.rules if rule.target == "lm_head.weight"), None)
    # Without any other tensor of the model, its absence is not what is wrong.
    if head is None or _stored_name(rules, head, source) is not None:
        return
    table = next((rule.source for rule in rules.rules if rule.axes[:1] == (("vocab",),)), head)
    if _stored_name(rules, table, source) is None:
        return
    raise ConfigMismatchError(
        where,
        f"{TIED} is false, and the files have no output head ({head!r}): they are a bare transformer, which gives no "
        "probabilities",
        suggestion=f"give the folder of the model with its head, or set {TIED}: true in config.json if the head is the "
        "embedding table",
    )


def _rules(config: LmConfig) -> WeightRules:
    assert config.vocab_size is not None
    return config.weight_rules(hax.Axis("vocab", config.vocab_size))


def _stored_name(rules: WeightRules, name: str, source: TensorSource) -> str | None:
    return next((spelling for spelling in rules.spellings(name) if spelling in source.tensors), None)


def _is_ignored(rules: WeightRules, name: str) -> bool:
    return not any(name in rules.spellings(rule.source) for rule in rules.rules)


def same_values(a_source: TensorSource, a: str, b_source: TensorSource, b: str) -> bool:
    """Whether two tensors have the same shape and values, also where their dtypes differ.

    Args:
        a_source: the tensors with the first one.
        a: its name.
        b_source: the tensors with the second one.
        b: its name.
    """
    shape = a_source.tensors[a].shape
    # Tensors of other shapes are not compared further: no reader could take one for the other.
    if b_source.tensors[b].shape != shape:
        return False
    # Different tensors differ nearly everywhere, so that the first block ends the comparison.
    return all(_equal(a_source.read(a, index), b_source.read(b, index)) for index in _blocks(a_source.tensors[a]))


def _blocks(info: TensorInfo) -> Iterator[Index]:
    """A tensor in blocks of rows."""
    if not info.shape:
        yield ()
        return
    # Whole rows, so that a block is one range of the file.
    rows = max(1, COMPARED_BYTES * info.shape[0] // max(info.nbytes, 1))
    rest = tuple(slice(0, size) for size in info.shape[1:])
    for start in range(0, info.shape[0], rows):
        yield (slice(start, min(start + rows, info.shape[0])), *rest)


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    if a.dtype == b.dtype and a.tobytes() == b.tobytes():
        return True
    # Every dtype of weights but float64 and wide integers is exact in float32; those compare as they are.
    exact = np.float64 if 8 in (a.dtype.itemsize, b.dtype.itemsize) else np.float32
    return bool(np.array_equal(a.astype(exact), b.astype(exact), equal_nan=True))
