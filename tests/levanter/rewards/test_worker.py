"""Rewards of functions that misbehave: the run ends or goes on within the bound, and no process stays."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from levanter.rewards import PythonRewardConfig, RegexRewardConfig, RewardError, RewardInput, Rewards
from levanter.rewards import worker as worker_module

SAMPLES = [
    RewardInput(prompt=f"{n}?", answer=str(n), ids=(n, 0), finish="stop", row={"answer": str(n % 2)}) for n in range(3)
]

MODULE = '''
import ctypes, os, signal, sys, time
import numpy as np

def right(batch):
    return [x["answer"] == x["row"]["answer"] for x in batch]

def fields(batch):
    assert [sorted(x) for x in batch] == [["answer", "finish", "ids", "prompt", "row"]] * len(batch)
    return [len(x["ids"]) + len(x["prompt"]) for x in batch]

def prints(batch):
    for n in range(1_000_000):
        print("line", n)
    return [1.0] * len(batch)

def prints_and_fails(batch):
    print("what it printed before")
    raise KeyError("solution")

def forks(batch):
    for _ in range(5):
        if os.fork() == 0:
            time.sleep(600)
    return [1.0] * len(batch)

def forks_and_returns(batch):
    os.fork()
    return [float(n) for n in range(len(batch))]

def daemonizes(batch):
    """A process of another session whose parent is gone."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)
    os.wait()
    return [1.0] * len(batch)

def sleeps(batch):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(600)

def reads_standard_input(batch):
    return [float(sys.stdin.read() == "")] * len(batch)

def leaks(batch):
    kept = [np.empty(1 << 24) for _ in range(1000)]
    return [1.0] * len(batch)

def crashes(batch):
    ctypes.string_at(0)

def exits(batch):
    sys.exit(3)

def ends(batch):
    os._exit(7)

def mutates(batch):
    values = [float(x["answer"]) for x in batch]
    for x in batch:
        x["answer"] = x["row"]["answer"] = "9"
        x["ids"].clear()
    batch.clear()
    return values

def imports_jax(batch):
    import jax
    assert {d.platform for d in jax.devices()} == {"cpu"}
    return jax.numpy.ones(len(batch))

