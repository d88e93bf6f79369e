# ruff: noqa: E501 - rows of tables
"""What does not fit on the devices at hand ends with exit code 3, before anything is allocated, and says why.

The sizes are beyond any machine, so that the table means the same on all of them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.attacks import Attack, judge, strike, table
from jax.sharding import Mesh

from haliax_ext.abstract import array_leaf
from haliax_ext.mapping import AxisMapping, Mappings
from haliax_ext.program import Input, Program
from levanter.distributed import compile_barrier
from levanter.distributed.compile_barrier import jit_together
from levanter.hardware.memory import host_memory
from levanter.runplan import DOES_NOT_FIT, DoesNotFitError, Target

SMALL = {"type": "llama", "max_seq_len": 64, "hidden_dim": 16, "intermediate_dim": 32, "num_layers": 1, "num_heads": 2,
         "num_kv_heads": 2, "vocab_size": 256}  # fmt: skip


def words(*more: str, **model: object):
    """Words for training, or planning, of a model that is tiny but for what is given."""

    def prepared(folder):
        block = ", ".join(f"{key}: {value}" for key, value in {**SMALL, **model}.items())
        (folder / "a.yaml").write_text(
            f"model: {{{block}}}\n"
            "data: {tokenizer: passthrough, vocab_size: 256, train_weights: {a: 1}, cache_dir: "
            f"'{folder}/cache', components: {{a: {{type: direct, datasets: {{train: ['1 2 3']}}}}}}}}\n"
            f"trainer: {{train_batch_size: 8, tracker: {{type: noop}}, log_dir: '{folder}/logs'}}\n"
        )
        return [*more[:1], "--config_path", str(folder / "a.yaml"), *more[1:]] if more[:1] == ("train_lm",) else [
            "--config_path", str(folder / "a.yaml"), *more]  # fmt: skip

    return prepared


ATTACKS = [
    Attack(name="wide-model", command="train_lm", words=words(hidden_dim=10**9), code=DOES_NOT_FIT,
           says=("it does not fit:", "inputs:", "largest input:", "GiB")),
    Attack(name="many-words", command="train_lm", words=words(vocab_size=2**31 - 1, hidden_dim=2**16), code=DOES_NOT_FIT,
           says=("it does not fit:", "largest input:")),
    Attack(name="huge-batch", command="train_lm", words=words("--trainer.train_batch_size", "1000000000", max_seq_len=65536),
           code=DOES_NOT_FIT, says=("it does not fit:", "batch")),
    Attack(name="planned-here", command="plan", words=words("train_lm", "--target", "local", hidden_dim=10**9),
           code=DOES_NOT_FIT, says=("does not fit", "alone")),
]  # fmt: skip


@pytest.mark.parametrize("attack", table(ATTACKS, in_make_test=["wide-model", "huge-batch"]))
def test_it_is_said_before_anything_is_allocated(attack, tmp_path):
    judge(attack, strike(attack, tmp_path))


def test_a_program_is_compared_with_the_memory_once_it_is_compiled(monkeypatch):
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    value = jax.ShapeDtypeStruct((64, 64), jnp.float32)

    def outer(x):
        return (x[:, :, None, None] * x[None, None]).sum((1, 2)) + x

    nowhere = AxisMapping({})
    program = Program(
        name="outer", function=outer, inputs=(Input(name="x", value=value, placement=nowhere),),
        mappings=Mappings(params=nowhere, compute=nowhere),
    )  # fmt: skip
    x = jnp.ones((64, 64), jnp.float32)
    monkeypatch.setattr(compile_barrier, "host_memory", lambda: 1000 * len(mesh.local_devices))
    with pytest.raises(DoesNotFitError, match=r"^outer does not fit: it takes .* of a device's .*: .* of inputs"):
        jit_together(program, mesh)(x)
    monkeypatch.undo()
    assert float(jit_together(program, mesh)(x)[0, 0]) == 64 * 64 + 1
    assert array_leaf("x", value).nbytes == 64 * 64 * 4 <= program.memory(mesh).total


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc/meminfo": "MemTotal:       100 kB\nMemFree: 1 kB\n"}, 102_400),
        ({"proc/meminfo": "MemTotal: 100 kB\n", "proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "5000\n"}, 5000),
        ({"proc/meminfo": "MemTotal: 100 kB\n", "proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}, 102_400),
        # The group around a group has the limit.
        ({"proc/meminfo": "MemTotal: 100 kB\n", "proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": "max\n",
          "sys/fs/cgroup/a/memory.max": "7000\n"}, 7000),
        # The first generation, which has a number for no limit too.
        ({"proc/meminfo": "MemTotal: 100 kB\n", "proc/self/cgroup": "4:cpu:/\n3:memory:/docker/x\n",
          "sys/fs/cgroup/memory/memory.limit_in_bytes": "9000\n"}, 9000),
        ({"proc/meminfo": "MemTotal: 100 kB\n", "proc/self/cgroup": "3:memory:/\n",
          "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}, 102_400),
        ({}, None),
    ],
)  # fmt: skip
def test_the_memory_of_a_machine_is_what_its_container_may_have(files, expected, tmp_path):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert host_memory(tmp_path) == expected


def test_here_there_is_memory():
    assert (host_memory() or 0) > 1 << 28


@pytest.mark.parametrize(
    ("target", "limit"),
    [
        (dict(platform="tpu", devices=8, hosts=2, hbm_bytes=32), 32),
        (dict(platform="cpu", devices=8, hosts=1, host_bytes=800), 100),
        (dict(platform="cpu", devices=8, hosts=2, host_bytes=800), 200),
        (dict(platform="cpu", devices=8), None),
    ],
)
def test_devices_of_a_cpu_share_its_memory(target, limit):
    assert Target(name="x", kind="x", **target).limit_bytes == limit


RAN_OUT = [
    (MemoryError("Unable to allocate 7.45 TiB for an array"), ("does not fit in memory: Unable to allocate 7.45 TiB",)),
    (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1099511627776 bytes."),
     ("does not fit in memory: RESOURCE_EXHAUSTED", "train_step needs", "largest input: ")),
    (jax.errors.JaxRuntimeError("INTERNAL: something else"), None),
]  # fmt: skip


@pytest.mark.parametrize(("error", "says"), RAN_OUT)
def test_what_slips_through_is_told_the_same_way(error, says, tmp_path, monkeypatch):
    import dataclasses

    from levanter.commands.cli import runner as shell
    from levanter.commands.train.lm.train_lm import ENTRY_POINT
    from levanter.config import load_written

    def execute(*_):
        raise error

    entry = dataclasses.replace(ENTRY_POINT, execute=execute)
    argv = words()(tmp_path)
    loaded = load_written(entry.config, argv)
    if says is None:
        with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
            shell.run_config(entry, loaded.config, written=loaded.written)
        return
    with pytest.raises(DoesNotFitError) as caught:
        shell.run_config(entry, loaded.config, written=loaded.written)
    assert caught.value.exit_code == DOES_NOT_FIT
    for text in says:
        assert text in str(caught.value), str(caught.value)
