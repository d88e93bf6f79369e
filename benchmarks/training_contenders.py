"""The contenders of `training.py`: one Llama's train step as ours, as a plain JAX program, as upstream's, and in torch.

Each maps sizes, weights, batches and the number of devices to a function that takes a number of steps and returns their
losses. Imports are local: upstream's environment has none of our packages, and ours none of upstream's.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LEARNING_RATE, DECAY, CLIP, BETAS = 3e-4, 0.1, 1.0, (0.9, 0.95)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of the model and of a batch.

    Attributes:
        tied: whether the head is the embedding table.
        remat: whether layers are recomputed in the backward pass; torch keeps what it needs in any case.
    """

    vocab: int = 4096
    embed: int = 384
    mlp: int = 1024
    layers: int = 4
    heads: int = 6
    kv_heads: int = 6
    head_size: int = 64
    batch: int = 8
    length: int = 256
    tied: bool = False
    remat: bool = True

    def weights(self) -> dict[str, tuple[int, ...]]:
        """Every weight's shape, output axes first."""
        e, n, heads = self.embed, self.layers, (self.heads, self.head_size)
        return {
            "table": (self.vocab, e),
            **({} if self.tied else {"head": (self.vocab, e)}),
            "norm": (e,),
            "q": (n, *heads, e),
            **{name: (n, self.kv_heads, self.head_size, e) for name in ("k", "v")},
            "o": (n, e, *heads),
            **{name: (n, self.mlp, e) for name in ("gate", "up")},
            "down": (n, e, self.mlp),
            **{name: (n, e) for name in ("norm1", "norm2")},
        }


OUR_PATHS = {
    "embeddings.token_embeddings.weight": "table",
    "lm_head.weight": "head",
    "transformer.norm.weight": "norm",
    "transformer.layers.stacked.input_layernorm.weight": "norm1",
    "transformer.layers.stacked.post_attention_layernorm.weight": "norm2",
    **{f"transformer.layers.stacked.self_attn.{x}_proj.weight": x for x in "qkvo"},
    **{f"transformer.layers.stacked.mlp.{x}_proj.weight": x for x in ("gate", "up", "down")},
}
Run = Callable[[int], list[float]]


def make_weights(shape: Shape, file: str) -> None:
    """Random weights and four batches, which every contender reads."""
    import numpy as np

    rng = np.random.default_rng(0)
    arrays = {
        name: np.ones(size, np.float32) if "norm" in name else rng.standard_normal(size, np.float32) * np.float32(0.02)
        for name, size in shape.weights().items()
    }
    tokens = rng.integers(0, shape.vocab, (4, shape.batch, shape.length)).astype(np.int32)
    np.savez(file, tokens=tokens, **arrays)


def ours(shape: Shape, data: Any, _: int) -> Run:
    """The run's own Program."""
    import haliax as hax
    import jax
    import numpy as np

    from haliax_ext.abstract import leaves, with_arrays
    from levanter.commands.cli.devices import configure_jax, local_target
    from levanter.commands.train.lm.train_lm import TrainLmConfig, describe
    from levanter.config import parse
    from levanter.data import next_tokens
    from levanter.mesh import local_devices
    from levanter.trainer.loss import LmBatch

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
                "gradient_checkpointing": shape.remat,
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
            "trainer.train_batch_size": shape.batch,
            "trainer.num_train_steps": 1000,
        },
    )
    configure_jax(config.trainer)
    found = local_devices(config.trainer.mesh)
    plan = describe(config, local_target(found)).check()
    mesh = plan.mesh.build(found.devices)
    work, program = plan.work, plan.program("train_step")
    state = plan.program("init_state").jit(mesh)(jax.random.PRNGKey(0))
    model = {}
    for leaf, x in zip(leaves(work.state.model), jax.tree.leaves(state.model), strict=True):
        model[leaf.path] = jax.device_put(data[OUR_PATHS[leaf.path]].reshape(x.shape), x.sharding)
    state = dataclasses.replace(state, model=with_arrays(state.model, model))
    declared = program.input("batch").value
    axes = declared.tokens.axes
    ways = work.resolved.mappings.compute.mesh_axes("batch")
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(ways))

    def named(x: Any) -> Any:
        return hax.NamedArray(jax.device_put(x, rows), axes)

    ones = np.ones((shape.batch, shape.length), np.float32)
    batches = [
        LmBatch(tokens=named(tokens), targets=named(next_tokens(tokens)), loss_weights=named(ones))
        for tokens in data["tokens"]
    ]
    step = program.jit(mesh)

    def once(state: Any, n: int) -> tuple[Any, Any]:
        state, metrics = step(state, None, batches[n % len(batches)])
        return state, metrics.loss

    return _loop(once, state)


