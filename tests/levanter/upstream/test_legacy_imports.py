"""Names that scripts of earlier generations import: every row of the table, and whole scripts as users have them.

Each row runs in one fresh interpreter (a name is told once in a process); scripts run in interpreters of their own.
"""

import importlib
import json
import os
import subprocess
import sys
import textwrap

import pytest
from helpers import hf_folder
from helpers.golden import GOLDEN

import levanter
from levanter.upstream.imports import GoneError, GoneMemberError, look_up
from levanter.upstream.install import EARLIER_CLASS_MEMBERS, EARLIER_KEYWORDS, EARLIER_NAMES
from levanter.upstream.names import CLASS_MEMBERS, NAMES
from levanter.upstream.unsupported.names import GONE, GONE_IN, GONE_MODULES

UPSTREAM_NAMES = GOLDEN / "legacy" / "upstream_names.json"
PUBLIC_NAMES = GOLDEN / "legacy" / "public_names.json"
"""Every public name of upstream of September 2025 and of marin-levanter 0.2.227: `tests/upstream/public_names.py`."""
ALL = sorted((at, name) for at, names in NAMES.items() for name in names)


def script(text: str, *arguments: str, devices: int = 1, module: str | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a user's script as Python runs it by default: a warning is shown where the script itself is told off."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "HF_HUB_OFFLINE": "1",
    }
    how = ["-m", module] if module else ["-c", textwrap.dedent(text)]
    command = [sys.executable, *how, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=240)


EVERY_NAME = """
    import importlib, json, sys, warnings
    rows = json.loads(sys.argv[1])
    told = {}
    for at, name in rows:
        module, _, cls = at.partition(":")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = importlib.import_module(module)
            if cls:
                found = getattr(found, cls)
                from levanter.upstream.imports import NAMES
                target, attribute = NAMES[at][name].split(":")
                assert callable(getattr(importlib.import_module(target), attribute))
                continue
            for _ in range(3):
                assert getattr(found, name) is getattr(found, name)
            exec(f"from {module} import {name}")
        mine = [str(w.message) for w in caught if f"{module}.{name} " in str(w.message)]
        told[f"{module}.{name}"] = [len(mine), [w.category.__name__ for w in caught if str(w.message) in mine]]
    warnings.simplefilter("ignore")
    from levanter.upstream.imports import GoneError
    lost, refused = [], {}
    generations = [row for path in sys.argv[2:] for row in json.load(open(path)).items()]
    for generation, modules in generations:
        for module, names in modules.items() if isinstance(modules, dict) else ():
            try:
                found = importlib.import_module(module)
            except GoneError as error:
                refused[module] = str(error)
                continue
            except ImportError:
                lost.append(f"{generation}: {module}")
                continue
            for name in names:
                try:
                    exec(f"from {module} import {name}")
                except GoneError as error:
                    refused[f"{module}.{name}"] = str(error)
                except ImportError as error:
                    lost.append(f"{generation}: {module}.{name}")
    print(json.dumps([told, lost, refused]))
"""


def test_every_name_is_there_and_told_once():
    """The table's names are told once; each name that upstream's modules have is here, or refused with the reason."""
    done = script(EVERY_NAME, json.dumps(ALL), str(UPSTREAM_NAMES), str(PUBLIC_NAMES))
    assert done.returncode == 0, done.stderr
    told, lost, refused = json.loads(done.stdout)
    assert lost == []
    assert all(" is not carried over: " in why for why in refused.values())
    assert {"levanter.trainer.TrainerHooks", "levanter.grad_accum", "levanter.inference.openai"} <= set(refused)
    modules = {f"{at}.{name}" for at, name in ALL if ":" not in at}
    whole = {f"{at}.{name}" for at, name in ALL if ":" not in NAMES[at][name]}
    assert set(told) == modules
    assert {name: count for name, count in told.items() if count != [1, ["DeprecationWarning"]]} == {
        name: [0, []] for name in whole
    }


