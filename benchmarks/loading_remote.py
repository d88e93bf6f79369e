"""Times loading checkpoints from an object store that is as fast as it is told to be, on virtual CPU devices.

    python benchmarks/loading_remote.py [--shape NAME …] [--repeat 3] [--latency 0.03] [--connection 20e6]
                                        [--total 200e6] [--budget-mib 256] [--fault-every N]
    python benchmarks/loading_remote.py --unlimited [--tls]      # as fast as it goes: processor seconds a gigabyte
    python benchmarks/loading_remote.py --shape exchange --processes     # all hosts of it, that exchange (gloo)

The store is `tests/helpers/object_store.py` in a process of its own: so many seconds to the first byte of an answer, so
many bytes a second of one connection and of all together. Checkpoints are made in the temporary folder when they are
not there. Each measurement is a process of its own, and begins when the checkpoint has been opened and planned. With
`--drop` blocks are dropped once they are full, as on a host whose chips take them: none of the time goes into pages of
memory that nothing has used before. *Of the limit* is bytes of the checkpoint over seconds, over the store's bytes a
second. *Serial* are the processor seconds in which the interpreter's lock is held, estimated as all of them without
those of receiving, casting and checking (which release it): one process cannot be faster than a gigabyte in so many.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A checkpoint, and how it is laid out.

    Attributes:
        family: `llama` or `gpt_neox`.
        hidden, intermediate, layers, heads, kv_heads, vocab: sizes.
        mapping: axis → mesh axis of data 4 × model 2.
        dtype: what it is loaded in; it is stored in bf16.
        hosts: of the run; of several, the first one's share is read, and dropped (unless `--processes`).
        about: a few words.
    """

    family: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    mapping: dict[str, str]
    dtype: str = "bfloat16"
    hosts: int = 1
    about: str


BOTH = {"embed": "data", "mlp": "model", "kv_head": "model", "vocab": "model"}
LLAMA = {"hidden": 2048, "intermediate": 8192, "layers": 16, "heads": 32, "kv_heads": 8, "vocab": 128256}
PYTHIA = {"hidden": 2048, "intermediate": 8192, "layers": 16, "heads": 8, "kv_heads": 8, "vocab": 50304}
SMALL = {"hidden": 1024, "intermediate": 4096, "layers": 24, "heads": 16, "kv_heads": 16, "vocab": 50304}
SHAPES = {
    "llama": Shape(family="llama", **LLAMA, mapping=BOTH, about="Llama 3.2 1B, 2.36 GiB"),
    "llama-f32": Shape(family="llama", **LLAMA, mapping=BOTH, dtype="float32", about="the same, cast to f32"),
    "neox": Shape(family="gpt_neox", **PYTHIA, mapping=BOTH, about="Pythia 1B, q, k and v of head after head"),
    "exchange": Shape(
        family="llama", **LLAMA, mapping={"embed": "data"}, hosts=2, about="inner axis: slabs of one of two hosts"
    ),
    "held-out": Shape(
        family="gpt_neox",
        **SMALL,
        mapping={"mlp": "data", "kv_head": "data", "vocab": "model"},
        dtype="float32",
        about="Pythia 410M in f32, runs of 128 KiB",
    ),
}


def tensors(shape: Shape) -> dict[str, tuple[int, ...]]:
    """The tensors of a checkpoint, in the order of its file."""
    hidden, wide = shape.hidden, shape.intermediate
    size = hidden // shape.heads
    if shape.family == "llama":
        found = {"model.embed_tokens.weight": (shape.vocab, hidden)}
        for n in range(shape.layers):
            layer = f"model.layers.{n}"
            found |= {
                f"{layer}.self_attn.q_proj.weight": (hidden, hidden),
                f"{layer}.self_attn.k_proj.weight": (shape.kv_heads * size, hidden),
                f"{layer}.self_attn.v_proj.weight": (shape.kv_heads * size, hidden),
                f"{layer}.self_attn.o_proj.weight": (hidden, hidden),
                f"{layer}.mlp.gate_proj.weight": (wide, hidden),
                f"{layer}.mlp.up_proj.weight": (wide, hidden),
                f"{layer}.mlp.down_proj.weight": (hidden, wide),
                f"{layer}.input_layernorm.weight": (hidden,),
                f"{layer}.post_attention_layernorm.weight": (hidden,),
            }
        return found | {"model.norm.weight": (hidden,)}
    found = {"gpt_neox.embed_in.weight": (shape.vocab, hidden)}
    for n in range(shape.layers):
        layer = f"gpt_neox.layers.{n}"
        for name, axes in {
            "attention.query_key_value": (3 * hidden, hidden),
            "attention.dense": (hidden, hidden),
            "mlp.dense_h_to_4h": (wide, hidden),
            "mlp.dense_4h_to_h": (hidden, wide),
        }.items():
            found |= {f"{layer}.{name}.weight": axes, f"{layer}.{name}.bias": axes[:1]}
        for name in ("input_layernorm", "post_attention_layernorm"):
            found |= {f"{layer}.{name}.weight": (hidden,), f"{layer}.{name}.bias": (hidden,)}
    found |= {f"gpt_neox.final_layer_norm.{part}": (hidden,) for part in ("weight", "bias")}
    return found | {"embed_out.weight": (shape.vocab, hidden)}


