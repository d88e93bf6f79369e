"""Measures memorization of prepared prompts, row by row: the probability of the exact suffix.

    python -m levanter.main.eval_sliding_lm --config_path my_set.yaml

The same engine as `eval_careless_lm`, over rows that were prepared beforehand (a prompt and what follows it) instead of
windows that slide over a book. Rows may differ in length; see `levanter.memorization.examples` for their formats. Each
component of `data:` is a separate set, with its own folder of results.
"""

from levanter.commands.cli.runner import run_config
from levanter.commands.memorize.plan import (
    DEFAULT_BATCH,
    BookJob,
    MemorizationWork,
    OpenJob,
    describe_jobs,
    model_block,
)
from levanter.commands.memorize.run import execute_jobs, finish, outputs
from levanter.commands.memorize.sliding_config import EvalSlidingLmConfig
from levanter.commands.model.saved_model import resolve_saved_source
from levanter.commands.model.source import find_tokenizer, resolve_source
from levanter.config import ExplicitKeys
from levanter.data import (
    DatasetComponent,
    LmDatasetFormatBase,
    Tokenizer,
    UrlDatasetSource,
    read_records,
)
from levanter.data.errors import DataError
from levanter.io import join
from levanter.io.paths import MissingFileError, expand, is_remote
from levanter.memorization.books import slug
from levanter.memorization.conventions import CUSTOM
from levanter.memorization.examples import Examples, pairs_digest, prompt_pairs, tokenized
from levanter.memorization.results import FULL, Scheme
from levanter.runplan import Check, EntryPoint, RunPlan, Target

NAME = "eval_sliding_lm"
PLANNED_POSITIONS = 100
"""Assumed tokens of a row if the rows are not available here; half of them are scored."""


def describe(
    config: EvalSlidingLmConfig, target: Target, *, written: ExplicitKeys | None = None
) -> RunPlan[MemorizationWork]:
    """Describes the run for `target`; reads metadata and the rows, no weights."""
    written = ExplicitKeys.in_python(config) if written is None else written
    # The checkpoint's own tokenizer is used unless the user wrote another one.
    named = config.data.tokenizer if "data.tokenizer" in written else None
    model, _ = model_block(config, written)
    if config.checkpoint_path is not None:
        origin = resolve_saved_source(config.checkpoint_path, model)
    else:
        origin = resolve_source(config.reference, model, allow_pickle=config.allow_pickle)
    # The rows' lengths depend on the tokenizer, so it is needed before the model is described.
    tokenizer, _ = find_tokenizer(named, origin=origin, size=origin.architecture.vocab_size)
    checks: list[Check] = []
    jobs = []
    for name, component in config.data.components.items():
        job, check = _job(config, name, component, tokenizer, longest=origin.architecture.max_seq_len)
        jobs.append(job)
        checks.append(check)
    return describe_jobs(
        config,
        target,
        jobs,
        entry_point=NAME,
        checks=checks,
        schemes=[Scheme.parse(name) for name in config.schemes] + [job.scheme for job in jobs],
        tokenizer=named,
        written=written,
    )


def _job(
    config: EvalSlidingLmConfig, name: str, component: object, tokenizer: Tokenizer | None, *, longest: int
) -> tuple[BookJob, Check]:
    examples: Examples | None = None
    digest = None
    reason = "the rows are not available here"
    try:
        paths, format = _files(config, name, component)
        pairs = [pair for path in paths for pair in prompt_pairs(read_records(path), format)]
        # Upstream limits batches, so the limit in rows depends on the batch size.
        if config.max_batches is not None:
            pairs = pairs[: config.max_batches * (config.eval_batch_size or DEFAULT_BATCH)]
        # The digest is of the text, so that it is known without a tokenizer.
        digest = pairs_digest(pairs)
        if tokenizer is not None:
            examples = Examples.of(tokenized(pairs, tokenizer, bos=config.bos))
            reason = f"{len(examples):,} rows"
        check = Check(name="rows", status="ok", message=f"{name}: {len(pairs):,} rows in {len(paths)} files")
    except MissingFileError as error:
        check = Check(name="rows", status="unchecked", message=f"{name}: {error}", error=error)
    # Problems of a set name the set's key.
    except ValueError as error:
        bad = DataError(f"data.components.{name}: {error}")
        check = Check(name="rows", status="error", message=str(bad), error=bad)

    def opened(_: Tokenizer) -> OpenJob:
        assert examples is not None, "RunPlan.check() comes before a run"
        return OpenJob(source=examples, spans=examples.spans(), aligned=examples.aligned)

    # Rows that are not available are planned with an assumed length, at most the model's context.
    positions = min(PLANNED_POSITIONS, longest) if examples is None else examples.positions
    job = BookJob(
        key=name,
        title=name,
        folder=join(config.output_base_path, slug(name)),
        preset=CUSTOM,
        scheme=FULL if config.scheme is None else Scheme.parse(config.scheme),
        positions=positions,
        suffix_tokens=positions // 2 if examples is None else examples.suffix_tokens,
        bos=config.bos,
        # Rows of different lengths are padded; then each row has its own suffix.
        padded=examples is not None and examples.padded,
        batch_size=config.eval_batch_size,
        windows=None if examples is None else len(examples),
        windows_reason=reason,
        identity={
            "rows.sha256": digest,
            "rows.bos": config.bos,
            "preset": CUSTOM,
            "scheme": config.scheme or FULL.name,
        },
        text=None,
        open=opened,
    )
    return job, check


def _files(config: EvalSlidingLmConfig, name: str, component: object) -> tuple[list[str], LmDatasetFormatBase]:
    if not isinstance(component, DatasetComponent) or not isinstance(component.source, UrlDatasetSource):
        raise DataError("a prepared set is one component with files: source: {validation_urls: […]}")
    patterns = component.source.urls(config.split)
    if not patterns:
        raise DataError(f"source: has no {config.split}_urls")
    try:
        return expand(patterns), component.format
    except (ValueError, OSError) as error:
        # A remote file that cannot be listed here may be there for the machine that runs.
        if isinstance(error, MissingFileError) or not any(map(is_remote, patterns)):
            raise
        raise MissingFileError(f"{name}: {error}") from error


execute = execute_jobs

ENTRY_POINT = EntryPoint(
    name=NAME,
    config=EvalSlidingLmConfig,
    describe=describe,
    execute=execute_jobs,
    outputs=outputs,
    finish=finish,
)


def main(config: EvalSlidingLmConfig, *, written: ExplicitKeys | None = None) -> int:
    """Runs the evaluation on the devices of this run."""
    return run_config(ENTRY_POINT, config, written=written).exit_code
