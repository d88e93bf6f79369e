"""Trains a byte-level BPE tokenizer from text.

    python -m levanter.main.train_tokenizer --config_path config/train/my_run.yaml --output_path tokenizers/mine

Reads the training text of a `data:` block, as a training run would, and writes a folder that every command takes as
`tokenizer`: tokenizer.json, tokenizer_config.json with a chat template, token_bytes.json (the number of bytes of each
id), and report.json. Pieces and special tokens are nanochat's. The files depend on the text and the keys below only;
they get their folder's name when they are complete, so a killed run leaves no tokenizer. No accelerator is used.
"""

import json
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from levanter.commands.train.config import TrainLmConfig
from levanter.commands.train_tokenizer.compression import Compression, measure, measured_texts, table
from levanter.commands.train_tokenizer.training_text import TextCounts, TrainingText, text_sets
from levanter.compat.hf.bpe_training import BYTES, BpeSpecification, train_bpe
from levanter.compat.hf.export_dir import ExportDir, export_dir
from levanter.compat.hf.nanochat_tokens import ASSISTANT_END, BOS, CHAT_TEMPLATE, PATTERN, SPECIAL_TOKENS
from levanter.compat.hf.tokenizer import DEFINITION, FastTokenizer
from levanter.compat.open import load_tokenizer
from levanter.config import ExplicitKeys
from levanter.config.validators import ManyInt, PathText, PositiveInt
from levanter.data import DataError, Tokenizer
from levanter.io import Output, Progress, leased, probe
from levanter.io.progress import amount, duration

T = TypeVar("T")

DEFAULT_SIZE = 32_768
LARGEST_VOCABULARY = 1 << 22
"""Ids beyond this are a typing error: an embedding table has a row for each."""
ROWS_MULTIPLE = 64
"""nanochat pads a vocabulary to a multiple of this; tables of such a size divide over a mesh."""


@dataclass(frozen=True, kw_only=True)
class TrainTokenizerConfig(TrainLmConfig):
    """Train a tokenizer on the training text of a training configuration; only `data.components` is read of it.

    Attributes:
        vocab_size: the number of ids: 256 bytes, merges, and 9 special tokens; null for `model.vocab_size` if the
            document has one, else 32,768.
        output_path: the folder to write.
        max_chars: the most characters to train on; data sets share them equally.
        max_document_chars: the most characters of one document; the rest of it is not used.
        compare: another tokenizer in the report: a folder, a tokenizer.json, or a hub id.
        overwrite: whether an existing folder is replaced.
    """

    vocab_size: PositiveInt | None = None
    output_path: PathText = "tokenizer"
    max_chars: ManyInt | None = 2_000_000_000
    max_document_chars: PositiveInt | None = 10_000
    compare: PathText | None = None
    overwrite: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vocab_size is not None and (problem := _size_problem(self.vocab_size)):
            raise ValueError(f"vocab_size: {problem}")


def _size_problem(size: int) -> str | None:
    """What is wrong with a number of ids."""
    smallest = BYTES + len(SPECIAL_TOKENS)
    if size < smallest:
        return (
            f"{size} is less than {smallest}: the {BYTES} bytes and {len(SPECIAL_TOKENS)} special tokens\n"
            f"  → set vocab_size to at least {smallest} (2048 for a small model, 32768 by default)"
        )
    return f"{size:,} is more than {LARGEST_VOCABULARY:,}, the largest" if size > LARGEST_VOCABULARY else None


def _size(config: TrainTokenizerConfig, written: ExplicitKeys | None) -> int:
    """The number of ids.

    Raises:
        ValueError: the model's vocabulary is too small or too large for a tokenizer.
    """
    if config.vocab_size is not None:
        return config.vocab_size
    size = config.model.vocab_size if written is not None and "model.vocab_size" in written else None
    if size is None:
        return DEFAULT_SIZE
    if problem := _size_problem(size):
        raise ValueError(f"model.vocab_size: {problem}")
    return size


@dataclass(frozen=True, kw_only=True)
class TrainedTokenizer:
    """A trained tokenizer and the facts of its training.

    Attributes:
        tokenizer: the tokenizer.
        counts: the text that was read.
        rows: its compression, by kind of text.
        compared: the name of the tokenizer that it is compared with.
    """

    tokenizer: FastTokenizer
    counts: TextCounts
    rows: Sequence[Compression]
    compared: str | None

    def report(self, config: TrainTokenizerConfig) -> Mapping[str, Any]:
        """The content of report.json, which has no times: the same text gives the same bytes."""
        counts = self.counts
        return {
            "vocab_size": self.tokenizer.vocab_size,
            "tokenizer_hash": self.tokenizer.hash,
            "special_tokens": dict(self.tokenizer.special_tokens),
            "pattern": PATTERN,
            "max_chars": config.max_chars,
            "max_document_chars": config.max_document_chars,
            "documents": counts.documents,
            "characters": counts.chars,
            "characters_not_used": counts.cut,
            "documents_cut": counts.long,
            "compared": self.compared,
            "compression": [row.document() for row in self.rows],
        }


