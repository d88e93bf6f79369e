"""nanochat's files against torch: tensors in and out, damaged ones, and ones that would run code."""

import collections
import json
import os
import pickle
import zipfile

import haliax as hax
import jax
import numpy as np
import pytest

from haliax_ext.abstract import abstract, leaves
from levanter.compat.hf.errors import CheckpointError
from levanter.compat.nanochat import open_nanochat, write_nanochat
from levanter.compat.nanochat.checkpoint import tensor_parts
from levanter.compat.nanochat.torch_zip import read_torch_zip, write_torch_zip
from levanter.compat.open import open_checkpoint
from levanter.models.nanochat.config import VARIANTS, NanochatConfig

torch = pytest.importorskip("torch")

SIZES = dict(num_layers=5, hidden_dim=32, intermediate_dim=128, num_heads=4, num_kv_heads=2)
CONFIGS = {
    # 70 ids are padded to 128 rows.
    "today": NanochatConfig(**SIZES, max_seq_len=512, vocab_size=70, pattern="SSSL"),
    "october_2025": NanochatConfig(**SIZES, max_seq_len=64, vocab_size=64, **VARIANTS["october_2025"]),
    "tpu_fork": NanochatConfig(**SIZES, max_seq_len=512, vocab_size=64, **VARIANTS["tpu_fork"] | {"pattern": "SL"}),
}


BY_TOKEN = ("transformer.wte", "lm_head", "value_embeds")


def theirs(config: NanochatConfig) -> dict:
    """nanochat's state dictionary, as its training saves it: bfloat16 tables, float32 matrices, padded rows."""
    rng = torch.Generator().manual_seed(0)
    state = {}
    for part in tensor_parts(config).values():
        by_token = part.name.startswith(BY_TOKEN)
        rows = -(-part.shape[0] // 64) * 64 if by_token else part.shape[0]
        dtype = torch.bfloat16 if by_token and part.name != "lm_head.weight" else torch.float32
        state[part.name] = torch.randn((rows, *part.shape[1:]), generator=rng).to(dtype)
    return state


def saved(folder, config: NanochatConfig, state: dict):
    meta = dict(sequence_len=config.max_seq_len, vocab_size=config.vocab_size, n_layer=5, n_head=4, n_kv_head=2)
    folder.mkdir()
    torch.save({f"_orig_mod.{name}": tensor for name, tensor in state.items()}, folder / "model_000650.pt")
    document = {"step": 650, "model_config": meta | {"n_embd": 32, "window_pattern": config.pattern}}
    (folder / "meta_000650.json").write_text(json.dumps(document))
    return folder


def as_numpy(tensor):
    return tensor.detach().float().numpy()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_folder_comes_in_and_goes_out(name, tmp_path):
    config, state = CONFIGS[name], theirs(CONFIGS[name])
    opened = open_nanochat(saved(tmp_path / "in", config, state))
    assert opened.config == config and opened.step == 650 and not opened.ignored
    # Every leaf of the model has its tensor, in the shape that the loader expects.
    model = abstract(lambda: config.build(hax.Axis("vocab", config.vocab_size), key=jax.random.key(0)))
    shapes = {source: shape for source, (shape, _) in config.weight_rules().sources(leaves(model)).items()}
    assert {source: info.shape for source, info in opened.source.tensors.items()} == shapes
    for source, part in tensor_parts(config).items():
        info = opened.source.tensors[source]
        index = tuple(slice(0, size) for size in info.shape)
        expected = as_numpy(state[part.name]).reshape(-1)[part.first : part.first + info.size]
        np.testing.assert_array_equal(opened.source.read(source, index).astype(np.float32).reshape(-1), expected)
        assert sum(piece.nbytes for piece in opened.source.byte_ranges(source, index)) == info.nbytes
    rows = opened.source.read("lm_head.weight", (slice(3, 7), slice(2, 9)))
    np.testing.assert_array_equal(rows, as_numpy(state["lm_head.weight"])[3:7, 2:9])
    written = write_nanochat(tmp_path / "out", config, opened.source, step=7)
    back = torch.load(written, weights_only=True)
    assert back.keys() == state.keys()
    for key, tensor in state.items():
        ids = config.vocab_size if key.startswith(BY_TOKEN) else tensor.shape[0]
        assert torch.equal(back[key][:ids], tensor[:ids]) and back[key].dtype == tensor.dtype
        assert back[key].shape == tensor.shape and not back[key][ids:].any()
    assert open_nanochat(tmp_path / "out").config == config


def test_runs_open_such_a_folder(tmp_path):
    config = CONFIGS["today"]
    folder = saved(tmp_path / "in", config, theirs(config))
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.config == config and "torch" in checkpoint.description
    assert checkpoint.source.tensors["model.layers.4.self_attn.value_embedding.table"].shape == (70, 16)


def test_all_kinds_of_tensors_are_those_of_torch(tmp_path):
    base = torch.arange(24.0).reshape(4, 6)
    tensors = collections.OrderedDict(
        whole=base,
        rows=base[1:3],
        parameter=torch.nn.Parameter(torch.ones(3, 1)),
        half=torch.ones(2, dtype=torch.float16),
        ints=torch.arange(5),
        flags=torch.tensor([True, False]),
        scalar=torch.tensor(2.5),
        empty=torch.zeros(0, 4),
    )
    torch.save(tensors, tmp_path / "a.pt")
    raw = (tmp_path / "a.pt").read_bytes()
    found = read_torch_zip(tmp_path / "a.pt")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        stored = found[name]
        array = np.frombuffer(raw[stored.start : stored.start + stored.nbytes], stored.dtype).reshape(stored.shape)
        np.testing.assert_array_equal(array, tensor.detach().numpy())
    write_torch_zip(tmp_path / "b.pt", {name: x.detach().numpy() for name, x in tensors.items()})
    for name, tensor in torch.load(tmp_path / "b.pt", weights_only=True).items():
        assert torch.equal(tensor, tensors[name].detach()) and tensor.dtype == tensors[name].dtype


class Runs:
    """Runs a command when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def replaced(source, target, description: bytes):
    """A file with another description."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for entry in old.infolist():
            is_description = entry.filename.endswith("data.pkl")
            new.writestr(entry.filename, description if is_description else old.read(entry))
    return target


def test_a_foreign_global_is_named_and_not_called(tmp_path):
    touched = tmp_path / "touched"
    torch.save({"a": torch.ones(2), "b": Runs(touched)}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"refers to (posix|os)\.system, .* is refused"):
        read_torch_zip(tmp_path / "a.pt")
    # Of every protocol, and by every operation that can call.
    for protocol in range(6):
        target = replaced(tmp_path / "a.pt", tmp_path / f"{protocol}.pt", pickle.dumps(Runs(touched), protocol))
        with pytest.raises(CheckpointError):
            read_torch_zip(target)
    assert not touched.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-300]), "not a zip file"),
        (lambda path: torch.save([torch.ones(2)], path), "EMPTY_LIST|APPEND|not a dictionary"),
        (lambda path: torch.save({"a": 3}, path), "entry 'a' is not a named tensor"),
        (lambda path: torch.save({"a": torch.ones(2, 3).T}, path), "'a' is not contiguous"),
        (lambda path: torch.save({"a": torch.ones(2)}, path, _use_new_zipfile_serialization=False), "not a zip file"),
        (lambda path: path.write_bytes(b""), "not a zip file"),
    ],
)
def test_other_files_are_refused(change, message, tmp_path):
    path = tmp_path / "a.pt"
    torch.save({"a": torch.ones(2)}, path)
    change(path)
    with pytest.raises(CheckpointError, match=message):
        read_torch_zip(path)


