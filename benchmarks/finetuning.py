"""Times a step that trains adapters: ours, our full step, peft with torch, and upstream's.

    python benchmarks/finetuning.py [--shape smollm2] [--peft …/python] [--upstream …/python] [--rounds 8]

The model is a Llama of the shape of SmolLM2-135M, or another of `SHAPES`, in float32 on one CPU device; adapters of
rank 16 on all seven projections of each layer. All contenders begin with the same weights, use the same batches (random
ids, one segment), clip the gradient at norm 1 and apply AdamW with decay 0.1. A is random and B is 0, from the same
file: the losses of the first steps of all that train adapters must agree to 1e-4, and the first loss of all, or
nothing is timed.

- *lora*: the `train_step` Program of `levanter.main.train_lm` with `adapter: {type: lora}`.
- *full*: the same without it.
- *lora_remat*, *full_remat*: both with every layer recomputed in the backward pass.
- *peft*: transformers' Llama with `peft.get_peft_model` and torch's AdamW over what requires a gradient.
- *upstream*: the compiled step of its `Trainer` as its `train_lm` makes it for `adapter: {type: lora}`, of
  `pip install marin-levanter gitpython` in a separate environment.

Every contender runs in its own process for the entire measurement and waits for its turn; turns alternate, in a
different order each round. Ratios are taken turn by turn and their median is reported, for time and for CPU seconds.
The bytes of a state are those of the arrays that a step is given and keeps: the base, what is trained, two moments.
"""

import argparse
import dataclasses
import math
import random
import statistics
import sys
import tempfile
from typing import Any

from training import Contender, work
from training_contenders import BETAS, CLIP, DECAY, LEARNING_RATE, OUR_PATHS, Run, Shape, _loop, make_weights

RANK, ALPHA = 16, 32.0
AGREE = 1e-4
SHAPES = {
    # To see that everything runs.
    "tiny": {"vocab": 512, "embed": 64, "mlp": 128, "layers": 2, "heads": 4, "kv_heads": 2, "head_size": 16},
    "smollm2": {
        "vocab": 49152, "embed": 576, "mlp": 1536, "layers": 30, "heads": 9, "kv_heads": 3, "tied": True,
        "batch": 4, "length": 256,
    },
    # A layer of Llama 3.2 1B's shape and a quarter of them; few large matrices.
    "wide": {
        "vocab": 32000, "embed": 2048, "mlp": 8192, "layers": 4, "heads": 32, "kv_heads": 8, "tied": True,
        "batch": 2, "length": 256,
    },
    # Longer rows: attention is a larger part.
    "long": {
        "vocab": 32000, "embed": 768, "mlp": 2048, "layers": 12, "heads": 12, "kv_heads": 12,
        "batch": 1, "length": 1024,
    },
}  # fmt: skip
PROJECTIONS = {
    **{name: f"self_attn.{name}_proj" for name in "qkvo"},
    **{n: f"mlp.{n}_proj" for n in ("gate", "up", "down")},
}
INPUTS = {name: 2 if name == "o" else 1 for name in PROJECTIONS}
"""How many of a weight's last axes are its inputs."""


def factors(shape: Shape) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """By projection, the shapes of A and B: `[layers, rank, *in]`, `[layers, *out, rank]`."""
    found = {}
    for name, size in shape.weights().items():
        if name in PROJECTIONS:
            layers, *rest = size
            out, inner = rest[: len(rest) - INPUTS[name]], rest[len(rest) - INPUTS[name] :]
            found[name] = ((layers, RANK, *inner), (layers, *out, RANK))
    return found


def make_factors(shape: Shape, file: str) -> None:
    """Adds A of every projection to the file of the weights."""
    import numpy as np

    rng, held = np.random.default_rng(1), dict(np.load(file))
    for name, (a, _) in factors(shape).items():
        held[f"a.{name}"] = rng.standard_normal(a, np.float32) / np.float32(math.sqrt(math.prod(a[2:])))
    np.savez(file, **held)


