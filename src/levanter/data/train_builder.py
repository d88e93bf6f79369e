"""Building training data: resolve, tokenize what is missing, lay documents into rows, mix sets.

Cheap checks come first: names, then the identities of existing token stores; only then is text tokenized.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import numpy as np

from levanter.data.best_fit_packing import BEST_FIT, best_fit_rows
from levanter.data.cache_staleness import refuse_stale
from levanter.data.component_formats import FORMATS
from levanter.data.config import BlockShuffleConfig, LmDataConfig
from levanter.data.conversations import ChatEncoder, chat_template, describe_chat
from levanter.data.documents import Formats
from levanter.data.encoders import PrebuiltEncoder, SupervisedEncoder, TextEncoder
from levanter.data.errors import DataError, raise_problems
from levanter.data.fill_in_middle import FillInMiddleTokens, Sentinels, find_sentinels
from levanter.data.formats import (
    ChatLmDatasetFormat,
    PrebuiltLmDatasetFormat,
    PreferenceChatLmDatasetFormat,
    SupervisedLmDatasetFormat,
    TextLmDatasetFormat,
)
from levanter.data.manifest import StoreError, StoreIdentity, compare
from levanter.data.mixture import plan_mixture
from levanter.data.pairs import SIDES, pair_rows
from levanter.data.preference import PairDocuments, PairEncoder, describe_pairs, pair_template
from levanter.data.rows import ConcatenatedRows, Overlength, Rows, TrainRows, packed_rows
from levanter.data.shuffle import Identity, Permutation, permutation, subkey
from levanter.data.store import Tokens, open_store
from levanter.data.store_build import BuildProgress, Encoder, build_store, tokenize_in_memory
from levanter.data.tokenizer import Tokenizer, bos_note
from levanter.data.train_dataset import BatchSchedule, SetRows, TrainingData
from levanter.data.train_sets import TrainingSet, TrainingSets, resolve_training
from levanter.io.paths import join

TOKENS = 512
"""The most tokens of a conversation that a sample shows."""


def marked_sample(
    name: str, tokens: Tokens, tokenizer: Tokenizer, *, number: int = 0, what: str = "the first conversation"
) -> str:
    """A document of a set with weights, as text and as ids, in a few lines.

    Args:
        name: the set's.
        tokens: its documents.
        tokenizer: the run's.
        number: the index of the document.
        what: the description of the document.
    """
    length = int(tokens.starts[number + 1] - tokens.starts[number])
    ids, weights = tokens.read(tokens.starts[number : number + 1], np.array([length]))
    assert weights is not None
    # A weight is that of predicting *from* a place.
    counted = np.concatenate([[False], weights[:-1] > 0])
    text = [tokenizer.decode(ids[list(run)]) for run in _runs(counted[:TOKENS])]
    numbers = [" ".join(map(str, ids[list(run)].tolist())) for run in _runs(counted[:TOKENS])]
    marks = [bool(counted[run[0]]) for run in _runs(counted[:TOKENS])]
    omitted = f" … and {length - TOKENS:,} more tokens" if length > TOKENS else ""
    lines = [
        f"{name}: {what}, {length:,} tokens, of which {int(counted.sum()):,} count (between ⟦ and ⟧)",
        *_marked(text, marks, "").splitlines(),
        f"ids: {_marked(numbers, marks, ' ')}{omitted}",
    ]
    bos = tokenizer.bos_id
    if bos is not None and ids[0] != bos:
        lines.append(f"it does not begin with {tokenizer.decode([bos])} (id {bos}): its chat template writes none")
    return "\n  ".join(lines)


def _runs(counted: np.ndarray) -> list[range]:
    """The maximal ranges of equal values."""
    runs, start = [], 0
    for _, group in groupby(counted.tolist()):
        length = len(list(group))
        runs.append(range(start, start + length))
        start += length
    return runs


def _marked(pieces: list[str], marks: list[bool], separator: str) -> str:
    return separator.join(f"⟦{piece}⟧" if mark else piece for piece, mark in zip(pieces, marks, strict=True))


def build_training(
    config: LmDataConfig,
    tokenizer: Tokenizer,
    *,
    positions: int,
    batch_sizes: Sequence[tuple[int, int]],
    seed: int,
    vocab_size: int | None = None,
    on_progress: Callable[[BuildProgress], None] | None = None,
    formats: Formats = FORMATS,
    last_held_out: float = 0.0,
) -> TrainingData:
    """Tokenizes sets without a token store, and opens the rows of a training run.

    Args:
        config: the `data:` block.
        tokenizer: text to ids.
        positions: tokens in a row, at least 2.
        batch_sizes: (first step, rows), ascending from step 0.
        seed: of every order.
        vocab_size: the size of the model's vocabulary; the tokenizer's by default.
        on_progress: called with the progress of tokenization over all sets.
        formats: the formats of records that can be trained on.
        last_held_out: the share of each set's rows, at its end, that is held out for validation.

    Raises:
        DataError: the problems of `resolve_training`; token stores of another identity, or damaged ones; sets without
            text; ids outside the model's vocabulary. Everything of one kind at once.
    """
    if positions < 2:
        raise ValueError(f"train_seq_len must be at least 2 (a token and the next), got {positions}")
    resolved = resolve_training(config, formats=formats)
    # Before hours of tokenizing: a tokenizer without sentinels is refused.
    sentinels, problems = _sentinels(resolved.sets, tokenizer)
    raise_problems(problems)
    tokens = build_tokens(config, resolved.sets, tokenizer, on_progress)
    tokens = [
        set_tokens
        if (ids := sentinels.get(dataset.name)) is None
        else _fill_in_middle(config, dataset, set_tokens, tokenizer, ids, seed)
        for dataset, set_tokens in zip(resolved.sets, tokens, strict=True)
    ]
    limit = tokenizer.vocab_size if vocab_size is None else vocab_size
    raise_problems(list(token_problems(resolved.sets, tokens, limit)))
    schedule = BatchSchedule.of(batch_sizes)
    sets, lines_of_sets, problems, samples = [], [], [], []
    for dataset, set_tokens in zip(resolved.sets, tokens, strict=True):
        try:
            rows = plan_rows(config, dataset, set_tokens, positions)
            share = last_held_out
            sets.append(_set_rows(config, dataset.name, rows, first_batch=schedule.sizes[0], seed=seed, share=share))
        except DataError as error:
            problems.append(str(error))
            continue
        lines_of_sets.append(_describe_set(dataset, set_tokens, sets[-1], tokenizer))
        if isinstance(dataset.format, ChatLmDatasetFormat):
            samples.append(marked_sample(dataset.name, set_tokens, tokenizer))
        elif isinstance(dataset.format, PreferenceChatLmDatasetFormat):
            titles = [f"the first pair, {side}" for side in SIDES]
            samples += [
                marked_sample(dataset.name, set_tokens, tokenizer, number=n, what=title)
                for n, title in enumerate(titles)
            ]
    raise_problems(problems)
    mixture = plan_mixture(
        [(schedule.first_draw(step), weights) for step, weights in resolved.stages],
        [dataset.name for dataset in sets],
        block=config.mixture_block_size,
        seed=seed,
    )
    mixed = [line for line in resolved.describe() if line.startswith("mixture")]
    lines = (
        *lines_of_sets,
        *mixed,
        f"order: {_shuffle_line(config)}, seed {seed}; stop_strategy {config.stop_strategy}",
    )
    ignored = config.ignore_token_id
    return TrainingData(
        positions=positions,
        sets=tuple(sets),
        mixture=mixture,
        schedule=schedule,
        ignored=ignored if ignored is not None and ignored >= 0 else None,
        draws=mixture.end([dataset.used for dataset in sets], config.stop_strategy),
        described=lines,
        notes=resolved.notes,
        samples=tuple(samples),
    )


def _sentinels(sets: Sequence[TrainingSet], tokenizer: Tokenizer) -> tuple[dict[str, Sentinels], list[str]]:
    """The sentinels of each set that has `fim`, and the problems with them."""
    ids, problems = {}, []
    for dataset in sets:
        if dataset.fim is not None:
            try:
                ids[dataset.name] = find_sentinels(dataset.fim, tokenizer)
            except DataError as error:
                problems.append(f"data set {dataset.name!r}: {error}")
    return ids, problems


def _fill_in_middle(
    config: LmDataConfig,
    dataset: TrainingSet,
    tokens: Tokens,
    tokenizer: Tokenizer,
    sentinels: Sentinels,
    seed: int,
) -> FillInMiddleTokens:
    assert dataset.fim is not None
    return FillInMiddleTokens(
        tokens=tokens,
        rate=dataset.fim.rate,
        spm=dataset.fim.spm,
        sentinels=sentinels,
        key=subkey(seed, "fim", dataset.name),
        bos=config.enforce_bos and tokenizer.bos_id is not None,
        eos=config.enforce_eos and tokenizer.eos_id is not None,
    )


def _shuffle_line(config: LmDataConfig) -> str:
    shuffle, kind = config.shuffle, config.permutation_type or "feistel"
    if isinstance(shuffle, BlockShuffleConfig):
        block, window = shuffle.io_block_size, shuffle.window_blocks
        return f"blocks of {block} rows shuffled, then rows within {window} blocks ({shuffle.perm_type})"
    if shuffle is True:
        return f"all rows shuffled ({kind})"
    return f"rows shuffled within eras of {shuffle} ({kind})" if shuffle else "rows in document order"


def build_tokens(
    config: LmDataConfig,
    sets: Sequence[TrainingSet],
    tokenizer: Tokenizer,
    on_progress: Callable[[BuildProgress], None] | None = None,
) -> list[Tokens]:
    """The tokens of each set: from its store, which is built if it is missing, or in memory.

    Raises:
        StoreError: lists all stores of another identity, before any store is built.
        DataError: a document cannot be read or tokenized.
    """
    # All stores are compared before the first one is built: tokenization may take hours.
    identities, problems = _identities(config, sets, tokenizer)
    if problems:
        raise StoreError("\n".join(problems))
    sizes = [
        # Finished stores take no time, so they have no share in the progress.
        0
        if dataset.built is not None and dataset.built.shards is not None
        else sum(source.size for source in identity.sources)
        for dataset, identity in zip(sets, identities, strict=True)
    ]
    opened: list[Tokens] = []
    total, before, tokens = max(sum(sizes), 1), 0, 0
    for dataset, identity, size in zip(sets, identities, sizes, strict=True):
        # The defaults bind the values of this round of the loop.
        def report(progress: BuildProgress, size: int = size, before: int = before, tokens: int = tokens) -> None:
            if on_progress is not None:
                fraction = (before + progress.fraction * size) / total
                on_progress(BuildProgress(tokens=tokens + progress.tokens, fraction=fraction))

        manifest = dataset.built
        if dataset.folder is not None and (manifest is None or manifest.shards is None):
            manifest = build_store(
                dataset.folder, identity, dataset.sources(), _encoder(dataset, identity, tokenizer), report
            )
        if dataset.folder is not None and manifest is not None:
            opened.append(open_store(dataset.folder, manifest))
        else:
            opened.append(
                tokenize_in_memory(identity, dataset.sources(), _encoder(dataset, identity, tokenizer), report)
            )
        before += size
        tokens += int(opened[-1].starts[-1]) if size else 0
    return opened


def compare_stores(
    config: LmDataConfig, sets: Sequence[TrainingSet], tokenizer: Tokenizer, *, vocab_size: int
) -> list[str]:
    """The problems of existing token stores, found without reading a token.

    Args:
        config: the `data:` block.
        sets: from `resolve_training`.
        tokenizer: the run's.
        vocab_size: the size of the model's vocabulary.
    """
    _, problems = _identities(config, sets, tokenizer)
    problems += _sentinels(sets, tokenizer)[1]
    for dataset in sets:
        if dataset.built is not None and dataset.built.shards is not None and dataset.built.largest_id >= vocab_size:
            problems.append(vocabulary_error(dataset, dataset.built.largest_id, vocab_size))
    return problems


def template_lines(sets: Sequence[TrainingSet], tokenizer: Tokenizer) -> list[str]:
    """For each set of conversations its template, and the rule for the tokens that count.

    Raises:
        DataError: a set has no template.
    """
    chats = [(dataset.name, dataset.format) for dataset in sets if isinstance(dataset.format, ChatLmDatasetFormat)]
    pairs = [
        (dataset.name, dataset.format) for dataset in sets if isinstance(dataset.format, PreferenceChatLmDatasetFormat)
    ]
    return [
        *(f"{name}: {describe_chat(format, tokenizer)}" for name, format in chats),
        *(f"{name}: pairs; {describe_pairs(format, tokenizer)}" for name, format in pairs),
    ]


def _identities(
    config: LmDataConfig, sets: Sequence[TrainingSet], tokenizer: Tokenizer
) -> tuple[list[StoreIdentity], list[str]]:
    """The identity of each set's token store by the configuration, and the problems of stores that have another one."""
    identities, problems = [], []
    for dataset in sets:
        try:
            identity = store_identity(config, dataset, tokenizer)
        # A `StoreError` concerns storage rather than this set, so it is raised at once; other problems are collected.
        except StoreError:
            raise
        except DataError as error:
            problems.append(f"data set {dataset.name!r}: {error}")
            continue
        identities.append(identity)
        if dataset.built is not None and dataset.folder is not None:
            try:
                compare(dataset.folder, dataset.built.identity, identity, sources=dataset.document_sources is not None)
                if dataset.document_sources is not None:
                    refuse_stale(dataset.folder, dataset.built, identity)
            except StoreError as error:
                problems.append(str(error))
    return identities, problems


