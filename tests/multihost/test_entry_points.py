"""The other entry points as several processes, and what is said where the processes were told different things."""

import json
import re

import numpy as np
import pytest
from helpers.processes import Run, check_named, run_together

from levanter.memorization.results import FULL, BookResult

# Real processes on a machine that has other things to do.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


NUMBER = r"\d+(?:\.\d+)?"


def test_prepared_rows(tmp_path, inputs):
    found = []
    for count in (1, 2):
        folder = tmp_path / str(count)
        run_together(folder, count, inputs.eval_sliding_lm(folder), devices=8 // count, cache=inputs.cache)
        found.append(BookResult.read(str(folder / "out" / "train")))
    alone, together = found
    assert len(alone) == 21
    np.testing.assert_array_equal(together.ranks, alone.ranks)
    np.testing.assert_allclose(together.log_pz(FULL), alone.log_pz(FULL), atol=1e-4, rtol=0)


def test_a_page_of_log_probabilities(tmp_path, inputs):
    for count in (1, 2):
        folder = tmp_path / str(count)
        outputs = run_together(folder, count, inputs.viz_logprobs(folder), devices=8 // count, cache=inputs.cache)
        assert "nats per token" in outputs[0] and not any("nats per token" in each for each in outputs[1:])
    alone, together = ((tmp_path / name / "page.html").read_text() for name in "12")
    assert re.sub(NUMBER, "", together) == re.sub(NUMBER, "", alone)
    numbers = [[float(each) for each in re.findall(NUMBER, page)] for page in (alone, together)]
    assert len(numbers[0]) > 200
    np.testing.assert_allclose(numbers[1], numbers[0], atol=0.02, rtol=0)


def test_two_models_on_the_same_bytes(tmp_path, inputs):
    found = []
    for count in (1, 2):
        folder = tmp_path / str(count)
        outputs = run_together(folder, count, inputs.perplexity_gap(folder), devices=8 // count, cache=inputs.cache)
        assert "bits per byte" in outputs[0] and not any("bits per byte" in each for each in outputs[1:])
        (row,) = json.loads((folder / "out" / "summary.json").read_text())["datasets"]
        found.append({key: value for key, value in row.items() if "second" not in key})
    alone, together = found
    assert together == pytest.approx(alone, abs=1e-5) and alone["delta_bits"] != 0


def needles(folder):
    return [json.loads(line) for line in (folder / "out" / "samples.jsonl").read_text().splitlines()]


def same_needles(one, other):
    assert len(one) == len(other) == 6
    for a, b in zip(one, other, strict=True):
        assert a["ranks"] == b["ranks"] and a["values"] == b["values"]
        np.testing.assert_allclose(b["logprobs"], a["logprobs"], atol=2e-5, rtol=0)


@pytest.fixture(scope="module")
def alone(tmp_path_factory, inputs):
    """What one process with eight devices finds, a text on each."""
    folder = tmp_path_factory.mktemp("alone")
    run_together(folder, 1, inputs.eval_needles(folder), devices=8, cache=inputs.cache)
    return needles(folder)


def test_needles(tmp_path, inputs, alone):
    outputs = run_together(tmp_path, 2, inputs.eval_needles(tmp_path), devices=4, cache=inputs.cache)
    assert "values found" in outputs[0] and "values found" not in outputs[1]
    same_needles(alone, needles(tmp_path))
    assert not (tmp_path / "out" / "parts").exists()
    # Again, in two processes: both know that there is nothing to do.
    outputs = run_together(tmp_path, 2, inputs.eval_needles(tmp_path), devices=4, cache=inputs.cache)
    assert "nothing to do" in outputs[0]


@pytest.mark.parametrize("exchange", ["gather", "heads", "ring"])
def test_needles_in_texts_that_lie_in_four_processes(tmp_path, inputs, alone, exchange):
    """Heads are two: those of a process have a text together. Else each text is cut over all processes."""
    context = 2 if exchange == "heads" else 8
    mesh = {
        "axes": {"data": 8 // context, "context": context},
        "compute_mapping": {"position": "context"},
        "attention_mapping": exchange,
    }
    outputs = run_together(tmp_path, 4, inputs.eval_needles(tmp_path, mesh=mesh), devices=2, cache=inputs.cache)
    assert "values found" in outputs[0] and not any("values found" in each for each in outputs[1:])
    same_needles(alone, needles(tmp_path))


def told(tmp_path, command: list[str], *words: str) -> list[str]:
    """A command of which process 1 gets more words."""
    module = command[0]
    script = tmp_path / "one.py"
    script.write_text(
        "import os, runpy, sys\n"
        f"sys.argv += {list(words)!r} if os.environ['LEVANTER_PROCESS_ID'] == '1' else []\n"
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)\n"
    )
    return [str(script), *command[1:]]


def test_other_words_on_another_host_are_refused(tmp_path, inputs):
    """A file that was changed on one host only; the run would compute two things, or wait for ever."""
    train = inputs.train_lm(tmp_path, steps=2)
    words = ["--optimizer.learning_rate", "0.02", "--model.num_layers", "2"]
    outputs = run_together(tmp_path, 2, told(tmp_path, train, *words), devices=4, cache=inputs.cache, code=2)
    assert "the configuration differs between processes:" in outputs[0]
    assert "model.num_layers 2 (process 0: 1); optimizer.learning_rate 0.02 (process 0: 0.01)" in outputs[0]
    assert not (tmp_path / "checkpoints").exists()


def test_another_text_or_checkpoint_on_another_host_is_refused(tmp_path, inputs):
    lines = inputs.documents.read_text().splitlines()
    (tmp_path / "other.jsonl").write_text("".join(json.dumps({"text": "other"}) + "\n" for _ in lines))
    words = [f"--data.components.docs.source.validation_urls=[{tmp_path}/other.jsonl]"]
    command = told(tmp_path, inputs.eval_lm(tmp_path), *words)
    outputs = run_together(tmp_path / "text", 2, command, devices=4, cache=inputs.cache, code=2)
    assert "the text differs between processes:" in outputs[0] and "must be the same on all hosts" in outputs[0]

    copy = tmp_path / "model"
    copy.mkdir()
    for path in inputs.model.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    weights = copy / "model.safetensors"
    changed = bytearray(weights.read_bytes())
    at = 8 + int.from_bytes(changed[:8], "little")
    changed[at:] = bytes(len(changed) - at)
    weights.write_bytes(bytes(changed))
    command = told(tmp_path, inputs.eval_lm(tmp_path), "--hf_checkpoint", str(copy))
    outputs = run_together(tmp_path / "weights", 2, command, devices=4, cache=inputs.cache, code=2)
    assert "the checkpoint differs between processes:" in outputs[0]
    assert not (tmp_path / "out.json").exists()


def test_an_error_of_the_user_that_a_killed_process_caused_is_not_the_users(tmp_path, inputs):
    """As where a checkpoint cannot be written, because the step before it waited for who is gone."""
    script = tmp_path / "one.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "import jax\n"
        "from levanter.checkpoint import CheckpointSaveError\n"
        "from levanter.main import eval_lm\n"
        "from levanter.commands.cli.errors import run_entry_point\n"
        "def execute(plan, mesh):\n"
        "    if os.environ['LEVANTER_PROCESS_ID'] == '1': os.kill(os.getpid(), signal.SIGKILL)\n"
        "    raise CheckpointSaveError('not written') from jax.errors.JaxRuntimeError('Connection reset by peer')\n"
        "eval_lm.execute = execute\n"
        "sys.exit(run_entry_point(eval_lm.EvalLmConfig, eval_lm.main))\n"
    )
    with Run(tmp_path, 2, [str(script), *inputs.eval_lm(tmp_path)[1:]], devices=4, cache=inputs.cache) as run:
        check_named(run.wait(), 1)


def test_an_error_behind_the_start_is_told_with_its_traceback(tmp_path, inputs):
    """An error of ours, on one process: exit code 1 there, 5 with its first line elsewhere."""
    script = tmp_path / "one.py"
    script.write_text(
        "import os, sys\n"
        "from levanter.main import eval_lm\n"
        "from levanter.commands.cli.errors import run_entry_point\n"
        "real = eval_lm.execute\n"
        "def execute(plan, mesh):\n"
        "    if os.environ['LEVANTER_PROCESS_ID'] == '1': raise KeyError('a bug')\n"
        "    return real(plan, mesh)\n"
        "eval_lm.execute = execute\n"
        "sys.exit(run_entry_point(eval_lm.EvalLmConfig, eval_lm.main))\n"
    )
    with Run(tmp_path, 2, [str(script), *inputs.eval_lm(tmp_path)[1:]], devices=4, cache=inputs.cache) as run:
        ended = run.wait()
    assert [each.code for each in ended] == [5, 1]
    assert "ended with exit code 1: KeyError: 'a bug'" in ended[0].output and "Traceback" in ended[1].output