def test_what_is_gone_says_what_there_is_instead():
    for at, rows in GONE_IN.items():
        for name, why in ((name, why) for names, why in rows.items() for name in names.split()):
            old = f"{at.replace(':', '.')}.{name}"
            with pytest.raises(GoneMemberError if ":" in at else GoneError) as caught:
                look_up(at, name, *([object()] if ":" in at else []))
            assert str(caught.value) == f"{old} is not carried over: {why} (docs/migrating.md)" == refusal(old)
            assert name not in NAMES.get(at, {}), old
    assert len(GONE) == sum(len(names.split()) for rows in GONE_IN.values() for names in rows)


def refusal(old: str) -> str:
    return f"{old} is not carried over: {GONE.get(old) or GONE_MODULES[old]} (docs/migrating.md)"


@pytest.mark.parametrize("module", ["levanter.grad_accum", "levanter.inference.openai", "levanter.optim.soap"])
def test_a_module_that_is_gone_says_so_however_it_is_imported(module: str):
    why = next(GONE_MODULES[part] for part in (module, module.rpartition(".")[0]) if part in GONE_MODULES)
    with pytest.raises(GoneError) as caught:
        importlib.import_module(module)
    assert why in str(caught.value)
    assert module not in sys.modules


def test_no_module_of_the_project_is_refused():
    for module in GONE_MODULES:
        assert not find_spec_of(module), module
        assert not any(at.partition(":")[0].startswith(f"{module}.") for at in (*NAMES, *GONE_IN)), module


def test_modules_that_exist_are_the_ones_that_are_looked_at():
    """`EARLIER_NAMES` lists the project's modules of which the tables have names, and no others."""
    listed = EARLIER_NAMES
    for at in [*NAMES, *GONE_IN]:
        module, _, cls = at.partition(":")
        if find_spec_of(module) and module != "levanter":
            assert module in listed, module
        assert not cls or cls in listed[module]
    assert all(cls in {at.partition(":")[2] for at in NAMES | GONE_IN} for names in listed.values() for cls in names)
    members = {f"{module}:{cls}": names for module, row in EARLIER_CLASS_MEMBERS.items() for cls, names in row.items()}
    assert members == CLASS_MEMBERS


def test_classes_that_take_earlier_keywords_are_there():
    for module, classes in EARLIER_KEYWORDS.items():
        for cls in classes:
            assert hasattr(getattr(importlib.import_module(module), cls).__init__, "__wrapped__"), f"{module}.{cls}"


def find_spec_of(module: str) -> bool:
    """Whether the project has a module of that name."""
    root = os.path.dirname(levanter.__file__)
    path = os.path.join(root, *module.split(".")[1:])
    return os.path.isdir(path) or os.path.isfile(path + ".py")


def test_importing_levanter_costs_little_and_loads_the_standard_library():
    """One line of side effect: two finders, and four modules."""
    text = """
        import sys
        before = set(sys.modules)
        import levanter
        new = {name for name in set(sys.modules) - before if name.partition(".")[0] not in sys.stdlib_module_names}
        upstream = {f"levanter.upstream{name}" for name in ("", ".install", ".draccus_help")}
        assert new == {"levanter", *upstream}, new
        finders = [finder.__module__ for finder in sys.meta_path if isinstance(finder, type)]
        assert finders.count("levanter.upstream.install") == 2, finders
        # What takes time to import is none of it.
        assert not {"asyncio", "dataclasses", "inspect", "logging", "importlib.metadata"} & (set(sys.modules) - before)
    """
    done = script(text)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_misspelt_names_and_modules_are_ordinary_errors():
    done = script("""
        import levanter, importlib
        for statement in ("from levanter.trainer import Traner", "import levanter.modls", "levanter.trackr",
                          "from levanter.models.lm_model import LmExampel", "levanter.trainer.TrainerConfig().meshh",
                          "from levanter import trackr"):
            try:
                exec(statement)
            except (ImportError, AttributeError) as error:
                print(type(error).__name__, error)
        assert not hasattr(levanter.trainer.TrainerConfig(), "nothing")
        import sys; print("levanter.upstream.imports" in sys.modules)
    """)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 7 and "levanter.modls" in lines[1]
    assert lines[0].startswith("ImportError cannot import name 'Traner' from 'levanter.trainer'")
    assert lines[3].startswith("ImportError cannot import name 'LmExampel' from 'levanter.models.lm_model'")


