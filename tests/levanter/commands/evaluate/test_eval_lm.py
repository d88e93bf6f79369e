"""`eval_lm` as a user runs it: real files in, numbers equal torch's, one clear error and exit code 2 for bad input."""

import json
import math

import numpy as np
import pytest
import torch
import transformers
from helpers.drawn_tokenizers import build
from helpers.hf_folder import CONFIG, TEXTS, write_folder
from tokenizers import Tokenizer

from levanter.commands.cli.errors import run_entry_point
from levanter.commands.evaluate.eval_lm import EvalLmConfig, main

TEXT = "\n".join(TEXTS) * 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("model")
    write_folder(where)
    return where


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    where = tmp_path_factory.mktemp("text") / "docs.jsonl"
    where.write_text("".join(json.dumps({"text": t}) + "\n" for t in [TEXT, "a second document", TEXT[::-1]]))
    return where


def config_file(tmp_path, folder, texts, **more):
    document = {
        "hf_checkpoint": str(folder),
        "max_eval_length": 48,
        "output_path": str(tmp_path / "out.json"),
        "data": {"enforce_bos": True, "components": {"docs": {"source": {"validation_urls": [str(texts)]}}}},
        "trainer": {
            "mp": "f32",
            "tracker": {"type": "json_file", "output_path": str(tmp_path / "tracker")},
            "per_device_eval_parallelism": 1,
            "mesh": {"axes": {"data": 4, "model": 2}, "shared_mapping": {"vocab": "model"}},
        },
    }
    for dotted, value in more.items():
        at = document
        *parents, last = dotted.split("__")
        for key in parents:
            at = at.setdefault(key, {})
        at[last] = value
    path = tmp_path / "eval.yaml"
    path.write_text(json.dumps(document))
    return str(path)


def run(path, *words):
    return run_entry_point(EvalLmConfig, main, ["--config_path", path, *words])


def torch_loss(folder, texts, length, *, bos=1, eos=2):
    """Documents end to end in rows that share one token, as our docs say; each document sees only itself."""
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    stream, owner = [], []
    for number, line in enumerate(texts.read_text().splitlines()):
        ids = tokenizer.encode(json.loads(line)["text"], add_special_tokens=False).ids
        ids = [bos, *ids, eos]
        stream += ids
        owner += [number] * len(ids)
    nats, count = 0.0, 0
    for start in range(0, len(stream) - 1, length - 1):
        row, docs = stream[start : start + length], owner[start : start + length]
        begin = 0
        while begin < len(row):
            end = begin
            while end < len(row) and docs[end] == docs[begin]:
                end += 1
            # Positions count from the row's start, but rotary attention sees only their differences.
            piece = torch.tensor([row[begin:end]])
            with torch.no_grad():
                logprobs = model(piece).logits.double().log_softmax(-1)[0]
            for t in range(end - begin - 1):
                nats -= float(logprobs[t, piece[0, t + 1]])
                count += 1
            begin = end
    return nats / count, count


def test_numbers_equal_torch_whatever_the_batch(tmp_path, folder, texts, capsys):
    path = config_file(tmp_path, folder, texts)
    expected, count = torch_loss(folder, texts, 48)
    losses = []
    for per_device in (1, 3):
        assert run(path, "--trainer.per_device_eval_parallelism", str(per_device)) == 0
        numbers = json.loads((tmp_path / "out.json").read_text())
        assert numbers["sets"]["docs"]["tokens"] == count
        losses.append(numbers["sets"]["docs"]["loss"])
    assert losses[0] == pytest.approx(expected, abs=2e-4)
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    byte_count = numbers["sets"]["docs"]["bytes"]
    assert byte_count == sum(len(json.loads(line)["text"].encode()) for line in texts.read_text().splitlines())
    assert numbers["sets"]["docs"]["bits_per_byte"] == pytest.approx(
        losses[1] * count / byte_count / math.log(2), rel=1e-6
    )
    shown = capsys.readouterr().out
    assert "BOS before each document (`data.enforce_bos`), which this tokenizer does not write by itself" in shown
    assert "loading 11 arrays (11 direct)" in shown
    assert "programs: score" in shown
    tracked = (tmp_path / "tracker" / "metrics.jsonl").read_text()
    assert '"eval/loss"' in tracked


