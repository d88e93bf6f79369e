"""The resolved configuration of a training run: every choice that needs no array is made.

The config is completed from the checkpoint that the run begins from, the model has its kernels, the mesh its mappings,
the batch its division and the optimizer its schedule. Problems of all of them are raised together.
"""

from dataclasses import replace

from levanter.commands.model.compiler import choose_compiler
from levanter.commands.model.context_stage import context_checks, length_checks, resolve_context_stage
from levanter.commands.model.defaults import default_notes
from levanter.commands.model.layers import body_checks, splash_position_checks
from levanter.commands.model.quantization import QuantizationError
from levanter.commands.model.sharding import resolve_mesh
from levanter.commands.model.source import ModelBlock, ModelSource, find_tokenizer, resolve_source, vocabulary
from levanter.commands.model.unsupported import unsupported_option_checks
from levanter.commands.train.checks import attempted, needs_blockwise, refuse_all, refuse_kernels
from levanter.commands.train.config import TrainLmConfig
from levanter.commands.train.task import TrainingTask
from levanter.commands.train.trained_run import ResolvedTraining
from levanter.config import ExplicitKeys
from levanter.data import Tokenizer
from levanter.hardware.compiler import Work
from levanter.models.precision import Precision
from levanter.models.registry import LmConfig
from levanter.runplan import Check, Target
from levanter.trainer.averaging import check_averaging
from levanter.trainer.batch_plan import plan_batches


def resolve_training_config(task: TrainingTask, target: Target, written: ExplicitKeys) -> ResolvedTraining:
    """Resolves model, vocabulary, data, mesh, batch and optimizer; raises all their problems together."""
    origin = resolve_base(task.config, written)
    config = complete_config(task.config, origin, written)
    task = replace(task, config=config)
    trainer = config.trainer
    precision = Precision.parse(trainer.mp)
    checks = [*(() if origin is None else origin.checks), *unsupported_option_checks(config, written)]
    checks += [] if config.takes_architecture else default_notes(config.model, written.below("model"))
    architecture = config.model if origin is None else origin.architecture
    # The kernels are chosen once the mesh is known, but their lines belong here in the report.
    kernels_at = len(checks)
    checks += body_checks(architecture)
    checks += length_checks(architecture, config.positions, origin)
    checks.append(Check(name="precision", status="ok", message=str(precision)))
    vocab, tokenizer, vocab_checks = _vocabulary(config, architecture)
    rows = task.find_rows(tokenizer, vocab_size=vocab)
    # Training and validation describe the same sets; each message is shown once.
    messages = {check.message for check in checks}
    checks += [check for check in rows.checks if check.message not in messages]
    # Each step below may fail; `attempted` collects its error and lets the next one run.
    problems: list[ValueError] = []
    sizes = {"vocab": vocab, "positions": config.positions}
    resolved = attempted(
        problems,
        lambda: resolve_mesh(target, trainer.mesh, architecture, **sizes, precision=precision, backward=True),
    )
    batches = None
    # Without a mesh the batch cannot be divided, and the mesh's problem is recorded already.
    if resolved is not None:
        batches = attempted(
            problems,
            lambda: plan_batches(
                trainer.train_batch_size,
                per_device=trainer.per_device_parallelism,
                ways=resolved.batch_ways,
                positions=config.positions,
                allow_padding=trainer.allow_nondivisible_batch_size,
                mesh=str(resolved.spec),
            ),
        )
    mappings = None if resolved is None else resolved.mappings
    transformation = attempted(
        problems, lambda: config.optimizer.build_for(trainer.num_train_steps, target.platform, mappings)
    )
    attempted(problems, lambda: check_averaging(trainer.model_averaging, precision))
    refuse_all(checks, problems)
    assert resolved is not None and batches is not None and transformation is not None
    model, reasons = _choose_kernels(config, architecture, target, precision, resolved.query_ways)
    checks += splash_position_checks(model, resolved, positions=config.positions)
    # A run that never evaluates needs no compiler options for scoring.
    scores = rows.validation is not None or config.eval_harness is not None
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
        # The true size: the rows of embedding and head may be more, so that they divide over their shards.
        model=replace(model, vocab_size=vocab),
        vocab=vocab,
        precision=precision,
        tokenizer=tokenizer,
        rows=rows,
        resolved=resolved,
        batches=batches,
        transformation=transformation,
        compiler=compiler,
        checks=(*checks, *vocab_checks),
    )


def _choose_kernels(
    config: TrainLmConfig, architecture: LmConfig, target: Target, precision: Precision, query_ways: int
) -> tuple[LmConfig, tuple[str, ...]]:
    """The model with the kernels of its platform, and a line for each choice."""

    def choose(model: LmConfig) -> tuple[LmConfig, tuple[str, ...]]:
        return model.for_platform(
            target.platform,
            compute_dtype=precision.compute,
            length=config.positions,
            sequence_shards=query_ways,
            device_kind=target.kind,
            packed=config.data.block_cross_document_attention,
        )

    model, reasons = choose(architecture)
    # Kernels are known only after `for_platform`, so this cannot come earlier.
    if needs_blockwise(config.optimizer, architecture, model):
        model, reasons = choose(replace(architecture, attn_backend="blockwise"))
        reasons = (*reasons, "attention in blocks, because the optimizer differentiates the loss twice")
    refuse_kernels(config.optimizer, model)
    return model, reasons


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
    if replaces and "model" not in written:
        # The default of the key, which nobody has set.
        block = None
    # Where the checkpoint's architecture is used, so are its rotary embeddings, and the block cannot stretch them.
    stage = (
        None
        if replaces
        else resolve_context_stage(
            config.pretrained,
            config.model,
            written,
            positions=config.positions,
            adapters=config.lora is not None,
        )
    )
    if stage is not None:
        origin = stage.origin(config.pretrained)
    else:
        # Only upstream's key makes the block give way with a note; otherwise what it sets has to be the checkpoint's.
        yields = "use_hf_model_config" in written
        origin = resolve_source(config.pretrained, block, block_is_whole=not replaces, block_yields=yields)
        origin = replace(origin, checks=(*origin.checks, *context_checks(origin, config.positions)))
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