def test_a_description_cannot_take_forever(tmp_path):
    """Tuples that hold the same tuple twice, sixty times over: their hash and their text have 2^60 parts."""
    torch.save({"a": torch.ones(2)}, tmp_path / "a.pt")
    nested = b"\x80\x02)" + b"2\x86" * 60
    doubled = b"".join(b"q%ch%c\x86" % (n, n) for n in range(60))
    for description in (nested, b"\x80\x02})" + doubled + b"Ns.", b"\x80\x02}X\x01\x00\x00\x00a)" + doubled + b"s."):
        with pytest.raises(CheckpointError):
            read_torch_zip(replaced(tmp_path / "a.pt", tmp_path / "b.pt", description))


@pytest.mark.parametrize("cases", [300, pytest.param(100_000, marks=pytest.mark.slow)])
def test_damaged_files_are_read_or_refused(cases, tmp_path):
    path, damaged = tmp_path / "a.pt", tmp_path / "b.pt"
    torch.save({"a": torch.ones(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}, path)
    with zipfile.ZipFile(path) as archive:
        description = archive.read("a/data.pkl")
    whole, rng = path.read_bytes(), np.random.default_rng(0)
    refused = 0
    for case in range(cases):
        # Half of the cases damage the description only, so that the archive is sound and the interpreter is reached.
        data = np.frombuffer(whole if case % 2 else description, np.uint8).copy()
        data[rng.integers(0, len(data), rng.integers(1, 6))] = rng.integers(0, 256)
        data = data[: rng.integers(0, len(data))] if case % 7 == 0 else data
        if case % 2:
            damaged.write_bytes(data.tobytes())
        else:
            replaced(path, damaged, data.tobytes())
        try:
            tensors = read_torch_zip(damaged)
        except CheckpointError:
            refused += 1
            continue
        size = damaged.stat().st_size
        assert all(x.start >= 0 and x.start + x.nbytes <= size for x in tensors.values())
    assert refused > cases // 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state, meta: state.pop("smear_lambda"), "between October 2025 and July 2026"),
        (lambda state, meta: state.pop("transformer.h.2.mlp.c_fc.weight"), "'transformer.h.2.mlp.c_fc.* is missing"),
        (lambda state, meta: meta["model_config"].pop("n_layer"), "model_config.n_layer is None, not a number"),
        (lambda state, meta: meta["model_config"].update(n_embd=64), r"by the meta file it is \(70, 64\)"),
        (lambda state, meta: meta["model_config"].update(window_pattern="SXL"), "'X'; letters are"),
    ],
)  # fmt: skip
def test_what_does_not_belong_together_is_named(change, message, tmp_path):
    config = CONFIGS["today"]
    folder, state = saved(tmp_path / "in", config, theirs(config)), theirs(config)
    meta = json.loads((folder / "meta_000650.json").read_text())
    change(state, meta)
    torch.save(state, folder / "model_000650.pt")
    (folder / "meta_000650.json").write_text(json.dumps(meta))
    with pytest.raises(CheckpointError, match=message):
        open_nanochat(folder)
