"""How a model answers requests of lm_eval's tasks: tokens, chat template, rows and the Programs that score them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import haliax as hax

from haliax_ext.program import Placement, Program
from levanter.commands.model.scoring_common import context_length_checks
from levanter.compat.hf.tokenizer import FastTokenizer
from levanter.data import Tokenizer
from levanter.data.chat import ChatTemplate, select_template
from levanter.eval.harness.batch_shapes import RowLimits
from levanter.eval.harness.config import HarnessConfig
from levanter.eval.harness.encoding import HarnessError, QueryEncoder
from levanter.eval.harness.packing import RowShape, row_shapes
from levanter.eval.harness.request_table import RequestCount
from levanter.eval.harness.scoring import score_programs
from levanter.eval.harness.task_discovery import DiscoveredTasks, count_requests
from levanter.mesh import ResolvedMesh
from levanter.models.base import LmHeadModel
from levanter.models.precision import Precision
from levanter.models.registry import LmConfig
from levanter.runplan import Check, Workload

ASSUMED_TOKENS = 128
"""Assumed number of tokens of a request if the documents are not available."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TaskScoring:
    """The Programs that score the requests of tasks, and the number of their executions.

    Attributes:
        tasks: the tasks.
        config: how requests are built.
        model: the architecture.
        vocab: rows of the head.
        encoder: texts to tokens; None if there is no tokenizer.
        template: renders conversations; None if the tokenizer has no chat template.
        programs: shape → Program that scores rows.
        requests: requests, and executions of each Program; None if the documents are not available here.
        checks: lines of the plan.
    """

    tasks: DiscoveredTasks
    config: HarnessConfig
    model: LmConfig
    vocab: int
    encoder: QueryEncoder | None
    template: ChatTemplate | None
    programs: Mapping[RowShape, Program]
    requests: RequestCount | None
    checks: tuple[Check, ...]

    def cost(self, shape: RowShape) -> float:
        """FLOPs of a batch."""
        return rows_flops(self.model, self.vocab, shape, "full")

    def workloads(self, times: int, *, reason: str) -> tuple[Workload, ...]:
        """The work of the Programs.

        Args:
            times: number of evaluations.
            reason: why the number of executions is unknown, if it is.
        """
        if self.requests is not None:
            reason = self.requests.reason + (f", {times:,} times" if times > 1 else "")
        return tuple(
            Workload(
                program=shape.name,
                tokens=shape.rows * shape.length,
                unit="tokens",
                items=shape.rows * shape.length,
                flops_full=self.cost(shape),
                flops_causal=rows_flops(self.model, self.vocab, shape, "causal"),
                executions=None if self.requests is None else times * self.requests.executions.get(shape.name, 0),
                reason=reason,
            )
            for shape in self.programs
        )


def describe_task_scoring(
    tasks: DiscoveredTasks,
    config: HarnessConfig,
    module: LmHeadModel,
    *,
    model: LmConfig,
    Vocab: hax.Axis,
    tokenizer: Tokenizer | None,
    resolved: ResolvedMesh,
    platform: str,
    placement: Placement,
    precision: Precision,
    compiler_options: Mapping[str, str],
    length: int,
    tokens: int,
    fixed_rows: bool,
    assume_requests: int | None = None,
    usable: Callable[[LmHeadModel], LmHeadModel] = lambda module: module,
) -> TaskScoring:
    """Describes how the requests of tasks are scored.

    Args:
        tasks: the tasks.
        config: how requests are built.
        module: the model, abstract.
        model: its architecture.
        Vocab: rows of its head.
        tokenizer: texts to tokens; None if it is not available here.
        resolved: the mesh.
        platform: of the devices.
        placement: the sharding of the parameters.
        precision: the dtype policy.
        compiler_options: options for XLA.
        length: the context length in tokens.
        tokens: tokens of a batch on each of its shards.
        fixed_rows: whether the user chose the number of rows; otherwise shapes are fitted to the requests.
        assume_requests: the number of requests to plan with if the documents are not available; None for none.
        usable: converts the model to the form in which it computes.
    """
    # Rows may be longer than the context if their segments are not; `branches`: segments may share a prefix.
    longest, branches = rows_reach(model, resolved, platform, length=length, tokens=tokens)
    shapes = row_shapes(longest, tokens=tokens, ways=resolved.batch_ways, branches=branches)
    template, template_checks = conversation_template(tokenizer, required=config.apply_chat_template)
    encoder, encoder_checks = query_encoder(tokenizer, length)
    checks = [*reading_checks(model, longest), *template_checks, *encoder_checks]
    checks += sampling_checks(logged=config.sample_logging.logs)

    def cost(shape: RowShape) -> float:
        return rows_flops(model, Vocab.size, shape, "full")

    limits = None if fixed_rows else batch_limits(resolved, platform)
    requests, problem = count_requests(tasks, config, encoder, template, shapes, cost, limits)
    checks += [] if problem is None else [problem]
    shapes = shapes if requests is None else requests.shapes
    if requests is None and problem is None and assume_requests is not None:
        requests = RequestCount.assumed(assume_requests, ASSUMED_TOKENS, shapes)
    programs = score_programs(
        module,
        shapes,
        mappings=resolved.mappings,
        placement=placement,
        batch_axis=resolved.batch_axis,
        matmul_precision=precision.matmul,
        compiler_options=compiler_options,
        usable=usable,
    )
    return TaskScoring(
        tasks=tasks,
        config=config,
        model=model,
        vocab=Vocab.size,
        encoder=encoder,
        template=template,
        programs=programs,
        requests=requests,
        checks=tuple(checks),
    )


