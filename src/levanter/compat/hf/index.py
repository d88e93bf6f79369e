"""Finds the files of a checkpoint's weights and the file of each tensor: `model.safetensors[.index.json]`.

The index is untrusted: a file name in it must stay inside the checkpoint's folder, and its tensor list is compared
with the headers of the files. The files decide what there is: where the index is older than they are, tensors are read
from where they are stored, as transformers reads them, and a note says so. Pickle files are never opened.
"""

import re
from collections.abc import Mapping, Sequence

from levanter.compat.hf.errors import (
    CheckpointError,
    CorruptFileError,
    MissingCheckpointFileError,
    UnsafeCheckpointError,
    raise_if,
)
from levanter.compat.hf.header import ShardHeader
from levanter.compat.hf.readers import ByteReader
from levanter.compat.hf.repository import INDEX, SINGLE, Repository, read_json, stays_inside
from levanter.compat.hf.safetensors import SafetensorsSource, read_headers

MAX_SHARD_BYTES = 5 * 10**9
"""The default size of one file of weights."""


_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".bin.index.json")
_SHARD = re.compile(r"^(?P<stem>.+)-\d+-of-(?P<count>\d+)\.safetensors$")
_LISTED = 8

_CONVERT = (
    "convert it once, where torch is installed and the file is trusted: "
    'AutoModelForCausalLM.from_pretrained("…").save_pretrained("…", safe_serialization=True)'
)


def open_weights(repository: Repository, *, allow_pickle: bool = False) -> SafetensorsSource:
    """The tensors of a checkpoint; reads only headers.

    Args:
        repository: the checkpoint.
        allow_pickle: whether the user accepts pickle files; it only changes the message of their refusal.

    Raises:
        CheckpointError: no weights, or missing, damaged, contradicting or unsafe files; lists all problems of one kind.
    """
    files, weight_map = weight_files(repository, allow_pickle=allow_pickle)
    readers = {file: repository.reader(file) for file in sorted(files)}
    headers = read_headers(readers)
    notes: list[str] = []
    if weight_map is not None:
        headers = _check_index(repository.where(INDEX), weight_map, headers, readers, notes)
    elif INDEX in repository.files:
        notes.append(f"{INDEX} is not used: {SINGLE} has all tensors in one file")
    return SafetensorsSource(readers, headers, notes=notes)


def weight_files(
    repository: Repository, *, allow_pickle: bool = False
) -> tuple[tuple[str, ...], Mapping[str, str] | None]:
    """The safetensors files of a checkpoint and, if it has an index, tensor name → file."""
    # A folder may hold both a single file and an index, often the index of earlier shards. transformers reads the file.
    if SINGLE in repository.files:
        return (SINGLE,), None
    if INDEX in repository.files:
        weight_map = _weight_map(repository)
        files = tuple(sorted(set(weight_map.values())))
        missing = [file for file in files if file not in repository.files]
        raise_if(
            MissingCheckpointFileError,
            repository.where(INDEX),
            [f"names {file}, which is not there ({_count(weight_map, file)} tensors)" for file in missing],
            suggestion="the download or copy of the checkpoint is not complete",
        )
        return files, weight_map
    return _without_standard_names(repository, allow_pickle), None


def _count(weight_map: Mapping[str, str], file: str) -> int:
    return sum(shard == file for shard in weight_map.values())


def _without_standard_names(repository: Repository, allow_pickle: bool) -> tuple[str, ...]:
    # Top level only: subfolders hold other formats (e.g. `original/`) of the same weights.
    files = sorted(file for file in repository.files if file.endswith(".safetensors") and "/" not in file)
    # `stem-00001-of-00004.safetensors`: the set is complete if all names have one stem and count, and there are as
    # many.
    shards = [match for file in files if (match := _SHARD.match(file))]
    if len(files) == 1 and not shards:
        return tuple(files)
    if shards:
        counts = {(match["stem"], int(match["count"])) for match in shards}
        if len(counts) == 1 and len(shards) == len(files) == next(iter(counts))[1]:
            return tuple(files)
        raise MissingCheckpointFileError(
            repository.name,
            f"there is no {INDEX}, and the shards do not form one set: {', '.join(files[:_LISTED])}",
            suggestion="the download or copy of the checkpoint is not complete",
        )
    if files:
        raise CheckpointError(
            repository.name,
            f"there is neither {SINGLE} nor {INDEX}, but several other files: {', '.join(files[:_LISTED])}",
            suggestion=f"rename the intended one to {SINGLE}",
        )
    pickles = sorted(file for file in repository.files if file.endswith(_PICKLES))
    # Pickles come last, so that a repository with both formats is read from its safetensors.
    if pickles and not allow_pickle:
        raise UnsafeCheckpointError(
            repository.name,
            f"its weights are pickle files ({', '.join(pickles[:_LISTED])}); reading them can run any code, "
            "so they are refused",
            suggestion=_CONVERT,
        )
    if pickles:
        raise UnsafeCheckpointError(
            repository.name,
            f"its weights are pickle files ({', '.join(pickles[:_LISTED])}); allow_pickle accepts the risk, but this "
            "project has no reader for them (it would need torch)",
            suggestion=_CONVERT,
        )
    present = ", ".join(sorted(repository.files)[:_LISTED]) or "nothing"
    raise MissingCheckpointFileError(repository.name, f"there are no weights ({SINGLE} or {INDEX}); it has {present}")