def test_compiler_options_of_this_platform_are_used_and_others_left_out(tmp_path, folder, texts, capsys):
    written = {"xla_tpu_scoped_vmem_limit_kib": 65536, "xla_cpu_enable_fast_math": False}
    path = config_file(tmp_path, folder, texts, trainer__compiler="tuned", trainer__compiler_options=written)
    assert run(path) == 0
    expected, _ = torch_loss(folder, texts, 48)
    assert json.loads((tmp_path / "out.json").read_text())["sets"]["docs"]["loss"] == pytest.approx(expected, abs=2e-4)
    shown = capsys.readouterr().out
    assert "xla_tpu_scoped_vmem_limit_kib: no options of cpu programs, skipped" in shown
    assert "trainer.compiler_options: xla_cpu_enable_fast_math=False" in shown


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hf_checkpiont": "x"}, "hf_checkpiont"),
        ({"trainer__mesh__shared_mapping": {"embd": "data"}}, "did you mean embed?"),
        ({"trainer__mesh__axes": {"data": 1, "model": 8}}, "cannot be sharded over model 8"),
        ({"trainer__mesh__axes": {"data": 3, "model": 2}}, "there are 8 devices"),
        ({"hf_checkpoint": "/nowhere/model"}, "/nowhere/model"),
        (
            {"data__components": {"docs": {"source": {"validation_urls": ["/nowhere/docs.jsonl"]}}}},
            "/nowhere/docs.jsonl",
        ),
        ({"model": {"type": "llama", "num_layers": 3}}, "model.num_layers"),
        ({"model": {"type": "lama"}}, "llama"),
        ({"max_eval_length": 1}, "max_eval_length"),
        ({"log_entropy": True}, "log_entropy"),
        ({"trainer__mp": "f33"}, "f33"),
        ({"trainer__quantization": {"int8": True}}, "quantization"),
        ({"trainer__jax_config": {"jax_no_such_option": True}}, "jax_no_such_option"),
        ({"trainer__compiler_options": {"xla_no_such_option": 1}}, "No such compile option: 'xla_no_such_option'"),
        ({"trainer__distributed": {"coordinator_address": "host:1"}}, "trainer.distributed.num_processes"),
        ({"trainer__require_accelerator": True}, "require_accelerator"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_input_is_one_clear_error(tmp_path, folder, texts, capsys, change, message):
    assert run(config_file(tmp_path, folder, texts, **change)) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert "Traceback" not in shown
    assert "loading weights" not in shown


def test_unreadable_text_is_found_before_a_weight_is_read(tmp_path, folder, capsys):
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"good until here \xff\xfe and then not")
    assert run(config_file(tmp_path, folder, bad)) == 2
    shown = capsys.readouterr().err
    assert "bad.txt" in shown
    assert "loading weights" not in shown


def test_a_large_replication_is_refused_with_code_3(tmp_path, folder, texts, capsys):
    path = config_file(
        tmp_path, folder, texts, trainer__mesh__hbm_gib=1e-4, trainer__mesh__shared_mapping={"vocab": None}
    )
    assert run(path) == 3
    shown = capsys.readouterr().err
    assert "embeddings.token_embeddings.weight [vocab 320, embed 32]" in shown
    assert "allow_replicated" in shown


def test_help_lists_the_keys(capsys):
    assert run_entry_point(EvalLmConfig, main, ["--help"]) == 0
    shown = capsys.readouterr().out
    assert "hf_checkpoint" in shown
    assert "max_eval_length" in shown