ENFORCED_FORMATS = (TextLmDatasetFormat, SupervisedLmDatasetFormat, PreferenceChatLmDatasetFormat)
"""The formats to which `enforce_bos` and `enforce_eos` apply: chat templates write BOS and EOS themselves, and prebuilt
ids contain them. Preferences may be plain texts."""


def bos_notes(config: LmDataConfig, sets: Sequence[TrainingSet], tokenizer: Tokenizer) -> list[str]:
    """A line if documents of these sets begin with a BOS that the tokenizer's files do not put there."""
    enforce = config.enforce_bos and any(isinstance(dataset.format, ENFORCED_FORMATS) for dataset in sets)
    note = bos_note(tokenizer, enforce=enforce, what="document", key="data.enforce_bos")
    return [] if note is None else [note]


def store_identity(config: LmDataConfig, dataset: TrainingSet, tokenizer: Tokenizer) -> StoreIdentity:
    """The identity of a set's token store by the configuration."""
    adds_bos_eos = isinstance(dataset.format, ENFORCED_FORMATS)
    return StoreIdentity(
        tokenizer=tokenizer.hash,
        tokenizer_name=tokenizer.name,
        vocab_size=tokenizer.vocab_size,
        bos=tokenizer.bos_id if adds_bos_eos and config.enforce_bos else None,
        eos=tokenizer.eos_id if adds_bos_eos and config.enforce_eos else None,
        format=dataset.format_json(tokenizer),
        weighted=not isinstance(dataset.format, TextLmDatasetFormat),
        sources=tuple(source.describe() for source in dataset.sources()),
        groups=config.cache_options.num_shard_groups or 128,
    )


