"""The resolved configuration of a training run: every choice that needs no array is made.

The config is completed from the checkpoint that the run begins from, the model has its kernels, the mesh its mappings,
the batch its division and the optimizer its schedule. Problems of all of them are raised together.
"""

from dataclasses import dataclass, replace

import optax

from levanter.commands.model.compiler import CompilerChoice, choose_compiler
from levanter.commands.model.defaults import default_notes
from levanter.commands.model.layers import body_checks, splash_position_checks
from levanter.commands.model.quantization import QuantizationError
from levanter.commands.model.sharding import resolve_mesh
from levanter.commands.model.source import ModelBlock, ModelSource, find_tokenizer, resolve_source, vocabulary
from levanter.commands.model.unsupported import unsupported_option_checks
from levanter.commands.train.checks import attempted, data_checks, refuse_all, refuse_kernels
from levanter.commands.train.config import TrainLmConfig
from levanter.commands.train.context_extension import context_checks, resolve_context_stage
from levanter.commands.train.dpo.setup import data_formats
from levanter.commands.train.lm.evaluation import find_validation
from levanter.config import ExplicitKeys
from levanter.data import EvaluationData, Tokenizer
from levanter.hardware.compiler import Work
from levanter.mesh import ResolvedMesh
from levanter.models.precision import Precision
from levanter.models.registry import LmConfig
from levanter.runplan import Check, Target
from levanter.trainer.averaging import check_averaging
from levanter.trainer.batch_plan import BatchStage, plan_batches


@dataclass(frozen=True, kw_only=True, eq=False)
class ResolvedTraining:
    """A run's resolved config, before any array is placed.

    Attributes:
        config: as written, completed from its checkpoint.
        written: the keys that the user wrote.
        origin: the checkpoint that it begins from; None for none.
        model: the architecture, with the choices for this platform made.
        vocab: size of the vocabulary.
        precision: the dtype policy.
        tokenizer: None if it is not available here.
        validation: the sets that are scored; None for none.
        resolved: mesh and mappings.
        batches: the stages of the batch size, by first step.
        transformation: the optimizer's.
        compiler: options for XLA.
        checks: those made so far.
    """

    config: TrainLmConfig
    written: ExplicitKeys
    origin: ModelSource | None
    model: LmConfig
    vocab: int
    precision: Precision
    tokenizer: Tokenizer | None
    validation: EvaluationData | None
    resolved: ResolvedMesh
    batches: tuple[BatchStage, ...]
    transformation: optax.GradientTransformation
    compiler: CompilerChoice
    checks: tuple[Check, ...]


def resolve_training_config(config: TrainLmConfig, target: Target, written: ExplicitKeys) -> ResolvedTraining:
    """Resolves model, vocabulary, data, mesh, batch and optimizer; raises all their problems together."""
    origin = resolve_base(config, written)
    config = complete_config(config, origin, written)
    trainer = config.trainer
    precision = Precision.parse(trainer.mp)
    checks = [*(() if origin is None else origin.checks), *unsupported_option_checks(config, written)]
    checks += [] if config.takes_architecture else default_notes(config.model, written.below("model"))
    architecture = config.model if origin is None else origin.architecture
    # The kernels are chosen once the mesh is known, but their lines belong here in the report.
    kernels_at = len(checks)
    checks += body_checks(architecture)
    checks.append(Check(name="precision", status="ok", message=str(precision)))
    vocab, tokenizer, vocab_checks = _vocabulary(config, architecture)
    formats = data_formats(config)
    checks += data_checks(config.data, tokenizer, vocab_size=vocab, formats=formats)
    validation, validation_checks = find_validation(config.data, formats)
    # Training and validation describe the same sets; each message is shown once.
    known = {check.message for check in checks}
    checks += [check for check in validation_checks if check.message not in known]
    # Each step below may fail; `attempted` collects its error and lets the next one run.
    problems: list[ValueError] = []
    resolved = attempted(problems, lambda: _resolved(config, architecture, vocab, target))
    # Without a mesh the batch cannot be divided, and the mesh's problem is recorded already.
    batches = attempted(problems, lambda: () if resolved is None else _batches(config, resolved))
    mappings = None if resolved is None else resolved.mappings
    transformation = attempted(
        problems, lambda: config.optimizer.build_for(trainer.num_train_steps, target.platform, mappings)
    )
    attempted(problems, lambda: check_averaging(trainer.model_averaging, precision))
    refuse_all(checks, problems)
    assert resolved is not None and batches is not None and transformation is not None
    model, reasons = architecture.for_platform(
        target.platform, compute_dtype=precision.compute, length=config.positions, sequence_shards=resolved.query_ways
    )
    # Kernels are known only after `for_platform`, so this check cannot come earlier.
    refuse_kernels(config.optimizer, model)
    checks += splash_position_checks(model, resolved, positions=config.positions)
    # A run that never evaluates needs no compiler options for scoring.
    scores = validation is not None or config.eval_harness is not None
    works: tuple[Work, ...] = ("train", "score") if scores else ("train",)
    compiler = choose_compiler(trainer, target, resolved, works=works)
    checks += compiler.checks
    # Inserted where `kernels_at` was noted, before the checks that were added since.
    checks[kernels_at:kernels_at] = [Check(name="kernels", status="ok", message=reason) for reason in reasons]
    checks += [
        Check(name="schedule", status="note", message=line)
        for line in config.optimizer.adjusted(trainer.num_train_steps)
    ]
    return ResolvedTraining(
        config=config,
        written=written,
        origin=origin,
        model=model,
        vocab=vocab,
        precision=precision,
        tokenizer=tokenizer,
        validation=validation,
        resolved=resolved,
        batches=batches,
        transformation=transformation,
        compiler=compiler,
        checks=(*checks, *vocab_checks),
    )


