"""The plan of `generate`: the model, its KV cache, and the Programs that fill and read it."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

from levanter.commands.cli.outputs import output_checks
from levanter.commands.generate.config import GenerateConfig
from levanter.commands.model.generation import PlacedModel, describe_generation, whole_parameters
from levanter.commands.model.pretrained import ModelChoice, PretrainedModel, describe_pretrained
from levanter.commands.model.source import ModelBlock
from levanter.commands.model.unsupported import unsupported_option_checks
from levanter.config import ExplicitKeys
from levanter.data.chat import ChatTemplate, is_template, template_text
from levanter.data.tokenizer import TemplateTokenizer, Tokenizer
from levanter.inference.capacity import DecodeCost
from levanter.inference.config import CHUNK, InferenceConfig
from levanter.inference.programs import GenerationPrograms
from levanter.io import exists, is_remote, local_path, special_kind
from levanter.runplan import Check, RunPlan, Target

NAME = "generate"


@dataclass(frozen=True, kw_only=True, eq=False)
class GenerateWork:
    """The resolved inputs of `execute` besides the Programs.

    Attributes:
        config: as the user wrote it.
        pretrained: the model.
        programs: the Programs that fill and read the cache.
        serving: memory and traffic of a decode step.
    """

    config: GenerateConfig
    pretrained: PretrainedModel
    programs: GenerationPrograms
    serving: DecodeCost


def describe(config: GenerateConfig, target: Target, *, written: ExplicitKeys | None = None) -> RunPlan[GenerateWork]:
    """Describes the run for `target`; reads metadata, no weights.

    At a terminal one row is used at a time; there are as many rows as the mesh has shards of the batch.

    Args:
        config: what is generated.
        target: the devices.
        written: the keys that the user wrote; None for a config made in Python.

    Raises:
        ValueError: the model is broken or unknown, the mesh cannot be resolved, or the rows cannot be cut over it.
    """
    written = ExplicitKeys.in_python(config) if written is None else written
    inference = config.inference
    trainer, notes = whole_parameters(config.trainer, written)
    pretrained = describe_pretrained(
        ModelChoice.of(
            replace(config, trainer=trainer),
            files=config.hf_checkpoint,
            saved=config.checkpoint_path,
            model=ModelBlock.of(config.model, written),
            tokenizer=config.tokenizer,
        ),
        target,
        # One part of one prompt on each shard is the largest call, so it decides the activations.
        batch=lambda ways: ways,
        positions=CHUNK if inference.prefill_chunk == "auto" else inference.prefill_chunk,
        work="generate",
    )
    model = placed_model(pretrained, target)
    # A model without a cache is refused before its rows are counted.
    _, ways = model.decodes, pretrained.resolved.batch_ways
    if config.interactive and (rows := _at_terminal(inference, ways)) != inference.max_rows:
        inference = replace(inference, max_rows=rows)
        notes = (*notes, f"inference.max_rows: {rows}, one for each shard of the batch: a terminal asks one at a time")
    generation = describe_generation(model, inference, target)
    # The kernel check is about attention within whole sequences; attention to a cache has a line of the engine's own.
    checks = [check for check in pretrained.checks if check.name != "kernels"]
    checks += [*unsupported_option_checks(config, written), *generation.checks]
    tokenizer = pretrained.local_tokenizer
    checks += [*template_checks(config.chat_template, tokenizer), *_bos_checks(config, tokenizer)]
    checks += _file_checks(config)
    return pretrained.run_plan(
        NAME,
        target,
        checks=checks,
        computing=generation.programs.all,
        workloads=generation.workloads,
        notes=notes,
        work=GenerateWork(config=config, pretrained=pretrained, programs=generation.programs, serving=generation.cost),
        resident_bytes=generation.resident_bytes,
        coresident_bytes=generation.coresident_bytes,
        searchable="layouts of generation are not searched yet",
    )


def placed_model(pretrained: PretrainedModel, target: Target) -> PlacedModel:
    """A model whose weights are read from files, as `describe_generation` takes it."""
    return PlacedModel(
        config=pretrained.config,
        module=pretrained.abstract,
        Vocab=pretrained.Vocab,
        sharding=pretrained.sharding,
        activations=pretrained.activations,
        resolved=pretrained.resolved,
        precision=pretrained.precision,
        compiler_options=dict(pretrained.compiler_options),
        hbm_bytes=pretrained.choice.trainer.mesh.hbm_bytes(target.hbm_bytes),
    )


def _at_terminal(inference: InferenceConfig, ways: int) -> int:
    """The rows of an interactive run: one for each shard, or the configured number."""
    wanted = inference.max_rows
    # Rounded up to a multiple of the shards.
    return ways if wanted == "auto" else -(-wanted // ways) * ways


def _file_checks(config: GenerateConfig) -> list[Check]:
    checks = []
    if config.interactive:
        return checks
    for key, path in (("input_path", config.input_path), ("output_path", config.output_path)):
        if path is None:
            message = "a run needs it; a plan does not"
            checks.append(Check(name=key, status="unchecked", message=message, error=ValueError(f"{key}: {message}")))
    if config.input_path is not None and not exists(config.input_path):
        message = f"{config.input_path}: no such file"
        error = ValueError(f"input_path: {message}")
        checks.append(Check(name="input_path", status="unchecked", message=message, error=error))
    if config.output_path is not None:
        checks += output_checks("output_path", config.output_path)
    for key, problem in _not_files(config):
        error = ValueError(problem)
        checks.append(Check(name=key, status="unchecked", message=problem, error=error))
    return checks


def _not_files(config: GenerateConfig) -> Iterator[tuple[str, str]]:
    """Problems of paths that exist but are no regular files, or the same file twice; by key."""
    read, written = config.input_path, config.output_path
    # Read twice: for the identity of the run, and for its requests.
    if read is not None and (kind := _kind(read)) is not None:
        yield "input_path", f"input_path: {read} is a {kind}; a run reads its prompts twice\n  → name a file"
    if written is not None and (kind := _kind(written)) is not None:
        yield (
            "output_path",
            f"output_path: {written} is a {kind}; resuming a run needs a regular file\n  → name a file",
        )
    if read is not None and written is not None and _same_file(read, written):
        yield "output_path", f"output_path: {written} is the file of the prompts\n  → name another file"


def _kind(path: str) -> str | None:
    return None if is_remote(path) else special_kind(path)


def _same_file(one: str, other: str) -> bool:
    if is_remote(one) or is_remote(other):
        # Symbolic links and relative paths may name one file.
        return one == other
    return os.path.realpath(local_path(one)) == os.path.realpath(local_path(other))


def template_checks(template: str | None, tokenizer: Tokenizer | None = None) -> Iterator[Check]:
    """An error for a chat template that is not Jinja; `unchecked` if its file does not exist here."""
    # It may be the name of one of the tokenizer's templates.
    if isinstance(tokenizer, TemplateTokenizer) and template in tokenizer.chat_templates:
        return
    if template is not None and not is_template(template) and not exists(template):
        error = ValueError(f"chat_template: {template}: no such file, and no Jinja either")
        yield Check(name="chat_template", status="unchecked", message=str(error), error=error)
        return
    try:
        # Compiled here, because otherwise only the first request with messages would report the error.
        if (text := template_text(template)) is not None:
            ChatTemplate(text=text).check()
    except ValueError as problem:
        yield Check(name="chat_template", status="error", message=str(problem), error=problem)


def _bos_checks(config: GenerateConfig, tokenizer: Tokenizer | None) -> Iterator[Check]:
    """An error if prompts are to begin with a BOS that the tokenizer does not have."""
    try:
        if tokenizer is not None:
            tokenizer.frame.with_bos(tokenizer.bos_id, enforce=config.enforce_bos)
    except ValueError as error:
        yield Check(name="prompts", status="error", message=str(error), error=error)