def _encoder(dataset: TrainingSet, identity: StoreIdentity, tokenizer: Tokenizer) -> Encoder:
    format = dataset.format
    if isinstance(format, PrebuiltLmDatasetFormat):
        return PrebuiltEncoder(format=format, vocab_size=tokenizer.vocab_size)
    if isinstance(format, SupervisedLmDatasetFormat):
        return SupervisedEncoder(format=format, tokenizer=tokenizer, bos=identity.bos, eos=identity.eos)
    if isinstance(format, ChatLmDatasetFormat):
        return ChatEncoder(format=format, template=chat_template(format, tokenizer), tokenizer=tokenizer)
    if isinstance(format, PreferenceChatLmDatasetFormat):
        template = pair_template(format, tokenizer)
        pairs = PairEncoder(format=format, template=template, tokenizer=tokenizer, bos=identity.bos, eos=identity.eos)
        return PairDocuments(pairs=pairs)
    return TextEncoder(tokenizer=tokenizer, bos=identity.bos, eos=identity.eos, vocab_size=tokenizer.vocab_size)


def token_problems(sets: Sequence[TrainingSet], tokens: Sequence[Tokens], vocab_size: int) -> Iterator[str]:
    """Problems that make a set useless: no text, ids that the model lacks, nothing that counts in the loss."""
    for dataset, set_tokens in zip(sets, tokens, strict=True):
        where = dataset.folder if dataset.document_sources is None else "; ".join(map(str, dataset.document_sources))
        # Every document's first token is context, so at least one document needs two tokens.
        if set_tokens.starts[-1] - (len(set_tokens.starts) - 1) < 1:
            what = "no text" if set_tokens.starts[-1] == 0 else "no document with at least two tokens"
            if isinstance(dataset.format, ChatLmDatasetFormat):
                what = "no conversation in which the assistant says something"
            yield f"data set {dataset.name!r} is empty: {what} in {where}"
        elif set_tokens.largest_id >= vocab_size:
            yield vocabulary_error(dataset, set_tokens.largest_id, vocab_size)
        elif set_tokens.weighted and not counted_tokens(set_tokens)[0]:
            why = _UNCOUNTED[type(dataset.format)]
            yield f"data set {dataset.name!r}: none of its {set_tokens.starts[-1]:,} tokens counts in the loss; {why}"


