"""The text that a tokenizer is trained on: the training split of each component, cut where limits say so."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from levanter.data import DataError, LmDataConfig, TextLmDatasetFormat
from levanter.data.documents import Documents, FileDocuments, component_documents
from levanter.data.errors import raise_problems
from levanter.data.readers import Document, read_documents
from levanter.io.paths import MissingFileError, file_size


@dataclass(frozen=True, kw_only=True)
class TextSet:
    """The training text of one component.

    Attributes:
        name: the component's name.
        documents: its sources.
    """

    name: str
    documents: tuple[Documents, ...]

    def files(self) -> Iterator[tuple[int, Iterator[Document]]]:
        """The documents of each file, with the file's size; 0 bytes for text that is no file."""
        for source in self.documents:
            # Text in memory (Python's documentation, texts of the configuration) takes no time to read.
            if not isinstance(source, FileDocuments):
                yield 0, iter(source)
                continue
            assert isinstance(source.format, TextLmDatasetFormat)
            for path in source.paths:
                yield file_size(path), read_documents(path, source.format)

    @property
    def nbytes(self) -> int:
        """The bytes of its files, compressed ones as they are."""
        files = (path for source in self.documents if isinstance(source, FileDocuments) for path in source.paths)
        return sum(map(file_size, files))


def text_sets(data: LmDataConfig) -> list[TextSet]:
    """The components with training text.

    Raises:
        DataError: with all problems: missing files, other formats than text, no training text at all.
    """
    sets, problems, without = [], [], []
    for name, component in data.components.items():
        try:
            documents = component_documents(
                f"data.components.{name}", component, "train", formats=(TextLmDatasetFormat,)
            )
        except (DataError, MissingFileError) as error:
            # Collected: one message lists what is wrong with every component.
            problems.append(str(error))
            continue
        if documents:
            sets.append(TextSet(name=name, documents=documents))
        else:
            without.append(name)
    raise_problems(problems)
    if not sets:
        what = f"none of {', '.join(without)} has training text (train_urls is empty)" if without else "no data set"
        raise DataError(
            f"data.components: {what}; a tokenizer is trained on data.components: {{NAME: {{source: {{train_urls: "
            "[FILE, …]}}}"
        )
    return sets


@dataclass(kw_only=True)
class TextCounts:
    """What was read so far.

    Attributes:
        documents: documents, empty ones left out.
        chars: characters that were used.
        cut: characters of long documents that were not used.
        long: documents that were cut.
        file_bytes: bytes of the files that were read to their end.
    """

    documents: int = 0
    chars: int = 0
    cut: int = 0
    long: int = 0
    file_bytes: int = 0


@dataclass(kw_only=True)
class TrainingText:
    """Texts of several sets within limits; iterated once.

    Attributes:
        sets: the sets.
        max_chars: the most characters in all; sets share it equally, and what a small set does not need is left for
            those behind it. None for no limit.
        max_document_chars: the most characters of one document; None for no limit.
        counts: updated while texts are read.
        on_text: called after each document.
    """

    sets: list[TextSet]
    max_chars: int | None
    max_document_chars: int | None
    counts: TextCounts = field(default_factory=TextCounts)
    on_text: Callable[[TextCounts], None] = lambda _: None

    def __iter__(self) -> Iterator[str]:
        counts = self.counts
        for number, text_set in enumerate(self.sets):
            # An equal share of what is left, for this set and for each behind it: a set that ends early leaves the rest
            # of its share to the others.
            limit = None
            if self.max_chars is not None:
                limit = counts.chars + (self.max_chars - counts.chars) // (len(self.sets) - number)
            for size, documents in text_set.files():
                for document in documents:
                    text = document.text[: self.max_document_chars]
                    if len(text) < len(document.text):
                        counts.long += 1
                        counts.cut += len(document.text) - len(text)
                    # The last document of a set is cut where the share ends, so the total is exact.
                    if limit is not None:
                        text = text[: limit - counts.chars]
                    if text:
                        counts.documents += 1
                        counts.chars += len(text)
                        self.on_text(counts)
                        yield text
                    if limit is not None and counts.chars >= limit:
                        break
                # Only a file that was read to its end counts for the estimate of what is to come.
                else:
                    counts.file_bytes += size
                    continue
                break

    def expected_chars(self, total_bytes: int) -> float | None:
        """The characters to be read in all, estimated from files that were read to their end; None if unknown."""
        counts = self.counts
        if not total_bytes:
            return None
        # Before the first file ends, a byte counts as a character; compressed files have more of these.
        chars_per_byte = counts.chars / counts.file_bytes if counts.file_bytes else 1.0
        expected = max(total_bytes * chars_per_byte, counts.chars)
        return expected if self.max_chars is None else min(expected, self.max_chars)
