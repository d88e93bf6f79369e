"""Bad input to `train_lm`, as a user meets it: exit code 2, one clear error, and what was there is as it was."""

import json
import shutil

import pytest

from levanter.checkpoint import find_checkpoints
from levanter.commands.cli.errors import run_entry_point
from levanter.commands.train.lm.train_lm import TrainLmConfig, main
from levanter.config import load
from levanter.data import PassthroughTokenizer, build_tokens, resolve_training
from levanter.io.paths import filesystem
from levanter.runplan import BAD_INPUT, INTERNAL_ERROR, OK

DOCUMENT = {
    "model": {
        "type": "llama",
        "max_seq_len": 16,
        "hidden_dim": 16,
        "intermediate_dim": 32,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 2,
    },
    "optimizer": {"learning_rate": 0.01, "warmup": 2},
}


@pytest.fixture
def place(tmp_path):
    """A folder with some text, and a function that runs `train_lm` in it."""
    return Place(tmp_path).with_text()


class Place:
    def __init__(self, folder):
        self.folder = folder

    def with_text(self):
        text = " ".join(str(n * n % 61) for n in range(1200))
        (self.folder / "numbers.jsonl").write_text(json.dumps({"text": text}) + "\n")
        return self

    def document(self, *, trainer=None, data=None, **top):
        components = {"numbers": {"source": {"type": "url", "train_urls": [str(self.folder / "numbers.jsonl")]}}}
        return {
            **DOCUMENT,
            "data": {"tokenizer": "passthrough", "vocab_size": 61, "cache_dir": None, "components": components}
            | (data or {}),
            "trainer": {
                "id": "run",
                "tracker": {"type": "noop"},
                "require_accelerator": False,
                "num_train_steps": 2,
                "train_batch_size": 8,
                "log_dir": str(self.folder / "logs"),
                "checkpointer": {"base_path": str(self.folder / "checkpoints"), "keep": []},
                "mesh": {"axes": {"data": 4, "model": 2}, "shared_mapping": {"vocab": "model"}},
            }
            | (trainer or {}),
            **top,
        }

    def files(self):
        # Folders apart: a run makes and tries those that it will write before it looks at what is in its data.
        return {str(p): p.stat().st_mtime_ns for p in self.folder.rglob("*") if p.is_file() and p.name != "config.yaml"}

    def run(self, **changes):
        path = self.folder / "config.yaml"
        path.write_text(json.dumps(self.document(**changes)))
        return run_entry_point(TrainLmConfig, main, ["--config_path", str(path)])

    def build_store(self, **changes):
        path = self.folder / "config.yaml"
        path.write_text(json.dumps(self.document(**changes)))
        data = load(TrainLmConfig, ["--config_path", str(path)]).data
        build_tokens(data, resolve_training(data).sets, PassthroughTokenizer(61))

    def refused(self, capsys, **changes) -> str:
        """The one error of a run that is refused before it begins; nothing was written or touched."""
        before = self.files()
        capsys.readouterr()
        code = self.run(**changes)
        said = capsys.readouterr().err
        assert code == BAD_INPUT, said
        assert "Traceback" not in said
        assert sum(line.startswith("error: ") for line in said.splitlines()) == 1
        assert self.files() == before
        return said[said.index("error: ") :]


def text_of(place, name, content):
    path = place.folder / name
    path.write_text(content)
    return {name.split(".")[0]: {"source": {"type": "url", "train_urls": [str(path)]}}}


def test_a_batch_that_the_devices_do_not_divide(place, capsys):
    error = place.refused(capsys, trainer={"train_batch_size": 10})
    assert "trainer.train_batch_size 10 is not a multiple of 4 ways" in error
    assert "nearest: 8 or 12" in error


def test_a_tokenizer_that_the_token_store_was_not_made_with(place, capsys):
    store = {"cache_dir": str(place.folder / "cache")}
    place.build_store(data=store)
    error = place.refused(capsys, data={**store, "vocab_size": 64})
    assert "cache/numbers/train" in error and "tokenizer" in error and "passthrough" in error


def test_ids_that_the_model_does_not_have(place, capsys):
    store = {"cache_dir": str(place.folder / "cache")}
    place.build_store(data=store)
    error = place.refused(capsys, data=store, model={**DOCUMENT["model"], "vocab_size": 40})
    assert "61 ids" in error or "token id 60 is outside the model's vocabulary of 40" in error


def test_a_set_without_training_text(place, capsys):
    numbers = str(place.folder / "numbers.jsonl")
    only_validation = {"numbers": {"source": {"type": "url", "validation_urls": [numbers]}}}
    error = place.refused(capsys, data={"components": only_validation})
    assert "data.components: none of numbers has training data (train_urls is empty)" in error
    weighted = {"components": only_validation, "train_weights": {"numbers": 1.0}}
    error = place.refused(capsys, data=weighted)
    assert "data.components.numbers: has a weight in data.train_weights but no training data" in error


def test_a_file_that_is_not_there(place, capsys):
    missing = {"numbers": {"source": {"type": "url", "train_urls": [str(place.folder / "number.jsonl")]}}}
    error = place.refused(capsys, data={"components": missing})
    assert "number.jsonl" in error and "numbers.jsonl" in error


@pytest.mark.parametrize("content", ["", json.dumps({"text": ""}) + "\n"])
def test_a_set_without_a_token(content, place, capsys):
    error = place.refused(capsys, data={"components": text_of(place, "nothing.jsonl", content)})
    assert "data set 'nothing' is empty" in error and "nothing.jsonl" in error