_UNCOUNTED: dict[type, str] = {
    ChatLmDatasetFormat: "nothing that the template rendered is within {% generation %}: do the messages have the "
    "role that it expects of the assistant?",
    SupervisedLmDatasetFormat: "all targets are empty",
    PreferenceChatLmDatasetFormat: "nothing that the assistant says is counted: do the messages have the role that "
    "the template expects of it?",
    PrebuiltLmDatasetFormat: "all weights are 0 (format.loss_weights_key)",
}
_COUNTED_AT_ONCE = 1 << 22


def counted_tokens(tokens: Tokens) -> tuple[int, int]:
    """How many tokens count in the loss, and of how many: of the first tokens, of more only if none of these counts.

    Args:
        tokens: documents with weights.
    """
    total = int(tokens.starts[-1])
    counted = stop = 0
    while stop < total and not counted:
        begin, stop = stop, min(stop + _COUNTED_AT_ONCE, total)
        # The documents that end within this stretch.
        first, last = np.searchsorted(tokens.starts, [begin, stop], side="right")
        ends = tokens.starts[first:last] - 1
        _, weights = tokens.read(np.array([begin]), np.array([stop - begin]))
        assert weights is not None
        # From a document's last token nothing is predicted, whatever its weight.
        counted += int(np.count_nonzero(weights > 0)) - int(np.count_nonzero(weights[ends - begin] > 0))
    return counted, stop


