"""Scoring, training and loading with two trees of this project, in turn: is one slower than the other?

    python benchmarks/before_after.py --before ../before [--after .] [--pairs 12] [--only training]

Both trees run the same documents: the Programs are those that `eval_lm` and `train_lm` describe, and the loader is that
of `eval_lm`. Each tree runs in its own process for the entire measurement and waits for its turn; turns go in pairs, in
alternating order. CPU seconds of a turn (all threads) are compared, which are more reliable than wall seconds if other
work shares the cores; compilation and the first turn are not counted. Reported for after over before: the median of
the pairs and its 95 % interval from 10,000 bootstrap samples.

Two processes of the same tree can differ by a tenth for their entire lifetime, since each gets different pages of
memory. `--restarts N` restarts both N times; a ratio is then of the medians of a pair of processes, and the interval
is over these. `--only` and the name of a shape (`--shape`) choose a line.
"""

import argparse
import importlib
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

MODELS: Mapping[str, dict[str, Any]] = {
    "256 wide, 4,096 ids": {"hidden_dim": 256, "vocab_size": 4096, "num_layers": 4, "num_kv_heads": 4},
    "256 wide, 49,152 ids": {"hidden_dim": 256, "vocab_size": 49152, "num_layers": 2, "num_kv_heads": 2},
    "512 wide, 16,384 ids": {"hidden_dim": 512, "vocab_size": 16384, "num_layers": 2, "num_kv_heads": 2},
}
"""Llamas of several shapes."""
POSITIONS, ROWS = 256, 4
STEPS = {"scoring": 4, "training": 2, "loading": 10}
SHAPES: Mapping[str, tuple[str, ...]] = {
    "scoring": tuple(MODELS),
    "training": tuple(MODELS),
    "loading": ("512 wide, 16,384 ids",),
}


def block(name: str) -> dict[str, Any]:
    """The `model:` block of a shape."""
    shape = MODELS[name]
    heads = shape["hidden_dim"] // 64
    return {
        "type": "llama",
        "max_seq_len": POSITIONS,
        "intermediate_dim": shape["hidden_dim"] * 8 // 3 // 64 * 64,
        "num_heads": heads,
        "tie_word_embeddings": False,
        **shape,
    }


def hugging_face(folder: Path, name: str) -> None:
    """Writes a checkpoint of a shape, with random weights and eight times its layers, so that there is work to do."""
    import numpy as np
    from safetensors.numpy import save_file

    model = {**block(name), "num_layers": 8 * block(name)["num_layers"]}
    width, inner, vocab = model["hidden_dim"], model["intermediate_dim"], model["vocab_size"]
    head = width // model["num_heads"]
    rng = np.random.default_rng(0)
    shapes = {
        "model.embed_tokens.weight": (vocab, width),
        "lm_head.weight": (vocab, width),
        "model.norm.weight": (width,),
    }
    for n in range(model["num_layers"]):
        at = f"model.layers.{n}"
        shapes |= {
            f"{at}.self_attn.q_proj.weight": (width, width),
            f"{at}.self_attn.k_proj.weight": (head * model["num_kv_heads"], width),
            f"{at}.self_attn.v_proj.weight": (head * model["num_kv_heads"], width),
            f"{at}.self_attn.o_proj.weight": (width, width),
            f"{at}.mlp.gate_proj.weight": (inner, width),
            f"{at}.mlp.up_proj.weight": (inner, width),
            f"{at}.mlp.down_proj.weight": (width, inner),
            f"{at}.input_layernorm.weight": (width,),
            f"{at}.post_attention_layernorm.weight": (width,),
        }
    save_file({k: rng.standard_normal(s, np.float32) * 0.02 for k, s in shapes.items()}, folder / "model.safetensors")
    document = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": model["num_layers"],
        "num_attention_heads": model["num_heads"],
        "num_key_value_heads": model["num_kv_heads"],
        "head_dim": head,
        "max_position_embeddings": POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(document))


def _module(*names: str) -> Any:
    """The first of these modules that the tree has; rooms had other names before."""
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
    raise ModuleNotFoundError(names[0])


