"""A training stage with a longer context: a checkpoint whose rotary embeddings are stretched by YaRN.

`initialize_from_hf` names the checkpoint, `model.rope: {type: yarn, factor: 4.0}` the factor, and `model.max_seq_len`
the length of rows. Everything else of the architecture must be the checkpoint's. Several stages are several runs, each
from the export of the previous one; factors count from the original context.
"""

import math
from dataclasses import dataclass, replace

from levanter.commands.model.scoring_common import context_length_checks
from levanter.commands.model.source import ModelBlock, ModelSource, UnknownArchitectureError, resolve_source
from levanter.config import ExplicitKeys
from levanter.layers.rotary import DefaultRotaryConfig, RotaryConfig, YarnRotaryConfig
from levanter.models.registry import LmConfig
from levanter.runplan import Check


class StageError(ValueError):
    """A model's context cannot be extended as configured; the message has the reason and a fix."""


@dataclass(frozen=True, kw_only=True)
class ContextStage:
    """A stretch of a checkpoint's context.

    Attributes:
        block: the `model:` block, with the checkpoint's own rotary embeddings.
        rope: those of the run.
        checks: lines of the plan that describe it.
    """

    block: ModelBlock
    rope: YarnRotaryConfig
    checks: tuple[Check, ...]

    def origin(self, reference: str) -> ModelSource:
        """The checkpoint as a source, with the rotary embeddings of the stage."""
        source = resolve_source(reference, self.block, block_is_whole=True)
        return replace(
            source, architecture=_roped(source.architecture, self.rope), checks=(*source.checks, *self.checks)
        )


def resolve_context_stage(
    reference: str, model: LmConfig, written: ExplicitKeys, *, positions: int, adapters: bool
) -> ContextStage | None:
    """The context extension of a run; None if it has none, or if the checkpoint is not reachable from here.

    Args:
        reference: the checkpoint that the run begins from.
        model: the `model:` block, which is not replaced by the checkpoint's architecture.
        written: the keys that the user wrote.
        positions: tokens of a row.
        adapters: whether adapters are trained instead of the model's weights.

    Raises:
        StageError: the block's rotary embeddings do not follow from the checkpoint's; lists every difference.
    """
    rope = getattr(model, "rope", None)
    if not isinstance(rope, YarnRotaryConfig):
        return None
    try:
        architecture = resolve_source(reference, None).architecture
    except UnknownArchitectureError:
        return None
    before = getattr(architecture, "rope", None)
    # Embeddings of other kinds (Llama 3's, linear scaling) have no YaRN fields to compare or to complete.
    if type(architecture) is not type(model) or not isinstance(before, DefaultRotaryConfig | YarnRotaryConfig):
        return None
    original = trained_length(architecture)
    # Fields that the user did not write are the checkpoint's, not the defaults of the class.
    rope = replace(
        rope,
        theta=rope.theta if "model.rope.theta" in written else before.theta,
        original_max_position_embeddings=(
            rope.original_max_position_embeddings
            if "model.rope.original_max_position_embeddings" in written
            else original
        ),
        partial_rotary_factor=(
            rope.partial_rotary_factor
            if "model.rope.partial_rotary_factor" in written
            else before.partial_rotary_factor
        ),
    )
    # The checkpoint is an earlier stage with exactly this stretch; training goes on in it.
    if rope == before:
        return None
    problems = [
        f"model.rope.{key} is {getattr(rope, key)}, the checkpoint's is {theirs}"
        for key, theirs in (
            ("theta", before.theta),
            ("partial_rotary_factor", before.partial_rotary_factor),
            ("original_max_position_embeddings", original),
        )
        if getattr(rope, key) != theirs
    ]
    if problems:
        raise StageError(
            "\n".join([*problems, f"  → leave {'it' if len(problems) == 1 else 'them'} out: they are the checkpoint's"])
        )
    # peft's adapter_config.json has no field for the base model's rotary embeddings, so an adapter would later be
    # loaded onto the unstretched model.
    if adapters:
        raise StageError(
            "model.rope and adapter: adapter files do not record that the context of their model was stretched\n"
            "  → train the model's own weights in this stage, and adapters of its export afterwards"
        )
    block = ModelBlock.of(model, written)
    assert block is not None
    # YaRN's factor counts from the original context, also if the checkpoint was stretched before.
    reach = rope.factor * original
    message = f"rotary embeddings are stretched by {rope.factor:g}, from {original:,} tokens to {reach:,.0f} (YaRN)"
    checks = [Check(name="stage", status="ok", message=message)]
    # Longer rows train, but their last positions lie outside the range that the factor was computed for.
    if positions > reach:
        more = (
            f"rows of {positions:,} tokens are longer than these {reach:,.0f}; factor "
            f"{_factor(positions, original):g} reaches them"
        )
        checks.append(Check(name="stage", status="note", message=more))
    return ContextStage(block=replace(block, config=_roped(block.config, before)), rope=rope, checks=tuple(checks))


def trained_length(architecture: LmConfig) -> int:
    """The context that a checkpoint was trained on before anything stretched it."""
    rope = getattr(architecture, "rope", None)
    # `max_seq_len` of a stretched checkpoint is the stretched length, hence the original one first.
    return getattr(rope, "original_max_position_embeddings", None) or architecture.max_seq_len


def context_checks(origin: ModelSource, length: int) -> list[Check]:
    """A note if rows are longer than the checkpoint's trained context and no rotary scaling extends it."""
    architecture = getattr(origin.checkpoint, "config", None)
    rope = getattr(architecture, "rope", None)
    # Without rotary embeddings (learned positions) there is no context to extrapolate from.
    if (
        not isinstance(architecture, LmConfig)
        or not isinstance(rope, RotaryConfig)
        or length <= architecture.max_seq_len
    ):
        return []
    original = trained_length(architecture)
    message = (
        f"rows of {length:,} tokens are longer than the {architecture.max_seq_len:,} that the rotary embeddings of "
        f"{origin.reference} were trained on, and nothing stretches them: model.rope: {{type: yarn, factor: "
        f"{_factor(length, original):g}}} does"
    )
    return [Check(name="context", status="note", message=message)]


def length_checks(model: LmConfig, length: int, origin: ModelSource | None) -> list[Check]:
    """A note if rows are longer than the context that the model's configuration states, and exports will state."""
    # A note about a checkpoint's context says more.
    if length <= model.max_seq_len or (origin is not None and context_checks(origin, length)):
        return []
    subject = f"train_seq_len: rows of {length:,} tokens"
    if model.learned_positions:
        return context_length_checks(model, subject, name="rows", advice="train_seq_len:")
    message = (
        f"{subject} exceed model.max_seq_len, {model.max_seq_len:,}, which config.json will state as the context of "
        f"this model; to state theirs: model.max_seq_len: {length}"
    )
    return [Check(name="rows", status="note", message=message)]


def _factor(length: int, original: int) -> float:
    """The factor that reaches a length, in quarters."""
    # Rounded up to quarters: 2.1 becomes 2.25.
    return math.ceil(4 * length / original) / 4


def _roped(config: LmConfig, rope: RotaryConfig) -> LmConfig:
    """A configuration with other rotary embeddings, of a family that has some."""
    return replace(config, **{"rope": rope})