def vocabulary_error(dataset: TrainingSet, largest: int, vocab_size: int) -> str:
    """The message about a set with ids that the model lacks."""
    where = dataset.folder if dataset.document_sources is None else "; ".join(map(str, dataset.document_sources))
    return (
        f"data set {dataset.name!r}: token id {largest} is outside the model's vocabulary of {vocab_size}; "
        f"{where} and model do not match"
    )


def plan_rows(config: LmDataConfig, dataset: TrainingSet, tokens: Tokens, positions: int) -> Rows:
    """Lays a set's documents into rows, by `pack` of the component or of its format."""
    if isinstance(dataset.format, PreferenceChatLmDatasetFormat):
        try:
            return pair_rows(tokens, half=positions, slices=dataset.format.slice_strategy)
        except DataError as error:
            raise DataError(f"data set {dataset.name!r}: {error}") from error
    separate = config.block_cross_document_attention
    pack = dataset.pack
    overlength: Overlength = "cut"
    if isinstance(dataset.format, ChatLmDatasetFormat):
        overlength = dataset.format.overlength
    if pack is None or pack is False:
        if isinstance(dataset.format, TextLmDatasetFormat):
            return ConcatenatedRows(tokens=tokens, positions=positions, separate=separate)
        # A record must stay whole, so `pack: false` puts one record in a row and pads it.
        pack = True if pack is None else "pad"
    if pack == BEST_FIT:
        # Beside the shards of the store, whose listing covers `shards/` alone.
        folder = None if dataset.folder is None else join(dataset.folder, "rows")
        return best_fit_rows(tokens, positions=positions, separate=separate, folder=folder)
    most = None if pack is True else 1 if pack == "pad" else int(pack)
    try:
        return packed_rows(tokens, positions=positions, separate=separate, most=most, overlength=overlength)
    except DataError as error:
        raise DataError(f"data set {dataset.name!r}: {error}") from error


