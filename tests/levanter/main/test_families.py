"""A checkpoint's folder alone is enough for every entry point, whatever its family; one of them is really evaluated."""

import json

import numpy as np
import pytest
from helpers.family_models import CPU8, ESSENTIAL, MESHES, VARIANTS, make_checkpoint, torch_logprobs
from helpers.hf_folder import TEXTS, byte_level_tokenizer, write_json

from levanter.config import load
from levanter.main import eval_careless_lm, eval_lm, train_lm
from levanter.main.entry import run_entry_point

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
                "initialize_from_hf": str(folder),
                "use_hf_model_config": True,
                "train_seq_len": 48,
                "data": {**train, "tokenizer": str(folder), "cache_dir": str(folder / "cache")},
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


@pytest.mark.parametrize(
    "name", [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in ESSENTIAL]
)
def test_every_entry_point_describes_it(name, folders, tmp_path):
    folder, model = folders(name)
    held = sum(parameter.numel() for parameter in model.parameters())
    for entry_point, (module, document) in documents(folder).items():
        path = tmp_path / f"{entry_point}.json"
        path.write_text(json.dumps(document))
        plan = module.describe(load(CONFIGS[entry_point], ["--config_path", str(path)]), CPU8)
        wrong = [check for check in plan.checks if check.status == "error"]
        assert not wrong and not plan.sharding.errors and not plan.activations.errors, (entry_point, wrong)
        assert plan.load is not None and plan.load.source_bytes == 4 * held
        kind = plan.work.model if entry_point == "train_lm" else plan.work.pretrained.config
        assert [(len(run.places), run.periods) for run in kind.runs] == list(VARIANTS[name].runs)


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
