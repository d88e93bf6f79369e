"""Samples continuations of a few prompts and prints them, with the keys of upstream's `sample_lm`.

    python -m levanter.main.sample_lm --config_path my_sampler.yaml

It is `generate` with prompts from the configuration and output to the terminal: the same plan, the same Programs, the
same slots. The plan lists upstream's keys that have no effect.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from jax.sharding import Mesh

from haliax_ext.abstract import with_arrays
from haliax_ext.load_progress import LoadReport
from levanter.base.exit_codes import INTERNAL_ERROR, OK
from levanter.commands.cli.runner import run_config
from levanter.commands.generate import plan as generation
from levanter.commands.generate.plan import GenerateWork
from levanter.commands.generate.sample_config import SampleLmConfig
from levanter.commands.model.pretrained import PretrainedModel, load_pretrained
from levanter.config import ExplicitKeys
from levanter.data.tokenizer import EMPTY_PROMPT_NOTE, empty_text_ids
from levanter.distributed.compile_barrier import jit_together
from levanter.inference.capacity import DecodeCost
from levanter.inference.detokenizer import ChoiceText
from levanter.inference.engine import DeviceRunner, Engine, make_schedule
from levanter.inference.prompts import end_of_text_ids
from levanter.inference.requests import ChoiceId, Failed, Request, Token, merge_stop_ids
from levanter.io import Output
from levanter.runplan import Check, EntryPoint, RunPlan, Session, Target

NAME = "sample_lm"


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleWork:
    """The resolved inputs of `execute` besides the Programs.

    Attributes:
        config: as the user wrote it.
        generate: the model, its cache and its Programs.
        requests: the prompts of one round.
    """

    config: SampleLmConfig
    generate: GenerateWork
    requests: tuple[Request, ...]

    @property
    def serving(self) -> DecodeCost:
        """Memory and traffic of a decode step."""
        return self.generate.serving


@dataclass(kw_only=True)
class SampledTexts:
    """The result of a run.

    Attributes:
        loading: report of the loading.
        texts: of each round, each prompt and each choice, in this order.
        failed: errors of choices that could not be finished.
        tokens: how many were generated.
        seconds: from the first prompt to the last token, compilation included.
    """

    loading: LoadReport | None = None
    texts: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0


def describe(config: SampleLmConfig, target: Target, *, written: ExplicitKeys | None = None) -> RunPlan[SampleWork]:
    """Describes the run for `target`; reads metadata, no weights.

    Args:
        config: what is sampled.
        target: the devices.
        written: the keys that the user wrote; None for a config made in Python.

    Raises:
        ValueError: the model is broken or unknown, the mesh cannot be resolved, or the rows cannot be cut over it.
    """
    written = ExplicitKeys.in_python(config) if written is None else written
    planned = generation.describe(config.generating(written), target, written=written)
    # Prompts come from the config and texts go to the terminal, so there are no files.
    checks = [check for check in planned.checks if check.name not in ("input_path", "output_path")]
    # A plan may have to do without the tokenizer; the check of it says so, and a run is refused.
    known = planned.work.pretrained.local_tokenizer is not None
    requests = tuple(_requests(config, planned.work.pretrained)) if known else ()
    checks += _prompt_checks(requests, planned.work) if known or not config.texts else ()
    notes = _notes(config, written, planned.work.serving)
    checks += [Check(name="keys", status="note", message=message) for message in notes]
    work = SampleWork(config=config, generate=planned.work, requests=requests)
    # `replace` changes the type parameter of the plan, which a type checker cannot follow.
    return cast("RunPlan[SampleWork]", replace(cast(Any, planned), entry_point=NAME, checks=tuple(checks), work=work))


def _notes(config: SampleLmConfig, written: ExplicitKeys, served: DecodeCost) -> Iterator[str]:
    yield from config.engine.notes(written, served=served)
    if config.profile:
        yield "profile: without effect; trainer.profiler profiles training runs"
    if config.log_kernel_jaxprs_path:
        yield "log_kernel_jaxprs_path: without effect; no kernel jaxprs are written"


def _requests(config: SampleLmConfig, pretrained: PretrainedModel) -> Iterator[Request]:
    """The prompts of the first round."""
    tokenizer = pretrained.tokenizer
    ends = end_of_text_ids(tokenizer)
    for n, ids in enumerate(tokenizer.encode_batch(config.texts)):
        tokens = tuple(tokenizer.frame.around(ids.tolist())) or empty_text_ids(tokenizer, tokenizer.frame)
        yield Request(
            id=str(n),
            tokens=tokens,
            continued=tokens,
            params=config.sampling,
            seed=config.seed,
            stop_ids=merge_stop_ids(config.sampling, ends),
        )


def _prompt_checks(requests: Sequence[Request], work: GenerateWork) -> Iterator[Check]:
    # The limits of the engine are those of `execute`, so a prompt that is too long is refused before loading.
    schedule = make_schedule(work.programs)
    if not requests:
        error = ValueError("prompts: an empty list; give at least one prompt")
        yield Check(name="prompts", status="error", message=str(error), error=error)
    tokenizer = work.pretrained.tokenizer
    if not tokenizer.frame.around(()) and any(request.tokens == (tokenizer.bos_id,) for request in requests):
        yield Check(name="prompts", status="note", message=EMPTY_PROMPT_NOTE)
    for n, request in enumerate(requests):
        try:
            schedule.check(request)
        except ValueError as problem:
            error = ValueError(f"prompts[{n}]: {problem}; engine.max_seq_len is the context")
            yield Check(name="prompts", status="error", message=str(error), error=error)


def execute(plan: RunPlan[SampleWork], mesh: Mesh | None, session: Session | None = None) -> SampledTexts:
    """Samples every round and prints its texts; nothing runs that is not in `plan`."""
    assert mesh is not None, "sampling runs on devices"
    work, show = plan.work, session is not None and session.show
    generate = work.generate
    loaded = load_pretrained(generate.pretrained, mesh, show=show)
    model = with_arrays(generate.pretrained.abstract, loaded.arrays)
    schedule = make_schedule(generate.programs, share_prefixes=generate.config.inference.share_prefixes)
    engine = Engine(DeviceRunner(generate.programs, mesh, model, jit=jit_together), schedule)
    result = SampledTexts(loading=loaded.report)
    began = time.perf_counter()
    for number in range(work.config.n_rounds):
        _round(work, engine, number, result, show=show)
    result.seconds = time.perf_counter() - began
    return result


def _round(work: SampleWork, engine: Engine, number: int, result: SampledTexts, *, show: bool) -> None:
    """Samples all prompts once."""
    # A request's id is `<round>.<prompt>`; each round has another seed, so it samples other texts.
    requests = {f"{number}.{r.id}": replace(r, id=f"{number}.{r.id}", seed=r.seed + number) for r in work.requests}
    texts, pieces = {}, {}
    for request in requests.values():
        for choice in range(request.params.n):
            of = ChoiceId(request.id, choice)
            stream = work.generate.pretrained.tokenizer.stream
            texts[of], pieces[of] = ChoiceText.for_request(request, stream, limit=work.config.max_new_tokens), []
    for event in engine.run(requests.values()):
        if isinstance(event, Failed):
            result.failed.append(f"{event.of}: {event.error}")
        elif isinstance(event, Token):
            result.tokens += 1
            piece = texts[event.of].push(event.id)
            pieces[event.of].append(piece.text)
            # The host found the stop string; the engine's slot is freed.
            if piece.reason is not None:
                engine.cancel(event.of)
    for of, text in pieces.items():
        result.texts.append("".join(text))
        if show:
            # The part of the id after the dot is the number of the prompt.
            prompt = work.config.texts[int(of.request.partition(".")[2])]
            print(f"--- round {number + 1}, prompt {of.request.partition('.')[2]}, text {of.choice + 1}")
            print(f"{prompt}{result.texts[-1]}")


def finish(plan: RunPlan[SampleWork], done: SampledTexts, session: Session) -> int:
    """Prints the speed, and the choices that could not be finished."""
    del plan
    rate = done.tokens / max(done.seconds, 1e-9)
    session.tracker.log_summary({"tokens": done.tokens, "seconds": done.seconds, "tokens_per_second": rate})
    if session.show:
        print(f"{done.tokens:,} tokens in {done.seconds:.1f} s = {rate:,.1f} tokens/s, compilation included")
        for message in done.failed:
            print(f"not finished: {message}")
    return INTERNAL_ERROR if done.failed else OK


def outputs(plan: RunPlan[SampleWork], session: Session) -> tuple[Output, ...]:
    """Nothing is written."""
    del plan, session
    return ()


ENTRY_POINT = EntryPoint(
    name=NAME,
    config=SampleLmConfig,
    describe=describe,
    execute=execute,
    outputs=outputs,
    finish=finish,
)


def main(config: SampleLmConfig, *, written: ExplicitKeys | None = None) -> int:
    """Samples on the devices of this run."""
    return run_config(ENTRY_POINT, config, written=written).exit_code