def ours(shape: Shape, data: Any, _: int, *, adapted: bool, remat: bool) -> Run:
    """The run's own Program, with adapters or without."""
    import haliax as hax
    import jax
    import numpy as np

    from haliax_ext.abstract import leaves, map_arrays
    from levanter.commands.cli.devices import configure_jax, local_target
    from levanter.commands.train.lm.train_lm import TrainLmConfig, describe
    from levanter.config import parse
    from levanter.data import next_tokens
    from levanter.mesh import local_devices
    from levanter.trainer.loss import LmBatch

    adapter = {"type": "lora", "r": RANK, "alpha": ALPHA, "zero_init_b": True, "a_init_mode": "peft"}
    config = parse(
        TrainLmConfig,
        overrides={
            "data.tokenizer": "passthrough",
            "data.vocab_size": shape.vocab,
            "data.block_cross_document_attention": False,
            "model": {
                "type": "llama",
                "max_seq_len": shape.length,
                "hidden_dim": shape.embed,
                "intermediate_dim": shape.mlp,
                "num_layers": shape.layers,
                "num_heads": shape.heads,
                "num_kv_heads": shape.kv_heads,
                "head_dim": shape.head_size,
                "tie_word_embeddings": shape.tied,
                "gradient_checkpointing": remat,
            },
            "optimizer": {
                "learning_rate": LEARNING_RATE,
                "weight_decay": DECAY,
                "lr_schedule": "constant",
                "warmup": 0,
                "max_grad_norm": CLIP,
                "beta1": BETAS[0],
                "beta2": BETAS[1],
            },
            **({"adapter": adapter} if adapted else {}),
            "trainer.train_batch_size": shape.batch,
            "trainer.num_train_steps": 1000,
        },
    )
    configure_jax(config.trainer)
    found = local_devices(config.trainer.mesh)
    plan = describe(config, local_target(found)).check()
    mesh, program = plan.mesh.build(found.devices), plan.program("train_step")
    key = jax.random.PRNGKey(0)

    def of_model(leaf: Any, x: Any) -> Any:
        return jax.device_put(data[OUR_PATHS[leaf.path]].reshape(x.shape), x.sharding)

    frozen = None
    if adapted:
        state = plan.program("init_adapters").jit(mesh)(key)
        frozen = map_arrays(of_model, plan.program("init_frozen").jit(mesh)(key))
        names = {path: name for name, path in PROJECTIONS.items()}

        def of_factor(leaf: Any, x: Any) -> Any:
            name = next(name for path, name in names.items() if f".{path}." in leaf.path)
            if ".b." in leaf.path:
                return jax.device_put(np.zeros(x.shape, np.float32), x.sharding)
            return jax.device_put(data[f"a.{name}"].reshape(x.shape), x.sharding)

        trained = map_arrays(of_factor, state.model)
    else:
        state = plan.program("init_state").jit(mesh)(key)
        trained = map_arrays(of_model, state.model)
    state = dataclasses.replace(state, model=trained)
    held = sum(x.nbytes for tree in (state, frozen) for x in jax.tree.leaves(tree))
    base = sum(leaf.nbytes for leaf in leaves(frozen)) if adapted else 0
    parameters = sum(math.prod(leaf.shape) for leaf in leaves(state.model))
    print(f"state: {held / 2**20:,.1f} MiB, of it base {base / 2**20:,.1f}; {parameters:,} trained", file=sys.stderr)
    assert abs(held - base - 12 * parameters) <= 0.01 * held + 64, "a state is more than base and 12 bytes a parameter"
    declared = program.input("batch").value
    axes = declared.tokens.axes
    ones = np.ones((shape.batch, shape.length), np.float32)

    def named(x: Any) -> Any:
        return hax.NamedArray(jax.device_put(x), axes)

    batches = [
        LmBatch(tokens=named(tokens), targets=named(next_tokens(tokens)), loss_weights=named(ones))
        for tokens in data["tokens"]
    ]
    step = program.jit(mesh)

    def once(state: Any, n: int) -> tuple[Any, Any]:
        state, metrics = step(state, frozen, batches[n % len(batches)])
        return state, metrics.loss

    return _loop(once, state)


def lora(shape: Shape, data: Any, devices: int) -> Run:
    """Adapters, every activation kept."""
    return ours(shape, data, devices, adapted=True, remat=False)


def full(shape: Shape, data: Any, devices: int) -> Run:
    """Every weight, every activation kept."""
    return ours(shape, data, devices, adapted=False, remat=False)


def lora_remat(shape: Shape, data: Any, devices: int) -> Run:
    """Adapters, layers recomputed."""
    return ours(shape, data, devices, adapted=True, remat=True)


def full_remat(shape: Shape, data: Any, devices: int) -> Run:
    """Every weight, layers recomputed."""
    return ours(shape, data, devices, adapted=False, remat=True)


def peft(shape: Shape, data: Any, _: int) -> Run:
    """transformers' Llama adapted by peft, torch's AdamW; nothing is recomputed."""
    import torch
    import training_contenders
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    model = training_contenders.torch_model(shape, data)
    assert isinstance(model, LlamaForCausalLM)
    targets = [f"{path.rsplit('.', 1)[-1]}" for path in PROJECTIONS.values()]
    model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets, lora_dropout=0.0))
    held = model.state_dict()
    for name, path in PROJECTIONS.items():
        for n in range(shape.layers):
            key = f"base_model.model.model.layers.{n}.{path}.lora_A.default.weight"
            held[key].copy_(torch.from_numpy(data[f"a.{name}"][n].reshape(RANK, -1)))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, betas=BETAS, weight_decay=DECAY, fused=True)
    batches = [torch.from_numpy(tokens).long() for tokens in data["tokens"]]

    def once(_: None, n: int) -> tuple[None, Any]:
        ids = batches[n % len(batches)]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return None, loss.detach()

    return _loop(once, None)


