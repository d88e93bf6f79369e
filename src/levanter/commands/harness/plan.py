"""What `eval_harness` will do, before it does it: tasks, model, rows, the Programs that score them, how often they run.

Which tasks there are and how much they ask process 0 finds out, with lm_eval; the others hear it, and describe the same
run. Where a task wants texts, the model lies as `generate` lays it out, and its Programs are there too.
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
    conversation_template,
    question_encoder,
    question_length,
    reading_checks,
    rows_flops,
    rows_reach,
    rows_room,
    sampling_checks,
)
from levanter.commands.model.pretrained import ModelChoice, PretrainedModel, describe_pretrained
from levanter.commands.model.scoring_common import output_key, rows_asked
from levanter.commands.model.source import ModelBlock
from levanter.commands.model.unsupported import not_carried
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
TOKENS_ON_CPU, TOKENS = 512, 16384
"""Tokens of a batch on each of its shards, where nobody says: enough for the products to be fast, few enough for the
last batches, which are not full, to cost little."""
LONGEST = 4096
"""Tokens that the model sees at once, where nobody says: rows as long as today's contexts would not fit."""
ASSUMED_TOKENS = 128
"""Of a request whose text is not there."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HarnessWork:
    """What `execute` needs besides the Programs.

    Attributes:
        config: as the user wrote it.
        pretrained: the model.
        tasks: what is asked.
        encoder: makes tokens of texts; None where there is no tokenizer.
        template: writes conversations; None where there is none.
        programs: that score rows, by their shape.
        texts: how texts are written; None where no task wants that.
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
        config: what is evaluated.
        target: the devices.
        written: the keys that the user wrote; None for a config made in Python.
    """
    written = ExplicitKeys.in_python(config) if written is None else written
    tasks = discover_tasks(config.harness, config.folders)
    pretrained, texts = _pretrained(config, target, written), None
    length, checking = question_length(config.harness.max_length, pretrained.config, LONGEST)
    if tasks.generates:
        generation = generating.describe(_generation(config, length), target, written=written)
        pretrained, texts = generation.work.pretrained, generation.work
        checks = [check for check in generation.checks if check.name not in ("input_path", "output_path", "rows")]
        notes, coresident, resident = generation.notes, dict(generation.coresident_bytes), generation.resident_bytes
        more, more_work = generation.computing, tuple(generation.workloads)
    else:
        checks = [*pretrained.checks, *not_carried(config, written)]
        notes, coresident, resident, more, more_work = pretrained.notes, {}, None, (), ()
    shapes, reading = _shapes(config.trainer, target, pretrained, length)
    tokenizer = pretrained.found_tokenizer
    template, found = conversation_template(tokenizer, asked=config.harness.apply_chat_template)
    checks += [*reading, tasks.check, *checking, *found, *_against_checks(config, tasks)]
    checks += sampling_checks(logged=config.harness.sample_logging.logs)
    checks += output_checks(*output_key(config))
    encoder, found = question_encoder(tokenizer, length)
    checks += found

    def cost(shape: RowShape) -> float:
        return rows_flops(pretrained.config, pretrained.Vocab.size, shape, "full")

    # Who says how many rows there are has them, in any case.
    room = rows_room(pretrained.resolved, target.platform) if rows_asked(config.trainer) is None else None
    counted, problem = count_requests(tasks, config.harness, encoder, template, shapes, cost, room)
    checks += [] if problem is None else [problem]
    shapes = shapes if counted is None else counted.shapes
    if counted is None and problem is None and config.plan.assume_requests is not None:
        counted = RequestCount.assumed(config.plan.assume_requests, ASSUMED_TOKENS, shapes)
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
        # Rows that write texts are let go before others are scored.
        resident = {"parameters": pretrained.sharding.bytes_per_device, **resident}
    return RunPlan(
        entry_point=NAME,
        target=target,
        mesh=pretrained.resolved.spec,
        checks=tuple(checks),
        sharding=pretrained.sharding,
        activations=pretrained.activations,
        load=pretrained.load_plan,
        computing=(*programs.values(), *more),
        workloads=(*(_workload(work, shape, counted) for shape in programs), *more_work),
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
    """The same model as `generate` would have it, in rows as long as the model sees."""
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
    def described(length: int) -> PretrainedModel:
        return describe_pretrained(
            ModelChoice.of(
                config,
                files=config.files,
                saved=config.saved,
                model=ModelBlock.of(config.model, written),
                tokenizer=config.tokenizer,
            ),
            target,
            batch=lambda ways: ways * max(1, _tokens(config.trainer, target, length) // length),
            positions=length,
        )

    asked = config.harness.max_length or LONGEST
    found = described(asked)
    meant_for = found.config.max_seq_len
    return described(meant_for) if config.harness.max_length is None and meant_for < asked else found


def _shapes(
    trainer: TrainerConfig, target: Target, pretrained: PretrainedModel, length: int
) -> tuple[tuple[RowShape, ...], list[Check]]:
    """Rows for anything that may be asked."""
    tokens, model = _tokens(trainer, target, length), pretrained.config
    longest, branches = rows_reach(model, pretrained.resolved, target.platform, length=length, tokens=tokens)
    shapes = row_shapes(longest, tokens=tokens, ways=pretrained.resolved.batch_ways, branches=branches)
    return shapes, reading_checks(model, longest)


def _tokens(trainer: TrainerConfig, target: Target, length: int) -> int:
    """Tokens of a batch on each of its shards."""
    if (asked := rows_asked(trainer)) is not None:
        return asked[0] * length
    return TOKENS_ON_CPU if target.platform == "cpu" else TOKENS


def _against_checks(config: EvalHarnessConfig, tasks: DiscoveredTasks) -> list[Check]:
    """Looks for the run that this one is compared with, before there is anything to compare."""
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


def _workload(work: HarnessWork, shape: RowShape, counted: RequestCount | None) -> Workload:
    executions, reason = None, "the tasks' documents are not available here; set plan.assume_requests"
    if counted is not None:
        executions, reason = counted.executions.get(shape.name, 0), counted.reason
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
