"""Builds the token caches of a training run in advance.

    python -m levanter.main.cache_dataset --config_path config/train/nano.yaml

Takes a training configuration as it is (or a file with nothing but `data:`), one set or a mixture, and tokenizes what
its training sets (those with a weight) and its validation sets need and has not been tokenized yet. Then it prints what
each store holds. A training run finds both kinds of stores, `eval_lm` the latter. An interrupted build resumes where it
stopped, file by file. No accelerator is used. `--verify true` checks every store against its checksums.

With several processes, the first one builds while the others wait; these then find the stores, or build their own if
`cache_dir` is on a local disk of each host.
"""

import logging
import time
from dataclasses import dataclass, replace

import numpy as np

from levanter.commands.cli.lifecycle import join_processes
from levanter.commands.model.source import find_tokenizer
from levanter.commands.train.lm.train_lm import TrainLmConfig
from levanter.config import ExplicitKeys
from levanter.data import (
    AbsentTextError,
    BuildProgress,
    DataError,
    DatasetComponentBase,
    LmDataConfig,
    TrainingSet,
    TrainingSets,
    as_training_set,
    build_tokens,
    resolve_evaluation,
    resolve_training,
)
from levanter.data.cache_staleness import changed_files, compare_sources, stale_message
from levanter.data.manifest import StoreError, StoreIdentity
from levanter.data.store import StoredTokens
from levanter.data.train_builder import store_identity
from levanter.distributed.agreement import ONE_FOR_ALL_SECONDS, is_process_0, process_0_first
from levanter.io import Output, Progress, probe
from levanter.io.progress import amount, duration
from levanter.runplan import BAD_INPUT, RunRefused

logger = logging.getLogger(__name__)

VERIFIED_AT_ONCE = 1 << 22
"""Tokens of one read during verification."""


@dataclass(frozen=True, kw_only=True)
class CacheDatasetConfig(TrainLmConfig):
    """Build the token caches of a training configuration; only `data:` and the vocabulary size are read.

    Attributes:
        verify: whether finished token caches are verified: all checksums, and whether the source text has changed
            since.
    """

    verify: bool = False


def main(config: CacheDatasetConfig, *, written: ExplicitKeys | None = None) -> int:
    """Builds missing token stores and prints all of them."""
    # Problems of other keys would stop a training run, but they do not affect its rows, so they are not checked here.
    if config.hf_checkpoint is not None and (written is None or "data.tokenizer" not in written):
        config = replace(config, data=replace(config.data, tokenizer=config.hf_checkpoint))
    join_processes(config.trainer.distributed)
    with process_0_first("preparing data", seconds=ONE_FOR_ALL_SECONDS):
        _build(config, show=is_process_0())
    return 0


def _build(config: CacheDatasetConfig, *, show: bool) -> None:
    log = print if show else logger.debug
    sets, lines = _sets(config.data)
    size = config.model.vocab_size if config.data.vocab_size is None else config.data.vocab_size
    tokenizer, check = find_tokenizer(config.data.tokenizer, origin=None, size=size)
    if tokenizer is None:
        assert check.error is not None
        raise check.error
    stored = [dataset for dataset in sets if dataset.folder is not None]
    # Before hours of tokenizing: is every cache folder writable?
    probe(
        Output(key=f"data.cache_dir of {dataset.name}", path=dataset.folder, kind="folder")
        for dataset in stored
        if dataset.folder is not None and dataset.document_sources is not None
    )
    for line in lines:
        log(line)
    # Such sets have no folder to build a store in.
    without = [dataset.name for dataset in sets if dataset.folder is None]
    if without:
        log(f"{', '.join(without)}: tokenized at the start of a run (data.cache_dir is null, or the text is in memory)")
    if not stored:
        return
    log(f"tokenizer: {tokenizer.name}, {tokenizer.vocab_size:,} ids")
    began = time.perf_counter()
    with Progress("tokenizing", total=None, unit="tokens", show=show, lazy=True) as progress:

        def report_progress(step: BuildProgress) -> None:
            # The total is known at the end only; until then it is estimated from the share of bytes that was read.
            if step.fraction > 0:
                progress.meter.total = max(step.tokens / step.fraction, step.tokens)
            progress.advance_to(step.tokens)

        tokens = build_tokens(config.data, stored, tokenizer, report_progress)
        new_tokens = progress.meter.done
        # Ends the progress line without a total, which may be off by a few tokens.
        progress.meter.total = None
    seconds = time.perf_counter() - began
    for dataset, store in zip(stored, tokens, strict=True):
        assert isinstance(store, StoredTokens)
        log(f"  {store_line(dataset, store)}")
    if new_tokens:
        log(f"{new_tokens:,.0f} tokens in {duration(seconds)}, {new_tokens / seconds:,.0f} tokens/s")
    else:
        log("nothing was missing")
    if config.verify:
        pairs = [
            (dataset, store) for dataset, store in zip(stored, tokens, strict=True) if isinstance(store, StoredTokens)
        ]
        _verify([store for _, store in pairs], show=show)
        for dataset, store in pairs:
            log(_verify_sources(dataset, store, store_identity(config.data, dataset, tokenizer)))
        log("verified: every token was read against its checksum")


