"""A checkpoint's folder alone is enough for every entry point, whatever its family; some really run.

`hf_checkpoint` is the only word about the model, its context, its vocabulary and its tokenizer. Every entry point
describes its run on devices that are here, and `plan` on a pod that is not; in the slow set each runs too, with a model
that is no Llama, and answers what torch answers.
"""

import json

import numpy as np
import pytest
from helpers.family_models import (
    CPU8,
    ESSENTIAL,
    MESHES,
    VARIANTS,
    make_checkpoint,
    torch_logprobs,
    transformers_config,
)
from helpers.hf_folder import TEXTS, byte_level_tokenizer, write_json
from helpers.train_processes import logged

from levanter.commands.cli.errors import run_entry_point
from levanter.commands.evaluate import eval_lm
from levanter.commands.memorize import eval_careless_lm
from levanter.commands.train.lm import train_lm
from levanter.config import load
from levanter.main import plan
from levanter.memorization.results import BookResult, Scheme
from levanter.models.registry import BUILTIN, family_named

TEXT = "\n".join(TEXTS) * 6


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Checkpoints with a tokenizer, made when asked for."""
    made = {}

    def folder(name):
        if name not in made:
            where = tmp_path_factory.mktemp(name)
            made[name] = where, make_checkpoint(name, where)
            byte_level_tokenizer(262).save(str(where / "tokenizer.json"))
            settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": "<pad>"}
            write_json(where / "tokenizer_config.json", settings)
            (where / "book.txt").write_text(TEXT)
        return made[name]

    return folder


def documents(folder):
    """What a user writes for each entry point: no word of the model but where it is."""
    trainer = {"mp": "f32", "tracker": {"type": "noop"}, "mesh": MESHES["2x4"]}
    book = {"components": {"book": {"source": {"validation_urls": [str(folder / "book.txt")]}}}}
    train = {"components": {"book": {"source": {"train_urls": [str(folder / "book.txt")]}}}}
    return {
        "eval_lm": (eval_lm, {"hf_checkpoint": str(folder), "max_eval_length": 48, "data": book, "trainer": trainer}),
        "eval_careless_lm": (
            eval_careless_lm,
            {
                "hf_checkpoint": str(folder),
                "txt_path": str(folder / "book.txt"),
                "chunk_size": 40,
                "prompt_tokens": 20,
                "token_mode": True,
                "eval_batch_size": 8,
                "output_base_path": str(folder / "out"),
                "trainer": trainer,
            },
        ),
        "train_lm": (
            train_lm,
            {
                "hf_checkpoint": str(folder),
                "data": {**train, "cache_dir": str(folder / "cache")},
                "trainer": {**trainer, "train_batch_size": 8, "num_train_steps": 2},
            },
        ),
    }


CONFIGS = {
    "eval_lm": eval_lm.EvalLmConfig,
    "eval_careless_lm": eval_careless_lm.EvalCarelessLmConfig,
    "train_lm": train_lm.TrainLmConfig,
}


DEFAULT = ("gemma3", "phi3")


def test_every_family_is_here():
    own = {transformers_config(name).model_type for name in ESSENTIAL}
    assert own == {family_named(name).config_json[0].model_type for name in BUILTIN}


@pytest.mark.parametrize(
    "name", [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in ESSENTIAL]
)
def test_every_entry_point_describes_it(name, folders, tmp_path, capsys):
    folder, model = folders(name)
    held = sum(parameter.numel() for parameter in model.parameters())
    for entry_point, (module, document) in documents(folder).items():
        path = tmp_path / f"{entry_point}.json"
        path.write_text(json.dumps(document))
        described = module.describe(load(CONFIGS[entry_point], ["--config_path", str(path)]), CPU8)
        wrong = [check for check in described.checks if check.status == "error"]
        assert not wrong and not described.sharding.errors and not described.activations.errors, (entry_point, wrong)
        assert described.load is not None and described.load.source_bytes == 4 * held
        kind = described.work.model if entry_point == "train_lm" else described.work.pretrained.config
        assert [(len(run.places), run.periods) for run in kind.runs] == list(VARIANTS[name].runs)
        if entry_point == "train_lm":
            assert described.work.config.positions == model.config.max_position_embeddings
            assert described.work.tokenizer is not None
        # On a pod of as many chips.
        words = ["--config_path", str(path), "--target", "v4-16", "--no-compile", "--json", "-"]
        assert plan.main([entry_point, *words]) == 0
        (verdict,) = json.loads(capsys.readouterr().out)["verdicts"]
        assert verdict["target"] == "v4-16" and verdict["exit_code"] == 0, verdict


def mean_loss(model, rows) -> float:
    """Of all tokens but the first of each row."""
    rows = np.asarray(rows)
    return -torch_logprobs(model, rows, np.zeros_like(rows)).sum() / (rows.size - len(rows))


@pytest.mark.parametrize("name", ["gemma3", pytest.param("phi3", marks=pytest.mark.slow)])
def test_eval_lm_gives_the_loss_that_torch_gives(name, folders, tmp_path):
    folder, model = folders(name)
    _, document = documents(folder)["eval_lm"]
    path = tmp_path / "eval.json"
    path.write_text(json.dumps({**document, "output_path": str(tmp_path / "out.json")}))
    assert run_entry_point(eval_lm.EvalLmConfig, eval_lm.main, ["--config_path", str(path)]) == 0
    found = json.loads((tmp_path / "out.json").read_text())["sets"]["book"]
    ids = byte_level_tokenizer(262).encode(TEXT, add_special_tokens=False).ids
    ids = [1, *ids, 2]
    nats = count = 0
    # Rows share one token with the next, so that every token but the first is scored once.
    for start in range(0, len(ids) - 1, 47):
        row = np.array(ids[start : start + 48])[None]
        nats -= torch_logprobs(model, row, np.zeros_like(row)).sum()
        count += row.size - 1
    assert found["tokens"] == count
    assert found["loss"] == pytest.approx(nats / count, abs=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma2", "qwen3_moe"])
def test_eval_careless_lm_gives_the_probabilities_that_torch_gives(name, folders, tmp_path):
    folder, model = folders(name)
    _, document = documents(folder)["eval_careless_lm"]
    path = tmp_path / "careless.json"
    path.write_text(json.dumps({**document, "cursor_inc_tokens": 7, "output_base_path": str(tmp_path / "out")}))
    config, main = eval_careless_lm.EvalCarelessLmConfig, eval_careless_lm.main
    assert run_entry_point(config, main, ["--config_path", str(path)]) == 0
    result = BookResult.read(str(tmp_path / "out"))
    ids = np.array(byte_level_tokenizer(262).encode(TEXT, add_special_tokens=False).ids)
    windows = np.stack([ids[start : start + 40] for start, _ in result.token_spans])
    assert len(windows) == (len(ids) - 40) // 7 + 1
    expected = torch_logprobs(model, windows, np.zeros_like(windows))[:, 19:39]
    np.testing.assert_allclose(result.logprobs, expected, atol=2e-4, rtol=0)
    np.testing.assert_allclose(result.log_pz(Scheme(top_k=None)), expected.sum(1), atol=2e-3, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", "gemma3", "gpt2"])
def test_train_lm_begins_with_the_loss_that_torch_gives(name, folders, tmp_path):
    folder, model = folders(name)
    _, document = documents(folder)["train_lm"]
    text = TEXT * 2
    (tmp_path / "long.txt").write_text(text)
    data = {"components": {"long": {"source": {"train_urls": [str(tmp_path / "long.txt")]}}}}
    trainer = {
        **document["trainer"],
        "log_dir": str(tmp_path),
        "id": "run",
        "tracker": {"type": "json_file", "output_path": str(tmp_path / "logged")},
        "checkpointer": {"base_path": str(tmp_path / "checkpoints")},
    }
    data |= {"cache_dir": str(tmp_path / "cache"), "shuffle": False}
    path = tmp_path / "train.json"
    path.write_text(json.dumps({**document, "data": data, "trainer": trainer}))
    assert run_entry_point(train_lm.TrainLmConfig, train_lm.main, ["--config_path", str(path)]) == 0
    # In order, rows are the text's ids, as many as the checkpoint has positions.
    ids = [1, *byte_level_tokenizer(262).encode(text, add_special_tokens=False).ids, 2]
    rows = np.array(ids[: 8 * 128]).reshape(8, 128)
    found = logged(tmp_path)
    assert found[0] == [pytest.approx(mean_loss(model, rows), abs=2e-4)]
    assert np.isfinite(found[1]).all()