def _resolved(config: TrainLmConfig, model: LmConfig, vocab: int, target: Target) -> ResolvedMesh:
    """The mesh and the mappings."""
    precision = Precision.parse(config.trainer.mp)
    sizes = {"vocab": vocab, "positions": config.positions}
    return resolve_mesh(target, config.trainer.mesh, model, **sizes, precision=precision, backward=True)


def _batches(config: TrainLmConfig, resolved: ResolvedMesh) -> tuple[BatchStage, ...]:
    """The division of each batch over devices and microbatches."""
    return plan_batches(
        config.trainer.train_batch_size,
        per_device=config.trainer.per_device_parallelism,
        ways=resolved.batch_ways,
        positions=config.positions,
        allow_padding=config.trainer.allow_nondivisible_batch_size,
        mesh=str(resolved.spec),
    )


def _vocabulary(config: TrainLmConfig, model: LmConfig) -> tuple[int, Tokenizer | None, tuple[Check, ...]]:
    """The size of the vocabulary, the tokenizer if it is available, and checks with the source of both."""
    name = config.data.tokenizer
    # A configured size counts only if the architecture leaves it open.
    if model.vocab_size is None and config.data.vocab_size is not None:
        model = replace(model, vocab_size=config.data.vocab_size)
    tokenizer, tokenizer_check = find_tokenizer(name, origin=None, size=model.vocab_size)
    size, how = vocabulary(model, tokenizer=tokenizer, names=(name, model.tokenizer))
    return size, tokenizer, (tokenizer_check, Check(name="vocabulary", status="ok", message=f"{size} ids, {how}"))


def resolve_base(config: TrainLmConfig, written: ExplicitKeys) -> ModelSource | None:
    """The checkpoint that the run begins from, as far as it is reachable; None if weights are initialized."""
    if config.pretrained is None:
        return None
    replaces = config.takes_architecture
    block = ModelBlock.of(config.model, written)
    if (stage := resolve_context_stage(config, written)) is not None:
        origin = stage.origin(config.pretrained)
    else:
        origin = resolve_source(config.pretrained, block, block_is_whole=not replaces, block_yields=replaces)
        origin = replace(origin, checks=(*origin.checks, *context_checks(origin, config)))
    # Adapters leave the weights as they are, so a base of 8-bit integers is acceptable for them only.
    return origin if config.lora is not None else replace(origin, checks=(*origin.checks, *_integers(origin)))


def _integers(origin: ModelSource) -> list[Check]:
    """Refuses weights that are integers."""
    if not origin.has_int8:
        return []
    error = QuantizationError(
        f"{origin.reference}: its weights are 8-bit integers, which take no updates; train adapters of it "
        "(adapter: {type: lora}), or begin from the checkpoint before it was quantized"
    )
    return [Check(name="weights", status="error", message=str(error), error=error)]


def complete_config(config: TrainLmConfig, origin: ModelSource | None, written: ExplicitKeys) -> TrainLmConfig:
    """Completes `config` from its checkpoint: the length of rows, and the tokenizer."""
    # A run that keeps its own `model:` block has its own length and tokenizer too.
    if origin is None or not config.takes_architecture:
        return config
    if config.train_seq_len is None:
        config = replace(config, train_seq_len=origin.architecture.max_seq_len)
    if config.hf_checkpoint is not None and "data.tokenizer" not in written:
        config = replace(config, data=replace(config.data, tokenizer=config.hf_checkpoint))
    return config