@pytest.mark.slow
def test_the_project_needs_no_table():
    done = script("""
        import sys
        import levanter.main.train_lm, levanter.main.eval_lm, levanter.main.eval_sliding_lm, levanter.main.plan
        assert "levanter.upstream.imports" not in sys.modules
        assert not any(name.startswith("levanter.upstream.facades") for name in sys.modules)
    """)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


# --- scripts as users have them ---

LOSS_2025 = """
    import sys
    import haliax as hax
    import jax, jax.numpy as jnp, numpy as np
    import levanter
    from levanter.compat.hf_checkpoints import HFCheckpointConverter, load_tokenizer
    from levanter.models.llama import LlamaConfig, LlamaLMHeadModel
    from levanter.models.lm_model import LmExample, compute_next_token_loss
    from levanter.trainer import TrainerConfig

    trainer = TrainerConfig(require_accelerator=False, mp="f32")
    config = LlamaConfig(seq_len=32, hidden_dim=32, num_layers=2, num_heads=4, num_kv_heads=2,
                         intermediate_dim=48, tie_word_embeddings=True)
    converter = config.hf_checkpoint_converter().replaced(reference_checkpoint=sys.argv[1], tokenizer=sys.argv[1])
    ids = np.load(sys.argv[2])
    losses = []
    for enter in (lambda: trainer.device_mesh, trainer.use_device_mesh):
        with enter(), hax.axis_mapping(trainer.parameter_axis_mapping):
            model = converter.load_pretrained(LlamaLMHeadModel, config=config, dtype=jnp.float32,
                                              axis_mapping=trainer.parameter_axis_mapping)
            Pos = config.Pos.resize(ids.shape[0])
            example = LmExample.causal(hax.named(jnp.asarray(ids), Pos))
            losses.append(float(hax.named_jit(compute_next_token_loss)(model, example)))
    assert converter.Vocab.size == len(load_tokenizer(sys.argv[1]).byte_lengths())
    print(*losses, model.transformer.layers.stacked.mlp.gate_proj.weight.array.sharding.spec)
    converter.save_pretrained(model, sys.argv[3])
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return hf_folder.write_folder(tmp_path_factory.mktemp("hf") / "tiny")


@pytest.fixture(scope="module")
def torch_loss(checkpoint, tmp_path_factory) -> tuple[str, float]:
    """Token ids in a file, and the loss that transformers and torch give them."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    ids = np.random.default_rng(3).integers(3, 300, 24).astype(np.int32)
    path = tmp_path_factory.mktemp("ids") / "ids.npy"
    np.save(path, ids)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    batch = torch.tensor(ids[None].astype(np.int64))
    with torch.no_grad():
        return str(path), float(model(batch, labels=batch).loss)