numpy_bools = lambda batch: [np.True_, np.False_, np.bool_(1)]
arrays = lambda batch: np.arange(3)
generators = lambda batch: (n / 2 for n in range(3))
nan = lambda batch: [1.0, float("nan"), 1.0]
infinite = lambda batch: [1.0, 1.0, float("-inf")]
too_few = lambda batch: [1.0]
too_many = lambda batch: [1.0] * 4
text = lambda batch: "111"
texts = lambda batch: ["1", "1", "1"]
nothing = lambda batch: None
nones = lambda batch: [None] * 3
mapping = lambda batch: dict.fromkeys(range(3), 1.0)
matrix = lambda batch: np.ones((3, 2))
not_a_function = 5
'''


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "hostile_rewards.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))


def marked():
    """The processes of workers that this process started."""
    return worker_module._marked(f"{os.getpid()}-")


def config(function, **more):
    return PythonRewardConfig(function=f"hostile_rewards:{function}", **({"seconds": 30.0} | more))


def score(name, *, batches=1, **more):
    with Rewards([config(name, **more)]) as rewards:
        results = [rewards.score(SAMPLES) for _ in range(batches)]
    assert not marked()
    return results[-1]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("right", [1, 1, 0]),
        ("fields", [4, 4, 4]),
        ("prints", [1, 1, 1]),
        ("forks", [1, 1, 1]),
        ("forks_and_returns", [0, 1, 2]),
        ("daemonizes", [1, 1, 1]),
        ("reads_standard_input", [1, 1, 1]),
        ("mutates", [0, 1, 2]),
        ("numpy_bools", [1, 0, 1]),
        ("arrays", [0, 1, 2]),
        ("generators", [0, 0.5, 1]),
    ],
)
def test_functions_whose_values_count(name, values):
    """Twice: what a function does to a batch does not change the next one."""
    assert score(name, batches=1 if name == "prints" else 2).total.tolist() == values
    assert SAMPLES[0].row == {"answer": "0"}


def test_a_function_may_import_jax_and_gets_no_accelerator():
    assert score("imports_jax", seconds=120.0).total.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("prints_and_fails", r"KeyError: 'solution' \(hostile_rewards.py, line \d+\)\n  printed: what it printed"),
        ("crashes", "died of SIGSEGV"),
        ("exits", "SystemExit: 3"),
        ("ends", "exit code 7"),
        ("leaks", "MemoryError"),
        ("nan", "returned nan for answer 1, expected a finite number"),
        ("infinite", "returned -inf for answer 2"),
        ("too_few", "returned 1 values for 3 answers"),
        ("too_many", "returned 4 values for 3 answers"),
        ("text", "returned str, expected a list of 3 numbers"),
        ("texts", r"returned '1' \(str\) for answer 0, expected a number"),
        ("nothing", "returned NoneType, expected a list"),
        ("nones", r"returned None \(NoneType\) for answer 0"),
        ("mapping", "returned dict, expected a list"),
        ("matrix", r"\(ndarray\) for answer 0, expected a number"),
        ("missing", "has no attribute 'missing'"),
        ("not_a_function", "is int, expected a function"),
    ],
)
def test_functions_that_fail_end_the_run_or_count_as_zero(name, message):
    more = {"memory_mib": 1024} if name == "leaks" else {}
    with pytest.raises(RewardError, match=f"(?s)rewards: python: .*{message}"):
        score(name, **more)
    result = score(name, on_error="zero", **more)
    assert result.total.tolist() == [0, 0, 0]
    assert result.failed == {"python": 3}
    assert "rewards: python" in result.errors[0]


def test_a_function_that_hangs_is_killed_at_its_bound_although_it_ignores_sigterm():
    start = time.monotonic()
    with pytest.raises(RewardError, match=r"no values after 0\.5 s, the limit"):
        score("sleeps", seconds=0.5)
    assert time.monotonic() - start < 60
    # The next batch gets another worker.
    with Rewards([config("sleeps", seconds=0.5, on_error="zero", name="slow"), config("right")]) as rewards:
        for _ in range(2):
            assert rewards.score(SAMPLES).total.tolist() == [1, 1, 0]
    assert not marked()


def test_a_module_that_does_not_exist_is_named():
    with pytest.raises(RewardError, match="No module named 'no_such_rewards'"):
        Rewards([PythonRewardConfig(function="no_such_rewards:f")]).score(SAMPLES)


@pytest.mark.parametrize("function", ["", "module", "module.function", "a b:c", "module:", "1module:f"])
def test_paths_that_are_none_are_refused(function):
    with pytest.raises(ValueError, match="expected module:function"):
        PythonRewardConfig(function=function)


def test_a_killed_run_leaves_no_worker(tmp_path):
    """By SIGKILL, while the function runs."""
    script = tmp_path / "run.py"
    script.write_text(
        "from levanter.rewards import PythonRewardConfig, Rewards, RewardInput\n"
        "reward = PythonRewardConfig(function='hostile_rewards:sleeps', seconds=600.0)\n"
        "Rewards([reward]).score([RewardInput(prompt='', answer='', ids=(1,), finish='stop', row={})])\n"
    )
    environment = dict(os.environ) | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    process = subprocess.Popen([sys.executable, str(script)], env=environment)
    mark = f"{process.pid}-"

    def wait_until(condition):
        end = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.05)

    wait_until(lambda: worker_module._marked(mark))
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until(lambda: not worker_module._marked(mark))


def test_a_regular_expression_that_takes_forever_is_killed():
    samples = [RewardInput(prompt="", answer="a" * 60 + "b", ids=(1,), finish="stop", row={})]
    hostile = RegexRewardConfig(pattern="(a+)+$", seconds=0.5)
    with Rewards([hostile]) as rewards, pytest.raises(RewardError, match=r"no values after 0\.5 s"):
        rewards.score(samples)
    assert not marked()


def test_a_worker_runs_in_the_working_folder_s_modules(tmp_path, monkeypatch):
    """An empty entry of the import path is the working folder."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "local_rewards.py").write_text("def one(batch): return [1] * len(batch)\n")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.syspath_prepend("")
    with Rewards([PythonRewardConfig(function="local_rewards:one")]) as rewards:
        assert rewards.score(SAMPLES).total.tolist() == [1, 1, 1]
    assert Path.cwd().name == "here"
