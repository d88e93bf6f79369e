"""`open_checkpoint`: opens a pretrained model as a value without reading weights; and `load_tokenizer`.

For every kind of reference (folder, Hub id, URL, GGUF file, file in a package) the result is the same: our config, the
tensors that a loader can read by slices, the tokenizer, and a line of description. All checks happen here: config,
index, headers, and that they describe one model.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import haliax as hax
import jax

from haliax_ext.abstract import abstract, leaves
from haliax_ext.sources import TensorSource
from levanter.compat.hf.config_bridge import BridgedConfig, check_model_block, check_tensors, read_config, write_config
from levanter.compat.hf.errors import CheckpointError, MissingCheckpointFileError, UnreachableError
from levanter.compat.hf.index import open_weights
from levanter.compat.hf.locate import ResolvedRef, locate, locate_first
from levanter.compat.hf.quantized.compressed_tensors import Int8Format, int8_weights
from levanter.compat.hf.quantized.formats import read_quantization, without_quantization
from levanter.compat.hf.refs import RepoRef
from levanter.compat.hf.repository import Repository, read_json
from levanter.compat.hf.tied import as_stored
from levanter.compat.hf.tokenizer import DEFINITION, FastTokenizer, check_vocabulary
from levanter.compat.hf.tokenizer_files import load_from_repository
from levanter.layers.quantized import quantizable
from levanter.models.config_json import FieldFinding
from levanter.models.registry import LmConfig

CONFIG = "config.json"


@dataclass(frozen=True, kw_only=True)
class PretrainedCheckpoint:
    """An opened pretrained model.

    Attributes:
        ref: the reference that was opened, of several alternatives.
        where: the name of its config in messages.
        document: config.json, or a GGUF file's metadata translated to its fields.
        bridged: our config, read from the document.
        source: the weights, by slices, under Hugging Face names.
        quantization: how weights are stored, if their dtype does not say it (`Q4_1`, FP8 in blocks).
        int8: names of the weights that are stored as 8-bit integers and scales.
        passed_over: earlier alternatives that could not be reached, and why.
        notes: contradictions between files, and how the model was read nevertheless; shown to the user.
    """

    ref: RepoRef
    where: str
    document: Mapping[str, Any]
    bridged: BridgedConfig
    source: TensorSource
    quantization: str | None
    int8: frozenset[str]
    passed_over: tuple[str, ...]
    notes: tuple[str, ...] = ()
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
        """Fields of the config that were not understood; shown to the user."""
        return self.bridged.findings

    @property
    def nbytes(self) -> int:
        """Bytes of the weights, as stored."""
        return sum(info.nbytes for info in self.source.tensors.values())

    @property
    def description(self) -> str:
        """A line of description: reference, family, storage format, size."""
        kinds: dict[str, int] = {}
        for info in self.source.tensors.values():
            kinds[info.dtype.name] = kinds.get(info.dtype.name, 0) + info.nbytes
        # The dtype of most bytes: float32 norms beside bfloat16 matrices do not count as the format.
        stored = self.quantization or max(kinds, key=lambda kind: kinds[kind])
        forms = {".gguf": "GGUF", ".pt": "torch"}
        form = forms.get(Path(self.where).suffix.lower(), "safetensors")
        return f"{self.ref} ({self.bridged.kind.model_type}, {form} {stored}, {self.nbytes / 2**20:,.1f} MiB)"

    def tokenizer(self) -> FastTokenizer:
        """The checkpoint's own tokenizer.

        Raises:
            CheckpointError: there is none, it cannot be read, or it has more ids than the model has embeddings.
        """
        tokenizer = self._open_tokenizer()
        # Ids beyond the table's rows would be clamped by a gather and silently embed wrong tokens.
        check_vocabulary(tokenizer, self.vocab_size, where=self.where)
        return tokenizer

    def check_model_block(self, block: Mapping[str, Any], *, block_name: str = "model") -> None:
        """Checks the keys of a YAML `model:` block, as written, against the checkpoint's config."""
        check_model_block(block, self.config, block_name=block_name, where=self.where)


