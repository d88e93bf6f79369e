"""The plan of `eval_harness`: tasks, model, rows, the scoring Programs and the number of their executions.

Process 0 loads the tasks with lm_eval and counts requests; the other processes receive the numbers and describe the
same run. If a task requests generated text, the model is sharded as by `generate`, and its Programs are added.
"""

from dataclasses import dataclass, replace

from levanter.commands.cli.outputs import output_checks
from levanter.commands.generate import plan as generating
from levanter.commands.generate.config import GenerateConfig
from levanter.commands.generate.plan import GenerateWork
from levanter.commands.harness.config import EvalHarnessConfig
from levanter.commands.model.eval_prompts import TaskScoring, context_length, describe_task_scoring
from levanter.commands.model.pretrained import ModelChoice, PretrainedModel, describe_pretrained
from levanter.commands.model.scoring_common import configured_rows, output_key
from levanter.commands.model.source import ModelBlock
from levanter.commands.model.unsupported import unsupported_option_checks
from levanter.config import ExplicitKeys
from levanter.distributed.agreement import is_process_0
from levanter.eval.harness.encoding import HarnessError
from levanter.eval.harness.results import read_run
from levanter.eval.harness.task_discovery import DiscoveredTasks, discover_tasks
from levanter.runplan import Check, RunPlan, Target
from levanter.trainer.config import TrainerConfig

NAME = "eval_harness"
# On CPUs the time of a batch grows with its tokens, so batches are small.
TOKENS_ON_CPU, TOKENS = 512, 16384
"""Default tokens of a batch on each of its shards: enough for fast matrix products, few enough that the last, partly
empty batches cost little."""
LONGEST = 4096
"""Default maximum number of tokens of an input: rows of a model's full context often do not fit."""
UNAVAILABLE = "the tasks' documents are not available here; set plan.assume_requests"


@dataclass(frozen=True, kw_only=True, eq=False)
class HarnessWork:
    """The values that `execute` needs in addition to the Programs.

    Attributes:
        config: as the user wrote it.
        pretrained: the model.
        scoring: the tasks, and the Programs that score their requests.
        texts: the plan of generation; None if no task requests generated text.
    """

    config: EvalHarnessConfig
    pretrained: PretrainedModel
    scoring: TaskScoring
    texts: GenerateWork | None


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
    scoring = describe_task_scoring(
        tasks,
        config.harness,
        pretrained.abstract,
        model=pretrained.config,
        Vocab=pretrained.Vocab,
        tokenizer=pretrained.local_tokenizer,
        resolved=pretrained.resolved,
        platform=target.platform,
        placement=pretrained.sharding,
        precision=pretrained.precision,
        compiler_options=pretrained.compiler_options,
        length=length,
        tokens=_tokens(config.trainer, target, length),
        fixed_rows=configured_rows(config.trainer) is not None,
        assume_requests=config.plan.assume_requests,
    )
    checks += [tasks.check, *length_checks, *scoring.checks, *_against_checks(config, tasks)]
    checks += output_checks(*output_key(config))
    work = HarnessWork(config=config, pretrained=pretrained, scoring=scoring, texts=texts)
    rows = "; ".join(f"{shape.rows} × {shape.length} ({shape.slots} scored)" for shape in scoring.programs)
    checks.append(Check(name="rows", status="ok", message=f"batches of {rows}"))
    if resident is not None and texts is not None:
        # The cache of generation is freed before rows are scored, so their memory does not add up.
        resident = {"parameters": pretrained.sharding.bytes_per_device, **resident}
    return pretrained.run_plan(
        NAME,
        target,
        checks=checks,
        computing=(*scoring.programs.values(), *more),
        workloads=(*scoring.workloads(1, reason=UNAVAILABLE), *more_work),
        notes=notes,
        work=work,
        resident_bytes=resident,
        coresident_bytes=coresident,
        searchable=pretrained.searchable(positions=length)
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
