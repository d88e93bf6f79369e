"""`open_checkpoint`: a pretrained model as a value, before a byte of weights is read; and `load_tokenizer`.

Whatever the reference names (folder, Hub id, URL, GGUF file, file in a package), the result is the same: our config,
the tensors that a loader can read by slices, the tokenizer, and a line that says what it is. All checks happen
here: config, index, headers, and that they describe one model.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from haliax_ext.sources import TensorSource
from levanter.compat.hf.compressed_tensors import Int8Format, Int8Source, read_quantization, without_quantization
from levanter.compat.hf.config_bridge import BridgedConfig, check_model_block, check_tensors, read_config
from levanter.compat.hf.errors import CheckpointError, MissingCheckpointFileError, UnreachableError
from levanter.compat.hf.index import open_weights
from levanter.compat.hf.locate import ResolvedRef, locate, locate_first
from levanter.compat.hf.refs import RepoRef
from levanter.compat.hf.repository import Repository, read_json
from levanter.compat.hf.tokenizer import DEFINITION, FastTokenizer, check_vocabulary, load_from_repository
from levanter.models.config_json import FieldFinding
from levanter.models.registry import LmConfig

CONFIG = "config.json"


@dataclass(frozen=True, kw_only=True)
class PretrainedCheckpoint:
    """A pretrained model that was opened.

    Attributes:
        ref: the reference that was taken.
        where: how messages call its config.
        document: config.json, or what a GGUF file's metadata says in its words.
        bridged: the config as it crossed over.
        source: the weights, by slices, under Hugging Face names.
        quantization: how weights are stored, if not as plain numbers (`Q4_1`).
        int8: names of the weights that are stored as 8-bit integers and scales.
        passed_over: references before it that could not be reached, and why.
    """

    ref: RepoRef
    where: str
    document: Mapping[str, Any]
    bridged: BridgedConfig
    source: TensorSource
    quantization: str | None
    int8: frozenset[str]
    passed_over: tuple[str, ...]
    _open_tokenizer: Callable[[], FastTokenizer]

    @property
    def config(self) -> LmConfig:
        """The architecture, with `vocab_size` as in the checkpoint."""
        return self.bridged.config

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding table."""
        assert self.config.vocab_size is not None
        return self.config.vocab_size

    @property
    def findings(self) -> tuple[FieldFinding, ...]:
        """Fields of the config that were not understood, to be shown to the user."""
        return self.bridged.findings

    @property
    def nbytes(self) -> int:
        """Bytes of the weights, as stored."""
        return sum(info.nbytes for info in self.source.tensors.values())

    @property
    def description(self) -> str:
        """What it is, in a line: place, family, storage, size."""
        kinds: dict[str, int] = {}
        for info in self.source.tensors.values():
            kinds[info.dtype.name] = kinds.get(info.dtype.name, 0) + info.nbytes
        stored = self.quantization or max(kinds, key=lambda kind: kinds[kind])
        form = "GGUF" if self.quantization is not None else "safetensors"
        return f"{self.ref} ({self.bridged.kind.model_type}, {form} {stored}, {self.nbytes / 2**20:,.1f} MiB)"

    def tokenizer(self) -> FastTokenizer:
        """The checkpoint's own tokenizer.

        Raises:
            CheckpointError: there is none, it cannot be read, or it has more ids than the model has embeddings.
        """
        tokenizer = self._open_tokenizer()
        check_vocabulary(tokenizer, self.vocab_size, where=self.where)
        return tokenizer

    def check_model_block(self, block: Mapping[str, Any], *, block_name: str = "model") -> None:
        """Holds the keys of a YAML `model:` block, as written, against the checkpoint's config."""
        check_model_block(block, self.config, block_name=block_name, where=self.where)


def open_checkpoint(
    ref: str | RepoRef, *, allow_pickle: bool = False, cache: Path | None = None
) -> PretrainedCheckpoint:
    """Opens a pretrained checkpoint: config, index and headers; no weight byte is read.

    Args:
        ref: see `RepoRef`; of alternatives (`a | b`) the first that can be reached is taken.
        allow_pickle: accept pickle files. There is no reader for them; it changes the explanation.
        cache: folder for files out of packages; the user's cache by default.

    Raises:
        CheckpointError: with everything that is wrong, of one kind at a time.
    """
    refs = RepoRef.parse_alternatives(ref)
    if len(refs) == 1:
        return _open(locate(refs[0], cache=cache), allow_pickle)
    failures: list[str] = []
    for alternative in refs:
        try:
            return _open(locate(alternative, cache=cache, passed_over=tuple(failures)), allow_pickle)
        except (UnreachableError, MissingCheckpointFileError) as error:
            failures.append(f"{alternative}: {'; '.join(error.problems)}")
    raise MissingCheckpointFileError(str(ref), failures)