def main(config: TrainTokenizerConfig, *, written: ExplicitKeys | None = None) -> int:
    """Trains, reports, writes."""
    config = replace(config, vocab_size=_size(config, written))
    sets = text_sets(config.data)
    # A mistake in this name must not cost the training.
    compared = None if config.compare is None else load_tokenizer(config.compare)
    target = export_dir(config.output_path)
    # Before the training, and again below, before the folder is written.
    if not config.overwrite:
        target.recover()
        target.refuse_existing()
    probe([Output(key="output_path", path=config.output_path, kind="new folder")])
    size = sum(text_set.nbytes for text_set in sets)
    names = ", ".join(text_set.name for text_set in sets)
    print(f"text: {names}; {amount(size, 'bytes')} of files" if size else f"text: {names}")
    assert config.vocab_size is not None
    if config.vocab_size % ROWS_MULTIPLE:
        nearest = -(-config.vocab_size // ROWS_MULTIPLE) * ROWS_MULTIPLE
        print(f"vocab_size {config.vocab_size:,} is no multiple of {ROWS_MULTIPLE}; {nearest:,} would be one")
    advice = "give another output_path"
    with leased(target.name, what="training a tokenizer", advice=advice, folder=target.lease) as lease:
        trained = train(config, TrainingText(
            sets=sets, max_chars=config.max_chars, max_document_chars=config.max_document_chars
        ), size, compared)  # fmt: skip
        for line in _lines(trained):
            print(line)
        # Training may have taken hours, in which another process may have taken the folder over or written it.
        lease.check()
        target.recover()
        if not config.overwrite:
            target.refuse_existing()
        write(target, trained, config)
    print(f"written: {config.output_path}")
    return 0


def train(
    config: TrainTokenizerConfig, text: TrainingText, nbytes: int, compared: Tokenizer | None
) -> TrainedTokenizer:
    """Learns the merges and measures the compression.

    Args:
        config: the configuration.
        text: the training text.
        nbytes: the bytes of its files.
        compared: another tokenizer for the report.

    Raises:
        DataError: there is no text, or a file cannot be read.
        SmallTextError: there is too little of it for the vocabulary.
    """
    assert config.vocab_size is not None
    specification = BpeSpecification(
        vocab_size=config.vocab_size, pattern=PATTERN, special_tokens=SPECIAL_TOKENS, bos=BOS
    )
    began = time.perf_counter()
    with Progress("reading text", total=text.expected_chars(nbytes), unit="characters") as progress:

        def show(counts: TextCounts) -> None:
            progress.meter.total = text.expected_chars(nbytes)
            progress.advance_to(counts.chars)

        text.on_text = show
        texts = iter(text)
        # The library would train on nothing without an error.
        beginning = next(texts, None)
        if beginning is None:
            raise DataError(f"data.components: {', '.join(s.name for s in text.sets)}: the training text is empty")

        def all_texts() -> Iterator[str]:
            yield beginning
            yield from texts
            # What remains is done by the library in one step, without progress of its own.
            progress.meter.total = None
            progress.advance_to(text.counts.chars, note=f"computing {specification.merges:,} merges")

        definition = _interruptible(lambda: train_bpe(all_texts(), specification))
    # The special tokens are the last ids, in their order. EOS is the end of an answer: documents have no end token in
    # nanochat, the BOS of the next one separates them.
    bos_id = config.vocab_size - len(SPECIAL_TOKENS)
    tokenizer = FastTokenizer(
        definition,
        name=config.output_path,
        bos_id=bos_id,
        eos_id=bos_id + SPECIAL_TOKENS.index(ASSISTANT_END),
        named_tokens={"bos_token": BOS, "eos_token": ASSISTANT_END},
        chat_template=CHAT_TEMPLATE,
    )
    seconds = time.perf_counter() - began
    print(f"{specification.merges:,} merges from {text.counts.chars:,} characters in {duration(seconds)}")
    rows = measure(tokenizer, compared, measured_texts(config.data))
    return TrainedTokenizer(
        tokenizer=tokenizer, counts=text.counts, rows=rows, compared=None if compared is None else compared.name
    )


def _interruptible(compute: Callable[[], T]) -> T:
    """Calls a function that blocks in a library, in a thread, so that Ctrl-C ends the process at once."""
    results: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue()

    def run() -> None:
        try:
            results.put((compute(), None))
        except BaseException as error:  # noqa: BLE001 - raised again by the caller
            results.put((None, error))

    # A daemon: a process that is interrupted does not wait for it.
    threading.Thread(target=run, name="train-tokenizer", daemon=True).start()
    while True:
        try:
            result, error = results.get(timeout=0.2)
        # Between two attempts Python handles signals.
        except queue.Empty:
            continue
        if error is not None:
            raise error
        return result  # pyright: ignore[reportReturnType]


def _lines(trained: TrainedTokenizer) -> list[str]:
    """The report as lines of text."""
    counts = trained.counts
    lines = [f"trained on {counts.documents:,} documents, {counts.chars:,} characters"]
    if counts.long:
        share = counts.cut / (counts.cut + counts.chars)
        lines.append(
            f"{counts.long:,} longer documents were cut; {counts.cut:,} characters ({share:.1%} of what was read) were "
            "not used (max_document_chars)"
        )
    return [*lines, *table(trained.rows, trained.compared)]


def write(target: ExportDir, trained: TrainedTokenizer, config: TrainTokenizerConfig) -> None:
    """Writes the folder, which gets its name when it is complete."""
    tokenizer = trained.tokenizer
    files: Mapping[str, object] = {
        DEFINITION: tokenizer.document,
        # As transformers reads it: the class with no rules of its own.
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **tokenizer.settings,
        },
        "token_bytes.json": tokenizer.byte_lengths().tolist(),
        "report.json": trained.report(config),
    }
    # The folder has another name until `finish`.
    target.begin()
    for name, content in files.items():
        # One number to a line would be as many lines as ids.
        indent = None if name == "token_bytes.json" else 2
        with target.open(name) as file:
            file.write((json.dumps(content, ensure_ascii=False, indent=indent) + "\n").encode())
    target.finish()