def _set_rows(
    config: LmDataConfig, name: str, rows: Rows, *, first_batch: int, seed: int, share: float = 0.0
) -> SetRows:
    total = len(rows)
    held_out = (config.num_validation_sequences or {}).get(name, 0)
    if share and total > 1:
        # At least one, and never all of them, as upstream.
        held_out = min(max(int(total * share), 1), total - 1)
    used = total - held_out
    if used < 1:
        raise DataError(
            f"data.num_validation_sequences.{name}: {held_out:,} rows are held out of {total:,} with "
            f"{rows.positions} tokens each; nothing is left to train on"
        )
    if config.target_budget is not None and config.experiment_budget is not None:
        # Upstream's simulated epoching: an experiment of a fraction of the target budget sees the same fraction of each
        # set.
        used = max(int(used * (config.experiment_budget / config.target_budget)), 1)
    most = (config.max_train_batches or {}).get(name)
    if most is not None:
        if most < 1 or most * first_batch > used:
            raise DataError(
                f"data.max_train_batches.{name}: {most} batches of {first_batch} rows each; there are {used:,} rows, "
                f"{used // first_batch} batches"
            )
        used = most * first_batch
    key = subkey(seed, "set", name)
    divided = held_out > 0 or most is not None
    # Without a division, all rows are used and their order within the set does not matter here.
    split: Permutation = Identity(total)
    if divided and config.shuffle_before_trainval_split and not share:
        # Not keyed by the seed: what is held out stays held out when another seed goes on with the same model.
        split = permutation("feistel", total, subkey(0, "split", name))
    return SetRows(
        name=name,
        rows=rows,
        used=used,
        held_out=held_out,
        split=split,
        shuffle=config.shuffle,
        kind=config.permutation_type,
        key=key,
    )


def _describe_set(dataset: TrainingSet, tokens: Tokens, rows: SetRows, tokenizer: Tokenizer) -> str:
    documents = len(tokens.starts) - 1
    counted = ""
    if tokens.weighted:
        count, examined = counted_tokens(tokens)
        counted = f", {count / examined:.1%} of them count" + (
            "" if examined == tokens.starts[-1] else f" (of the first {examined:,})"
        )
    clauses = [
        f"{dataset.name}: {int(tokens.starts[-1]):,} tokens{counted} in {documents:,} documents",
        f"{len(rows.rows):,} rows of {rows.rows.positions} ({rows.rows.describe()})",
    ]
    if isinstance(dataset.format, PreferenceChatLmDatasetFormat):
        clauses.append(describe_pairs(dataset.format, tokenizer))
    if isinstance(dataset.format, ChatLmDatasetFormat):
        clauses.append(describe_chat(dataset.format, tokenizer))
        if tokens.skipped:
            clauses.append(f"{tokens.skipped:,} conversations in which the assistant says nothing left out")
    if isinstance(tokens, FillInMiddleTokens):
        clauses.append(tokens.describe())
    if rows.held_out:
        clauses.append(f"{rows.held_out:,} rows held out")
    if rows.used + rows.held_out < len(rows.rows):
        clauses.append(f"{rows.used:,} rows used")
    clauses.append("in memory" if dataset.folder is None else f"token store {dataset.folder}")
    if dataset.note:
        clauses.append(dataset.note)
    return "; ".join(clauses)


__all__ = [
    "BatchSchedule",
    "SetRows",
    "TrainRows",
    "TrainingData",
    "TrainingSet",
    "TrainingSets",
    "build_tokens",
    "build_training",
    "compare_stores",
    "resolve_training",
    "store_identity",
    "template_lines",
]