def test_describe_needs_no_device_and_plans_a_pod(tmp_path, folder, texts):
    from levanter.commands.evaluate.eval_lm import describe
    from levanter.config import parse
    from levanter.runplan import Target

    target = Target(name="pod", platform="tpu", kind="TPU v4", devices=128, hosts=32, hbm_bytes=30 << 30)
    axes = {"trainer.mesh.axes": "{data: 16, model: 2, replica: 4}"}
    plan = describe(parse(EvalLmConfig, paths=[config_file(tmp_path, folder, texts)], overrides=axes), target).check()
    assert plan.mesh.size == 128
    assert plan.load is not None and plan.load.num_hosts == 32
    assert [program.name for program in plan.computing] == ["score"]
    assert "tensor<" in plan.program("score").lower(plan.mesh.abstract(), platform="tpu").as_text()
    assert np.isfinite(plan.sharding.bytes_per_device)


def test_words_whose_ids_lose_their_text_are_scored_in_nats(tmp_path, capsys):
    """WordPiece with lower case: torch's loss for both sets, bits per byte only for the set whose text the ids keep."""
    built = build("wordpiece")
    folder = write_folder(tmp_path / "model", config={**CONFIG, "vocab_size": built.get_vocab_size()})
    built.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    sets, losses = {"kept": ["of a river", "low stones"], "lost": ["Of a River", "the ☃"]}, {}
    components = {}
    for name, lines in sets.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
        losses[name] = torch_loss(folder, tmp_path / f"{name}.jsonl", 48, bos=0, eos=1)
        components[name] = {"source": {"validation_urls": [str(tmp_path / f"{name}.jsonl")]}}
    path = config_file(tmp_path, folder, "", data__components=components)
    assert run(path) == 0
    result, shown = json.loads((tmp_path / "out.json").read_text()), capsys.readouterr().out
    for name, (loss, count) in losses.items():
        assert result["sets"][name]["loss"] == pytest.approx(loss, rel=1e-5)
        assert result["sets"][name]["tokens"] == count
    kept, lost = result["sets"]["kept"], result["sets"]["lost"]
    nats, count = losses["kept"]
    size = sum(len(line.encode()) for line in sets["kept"])
    assert kept["bytes"] == size and kept["bits_per_byte"] == pytest.approx(nats * count / size / math.log(2), rel=1e-5)
    assert lost["bytes"] is lost["bits_per_byte"] is None and "the ids of 2 of 2 documents" in lost["no_bits_per_byte"]
    assert result["overall"]["micro"]["bits_per_byte"] is result["overall"]["macro"]["bits_per_byte"] is None
    assert "no bits/byte for lost: the ids of 2 of 2 documents do not keep their text" in shown


@pytest.mark.parametrize(
    ("words", "length", "batch"),
    [
        # 1 and 10 tokens fit the shortest row; 4 devices of data share one row each.
        (1, 1024, "4 rows of 128 tokens: 1 per device"),
        (10, 1024, "4 rows of 128 tokens: 1 per device"),
        # Some thousand tokens fill a few rows of their length, not a batch of 32.
        (1000, 256, "rows of 256 tokens: "),
        # A row that is a little too short for the text keeps its length.
        (100, 129, "rows of 129 tokens: "),
    ],
)
def test_a_batch_is_no_larger_than_the_text_fills(words, length, batch, tmp_path, folder, capsys):
    text = tmp_path / "short.jsonl"
    text.write_text(json.dumps({"text": " ".join(TEXT.split()[n % 7] for n in range(words))}) + "\n")
    path = config_file(tmp_path, folder, text, max_eval_length=length, trainer__per_device_eval_parallelism=8)
    assert run(path) == 0
    shown = capsys.readouterr().out
    assert batch in shown
    rows = int(shown.partition("batch: ")[2].split()[0])
    expected, count = torch_loss(folder, text, length)
    assert rows == max(4, 4 * -(-count // (length - 1) // 4)) and rows < 32
    numbers = json.loads((tmp_path / "out.json").read_text())["sets"]["docs"]
    assert numbers["tokens"] == count and numbers["loss"] == pytest.approx(expected, abs=2e-4)