def test_a_weight_for_a_set_that_there_is_not(place, capsys):
    error = place.refused(capsys, data={"train_weights": {"numbers": 0.5, "nunbers": 0.5}})
    assert "nunbers" in error and "train_weights" in error and "numbers" in error


@pytest.fixture(scope="module")
def one_step(tmp_path_factory):
    """What a run of one step leaves."""
    folder = tmp_path_factory.mktemp("one_step")
    assert Place(folder).with_text().run(trainer={"num_train_steps": 1}) == OK
    return folder


def after_one_step(place, one_step):
    shutil.copytree(one_step / "checkpoints", place.folder / "checkpoints")


def test_a_checkpoint_of_another_architecture(place, one_step, capsys):
    after_one_step(place, one_step)
    other = {**DOCUMENT["model"], "intermediate_dim": 48, "tie_word_embeddings": True}
    error = place.refused(capsys, model=other)
    assert "unexpected  model.lm_head.weight" in error
    assert "shape       model.transformer.layers.stacked.mlp.up_proj.weight" in error
    assert "token_embeddings" not in error
    # A run that would begin with its parameters is told the same.
    begins = {"initialize_model_from_checkpoint_path": str(place.folder / "checkpoints/run"), "model": other}
    error = place.refused(capsys, trainer={"id": "second"}, **begins)
    assert "shape       model.transformer.layers.stacked.mlp.up_proj.weight" in error
    assert "optimizer" not in error


def test_an_export_that_is_there(place, capsys):
    taken = place.folder / "hf/run/step-2"
    taken.mkdir(parents=True)
    (taken / "model.safetensors").write_text("of somebody")
    error = place.refused(capsys, hf_save_path=str(place.folder / "hf"))
    assert "hf/run" in error and "exports of another run" in error


def test_an_export_that_is_there_behind_a_url(place, capsys, monkeypatch):
    url = f"memory://{place.folder.name}/hf"
    fs, root = filesystem(f"{url}/run")
    fs.pipe_file(f"{root}/step-2/config.json", b"{}")
    assert f"{url}/run: contains exports of another run" in place.refused(capsys, hf_save_path=url)

    def refuse(path):
        raise ImportError("Install s3fs to access S3")

    # The package may be installed.
    monkeypatch.setattr("fsspec.core.url_to_fs", refuse)
    assert "s3:// needs one more package: pip install s3fs" in place.refused(capsys, hf_save_path="s3://bucket/hf")


def test_exports_that_a_store_refuses(place, capsys, monkeypatch):
    def refuses(_):
        raise PermissionError("403: no permission")

    monkeypatch.setattr("levanter.commands.train.run_dirs.check_writable", refuses)
    url = f"memory://{place.folder.name}/hf"
    assert f"hf_save_path: {url}/run: cannot be written (403" in place.refused(capsys, hf_save_path=url)


def test_folders_that_cannot_be_written(place, capsys):
    (place.folder / "file").write_text("")
    inside = str(place.folder / "file/below")
    error = place.refused(
        capsys, trainer={"log_dir": inside, "checkpointer": {"base_path": inside}}, hf_save_path=inside
    )
    for key in ("trainer.log_dir", "trainer.checkpointer.base_path", "hf_save_path"):
        assert f"{key}: {inside}: {place.folder / 'file'} is a file" in error


def test_nothing_to_resume(place, capsys):
    error = place.refused(capsys, trainer={"load_checkpoint": True})
    assert "trainer.load_checkpoint is true, but there is no complete checkpoint" in error


def test_everything_that_is_wrong_is_said_at_once(place, capsys):
    numbers = str(place.folder / "numbers.jsonl")
    only_validation = {"numbers": {"source": {"type": "url", "validation_urls": [numbers]}}}
    error = place.refused(
        capsys,
        trainer={"train_batch_size": 10, "quantization": {"int8": True}},
        data={"components": only_validation, "train_weights": {"numbers": 1.0}},
        optimizer={"learning_rate": 0.01, "cycles": 20},
    )
    for part in ("train_batch_size 10", "trainer.quantization", "optimizer.cycles 20", "no training data"):
        assert part in error
    assert "[1]" in error and "[4]" in error


@pytest.mark.parametrize("skipped", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_loss_that_is_none_ends_the_run_and_loses_nothing(skipped, place, one_step, capsys):
    after_one_step(place, one_step)
    kept = {p: p.read_bytes() for p in (place.folder / "checkpoints").rglob("*") if p.is_file()}
    capsys.readouterr()
    hot = {"learning_rate": 1e3, "warmup": 0, "max_grad_norm": None, "lr_schedule": "constant", "weight_decay": 1e12}
    # The checkpoint was made in another folder, from the text that lay there.
    trainer = {"num_train_steps": 9, "skip_nonfinite_steps": skipped, "resume_with_changes": True}
    code = place.run(trainer=trainer, optimizer=hot)
    said = capsys.readouterr().err
    assert code == INTERNAL_ERROR, said
    assert sum(line.startswith("error: ") for line in said.splitlines()) == 1
    assert "the last checkpoint is of step 1" in said
    if skipped:
        assert "2 steps before it were skipped for the same reason" in said
    else:
        assert "the state after it was not saved" in said and "trainer.skip_nonfinite_steps" in said
    (ref,) = find_checkpoints(str(place.folder / "checkpoints/run"))
    assert ref.step == 1
    now = {p: p.read_bytes() for p in (place.folder / "checkpoints").rglob("*") if p.is_file()}
    assert now.keys() >= kept.keys() and all(now[p] == content for p, content in kept.items())