def test_a_script_loads_a_llama_and_computes_its_loss(checkpoint, torch_loss, tmp_path):
    """Both ways of entering a mesh, one after the other."""
    ids, expected = torch_loss
    done = script(LOSS_2025, str(checkpoint), ids, str(tmp_path / "out"), devices=8)
    assert done.returncode == 0, done.stderr
    with_mesh, with_use, spec = done.stdout.split(maxsplit=2)
    assert float(with_mesh) == pytest.approx(expected, abs=2e-4)
    assert float(with_use) == float(with_mesh)
    assert "'data'" in spec
    told = [line for line in done.stderr.splitlines() if "DeprecationWarning: levanter." in line]
    assert len(told) == len(set(told))
    for name in ("compat.hf_checkpoints.HFCheckpointConverter", "models.lm_model.LmExample", "LmConfig.Pos"):
        assert sum(f"{name} is" in line for line in told) == 1, done.stderr
    # What was saved is the same model, for transformers too.
    from safetensors.numpy import load_file

    before, after = load_file(checkpoint / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert set(before) == set(after)
    assert all((before[name].astype("float32") == after[name]).all() for name in before)


REST = """
    import dataclasses, sys
    import haliax as hax, jax, jax.numpy as jnp, numpy as np
    from levanter.compat.hf_checkpoints import HFCheckpointConverter
    from levanter.models.lm_model import LmExample, LmHeadModel
    import levanter, levanter.tracker, levanter.callbacks, levanter.eval
    from levanter.callbacks.watch import WatchConfig
    from levanter.checkpoint import CheckpointerConfig, latest_checkpoint_path, is_checkpoint_path
    from levanter.data import LMMixtureDatasetConfig
    from levanter.data.text import LmDataConfig, TextLmDatasetFormat, UrlSingleDatasetLMConfig
    from levanter.distributed import DistributedConfig, RayConfig
    from levanter.layers.rotary import Llama3RotaryEmbeddingsConfig
    from levanter.optim import AdamConfig, OptimizerConfig
    from levanter.tracker import NoopConfig, current_tracker
    from levanter.trainer import TrainerConfig
    from levanter.utils.mesh import MeshConfig
    from levanter.utils.jax_utils import best_effort_sharding, create_fsdp_mesh, parameter_count
    from levanter.books.util import compute_extraction_rates

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Mine:
        trainer: TrainerConfig = dataclasses.field(default_factory=TrainerConfig)
        data: UrlSingleDatasetLMConfig = dataclasses.field(default_factory=UrlSingleDatasetLMConfig)
        optimizer: OptimizerConfig = dataclasses.field(default_factory=AdamConfig)

    @levanter.config.main(args=["--trainer.model_axis_size", "2", "--trainer.tensor_parallel_axes", "[mlp]",
                                "--trainer.tracker.type", "noop", "--data.train_urls", "[a.jsonl]",
                                "--trainer.train_batch_size", "16", "--trainer.per_device_parallelism", "2"])
    def main(config: Mine):
        levanter.initialize(config)
        trainer = config.trainer
        assert dict(trainer.device_mesh.shape)["model"] == 2 and trainer.data_axis_size == 4
        assert trainer.compute_axis_mapping["mlp"] == "model" and "heads" not in trainer.compute_axis_mapping
        assert (trainer.TrainBatch.size, trainer.eval_batch_size, trainer.EvalBatch.name) == (16, 8, "batch")
        assert (trainer.microbatch_size, trainer.num_devices_per_slice, trainer.num_slices) == (8, 8, 1)
        assert (trainer.data_ici_axis_size, trainer.data_dcn_axis_size) == (4, 1)
        assert 0 < float(config.optimizer.lr_scheduler(10)(9)) < config.optimizer.learning_rate
        assert trainer.batch_schedule.batch_size_at_step(3) == 16 and not hasattr(config.data, "train_set")
        assert config.data.components == UrlSingleDatasetLMConfig(train_urls=["a.jsonl"]).components
        levanter.tracker.log({"loss": 1.0}, step=0)
        with current_tracker() as tracker:
            assert tracker.name == "noop"
        with trainer.use_device_mesh():
            print(best_effort_sharding((16384, 16384)).spec)
        print(dict(create_fsdp_mesh(1, 4, 2).shape))
    main()
    same = TrainerConfig(tensor_parallel_axes=["mlp"], model_axis_size=2, ray=RayConfig(auto_start_cluster=False),
                         tracker=NoopConfig(), train_batch_size=16)
    assert same.mesh.axes == {"model": 2} and same.mesh.shared_mapping == {"mlp": "model", "heads": None}
    for wrong in ({"model_axis_sise": 2}, {"model_axis_size": 2, "mesh": MeshConfig()}, {"model_axis_size": "x"}):
        try:
            TrainerConfig(**wrong)
        except (TypeError, ValueError) as error:
            print("refused:", str(error).splitlines()[0], file=sys.stderr)
    assert MeshConfig(axes={"context": 2}).axis_shapes(8, 1)[0]["data"] == 4
    assert [rate for rate, _, _ in compute_extraction_rates([0.5, 0.0], n_list=[1, 10], p_list=[0.4])[0]] == [0.5, 0.5]
    assert not is_checkpoint_path("nowhere")
    RayConfig(auto_start_cluster=False)

    converter = HFCheckpointConverter.from_hf(sys.argv[1])
    model = converter.load_pretrained(None, dtype=jnp.float32)         # no mesh in scope
    assert isinstance(model, LmHeadModel)
    tokens = hax.named(jnp.asarray(np.load(sys.argv[2])), "position")
    print(float(model.compute_next_token_loss(LmExample.causal(tokens))))
    config = converter.config_from_hf_config(converter.default_hf_config)
    assert config.axes == converter.default_config.axes == model.config.axes
    assert converter.hf_config_from_config(config).hidden_size == config.hidden_dim
"""


EVALUATION = """
    import sys
    import equinox as eqx, haliax as hax, jax, jax.numpy as jnp, numpy as np, transformers
    import levanter
    from levanter import callbacks
    from levanter.compat.hf_checkpoints import HFCheckpointConverter, RepoRef, load_tokenizer
    from levanter.models.llama import LlamaConfig, LlamaLMHeadModel
    from levanter.models.lm_model import LmConfig, LmExample, LmHeadModel, compute_next_token_loss
    from levanter.trainer import TrainerConfig
    from levanter.utils.jax_utils import is_inexact_arrayish, key_iterator, local_cpu_mesh, use_cpu_device
    from levanter.utils.py_utils import non_caching_cycle
    from levanter.utils.tree_utils import inference_mode

    class Policy:                                              # as of the jmp package
        param_dtype, compute_dtype, output_dtype = jnp.float32, jnp.bfloat16, jnp.float32

    trainer = TrainerConfig(mp=Policy(), model_axis_size=2, tensor_parallel_axes=["mlp", "heads"],
                            fsdp_axis="embed", batch_axis="batch", per_device_eval_parallelism=2)
    assert str(trainer.mp) == "p=float32,c=bfloat16,o=float32"
    dtypes = trainer.mp.param_dtype, trainer.mp.compute_dtype, trainer.mp.output_dtype
    assert dtypes == ("float32", "bfloat16", "float32")
    Batch = hax.Axis(trainer.batch_axis, trainer.eval_batch_size)
    assert Batch == trainer.EvalBatch and Batch.size == 8 and trainer.replica_axis_size == 1

    ref = RepoRef.from_string(sys.argv[1])
    assert str(RepoRef("org/name", revision="v1")) == "org/name@v1" and ref.revision is None
    assert RepoRef("org/name@v1").model_name_or_path == "org/name"
    tokenizer = load_tokenizer(ref)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=sys.argv[1] + "/tokenizer.json")
    assert len(tokenizer) == len(theirs) == len(tokenizer.get_vocab())
    text = "the cat sat on the mat"
    assert tokenizer.encode(text) == theirs.encode(text, add_special_tokens=False)
    assert tokenizer.as_hf_tokenizer()(text, add_special_tokens=False)["input_ids"] == tokenizer.encode(text)
    text_ids = tokenizer.encode(text)
    assert tokenizer.convert_ids_to_tokens(text_ids) == theirs.convert_ids_to_tokens(text_ids)
    pad = tokenizer.pad_token_id or tokenizer.eos_token_id
    assert tokenizer.bos_token_id is None or isinstance(tokenizer.bos_token_id, int)

    converter = HFCheckpointConverter.from_hf(ref).replaced(tokenizer=theirs)
    assert converter.Vocab.size == len(theirs) and converter.tokenizer.encode(text) == text_ids
    config = LlamaConfig.from_hf_config(converter.default_hf_config)
    assert isinstance(config, LlamaConfig) and config.to_hf_config(320).vocab_size == 320
    assert config.KeyPos.size == config.Pos.size == config.max_Pos.size and config.Embed.size == config.hidden_dim
    assert config.flops_per_token(320, 16) > 2 * config.total_trainable_params(320) * 0.5

    with trainer.device_mesh, hax.axis_mapping(trainer.parameter_axis_mapping):
        state = converter.load_state_dict(ref, dtype=jnp.float32)
        model = converter.load_pretrained(config.model_type, ref=ref, config=config,
                                          axis_mapping=trainer.parameter_axis_mapping, dtype=trainer.mp.param_dtype)
        name = "model.layers.0.mlp.gate_proj.weight"
        mine = model.transformer.layers.stacked.mlp.gate_proj.weight.array[0]
        assert state[name].dtype == jnp.float32 and (np.asarray(state[name]) == np.asarray(mine)).all()
        assert len(state[name].sharding.device_set) == 8 and not state[name].sharding.is_fully_replicated
        assert model.vocab_size == model.Vocab.size and model.Pos == config.max_Pos
        model = inference_mode(model, True)

        @hax.named_jit(axis_resources=trainer.compute_axis_mapping)
        def loss_of(model, tokens):
            model = trainer.mp.cast_to_compute(model)
            return compute_next_token_loss(model, LmExample.causal(tokens), key=None)

        ids = np.load(sys.argv[2])
        print(float(loss_of(model, hax.named(jnp.asarray(ids), config.Pos.resize(len(ids))))))
    with use_cpu_device(), local_cpu_mesh() as mesh:
        assert mesh.size == 1 and is_inexact_arrayish(jnp.ones(2)) and not is_inexact_arrayish(3)
    keys = key_iterator(0)
    assert not (next(keys) == next(keys)).all()
    assert [item for item, _ in zip(non_caching_cycle([1, 2]), range(3))] == [1, 2, 1]
    for what in (lambda: model.resize_vocab(400), lambda: converter.with_tokenizer_padded_to_match_model()):
        try:
            what()
        except AttributeError as error:
            print("refused:", str(error).partition(" is not carried over: ")[0])
    assert not hasattr(model, "resize_vocab")
    try:
        from levanter.trainer import TrainerHooks
    except ImportError as error:
        print("refused:", str(error).partition(" is not carried over: ")[0])
"""


@pytest.mark.slow
def test_an_evaluation_of_2025_in_a_script(checkpoint, torch_loss):
    """As the examples and evaluations of that time are written: `mp` with dtypes, tokenizers of transformers."""
    ids, expected = torch_loss
    done = script(EVALUATION, str(checkpoint), ids, devices=8)
    assert done.returncode == 0, done.stderr
    loss, *refused = done.stdout.splitlines()
    assert float(loss) == pytest.approx(expected, rel=3e-3)  # bfloat16
    assert refused == [
        "refused: levanter.models.base.LmHeadModel.resize_vocab",
        "refused: levanter.compat.hf.converter.HFCheckpointConverter.with_tokenizer_padded_to_match_model",
        "refused: levanter.trainer.TrainerHooks",
    ]
    told = [line for line in done.stderr.splitlines() if "DeprecationWarning: levanter." in line]
    assert len(told) == len(set(told)) >= 20


@pytest.mark.slow
def test_a_script_of_all_the_rest(checkpoint, torch_loss):
    ids, expected = torch_loss
    done = script(REST, str(checkpoint), ids, devices=8)
    assert done.returncode == 0, done.stderr
    best_effort, fsdp, loss = done.stdout.splitlines()
    assert "'model'" in best_effort and "'data'" in best_effort
    assert fsdp == "{'data': 4, 'replica': 1, 'model': 2, 'replica_dcn': 1}"
    assert float(loss) == pytest.approx(expected, abs=2e-4)
    assert [line for line in done.stderr.splitlines() if line.startswith("refused:")] == [
        "refused: TrainerConfig.__init__() got an unexpected keyword argument 'model_axis_sise'",
        "refused: TrainerConfig: mesh and model_axis_size set the same thing; keep one",
        "refused: TrainerConfig(…): trainer.model_axis_size: expected an integer, got x",
    ]


@pytest.mark.slow
def test_an_old_module_runs_with_python_m(tmp_path):
    done = script("", "--config_path", os.devnull, module="levanter.eval_harness")
    assert done.returncode == 2
    assert "no tasks: give tasks" in done.stderr