def open_checkpoint(
    ref: str | RepoRef, *, allow_pickle: bool = False, cache: Path | None = None
) -> PretrainedCheckpoint:
    """Opens a pretrained checkpoint: config, index and headers; no weight byte is read.

    Args:
        ref: see `RepoRef`; of alternatives (`a | b`), the first that can be reached is opened.
        allow_pickle: accept pickle files. There is no reader for them; only the error message changes.
        cache: folder for files extracted from packages; the user's cache by default.

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
        # Only unreachable or missing alternatives are passed over: a
        # broken checkpoint must not be replaced by another one silently.
        except (UnreachableError, MissingCheckpointFileError) as error:
            failures.append(f"{alternative}: {'; '.join(error.problems)}")
    raise MissingCheckpointFileError(str(ref), failures)


def int8_format(document: Mapping[str, Any], *, where: object) -> tuple[Mapping[str, Any], Int8Format | None]:
    """Splits a config.json into that of the unquantized model and the format of its int8 weights.

    Raises:
        CheckpointError: the weights are quantized in another format.
    """
    stored_format = read_quantization(document, where=where)
    return without_quantization(document), stored_format if isinstance(stored_format, Int8Format) else None


def hf_config(ref: str | RepoRef, *, cache: Path | None = None) -> Mapping[str, Any]:
    """The config.json of a checkpoint; for GGUF, its metadata translated to config.json fields."""
    located = locate_first(ref, cache=cache)
    if located.is_gguf:
        from levanter.compat.gguf import hf_document, open_gguf

        return hf_document(open_gguf(located.local_path()))
    return _config(located)


def load_tokenizer(ref: str | RepoRef, *, cache: Path | None = None) -> FastTokenizer:
    """The tokenizer of a checkpoint: a folder, Hub id, URL, `.gguf` file, or a tokenizer.json itself.

    Args:
        ref: a reference in the syntax of `RepoRef`; alternatives are tried in order.
        cache: folder for files extracted from packages; the user's cache by default.

    Raises:
        CheckpointError: the reference leads to no file, or to no tokenizer.
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
    """Raises a specific error for the usual reason of a missing config.json: a repository of GGUF files."""
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
    # config.json itself is accepted as a name of the whole checkpoint; any other file is a misunderstanding.
    if located.file is not None and located.file != CONFIG:
        raise CheckpointError(
            located.repository.where(located.file),
            f"a model is its whole folder ({CONFIG}, weights, tokenizer), not one file of it",
            suggestion=f"give the folder:  {located.repository.name}",
        )
    repository = located.repository
    if CONFIG not in repository.files and _has_nanochat(repository):
        return _open_nanochat(located)
    document = _config(located)
    where = repository.where(CONFIG)
    stored_format = read_quantization(document, where=where)
    # The architecture readers refuse any `quantization_config`; the supported kinds were read above and are removed.
    bridged = read_config(without_quantization(document), where=where)
    files = open_weights(repository, allow_pickle=allow_pickle)
    source: TensorSource = files
    int8 = quantized = frozenset[str]()
    if stored_format is not None:
        source = stored_format.open(files)
        # Integers stay integers in the model; all other formats are decoded to floating-point numbers.
        int8 = int8_weights(source.tensors) if isinstance(stored_format, Int8Format) else int8
        quantized = source.quantized | int8
    # Behind the stored format: it offers the tensors under their plain names and shapes.
    findings = check_tensors(document, bridged, source.tensors, where=where, quantized=quantized)
    bridged, tied = _as_stored(bridged, source, where=where)
    if isinstance(stored_format, Int8Format):
        stored_format.check(source.tensors, _linear_weights(bridged.config), where=where)
    return PretrainedCheckpoint(
        ref=located.ref,
        where=where,
        document=document,
        bridged=bridged,
        source=source,
        quantization=None if stored_format is None else stored_format.description,
        int8=int8,
        passed_over=located.passed_over,
        notes=(*files.notes, *map(str, findings), *tied),
        # Lazy: scoring token ids needs no tokenizer, and a folder may have none.
        _open_tokenizer=lambda: _repository_tokenizer(repository),
    )


def _as_stored(bridged: BridgedConfig, source: TensorSource, *, where: object) -> tuple[BridgedConfig, list[str]]:
    """The config with its head tied or not as the tensors are, and a note if config.json says otherwise."""
    config, finding = as_stored(bridged.config, source, where=where)
    return (bridged, []) if finding is None else (replace(bridged, config=config), [str(finding)])


def _linear_weights(config: LmConfig) -> frozenset[str]:
    """The names, in all spellings, of the weights of a model's linear modules."""
    assert config.vocab_size is not None
    Vocab = hax.Axis("vocab", config.vocab_size)
    module = abstract(lambda: config.build(Vocab, key=jax.random.PRNGKey(0)))
    rules, by_path = config.weight_rules(Vocab), {leaf.path: leaf for leaf in leaves(module)}
    table = rules.by_target()
    paths = [f"{path}.weight" for path in quantizable(module)]
    names = (name for path in paths if path in table for name in table[path].source_names(by_path[path]))
    return frozenset(spelling for name in names for spelling in rules.spellings(name))


def _repository_tokenizer(repository: Repository) -> FastTokenizer:
    return load_from_repository(repository)


def _has_nanochat(repository: Repository) -> bool:
    # The names of nanochat's files are looked at first: most folders without a config.json are something else.
    if not any(name.startswith("model_") for name in repository.files):
        return False
    from levanter.compat.nanochat import is_nanochat_folder

    return is_nanochat_folder(repository.files)


def _open_nanochat(located: ResolvedRef) -> PretrainedCheckpoint:
    """A folder of nanochat's own files, as if it had the config.json of its architecture."""
    from levanter.compat.nanochat import open_nanochat

    repository = located.repository
    model = max(name for name in repository.files if name.startswith("model_") and name.endswith(".pt"))
    folder = open_nanochat(repository.local_path(model).parent)
    document = write_config(folder.config)
    return PretrainedCheckpoint(
        ref=located.ref,
        where=repository.where(model),
        document=document,
        bridged=read_config(document, where=repository.where(model)),
        source=folder.source,
        quantization=None,
        int8=frozenset(),
        passed_over=located.passed_over,
        notes=tuple(f"{name} is not read: the architecture does not have it" for name in folder.ignored),
        # nanochat keeps its tokenizer elsewhere; a tokenizer.json in the folder is read.
        _open_tokenizer=lambda: _repository_tokenizer(repository),
    )


def _open_gguf(located: ResolvedRef) -> PretrainedCheckpoint:
    from levanter.compat.gguf import GgufSource, hf_document, open_gguf
    from levanter.compat.gguf import tokenizer as gguf_tokenizer

    file = open_gguf(located.local_path())
    document = hf_document(file)
    bridged = read_config(document, where=file.path)
    # llama.cpp permutes q and k rows of each head; undoing it needs the numbers of heads.
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