def turn(what: str, name: str, scratch: Path) -> Callable[[], None]:
    """One turn of a kind of work on a shape, compiled, in the tree that this process imports."""
    import jax

    from haliax_ext.abstract import map_arrays
    from levanter.config import parse

    trainer = {"tracker": {"type": "noop"}, "log_dir": str(scratch), "require_accelerator": False}
    if what == "training":
        command = importlib.import_module("levanter.main.train_lm")
        document = {
            "data": {"tokenizer": "passthrough", "vocab_size": MODELS[name]["vocab_size"]},
            "model": block(name),
            "trainer": {**trainer, "train_batch_size": ROWS, "num_train_steps": 100},
        }
        config: Any = parse(command.TrainLmConfig, overrides=document)
    else:
        command = importlib.import_module("levanter.main.eval_lm")
        document = {
            "hf_checkpoint": str(scratch / "model") if what == "loading" else "nobody/nothing",
            "data": {"tokenizer": "passthrough"},
            "max_eval_length": POSITIONS,
            "trainer": {**trainer, "per_device_eval_parallelism": ROWS},
            **({} if what == "loading" else {"model": block(name)}),
        }
        config = parse(command.EvalLmConfig, overrides=document)
    local = _module("levanter.commands.cli.devices", "levanter.commands.shell.devices", "levanter.main.local")
    mesh_room = importlib.import_module("levanter.mesh")
    found = mesh_room.local_devices(config.trainer.mesh)
    plan = command.describe(config, local.local_target(found))
    mesh = plan.mesh.build(found.devices)
    if what == "loading":
        pretrained = _module("levanter.commands.model.pretrained", "levanter.main.pretrained")

        def load() -> None:
            for _ in range(STEPS[what]):
                loaded = pretrained.load_pretrained(plan.work.pretrained, mesh, show=False)
                jax.block_until_ready(list(loaded.arrays.values()))

        return load

    def filled(leaf: Any, x: Any) -> jax.Array:
        """Something of the shape and dtype; weights of a batch are ones, segments zeros."""
        import numpy as np

        rng = np.random.default_rng(0)
        if np.issubdtype(x.dtype, np.integer):
            zeros = "segment" in leaf.path
            value = np.zeros(x.shape, x.dtype) if zeros else rng.integers(0, 4096, x.shape).astype(x.dtype)
        else:
            value = np.ones(x.shape, x.dtype) if "weight" in leaf.path and what == "training" else None
            value = rng.standard_normal(x.shape).astype(x.dtype) * 0.02 if value is None else value
        return jax.device_put(value)

    if what == "scoring":
        program = plan.program("score")
        values = [map_arrays(filled, each.value) for each in program.inputs]
        score = program.jit(mesh)

        def scored() -> None:
            for _ in range(STEPS[what]):
                jax.block_until_ready(jax.tree.leaves(score(*values)))

        return scored
    state = [plan.program("init_state").jit(mesh)(jax.random.PRNGKey(0))]
    program = plan.program("train_step")
    # Behind the state; what is frozen, which is nothing here, stands between it and the batch.
    others = [map_arrays(filled, each.value) for each in program.inputs[1:]]
    step = program.jit(mesh)

    def trained() -> None:
        for _ in range(STEPS[what]):
            state[0], metrics = step(state[0], *others)
            jax.block_until_ready(jax.tree.leaves(metrics))

    return trained


def work() -> None:
    """A tree's process: a line `kind\\tshape` is a turn, answered by its CPU seconds and seconds."""
    scratch, turns = Path(os.environ["SCRATCH"]), {}
    for line in sys.stdin:
        what, name = line.rstrip("\n").split("\t")
        if (what, name) not in turns:
            turns[what, name] = turn(what, name, scratch)
            turns[what, name]()
        began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
        turns[what, name]()
        after = resource.getrusage(resource.RUSAGE_SELF)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        sys.stdout.write(f"TURN {cpu} {time.perf_counter() - began}\n")
        sys.stdout.flush()


def interval(ratios: list[float]) -> tuple[float, float]:
    """The 95 % interval of the median, by bootstrap."""
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(10_000))
    return medians[250], medians[9749]


def main() -> None:
    """Takes the turns and prints the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", required=True, help="a checkout of the tree before")
    parser.add_argument("--after", default=str(Path(__file__).parents[1]), help="a checkout of the tree after")
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--restarts", type=int, default=1, help="pairs of processes, each of which takes its pairs")
    parser.add_argument("--only", choices=sorted(SHAPES))
    parser.add_argument("--shape", choices=sorted(MODELS))
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "model").mkdir()
        hugging_face(Path(scratch) / "model", SHAPES["loading"][0])
        processes: dict[str, subprocess.Popen[str]] = {}

        def start(name: str, tree: str) -> None:
            root = Path(tree).resolve()
            env = {
                **os.environ,
                "PYTHONPATH": f"{root / 'src'}:{root}",
                "JAX_PLATFORMS": "cpu",
                "SCRATCH": scratch,
                "HF_HUB_OFFLINE": "1",
            }
            processes[name] = subprocess.Popen(
                [sys.executable, __file__, "work"],
                env=env,
                cwd=root,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )

        def restart() -> None:
            for process in processes.values():
                assert process.stdin is not None
                process.stdin.close()
                process.wait()
            for name, tree in (("before", asked.before), ("after", asked.after)):
                start(name, tree)

        def take(tree: str, what: str, name: str) -> float:
            process = processes[tree]
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(f"{what}\t{name}\n")
            process.stdin.flush()
            for line in process.stdout:
                if line.startswith("TURN "):
                    return float(line.split()[1])
            raise RuntimeError(f"the process of the tree {tree!r} ended")

        print(f"{'work':9} {'shape':22} {'before':>9} {'after':>9}  after / before (95 %)   load")
        restart()
        for what, names in SHAPES.items():
            if asked.only in (None, what):
                for name in [each for each in names if asked.shape in (None, each)]:
                    both: list[tuple[float, float]] = []
                    for again in range(asked.restarts):
                        if again:
                            restart()
                        for tree in processes:
                            take(tree, what, name)
                        seconds: dict[str, list[float]] = {tree: [] for tree in processes}
                        for n in range(asked.pairs):
                            for tree in sorted(processes, reverse=bool((n + again) % 2)):
                                seconds[tree].append(take(tree, what, name))
                        pairs = list(zip(seconds["before"], seconds["after"], strict=True))
                        if asked.restarts > 1:
                            middle = [statistics.median(seconds[tree]) for tree in ("before", "after")]
                            pairs = [(middle[0], middle[1])]
                        both += pairs
                    ratios = [after / before for before, after in both]
                    low, high = interval(ratios)
                    medians = [statistics.median(column) for column in zip(*both, strict=True)]
                    print(
                        f"{what:9} {name:22} {medians[0]:7.2f} s {medians[1]:7.2f} s  "
                        f"{statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})   {os.getloadavg()[0]:.1f}",
                        flush=True,
                    )
        for process in processes.values():
            assert process.stdin is not None
            process.stdin.close()
            process.wait()


if __name__ == "__main__":
    work() if sys.argv[1:] == ["work"] else main()