def _sets(config: LmDataConfig) -> tuple[list[TrainingSet], list[str]]:
    """The sets to tokenize, validation sets marked as such, and notes on them.

    Raises:
        DataError: there is no data, or it is invalid; lists all problems.
    """
    trained: TrainingSets | None = None
    problems: list[ValueError] = []
    nothing: list[ValueError] = []
    try:
        trained = resolve_training(config)
    except AbsentTextError as error:
        # A configuration that only evaluates has no training data, which is no problem then.
        expected = any(_has_training(component) for component in config.components.values())
        (problems if expected else nothing).append(error)
    except DataError as error:
        problems.append(error)
    validation: list[TrainingSet] = []
    try:
        evaluation_sets = resolve_evaluation(config, in_training=True).sets
        validation = [
            replace(as_training_set(one, folder=one.folder), name=f"{one.name} (validation)") for one in evaluation_sets
        ]
    except DataError as error:
        # Both resolutions report problems of the same component; each is listed once.
        if str(error) not in [str(problem) for problem in problems]:
            problems.append(error)
    # Only now is the missing training data a problem: there is nothing to evaluate either.
    if not problems and trained is None and not validation:
        problems = nothing
    if problems:
        raise problems[0] if len(problems) == 1 else RunRefused(problems, exit_code=BAD_INPUT)
    lines = [*map(str, validation)]
    if trained is not None:
        lines = [*trained.describe(), *lines, *trained.notes]
    return [*(() if trained is None else trained.sets), *validation], lines


def _has_training(component: DatasetComponentBase) -> bool:
    # `source` is absent from components that are sources themselves.
    source = getattr(component, "source", component)
    return bool(getattr(source, "train_urls", None)) or source is None


def store_line(dataset: TrainingSet, tokens: StoredTokens) -> str:
    """The contents of a store, in one line."""
    shards = tokens.manifest.shards or ()
    size = sum(sum(shard.files.values()) for shard in shards)
    skipped = sum(shard.skipped for shard in shards)
    empty = f", {skipped:,} empty documents left out" if skipped else ""
    return (
        f"{dataset.name}: {tokens.manifest.tokens:,} tokens, {tokens.manifest.documents:,} documents{empty}, "
        f"{len(shards)} shards, {amount(size, 'bytes')} in {tokens.folder}"
    )


def _verify_sources(dataset: TrainingSet, tokens: StoredTokens, wanted: StoreIdentity) -> str:
    """Compares the sources of a store with their recorded digests; returns the result in a line.

    Raises:
        StoreError: lists those whose text has changed.
    """
    if dataset.document_sources is None:
        return f"{dataset.name}: unverified: its sources are not available here"
    comparison = compare_sources(tokens.manifest, wanted, thorough=True)
    if comparison.problems:
        raise StoreError(stale_message(tokens.folder, comparison.problems))
    if comparison.unverified:
        return f"{dataset.name}: unverified: the store has no digests of {comparison.unverified:,} of its sources"
    return f"{dataset.name}: {len(wanted.sources):,} sources match the store"


def _verify_files(stores: list[StoredTokens]) -> None:
    """Compares every file with its recorded digest, which also finds files that were swapped."""
    for store in stores:
        problems, unknown = changed_files(store.folder, store.manifest)
        if problems:
            listed = "\n".join(f"  {problem}" for problem in problems[:8])
            raise StoreError(f"{store.folder}: this token store is damaged; delete it to build it again\n{listed}")
        if unknown:
            logger.info("%s: %d files have no digest; only their checksums are verified", store.folder, unknown)


def _verify(stores: list[StoredTokens], *, show: bool) -> None:
    """Reads every token; raises a `StoreError` if a checksum is wrong."""
    # File digests find swapped files; the reads below check the checksums within each file.
    _verify_files(stores)
    everything = sum(int(store.starts[-1]) for store in stores)
    with Progress("verifying", total=everything, unit="tokens", show=show) as progress:
        for store in stores:
            total = int(store.starts[-1])
            # Bounded reads, so that memory does not grow with the store.
            for begin in range(0, total, VERIFIED_AT_ONCE):
                count = min(VERIFIED_AT_ONCE, total - begin)
                store.read(np.array([begin]), np.array([count]))
                progress.advance(count)