def int8_format(document: Mapping[str, Any], *, where: object) -> tuple[Mapping[str, Any], Int8Format | None]:
    """A config.json as that of the model before it was quantized, and what it says of int8 weights.

    Raises:
        CheckpointError: the weights are quantized in another format.
    """
    return without_quantization(document), read_quantization(document, where=where)


def hf_config(ref: str | RepoRef, *, cache: Path | None = None) -> Mapping[str, Any]:
    """The config.json of a checkpoint, or its likeness from GGUF metadata."""
    located = locate_first(ref, cache=cache)
    if located.is_gguf:
        from levanter.compat.gguf import hf_document, open_gguf

        return hf_document(open_gguf(located.local_path()))
    return _config(located)


def load_tokenizer(ref: str | RepoRef, *, cache: Path | None = None) -> FastTokenizer:
    """The tokenizer of a checkpoint: a folder, Hub id, URL, `.gguf` file, or a tokenizer.json itself.

    Args:
        ref: where, as `RepoRef` reads it; alternatives are tried in order.
        cache: folder for files out of packages; the user's cache by default.

    Raises:
        CheckpointError: nothing there, or nothing that is a tokenizer.
    """
    located = locate_first(ref, cache=cache)
    if located.is_gguf:
        from levanter.compat.gguf import open_gguf
        from levanter.compat.gguf import tokenizer as gguf_tokenizer

        return gguf_tokenizer(open_gguf(located.local_path()))
    return load_from_repository(located.repository, file=located.file or DEFINITION)


def _config(located: ResolvedRef) -> Mapping[str, Any]:
    repository = located.repository
    if CONFIG not in repository.files:
        _explain_without_config(located)
    return read_json(repository, CONFIG, purpose="the model's architecture")


def _explain_without_config(located: ResolvedRef) -> None:
    """Raises the helpful error for the usual reasons that there is no config.json."""
    models = sorted(file for file in located.repository.files if file.lower().endswith(".gguf"))
    if models:
        raise CheckpointError(
            located.repository.name,
            f"there is no {CONFIG}, but GGUF files: {', '.join(models[:8])}",
            suggestion=f"give the file:  {located.ref}/{models[0]}",
        )


def _open(located: ResolvedRef, allow_pickle: bool) -> PretrainedCheckpoint:
    if located.is_gguf:
        return _open_gguf(located)
    if located.file is not None and located.file != CONFIG:
        raise CheckpointError(
            located.repository.where(located.file),
            f"a model is its whole folder ({CONFIG}, weights, tokenizer), not one file of it",
            suggestion=f"give the folder:  {located.repository.name}",
        )
    repository = located.repository
    document = _config(located)
    where = repository.where(CONFIG)
    int8 = read_quantization(document, where=where)
    bridged = read_config(without_quantization(document), where=where)
    source = open_weights(repository, allow_pickle=allow_pickle)
    int8_names = frozenset[str]()
    if int8 is not None:
        source = Int8Source(source)
        int8_names = source.int8
    check_tensors(document, bridged, source.tensors, where=where, int8=int8_names)
    return PretrainedCheckpoint(
        ref=located.ref,
        where=where,
        document=document,
        bridged=bridged,
        source=source,
        quantization=None,
        int8=int8_names,
        passed_over=located.passed_over,
        _open_tokenizer=lambda: _repository_tokenizer(repository),
    )


def _repository_tokenizer(repository: Repository) -> FastTokenizer:
    return load_from_repository(repository)


def _open_gguf(located: ResolvedRef) -> PretrainedCheckpoint:
    from levanter.compat.gguf import GgufSource, hf_document, open_gguf
    from levanter.compat.gguf import tokenizer as gguf_tokenizer

    file = open_gguf(located.local_path())
    document = hf_document(file)
    bridged = read_config(document, where=file.path)
    source = GgufSource(file, heads=document["num_attention_heads"], kv_heads=document["num_key_value_heads"])
    check_tensors(document, bridged, source.tensors, where=file.path)
    return PretrainedCheckpoint(
        ref=located.ref,
        where=str(file.path),
        document=document,
        bridged=bridged,
        source=source,
        quantization=file.quantization,
        int8=frozenset(),
        passed_over=located.passed_over,
        _open_tokenizer=lambda: gguf_tokenizer(file),
    )