def _weight_map(repository: Repository) -> Mapping[str, str]:
    where = repository.where(INDEX)
    document = read_json(repository, INDEX, purpose="it maps tensors to files")
    weight_map = document.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptFileError(where, "it has no weight_map")
    wrong = [
        f"tensor {name!r}: {file!r:.80} is not a file name"
        for name, file in weight_map.items()
        if not isinstance(file, str)
    ]
    raise_if(CorruptFileError, where, wrong)
    # A downloaded index could otherwise make a reader open any file of this machine (`../../…`).
    unsafe = sorted({file for file in weight_map.values() if not stays_inside(file)})
    raise_if(
        UnsafeCheckpointError,
        where,
        [f"file name {file!r} leaves the checkpoint's folder; it is refused" for file in unsafe],
    )
    other = sorted({file for file in weight_map.values() if not file.endswith(".safetensors")})
    raise_if(UnsafeCheckpointError, where, [f"file {file!r} is not a safetensors file" for file in other])
    return weight_map


def _check_index(
    where: str,
    weight_map: Mapping[str, str],
    headers: Sequence[ShardHeader],
    readers: Mapping[str, ByteReader],
    notes: list[str],
) -> list[ShardHeader]:
    """Compares the index with the headers; returns the headers with each tensor in one file.

    Args:
        where: the index's name in messages.
        weight_map: tensor → file, as the index says.
        headers: of all files that it names.
        readers: the files.
        notes: filled with differences that do not matter.

    Raises:
        CorruptFileError: no file has a tensor of the index, or two files have one of different values; lists all.
    """
    files_by_name: dict[str, list[str]] = {}
    for header in headers:
        for entry in header.tensors:
            files_by_name.setdefault(entry.name, []).append(header.file)
    problems = [
        f"tensor {name!r} should be in {file}, and no file that the index names has it"
        for name, file in weight_map.items()
        if name not in files_by_name
    ]
    problems += _copy_problems(files_by_name, headers, readers)
    # A wrong index disagrees in every tensor; a few lines are enough to see it.
    if len(problems) > 2 * _LISTED:
        problems = [*problems[: 2 * _LISTED], f"… and {len(problems) - 2 * _LISTED} more"]
    raise_if(CorruptFileError, where, problems, suggestion=_OUTDATED)
    # Neither is an error: which file a tensor is in follows from the headers alone.
    moved = [name for name, file in weight_map.items() if file not in files_by_name[name]]
    unnamed = [name for name in files_by_name if name not in weight_map]
    for names, what in ((moved, "in another file than the index says"), (unnamed, "not in the index")):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            notes.append(f"{names[0]}{more}: {what}; read from {files_by_name[names[0]][0]}")
    # A tensor may be in several files (tied weights saved twice), with equal values: the index says which one is read.
    chosen = {
        name: weight_map[name] if weight_map.get(name) in files else files[0] for name, files in files_by_name.items()
    }
    return [
        ShardHeader(
            header.file,
            tuple(entry for entry in header.tensors if chosen[entry.name] == header.file),
            header.metadata,
        )
        for header in headers
    ]


_OUTDATED = (
    "the index belongs to other files: copy the checkpoint again, or delete the index if the shards are complete "
    "(names of the form model-00001-of-00002.safetensors are read without one)"
)


def _copy_problems(
    files_by_name: Mapping[str, Sequence[str]], headers: Sequence[ShardHeader], readers: Mapping[str, ByteReader]
) -> list[str]:
    """Tensors that several files have with different values: readers would disagree about which one is meant."""
    # Imported here: configurations read a constant of this module, and `--help` imports no JAX.
    from levanter.compat.hf.tied import same_values

    # A source of each file: one of all files would refuse the same name twice.
    sources = {header.file: SafetensorsSource({header.file: readers[header.file]}, [header]) for header in headers}
    return [
        f"tensor {name!r} is in {files[0]} and, with other values, in {file}"
        for name, files in files_by_name.items()
        for file in files[1:]
        if not same_values(sources[files[0]], name, sources[file], name)
    ]
