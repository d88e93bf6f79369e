"""`sample_lm`: upstream's documents run, and their texts are those of `transformers`."""

import json
from typing import Any

import numpy as np
import pytest
from helpers.hf_folder import tensors, write_folder
from helpers.legacy_documents import FOLDER

from levanter.commands.cli.errors import run_entry_point
from levanter.commands.generate import sample_lm
from levanter.commands.generate.sample_config import PROMPTS, SampleLmConfig
from levanter.commands.generate.upstream_engine_config import InferenceEngineConfig
from levanter.config import ExplicitKeys, load_written
from levanter.inference.config import InferenceConfig
from levanter.plan.target_from_name import pod_target


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    where = tmp_path_factory.mktemp("sample") / "model"
    weights = {
        name: each if "norm" in name else (0.3 * each.astype(np.float32)).astype(each.dtype)
        for name, each in tensors().items()
    }
    write_folder(where, weights=weights, adds_bos=True)
    return where


def run(model, tmp_path, **document) -> int:
    path = tmp_path / "mine.yaml"
    trainer = {"mp": "f32", "tracker": {"type": "noop"}, "tensor_parallel_axes": ["mlp"], "model_axis_size": 2}
    path.write_text(json.dumps({"hf_checkpoint": str(model), "trainer": trainer, **document}))
    return run_entry_point(SampleLmConfig, sample_lm.main, ["--config_path", str(path)])


def test_texts_of_an_upstream_document(model, tmp_path, capsys, devices):
    """Greedy texts are transformers', every round has all of them; old keys are translated or named."""
    import tokenizers
    import torch
    import transformers

    engine = {"max_pages_per_seq": 4, "page_size": 16, "max_seqs": 4, "max_rounds": 16, "hbm_utilization": 0.5}
    prompts = ["the cat sat", "def f(x):"]
    options = {"temperature": 0, "stop_sequence": None, "max_new_tokens": 10, "n_rounds": 2, "profile": True}
    assert run(model, tmp_path, engine=engine, prompts=prompts, **options) == 0
    said = capsys.readouterr().out
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    for n, prompt in enumerate(prompts):
        ids = [1, *tokenizer.encode(prompt, add_special_tokens=False).ids]
        with torch.no_grad():
            made = theirs.generate(
                torch.tensor([ids]), max_new_tokens=10, do_sample=False, pad_token_id=0, eos_token_id=2
            )[0, len(ids) :].tolist()
        text = tokenizer.decode(made[:-1] if made[-1] == 2 else made)
        for number in (1, 2):
            assert f"--- round {number}, prompt {n}, text 1\n{prompt}{text}\n" in said
    for note in (
        "engine.hbm_utilization: without effect; ",
        "not taken from free memory: 4 rows of 64 positions, ",
        "engine.max_rounds: 8 instead of 16",
        "profile: without effect",
    ):
        assert note in said
    assert "tokens/s" in said


def test_an_empty_prompt_begins_with_a_bos_that_the_tokenizer_does_not_write(tmp_path):
    folder, path = write_folder(tmp_path / "model"), tmp_path / "mine.yaml"
    path.write_text(json.dumps({"hf_checkpoint": str(folder), "prompts": ["the cat", ""], "trainer": {"mp": "f32"}}))
    config, written = _read(path)
    plan = sample_lm.describe(config, pod_target("v6e-4"), written=written)
    assert plan.work.requests[0].tokens[:1] != (1,) and plan.work.requests[1].tokens == (1,)
    assert "a prompt without text begins with BOS, which this tokenizer does not write by itself" in str(plan.checks)


def test_a_prompt_that_is_too_long_is_refused_before_anything_is_loaded(model, tmp_path, capsys):
    assert run(model, tmp_path, engine={"max_seq_len": 40, "max_seqs": 4}, prompts=["the cat", "the cat " * 30]) == 2
    assert "prompts[0]: a prompt of" in (said := capsys.readouterr().err) and "max_tokens" in said


def test_upstream_s_sampler_document_says_what_it_plans():
    config, written = _read(FOLDER / "sampler/20_sample_llama8b.yaml")
    assert config.generating(written).inference == InferenceConfig(
        max_rows=8,
        max_seq_len=2048,
        prefill_chunk=1024,
        steps=8,
        allocation="paged",
        page_size=16,
        pages=2048,
        penalties=False,
    )
    assert config.texts == PROMPTS and config.n_rounds == 2
    assert [note.partition(":")[0] for note in config.engine.notes(written)] == [
        "engine.max_queued_tokens", "engine.max_seqs_in_prefill", "engine.max_rounds",
    ]  # fmt: skip


def _read(path):
    loaded = load_written(SampleLmConfig, ["--config_path", str(path)])
    return loaded.config, loaded.written


def test_rows_are_as_many_as_there_is_work_for():
    def rows(**changes):
        config = SampleLmConfig(hf_checkpoint="acme/llama", **changes)
        return config.generating(ExplicitKeys.in_python(config)).inference.max_rows

    assert rows() == 8
    assert rows(prompts=["a"] * 9, n_generations=3) == 32
    assert rows(prompts="a", n_generations=100, engine=InferenceEngineConfig(max_seqs=16)) == 16


def test_parameters_are_checked():
    with pytest.raises(ValueError, match="temperature"):
        SampleLmConfig(temperature=1e-9)
    with pytest.raises(ValueError, match=r"engine\.max_seqs: must be at least 1"):
        InferenceEngineConfig(max_seqs=0)