def plain(shape: Shape, data: Any, devices: int) -> Run:
    """The same step without any framework."""
    import jax
    import jax.numpy as jnp
    import optax
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,))
    P = PartitionSpec
    c = shape
    embed_axis = {
        **dict.fromkeys(("table", "o", "down"), -1),
        **dict.fromkeys(("head", "q", "k", "v", "gate", "up"), -2),
        **dict.fromkeys(("norm", "norm1", "norm2"), -1),
    }
    layer_names = ("q", "k", "v", "o", "gate", "up", "down", "norm1", "norm2")

    def spec(name: str, ndim: int) -> PartitionSpec:
        entries: list[str | None] = [None] * ndim
        entries[embed_axis[name]] = "data"
        return P(*entries)

    # [in, out] matrices: heads and head size are one axis.
    inputs_last = {name: data[name] for name in c.weights()}
    params = {name: inputs_last[name] for name in ("table", "norm", "norm1", "norm2")}
    if not c.tied:
        params["head"] = inputs_last["head"].T
    for name in ("q", "k", "v", "gate", "up"):
        params[name] = inputs_last[name].reshape(c.layers, -1, c.embed).transpose(0, 2, 1)
    for name in ("o", "down"):
        params[name] = inputs_last[name].reshape(c.layers, c.embed, -1).transpose(0, 2, 1)
    places = {name: NamedSharding(mesh, spec(name, value.ndim)) for name, value in params.items()}
    params = {name: jax.device_put(value, places[name]) for name, value in params.items()}
    rows = NamedSharding(mesh, P("data"))

    def by_rows(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, rows)

    def norm(x: jax.Array, weight: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5) * weight

    frequencies = 10000.0 ** (-jnp.arange(c.head_size // 2, dtype=jnp.float32) / (c.head_size // 2))
    angles = jnp.arange(c.length, dtype=jnp.float32)[:, None] * frequencies
    cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
    causal = jnp.tril(jnp.ones((c.length, c.length), bool))

    def rotated(x: jax.Array) -> jax.Array:
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def layer(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        h = norm(x, w["norm1"])
        q, k, v = ((h @ w[name]).reshape(*h.shape[:2], -1, c.head_size) for name in "qkv")
        k, v = (jnp.repeat(each, c.heads // c.kv_heads, axis=2) for each in (k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", rotated(q), rotated(k)) * c.head_size**-0.5
        shares = jax.nn.softmax(jnp.where(causal, scores, -1e30), axis=-1)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", shares, v).reshape(*h.shape[:2], -1)
        x = by_rows(x + mixed @ w["o"])
        h = norm(x, w["norm2"])
        return by_rows(x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]), None

    def loss_fn(params: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
        x = by_rows(params["table"][tokens])
        block = jax.checkpoint(layer) if c.remat else layer
        x, _ = jax.lax.scan(block, x, {name: params[name] for name in layer_names})
        head = params["table"].T if c.tied else params["head"]
        logits = by_rows(norm(x, params["norm"])[:, :-1] @ head)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    optimizer = optax.chain(
        optax.clip_by_global_norm(CLIP),
        optax.scale_by_adam(*BETAS),
        optax.add_decayed_weights(DECAY, lambda p: {name: name != "table" and "norm" not in name for name in p}),
        optax.scale(-LEARNING_RATE),
    )

    def step(params: Any, state: Any, tokens: jax.Array) -> tuple[Any, Any, Any]:
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, (loss, optax.global_norm(grads))

    whole = NamedSharding(mesh, P())
    state_places = optax.tree_utils.tree_map_params(
        optimizer,
        lambda _, place: place,
        jax.eval_shape(optimizer.init, params),
        places,
        transform_non_params=lambda _: whole,
    )
    state = jax.jit(optimizer.init, out_shardings=state_places)(params)
    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=(places, state_places, whole))
    batches = [jax.device_put(tokens, rows) for tokens in data["tokens"]]

    def once(carry: Any, n: int) -> tuple[Any, Any]:
        params, state, (loss, _) = jitted(*carry, batches[n % len(batches)])
        return (params, state), loss

    return _loop(once, (params, state))


def upstream(
    shape: Shape, data: Any, _: int, *, attention: str | None = None, adapter: dict[str, Any] | None = None
) -> Run:
    """Upstream's own trainer; runs in its environment. Of an adapter A is `a.<projection>` of the data and B is 0."""
    import equinox as eqx
    import haliax as hax
    import jax
    import jax.numpy as jnp
    from levanter.models.lm_model import LmExample

    import levanter.tracker
    from levanter.layers.attention import AttentionBackend
    from levanter.models.llama import LlamaConfig
    from levanter.optim import AdamConfig
    from levanter.trainer import Trainer, TrainerConfig

    model_config = LlamaConfig(
        max_seq_len=shape.length,
        hidden_dim=shape.embed,
        intermediate_dim=shape.mlp,
        num_layers=shape.layers,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_size,
        tie_word_embeddings=shape.tied,
        gradient_checkpointing=shape.remat,
        attn_backend=None if attention is None else AttentionBackend(attention),
    )
    optimizer = AdamConfig(
        learning_rate=LEARNING_RATE,
        weight_decay=DECAY,
        lr_schedule="constant",
        warmup=0,
        max_grad_norm=CLIP,
        beta1=BETAS[0],
        beta2=BETAS[1],
    ).build(1000)
    config = TrainerConfig(
        id="benchmark",
        train_batch_size=shape.batch,
        num_train_steps=1000,
        tracker=levanter.tracker.NoopConfig(),
        require_accelerator=False,
        log_jaxprs=False,
        log_xla_hlo=False,
        load_checkpoint=False,
    )
    for name, value in config.jax_config.items():
        jax.config.update(name, value)
    Vocab, Batch, Pos = hax.Axis("vocab", shape.vocab), hax.Axis("batch", shape.batch), model_config.max_Pos

    def loss_fn(model: Any, example: Any, *, key: Any = None) -> Any:
        return model.compute_next_token_loss(example, key=key)

    trainer = Trainer(config, optimizer, loss_fn, add_default_hooks=False)
    trainer.__enter__()
    key = jax.random.PRNGKey(0)
    if adapter is None:
        state = trainer.initial_state(key, model_init=lambda: model_config.build(Vocab, key=key))
    else:
        from levanter.adaptor import LoraAdaptorConfig

        # What its `train_lm` does with `adapter:`.
        kind = LoraAdaptorConfig(**adapter)
        model = kind.apply(model_config.build(Vocab, key=key), key=key, axis_mapping=trainer.parameter_axis_mapping)
        state = trainer.initial_state(key, model=model, is_trainable=kind.trainable_filter(model))

    def put(keys: Any, x: Any) -> Any:
        path = ".".join(key.name for key in keys if hasattr(key, "name"))
        if ".lora_B." in path:
            return jax.device_put(jnp.zeros_like(x), x.sharding)
        held = OUR_PATHS[path.replace(".wrapped", "").replace(".lora.lora_A", "")]
        return jax.device_put(data[f"a.{held}" if ".lora_A." in path else held].reshape(x.shape), x.sharding)

    arrays, rest = eqx.partition(state.model, eqx.is_array)
    state = dataclasses.replace(state, model=eqx.combine(jax.tree_util.tree_map_with_path(put, arrays), rest))

    def example(tokens: Any) -> Any:
        weight = jnp.ones(tokens.shape, jnp.float32).at[:, -1].set(0)
        found = LmExample(hax.named(tokens, (Batch, Pos)), hax.named(weight, (Batch, Pos)))
        return hax.shard(found, trainer.compute_axis_mapping)

    batches = [example(jnp.asarray(tokens)) for tokens in data["tokens"]]

    def once(state: Any, n: int) -> tuple[Any, Any]:
        done = trainer._jit_train_step_fn_no_hook(state, (batches[n % len(batches)],), {})
        return done.new_state, done.loss

    return _loop(once, state)


def upstream_vanilla(shape: Shape, data: Any, devices: int) -> Run:
    """Upstream with the attention that forms the scores, as ours and the plain program do at this length."""
    return upstream(shape, data, devices, attention="vanilla")


def torch_model(shape: Shape, data: Any) -> Any:
    """transformers' Llama with the weights of all contenders."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape.vocab,
            hidden_size=shape.embed,
            intermediate_size=shape.mlp,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_size,
            max_position_embeddings=shape.length,
            rms_norm_eps=1e-5,
            rope_theta=10000.0,
            tie_word_embeddings=shape.tied,
            attn_implementation="sdpa",
            use_cache=False,
        )
    ).float()
    flat = {"model.embed_tokens.weight": data["table"], "model.norm.weight": data["norm"]}
    if not shape.tied:
        flat["lm_head.weight"] = data["head"]
    for n in range(shape.layers):
        of = f"model.layers.{n}."
        for name in "qkv":
            flat[f"{of}self_attn.{name}_proj.weight"] = data[name][n].reshape(-1, shape.embed)
        flat[f"{of}self_attn.o_proj.weight"] = data["o"][n].reshape(shape.embed, -1)
        for name in ("gate", "up", "down"):
            flat[f"{of}mlp.{name}_proj.weight"] = data[name][n]
        flat[f"{of}input_layernorm.weight"] = data["norm1"][n]
        flat[f"{of}post_attention_layernorm.weight"] = data["norm2"][n]
    missing, unexpected = model.load_state_dict({k: torch.from_numpy(v) for k, v in flat.items()}, strict=False)
    assert not unexpected and set(missing) <= ({"lm_head.weight"} if shape.tied else set()), (missing, unexpected)
    return model


def torch(shape: Shape, data: Any, _: int, *, compiled: bool = False) -> Run:
    """transformers' Llama, torch's AdamW; one device."""
    import torch

    model = torch_model(shape, data)
    named = list(model.named_parameters())
    whole = [p for name, p in named if "norm" in name or "embed_tokens" in name]
    decayed = [p for name, p in named if not ("norm" in name or "embed_tokens" in name)]
    groups = [{"params": whole, "weight_decay": 0.0}, {"params": decayed, "weight_decay": DECAY}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, fused=True)
    forward = torch.compile(model) if compiled else model
    batches = [torch.from_numpy(tokens).long() for tokens in data["tokens"]]

    def once(_: None, n: int) -> tuple[None, Any]:
        ids = batches[n % len(batches)]
        loss = forward(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return None, loss.detach()

    return _loop(once, None)


def torch_compiled(shape: Shape, data: Any, devices: int) -> Run:
    """The same, its model compiled by Inductor."""
    return torch(shape, data, devices, compiled=True)


def _loop(once: Callable[[Any, int], tuple[Any, Any]], carry: Any) -> Run:
    """Steps one after the other, a step's loss fetched while the next one runs."""
    taken = 0

    def run(count: int) -> list[float]:
        nonlocal carry, taken
        losses, behind = [], None
        for _ in range(count):
            carry, loss = once(carry, taken)
            taken += 1
            if behind is not None:
                losses.append(float(getattr(behind, "array", behind)))
            behind = loss
        losses.append(float(getattr(behind, "array", behind)))
        return losses

    return run


CONTENDERS = {each.__name__: each for each in (ours, plain, upstream, upstream_vanilla, torch, torch_compiled)}