def make_checkpoint(folder: Path, shape: Shape, *, files: int = 2) -> None:
    """Writes a checkpoint of random numbers, one tensor after another."""
    import ml_dtypes
    import numpy as np

    rng = np.random.default_rng(0)
    noise = (rng.standard_normal(1 << 22, dtype=np.float32) * 0.02).astype(ml_dtypes.bfloat16).tobytes()
    shapes = tensors(shape)
    names, index = list(shapes), {}
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(files):
        file = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        header, at = {}, 0
        for name in names[number * len(names) // files : (number + 1) * len(names) // files]:
            nbytes = 2 * int(np.prod(shapes[name]))
            header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [at, at + nbytes]}
            at, index[name] = at + nbytes, file
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (folder / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            while at:
                at -= out.write(noise[: min(at, len(noise))])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def stored_as(name: str) -> str:
    """The first shape with the same checkpoint: its folder."""
    return next(other for other in SHAPES if tensors(SHAPES[other]) == tensors(SHAPES[name]))


def planned_on(shape: Shape, source, devices):
    """Sharding plan, load plan and mesh of a shape."""
    import haliax as hax
    import jax
    import numpy as np

    from haliax_ext.abstract import abstract, leaves
    from haliax_ext.loading import plan_loading
    from haliax_ext.mapping import AxisMapping, Mappings
    from haliax_ext.meshspec import MeshSpec
    from haliax_ext.planner import plan_sharding
    from levanter.models.gpt_neox import family as neox_weights
    from levanter.models.gpt_neox.config import GptNeoxConfig
    from levanter.models.llama import weights as llama_weights
    from levanter.models.llama.config import LlamaConfig

    sizes = {
        "hidden_dim": shape.hidden,
        "intermediate_dim": shape.intermediate,
        "num_layers": shape.layers,
        "num_heads": shape.heads,
        "num_kv_heads": shape.kv_heads,
        "vocab_size": shape.vocab,
    }
    if shape.family == "llama":
        config, rules = LlamaConfig(**sizes, tie_word_embeddings=True), llama_weights.rules
    else:
        config, rules = GptNeoxConfig(**sizes), neox_weights.rules
    spec = MeshSpec.of(data=4, model=2)
    mesh = jax.sharding.Mesh(np.asarray(devices).reshape(4, 2), spec.names)
    model = abstract(config.build, hax.Axis("vocab", shape.vocab), key=jax.random.PRNGKey(0))
    sharding = plan_sharding(leaves(model), Mappings(params=AxisMapping(shape.mapping)), spec).check()
    hosts = np.arange(8).reshape(4, 2) * shape.hosts // 8
    dtype = np.dtype(jax.numpy.dtype(shape.dtype))
    plan = plan_loading(sharding, rules(config), source, hosts=hosts, dtype=dtype)
    return sharding, plan, mesh


@contextmanager
def kernel_seconds():
    """Processor seconds of all threads in what releases the interpreter's lock: receiving, casting, checking."""
    from haliax_ext import host_reader
    from haliax_ext.leaf_layout import BlockCopy
    from levanter.io.ranges.connections import HttpAnswer

    spent, lock = [0.0], threading.Lock()

    def timed(function):
        def call(*args, **options):
            begun = time.thread_time()
            try:
                return function(*args, **options)
            finally:
                took = time.thread_time() - begun
                with lock:
                    spent[0] += took

        return call

    kept = HttpAnswer._some, BlockCopy.scatter, host_reader.all_finite
    HttpAnswer._some, BlockCopy.scatter, host_reader.all_finite = map(timed, kept)
    try:
        yield spent
    finally:
        HttpAnswer._some, BlockCopy.scatter, host_reader.all_finite = kept


def measure(name: str, url: str, args: argparse.Namespace) -> dict:
    """One load in this process."""
    import jax
    from levanter.distributed.barrier import barrier

    from haliax_ext.loading import load
    from levanter.commands.cli.lifecycle import join_processes
    from levanter.compat.hf.index import open_weights
    from levanter.compat.hf.repository import RemoteFolder
    from levanter.distributed.compile_barrier import jit_together
    from levanter.distributed.initialize import DistributedConfig

    shape, budget = SHAPES[name], args.budget_mib * MIB
    if args.processes:
        join_processes(DistributedConfig())
    begun = time.perf_counter()
    source = open_weights(RemoteFolder(f"{url}/{stored_as(name)}"), allow_pickle=False)
    opened = time.perf_counter() - begun
    sharding, plan, mesh = planned_on(shape, source, jax.devices())
    jax.block_until_ready([jax.device_put(jax.numpy.zeros(1), each) for each in jax.local_devices()])
    if args.processes:
        barrier("loading")
    cpu = time.process_time()
    with kernel_seconds() if args.unlimited else nullcontext([0.0]) as kernels:
        if args.drop or (shape.hosts > 1 and not args.processes):
            found = read_share(plan, source, budget)
        else:
            loaded = load(plan, sharding, source, mesh, memory_bytes=budget, jit=jit_together)
            shards = [shard.data for each in loaded.values() for shard in each.addressable_shards]
            found = {
                "seconds": max(loaded.report.seconds_by_host),
                "read": loaded.report.bytes_read,
                "arrays": sum({each.unsafe_buffer_pointer(): each.nbytes for each in shards}.values()),
                "peak": loaded.report.peak_rss_bytes,
            }
    cpu = time.process_time() - cpu
    return found | {
        "opened": opened,
        "cpu": cpu,
        "serial": cpu - kernels[0],
        "planned": plan.bytes_by_host[jax.process_index()],
        "source": plan.source_bytes // (1 if args.processes else shape.hosts),
        "own": plan.source_bytes // shape.hosts,
        "exchanged": sum(each.strategy == "exchange" for each in plan.loads),
        "tally": str(source.remote.tally),
        "extra": source.remote.tally.extra_bytes,
    }


def read_share(plan, source, budget: int) -> dict:
    """Reads what the first host reads, in the order and with the budget of `load`, and drops it."""
    from haliax_ext.host_reader import HostReader, Readers
    from haliax_ext.load_progress import MemoryWatch
    from haliax_ext.read_scheduler import read_all, read_batches

    begun = time.perf_counter()
    readers = Readers.of(source.remote, budget, threads=None, read_bytes=None)
    with MemoryWatch() as memory, HostReader(source, readers) as reader:

        def drop(batch) -> None:
            while not reader.wait(batch.futures, 0.2):
                pass
            batch.futures.clear()
            for read_plan in batch.plans:
                for block in read_plan.blocks:
                    block.memory = None

        batches = read_batches(plan, plan.host_devices(0), together=True)
        budget, ahead = budget - readers.held_bytes, readers.ahead_bytes
        read_all(batches, reader, drop, budget=budget, nbytes=plan.bytes_by_host[0], ahead=ahead)
        read = reader.bytes_done
    return {"seconds": time.perf_counter() - begun, "read": read, "arrays": 0, "peak": memory.peak_bytes}


class Store:
    """The stand-in in a process of its own."""

    def __init__(self, folder: Path, args: argparse.Namespace):
        words = [sys.executable, str(ROOT / "tests" / "helpers" / "object_store.py"), str(folder)]
        if not args.unlimited:
            words += ["--latency", args.latency, "--connection", args.connection, "--total", args.total]
        if args.fault_every:
            words += ["--fault-every", args.fault_every]
        if args.tls:
            words += ["--certificate", folder / "both.pem"]
        self.process = subprocess.Popen(list(map(str, words)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.url = json.loads(self.process.stdout.readline())["url"]

    def told(self) -> dict:
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.stdin.close()
        self.process.wait()


def touch_memory(gib: int) -> None:
    """Lets another process use that much memory and free it: a virtual machine gives memory on first use, slowly."""
    if gib:
        code = f"import numpy as np\nnp.ones({gib} << 30, np.uint8)"
        subprocess.run([sys.executable, "-c", code], check=True)


def run(name: str, url: str, args: argparse.Namespace, environment: dict[str, str]) -> dict:
    """One measurement, in a process of its own."""
    touch_memory(args.touch_gib)
    words = [str(Path(__file__).resolve()), "--one", name, url, "--budget-mib", str(args.budget_mib)]
    words += [word for word, given in (("--unlimited", args.unlimited), ("--drop", args.drop)) if given]
    count = SHAPES[name].hosts if args.processes else 1
    if args.processes:
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            where = f"localhost:{probe.getsockname()[1]}"
        flags = f"--xla_force_host_platform_device_count={8 // count}"
        environment = environment | {"LEVANTER_COORDINATOR": where, "LEVANTER_NUM_PROCESSES": str(count)}
        environment |= {"XLA_FLAGS": flags}
        words.append("--processes")
    running = [
        subprocess.Popen(
            [sys.executable, *words],
            env=environment | ({"LEVANTER_PROCESS_ID": str(number)} if args.processes else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(count)
    ]
    told = [each.communicate() for each in running]
    for process, (_, errors) in zip(running, told, strict=True):
        if process.returncode:
            sys.exit(errors[-4000:])
    found = [json.loads(said.splitlines()[-1]) for said, _ in told]
    return found[0] | {"cpu": sum(each["cpu"] for each in found), "extra": sum(each["extra"] for each in found)}


def certificate(folder: Path) -> None:
    """A certificate for this machine, and its key."""
    words = "req -x509 -newkey rsa:2048 -nodes -days 30 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    key, made = folder / "key.pem", folder / "cert.pem"
    subprocess.run(["openssl", *words.split(), "-keyout", key, "-out", made], check=True, capture_output=True)
    (folder / "both.pem").write_bytes(key.read_bytes() + made.read_bytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "levanter-bench-remote")
    parser.add_argument("--shape", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--latency", type=float, default=0.03)
    parser.add_argument("--connection", type=float, default=20e6)
    parser.add_argument("--total", type=float, default=200e6)
    parser.add_argument("--budget-mib", type=int, default=256)
    parser.add_argument("--fault-every", type=int, default=0, help="a 503, a reset or a stall every so many requests")
    parser.add_argument("--drop", action="store_true", help="drop what is read instead of keeping it in arrays")
    parser.add_argument("--touch-gib", type=int, default=0, help="memory another process uses just before")
    parser.add_argument("--unlimited", action="store_true", help="no limits; counts processor seconds")
    parser.add_argument("--processes", action="store_true", help="one for each host of a shape, all of them")
    parser.add_argument("--tls", action="store_true", help="by https")
    parser.add_argument("--one", nargs=2, metavar=("SHAPE", "URL"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(*args.one, args)))
        return
    for name in args.shape:
        same = stored_as(name)
        if not (args.folder / same / "model.safetensors.index.json").exists():
            make_checkpoint(args.folder / same, SHAPES[same])
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT, ROOT / "src")))
    if args.tls:
        certificate(args.folder)
        environment["SSL_CERT_FILE"] = str(args.folder / "cert.pem")
    print(f"{'':10} {'time':>9} {'rate':>10} {'of limit':>8} {'bytes':>7} {'extra':>7} {'budget used':>11} {'CPU':>11}")
    for name in args.shape:
        for _ in range(args.repeat):
            with Store(args.folder, args) as store:
                show(name, run(name, store.url, args, environment), store.told(), args)


def show(name: str, found: dict, told: dict, args: argparse.Namespace) -> None:
    """A line of the table."""
    assert found["read"] == found["planned"], "the plan says what is read"
    gigabytes, rate = found["source"] / 1e9, found["source"] / found["seconds"]
    share = "" if args.unlimited else f"{rate / args.total:.3f}"
    serial = f" ({found['serial'] / gigabytes:.2f} serial)" if args.unlimited else ""
    print(
        f"{name:10} {found['seconds']:7.2f} s {rate / 1e6:5.0f} MB/s {share:>8} "
        f"{found['read'] / found['own']:6.3f}× {found['extra'] / found['source']:6.2%} "
        f"{(found['peak'] - found['arrays']) / MIB:7.0f} MiB "
        f"{found['cpu'] / gigabytes:5.2f} s/GB{serial}  {found['tally']}; {told['requests']} requests, at most "
        f"{told['most']} at a time; opened in {found['opened']:.2f} s, {found['exchanged']} exchanged; server "
        f"{told['cpu']:.1f} CPU s",
        flush=True,
    )


if __name__ == "__main__":
    main()