def upstream(shape: Shape, data: Any, devices: int) -> Run:
    """Upstream's trainer with its adapters, and the attention that forms the scores; nothing is recomputed."""
    import training_contenders

    adapter = {"r": RANK, "alpha": ALPHA, "zero_init_b": True, "a_init_mode": "random"}
    whole = dataclasses.replace(shape, remat=False)
    return training_contenders.upstream(whole, data, devices, attention="vanilla", adapter=adapter)


FINETUNED = {each.__name__: each for each in (lora, full, lora_remat, full_remat, peft, upstream)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="smollm2")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=1, help="steps of a turn")
    parser.add_argument("--peft", help="the Python of an environment that has torch, transformers and peft")
    parser.add_argument("--upstream", help="the Python of an environment that has marin-levanter")
    parser.add_argument("--only", nargs="*", default=[], help="of ours: lora, full, lora_remat, full_remat")
    parser.add_argument("--worker", choices=list(FINETUNED), help=argparse.SUPPRESS)
    parser.add_argument("--file", help=argparse.SUPPRESS)
    parser.add_argument("--devices", type=int, default=1, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    shape = Shape(**SHAPES[asked.shape])
    if asked.worker:
        work(FINETUNED[asked.worker], shape, asked.file, asked.devices)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/weights.npz"
        make_weights(shape, file)
        make_factors(shape, file)
        pythons = dict.fromkeys(asked.only or ("lora", "full", "lora_remat", "full_remat"), sys.executable)
        pythons |= {"peft": asked.peft} if asked.peft else {}
        pythons |= {"upstream": asked.upstream} if asked.upstream else {}
        contenders = [
            Contender(name, python, file, 1, ["--shape", asked.shape], script=__file__)
            for name, python in pythons.items()
        ]
        for each in contenders:
            print(f"{each.name}: first losses {' '.join(f'{x:.6f}' for x in each.ready['losses'])}", flush=True)
        adapted = [each.ready["losses"] for each in contenders if not each.name.startswith("full")]
        firsts = [each.ready["losses"][0] for each in contenders]
        worst = max((abs(a - b) for losses in adapted for a, b in zip(losses, adapted[0], strict=True)), default=0.0)
        if max(worst, max(firsts) - min(firsts)) > AGREE:
            print(f"error: losses differ by up to {worst:.2g}: not the same training", file=sys.stderr)
            return 1
        order = random.Random(0)
        for n in range(asked.rounds):
            for each in order.sample(contenders, len(contenders)):
                each.turn(asked.steps)
            print(
                f"round {n + 1}: "
                + ", ".join(f"{c.name} {c.turns[-1]['wall'] / asked.steps:.2f} s" for c in contenders)
            )
        report(contenders, shape, asked.steps)
        for each in contenders:
            each.close()
    return 0


def report(contenders: list[Contender], shape: Shape, steps: int) -> None:
    """Rates, and the ratios that there are aims for: time, then CPU seconds."""
    by_name = {each.name: each for each in contenders}
    print("| | tokens/s | CPU seconds a step | peak GiB |\n|---|---|---|---|")
    for each in contenders:
        walls, cpus = ([turn[key] for turn in each.turns] for key in ("wall", "cpu"))
        rate = steps * shape.batch * shape.length / statistics.median(walls)
        cpu = statistics.median(cpus) / steps
        print(f"| {each.name} | {rate:,.0f} | {cpu:.3f} | {each.turns[-1]['peak']:.2f} |")
    aims = (("lora", "full", 0.75), ("lora_remat", "full_remat", 0.8), ("lora", "peft", 0.8), ("lora", "upstream", 0.8))
    print("| | time | CPU time | aim |\n|---|---|---|---|")
    for name, other, aim in aims:
        if name in by_name and other in by_name:
            one, two = by_name[name], by_name[other]
            print(f"| {name} / {other} | {_over(one, two, 'wall')} | {_over(one, two, 'cpu')} | {aim} |")


def _over(one: Contender, other: Contender, key: str) -> str:
    """Median and quartiles of what one took over what the other took, turn by turn."""
    ratios = sorted(a[key] / b[key] for a, b in zip(one.turns, other.turns, strict=True))
    quarter = len(ratios) // 4
    return f"{statistics.median(ratios):.3f} ({ratios[quarter]:.3f} to {ratios[-1 - quarter]:.3f})"


if __name__ == "__main__":
    sys.exit(main())