def query_encoder(tokenizer: Tokenizer | None, length: int) -> tuple[QueryEncoder | None, list[Check]]:
    """The encoder of requests of at most `length` tokens; None without a tokenizer."""
    if tokenizer is None:
        return None, []
    # Not a setting of the harness: the tokenizer's files decide about BOS.
    frame = tokenizer.frame
    around = [
        f"{', '.join(repr(tokenizer.decode([i])) for i in ids)} {place} a text"
        for ids, place in ((frame.prefix, "before"), (frame.suffix, "after"))
        if ids
    ]
    message = f"{' and '.join(around) or 'nothing around a text'}, as configured in the tokenizer's files"
    return QueryEncoder(tokenizer, frame, length), [Check(name="encoding", status="ok", message=message)]


def conversation_template(tokenizer: object, *, required: bool) -> tuple[ChatTemplate | None, list[Check]]:
    """The chat template of a model's tokenizer.

    Args:
        tokenizer: the model's tokenizer; None if it is unavailable.
        required: whether prompts use a chat template.
    """
    template = select_template(tokenizer, None) if isinstance(tokenizer, FastTokenizer) else None
    if template is None:
        # A tokenizer that is unavailable here may have a template.
        if not required or tokenizer is None:
            return None, []
        error = HarnessError(
            "eval_harness.apply_chat_template: the tokenizer has no chat template\n"
            "  → remove the key, or set a tokenizer that has one (tokenizer: …)"
        )
        return None, [Check(name="chat template", status="error", message=str(error), error=error)]
    return template, []


def context_length(max_length: int | None, model: LmConfig, most: int) -> tuple[int, list[Check]]:
    """The context length of requests, in tokens.

    Args:
        max_length: `eval_harness.max_length`.
        model: the architecture.
        most: upper limit of the default.
    """
    # Texts longer than the trained context are possible only on request.
    length = max_length or min(model.max_seq_len, most)
    if max_length is None and length < model.max_seq_len:
        message = (
            f"the context is {length:,} tokens, of the {model.max_seq_len:,} that the model was trained on "
            "(eval_harness.max_length): longer requests lose their beginning, longer texts are split into windows"
        )
        return length, [Check(name="length", status="note", message=message)]
    if length <= model.max_seq_len:
        return length, []
    message = f"eval_harness.max_length: {length:,} tokens"
    return length, context_length_checks(model, message, name="length", advice="eval_harness.max_length:")


def sampling_checks(*, logged: bool) -> list[Check]:
    """A note on upstream's `sample_logging`."""
    message = "eval_harness.sample_logging: samples are written to files, not to trackers"
    return [Check(name="samples", status="note", message=message)] if logged else []


def rows_reach(model: LmConfig, resolved: ResolvedMesh, platform: str, *, length: int, tokens: int) -> tuple[int, bool]:
    """Positions of the longest packed rows, and whether segments may share a prefix with others.

    Sequences with a common prefix share its computation only where attention is computed from explicit masks: the TPU
    kernel and context-parallel attention support one segment per query. A row may then be longer than the context,
    since its segments are not: up to twice, if a batch has the tokens and rotary embeddings do not depend on length.

    Args:
        model: the architecture.
        resolved: the mesh.
        platform: platform of the devices.
        length: the context length in tokens.
        tokens: tokens of a batch on each batch shard.
    """
    # One segment per query: a row is one sequence, which cannot be longer than the context.
    if platform == "tpu" or resolved.position_ways > 1:
        return length, False
    longest = max(length, min(tokens, 2 * length))
    # Length-dependent rotary embeddings would give other angles in longer rows.
    return (longest if model.reads_alike(length, longest) else length), True


def reading_checks(model: LmConfig, longest: int) -> list[Check]:
    """A note if the model's rotary embeddings depend on the length of a row.

    Args:
        model: the architecture.
        longest: positions of the longest rows.
    """
    if model.reads_alike(1, longest):
        return []
    message = (
        "rotary embeddings of this type depend on the length of the whole sequence; in packed rows of up to "
        f"{longest:,} positions short requests are computed as parts of a long one, as in a padded batch\n"
        "  → set eval_harness.max_length to the model's original context length if no request is longer"
    )
    return [Check(name="rotary", status="note", message=message)]


def batch_limits(resolved: ResolvedMesh, platform: str) -> RowLimits:
    """Limits of batch shapes on a platform: rows of any length on CPUs, multiples of 128 (the MXU tile) elsewhere.

    Where positions are sharded, each shard has two pieces (zigzag: an early and a late one), so lengths divide by both.
    """
    on_cpu = platform == "cpu"
    position_pieces = 2 * resolved.position_ways if resolved.position_ways > 1 else 1
    # On accelerators a batch has a cost of its own: the weights are gathered once per batch.
    unit, (fewer, larger) = (1 if on_cpu else 128) * position_pieces, (2.0, 4.0) if on_cpu else (1.0, 1.0)
    return RowLimits(num_shards=resolved.batch_ways, multiple=unit, max_batch_factor=fewer, max_row_factor=larger)


def rows_flops(model: LmConfig, vocab: int, shape: RowShape, attention: Literal["causal", "full"]) -> float:
    """FLOPs of a batch: all positions pass through the blocks, only the scored slots through the head.

    Args:
        model: the architecture.
        vocab: rows of the head.
        shape: shape of the batch.
        attention: whether attention FLOPs count the causal half of the position pairs, or all pairs.
    """
    # The difference with and without a vocabulary is the head.
    body = 2.0 * model.matmul_parameters(0)
    head = 2.0 * model.matmul_parameters(vocab) - body
    per_token = model.flops(vocab_size=vocab, context_length=shape.length, attention=attention)
    return shape.rows * (shape.length * (body + per_token.attention) + shape.slots * head)
