"""The texts on which models are compared byte by byte: the first documents of each set, truncated to a number of bytes.

A pair of input and target is one text, of which only the bytes of the target count.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from levanter.data.documents import FileDocuments
from levanter.data.errors import DataError
from levanter.data.eval_sets import EvaluationSet
from levanter.data.formats import LmDatasetFormatBase, SupervisedLmDatasetFormat, TextLmDatasetFormat, format_name
from levanter.data.readers import read_documents, read_records
from levanter.data.record_values import record_value


@dataclass(frozen=True, kw_only=True)
class ComparedText:
    """A document on which models are compared.

    Attributes:
        name: of its set.
        tags: those under which the set's numbers are aggregated, its own name last.
        shard: the file that it is in.
        row: its number in that file, from 0.
        text: the text that models score.
        begin: the first byte that counts.
    """

    name: str
    tags: tuple[str, ...]
    shard: str
    row: int
    text: str
    begin: int = 0


def read_compared_texts(
    sets: Sequence[EvaluationSet], *, max_documents: int | None, max_bytes: int | None
) -> tuple[ComparedText, ...]:
    """Reads the documents of sets, in their order.

    Args:
        sets: what to read: texts, or pairs of input and target.
        max_documents: of each set; None for all.
        max_bytes: of a document, truncated at a character boundary; None for all.

    Raises:
        DataError: a set of another format, or without a document that counts; whatever is wrong in a file.
        MissingFileError: a file no longer exists.
    """
    texts = []
    for dataset in sets:
        before = len(texts)
        for document in _documents(dataset):
            if max_documents is not None and len(texts) - before >= max_documents:
                break
            text = document.text if max_bytes is None else cut(document.text, max_bytes)
            # Truncation may leave nothing of the target, and then nothing of the text counts.
            if len(text.encode()) > document.begin:
                texts.append(ComparedText(**{**vars(document), "text": text}))
        if len(texts) == before:
            raise DataError(
                f"data set {dataset.name!r} is empty: no text in {'; '.join(map(str, dataset.document_sources))}"
            )
    return tuple(texts)


def cut(text: str, max_bytes: int) -> str:
    """The longest prefix of whole characters that has at most `max_bytes` UTF-8 bytes."""
    content = text.encode()
    # `ignore` drops the incomplete character at the end, the only invalid one.
    return text if len(content) <= max_bytes else content[:max_bytes].decode(errors="ignore")


def _documents(dataset: EvaluationSet) -> Iterator[ComparedText]:
    for part in dataset.document_sources:
        if not isinstance(part, FileDocuments):
            for row, document in enumerate(part):
                yield ComparedText(name=dataset.name, tags=dataset.tags, shard=str(part), row=row, text=document.text)
            continue
        for path in part.paths:
            for row, (text, begin) in enumerate(_file_texts(dataset.name, path, part.format)):
                yield ComparedText(name=dataset.name, tags=dataset.tags, shard=path, row=row, text=text, begin=begin)


def _file_texts(name: str, path: str, format: LmDatasetFormatBase) -> Iterator[tuple[str, int]]:
    if isinstance(format, TextLmDatasetFormat):
        for document in read_documents(path, format):
            yield document.text, 0
        return
    if not isinstance(format, SupervisedLmDatasetFormat):
        raise DataError(
            f"data set {name!r}: texts and pairs of input and target (`text`, `supervised`) are compared byte by byte; "
            f"`{format_name(format)}` is not"
        )
    # Models with different tokenizers are compared on bytes, and an id has none.
    if isinstance(format.separate_with, int):
        raise DataError(f"data set {name!r}: format.separate_with: a token's id has no text; name the text itself")
    for record, origin in read_records(path):
        prompt = record_value(record, format.input_key, str, origin) + (format.separate_with or "")
        yield prompt + record_value(record, format.target_key, str, origin), len(prompt.encode())
