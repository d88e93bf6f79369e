"""The plan of `eval_harness`: tasks, model, rows, the scoring Programs and the number of their executions.

Process 0 loads the tasks with lm_eval and counts requests; the other processes receive the numbers and describe the
same run. If a task requests generated text, the model is sharded as by `generate`, and its Programs are added.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from haliax_ext.program import Program
from levanter.commands.cli.outputs import output_checks
from levanter.commands.generate import plan as generating
from levanter.commands.generate.config import GenerateConfig
from levanter.commands.generate.plan import GenerateWork
from levanter.commands.harness.config import EvalHarnessConfig
from levanter.commands.model.eval_prompts import (
    batch_limits,
    context_length,
    conversation_template,
    query_encoder,
    reading_checks,
    rows_flops,
    rows_reach,
    sampling_checks,
)
from levanter.commands.model.pretrained import ModelChoice, PretrainedModel, describe_pretrained
from levanter.commands.model.scoring_common import configured_rows, output_key
from levanter.commands.model.source import ModelBlock
from levanter.commands.model.unsupported import unsupported_option_checks
from levanter.config import ExplicitKeys
from levanter.data.chat import ChatTemplate
from levanter.distributed.barrier import is_process_0
from levanter.eval.harness.encoding import HarnessError, QueryEncoder
from levanter.eval.harness.packing import RowShape, row_shapes
from levanter.eval.harness.request_table import RequestCount
from levanter.eval.harness.results import read_run
from levanter.eval.harness.scoring import score_programs
from levanter.eval.harness.task_discovery import DiscoveredTasks, count_requests, discover_tasks
from levanter.runplan import Check, RunPlan, Target, Workload
from levanter.trainer.config import TrainerConfig

NAME = "eval_harness"
# On CPUs the time of a batch grows with its tokens, so batches are small.
TOKENS_ON_CPU, TOKENS = 512, 16384
"""Default tokens of a batch on each of its shards: enough for fast matrix products, few enough that the last, partly
empty batches cost little."""
LONGEST = 4096
"""Default maximum number of tokens of an input: rows of a model's full context often do not fit."""
ASSUMED_TOKENS = 128
"""Assumed number of tokens of a request if the documents are not available."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HarnessWork:
    """The values that `execute` needs in addition to the Programs.

    Attributes:
        config: as the user wrote it.
        pretrained: the model.
        tasks: the tasks.
        encoder: texts to tokens; None if there is no tokenizer.
        template: renders conversations; None if the tokenizer has no chat template.
        programs: shape → Program that scores rows.
        texts: the plan of generation; None if no task requests generated text.
    """

    config: EvalHarnessConfig
    pretrained: PretrainedModel
    tasks: DiscoveredTasks
    encoder: QueryEncoder | None
    template: ChatTemplate | None
    programs: Mapping[RowShape, Program]
    texts: GenerateWork | None

    def cost(self, shape: RowShape) -> float:
        """FLOPs of a batch."""
        return rows_flops(self.pretrained.config, self.pretrained.Vocab.size, shape, "full")


def describe(config: EvalHarnessConfig, target: Target, *, written: ExplicitKeys | None = None) -> RunPlan[HarnessWork]:
    """Describes the run for `target`; reads metadata and the tasks' documents, no weights.

    Args:
        config: the configuration.
        target: the devices.
        written: the keys that the user wrote; None for a config made in Python.
    """
    written = ExplicitKeys.in_python(config) if written is None else written
    tasks = discover_tasks(config.harness, config.folders)
    # Described for scoring first: the context length depends on the architecture.
    pretrained, texts = _pretrained(config, target, written), None
    length, length_checks = context_length(config.harness.max_length, pretrained.config, LONGEST)
    # Generation has its own placement (weights whole along `embed`), and one set of weights serves both kinds of
    # Programs.
    if tasks.generates:
        generation = generating.describe(_generation(config, length), target, written=written)
        pretrained, texts = generation.work.pretrained, generation.work
        # Prompts come from the tasks; there are no files, and the rows of scoring are listed below.
        checks = [check for check in generation.checks if check.name not in ("input_path", "output_path", "rows")]
        # `run_plan` adds those about the model, which come first here too.
        notes = generation.notes[len(pretrained.notes) :]
        coresident, resident = dict(generation.coresident_bytes), generation.resident_bytes
        more, more_work = generation.computing, tuple(generation.workloads)
    else:
        checks = [*pretrained.checks, *unsupported_option_checks(config, written)]
        notes, coresident, resident, more, more_work = (), {}, None, (), ()
    shapes, position_checks = _shapes(config.trainer, target, pretrained, length)
    tokenizer = pretrained.local_tokenizer
    template, template_checks = conversation_template(tokenizer, required=config.harness.apply_chat_template)
    checks += [*position_checks, tasks.check, *length_checks, *template_checks, *_against_checks(config, tasks)]
    checks += sampling_checks(logged=config.harness.sample_logging.logs)
    checks += output_checks(*output_key(config))
    encoder, template_checks = query_encoder(tokenizer, length)
    checks += template_checks

    def cost(shape: RowShape) -> float:
        return rows_flops(pretrained.config, pretrained.Vocab.size, shape, "full")

    # A configured number of rows is kept; otherwise shapes are fitted to the requests.
    limits = batch_limits(pretrained.resolved, target.platform) if configured_rows(config.trainer) is None else None
    request_count, problem = count_requests(tasks, config.harness, encoder, template, shapes, cost, limits)
    checks += [] if problem is None else [problem]
    shapes = shapes if request_count is None else request_count.shapes
    if request_count is None and problem is None and config.plan.assume_requests is not None:
        request_count = RequestCount.assumed(config.plan.assume_requests, ASSUMED_TOKENS, shapes)
    programs = score_programs(
        pretrained.abstract,
        shapes,
        mappings=pretrained.resolved.mappings,
        placement=pretrained.sharding,
        batch_axis=pretrained.resolved.batch_axis,
        matmul_precision=pretrained.precision.matmul,
        compiler_options=pretrained.compiler_options,
    )
    work = HarnessWork(
        config=config,
        pretrained=pretrained,
        tasks=tasks,
        encoder=encoder,
        template=template,
        programs=programs,
        texts=texts,
    )
    rows = "; ".join(f"{shape.rows} × {shape.length} ({shape.slots} scored)" for shape in shapes)
    checks.append(Check(name="rows", status="ok", message=f"batches of {rows}"))
    if resident is not None and texts is not None:
        # The cache of generation is freed before rows are scored, so their memory does not add up.
        resident = {"parameters": pretrained.sharding.bytes_per_device, **resident}
    return pretrained.run_plan(
        NAME,
        target,
        checks=checks,
        computing=(*programs.values(), *more),
        workloads=(*(_workload(work, shape, request_count) for shape in programs), *more_work),
        notes=notes,
        work=work,
        resident_bytes=resident,
        coresident_bytes=coresident,
        searchable=pretrained.searchable(
            positions=length,
        )
        if texts is None
        else "layouts of generation are not searched yet",
    )


def _generation(config: EvalHarnessConfig, length: int) -> GenerateConfig:
    """The configuration of `generate` for the same model, with rows of the maximum input length."""
    inference = replace(config.inference, max_seq_len=config.inference.max_seq_len or length)
    return GenerateConfig(
        hf_checkpoint=config.files,
        checkpoint_path=config.saved,
        tokenizer=config.tokenizer,
        model=config.model,
        trainer=config.trainer,
        inference=inference,
        plan=config.plan,
        allow_pickle=config.allow_pickle,
        load_memory_gib=config.load_memory_gib,
        quantize=config.quantize,
        tied_head=config.tied_head,
        adapter_path=config.adapter_path,
    )


def _pretrained(config: EvalHarnessConfig, target: Target, written: ExplicitKeys) -> PretrainedModel:
    def describe_length(length: int) -> PretrainedModel:
        return describe_pretrained(
            ModelChoice.of(
                config,
                files=config.files,
                saved=config.saved,
                model=ModelBlock.of(config.model, written),
                tokenizer=config.tokenizer,
            ),
            target,
            # As many rows as the configured tokens make, at least one on each shard.
            batch=lambda ways: ways * max(1, _tokens(config.trainer, target, length) // length),
            positions=length,
        )

    requested = config.harness.max_length or LONGEST
    pretrained = describe_length(requested)
    max_seq_len = pretrained.config.max_seq_len
    # The default length may exceed the model's context, which is known only now.
    return describe_length(max_seq_len) if config.harness.max_length is None and max_seq_len < requested else pretrained


def _shapes(
    trainer: TrainerConfig, target: Target, pretrained: PretrainedModel, length: int
) -> tuple[tuple[RowShape, ...], list[Check]]:
    """Row shapes for any requests."""
    tokens, model = _tokens(trainer, target, length), pretrained.config
    longest, branches = rows_reach(model, pretrained.resolved, target.platform, length=length, tokens=tokens)
    shapes = row_shapes(longest, tokens=tokens, ways=pretrained.resolved.batch_ways, branches=branches)
    return shapes, reading_checks(model, longest)


def _tokens(trainer: TrainerConfig, target: Target, length: int) -> int:
    """Tokens of a batch on each of its shards."""
    if (rows := configured_rows(trainer)) is not None:
        return rows[0] * length
    return TOKENS_ON_CPU if target.platform == "cpu" else TOKENS


def _against_checks(config: EvalHarnessConfig, tasks: DiscoveredTasks) -> list[Check]:
    """Checks that the other run of a comparison exists, before anything is computed."""
    # Read before hours of evaluation, on the process that will compare.
    if config.against is None or not is_process_0():
        return []
    try:
        _, samples = read_run(config.against)
    except HarnessError as error:
        return [Check(name="against", status="unchecked", message=str(error), error=error)]
    if tasks.documents and not tasks.documents.keys() & samples.keys():
        error = HarnessError(
            f"against: {config.against}: no task in common: here {', '.join(tasks.documents)}; there "
            f"{', '.join(samples)}"
        )
        return [Check(name="against", status="unchecked", message=str(error), error=error)]
    return [Check(name="against", status="ok", message=f"{config.against}: {', '.join(samples)}")]


def _workload(work: HarnessWork, shape: RowShape, request_count: RequestCount | None) -> Workload:
    executions, reason = None, "the tasks' documents are not available here; set plan.assume_requests"
    if request_count is not None:
        executions, reason = request_count.executions.get(shape.name, 0), request_count.reason
    return Workload(
        program=shape.name,
        tokens=shape.rows * shape.length,
        unit="tokens",
        items=shape.rows * shape.length,
        flops_full=rows_flops(work.pretrained.config, work.pretrained.Vocab.size, shape, "full"),
        flops_causal=rows_flops(work.pretrained.config, work.pretrained.Vocab.size, shape, "causal"),
        executions=executions,
        reason=reason,
    )
