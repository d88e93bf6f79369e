"""`HFCheckpointConverter`: upstream's class for reading and writing Hugging Face checkpoints.

It is a facade: `open_checkpoint` resolves files and reads the config, the planner places every parameter, the loader
streams it into its shards, `export` writes. New code uses those; this class keeps upstream's scripts running:

    converter = HFCheckpointConverter.from_hf("org/model")
    with jax.set_mesh(mesh):
        model = converter.load_pretrained(LlamaLMHeadModel, axis_mapping={"embed": "data", "mlp": "model"})
    converter.save_pretrained(model, "exported")

Unlike upstream's, it reads nothing before a method needs it, works without a mesh in scope (on one device), reports
missing and unexpected tensors, and never runs code from a repository.
"""

import dataclasses
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from numpy.typing import DTypeLike

from haliax_ext.abstract import abstract, cast, leaves, with_arrays
from haliax_ext.best_effort import best_effort_sharding
from haliax_ext.load_strategy import plan_loading
from haliax_ext.loading import device_hosts, load
from haliax_ext.mapping import Mappings, compute_mapping_in_scope
from haliax_ext.meshspec import MeshSpec, mesh_in_scope
from haliax_ext.planner import plan_sharding
from haliax_ext.sources import TensorInfo, TensorSource
from levanter.compat.hf.config_bridge import read_config, write_config
from levanter.compat.hf.export import MAX_SHARD_BYTES, ExportExtras, export
from levanter.compat.hf.refs import RepoRef
from levanter.compat.hf.tied import as_stored
from levanter.compat.hf.tokenizer import FastTokenizer, from_transformers
from levanter.compat.open import PretrainedCheckpoint, hf_config, load_tokenizer, open_checkpoint
from levanter.config import ExplicitKeys, plain
from levanter.mesh import MeshConfig, local_devices, resolve
from levanter.models.axes import model_axes
from levanter.models.base import LmHeadModel
from levanter.models.registry import LmConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Reference = str | RepoRef
_DCN = ("replica_dcn", "data_dcn")


class HFCheckpointConverter:
    """Reads and writes Hugging Face files of one family.

    Args:
        LevConfigClass: our config class of the family; None for the class that the files imply.
        reference_checkpoint: the checkpoint that methods use if they get no `ref`.
        HfConfigClass: accepted for compatibility; the model type in config.json decides.
        tokenizer: a tokenizer (ours, or a fast one of transformers), or a reference to one; None for the checkpoint's.
        feature_extractor: upstream's argument for speech models; refused.
        config_overrides: keys of config.json that override those of the files.
        trust_remote_code: accepted for compatibility; code from a repository is never run.
        ignore_prefix: accepted for compatibility; each family's weight rules know its prefixes.
    """

    def __init__(
        self,
        LevConfigClass: type[LmConfig] | None = None,
        reference_checkpoint: Reference | None = None,
        HfConfigClass: "type[PretrainedConfig] | None" = None,
        tokenizer: FastTokenizer | Reference | None = None,
        feature_extractor: object = None,
        config_overrides: Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
        ignore_prefix: str | None = None,
    ):
        if feature_extractor is not None:
            raise ValueError("feature_extractor: text models have none")
        self.LevConfigClass, self.HfConfigClass = LevConfigClass, HfConfigClass
        self.reference_checkpoint, self.trust_remote_code = reference_checkpoint, trust_remote_code
        self.config_overrides, self.ignore_prefix = dict(config_overrides or {}), ignore_prefix
        self.feature_extractor = None
        self._tokenizer = tokenizer

    @staticmethod
    def from_hf(ref: Reference, trust_remote_code: bool = False) -> "HFCheckpointConverter":
        """Creates a converter for the model family of the checkpoint `ref`."""
        config_class = type(read_config(hf_config(ref), where=ref).config)
        return HFCheckpointConverter(config_class, ref, trust_remote_code=trust_remote_code)

    @staticmethod
    def of(config: LmConfig, ref: Reference | None = None) -> "HFCheckpointConverter":
        """A converter for a config's family, with its reference checkpoint unless another one is given."""
        return HFCheckpointConverter(type(config), config.reference_checkpoint if ref is None else ref)

    def replaced(
        self,
        reference_checkpoint: Reference | None = None,
        tokenizer: FastTokenizer | Reference | None = None,
        feature_extractor: object = None,
        trust_remote_code: bool | None = None,
    ) -> "HFCheckpointConverter":
        """This converter with some of its parts replaced; None leaves a part as it is."""
        return self._with(
            reference_checkpoint=self.reference_checkpoint if reference_checkpoint is None else reference_checkpoint,
            tokenizer=self._tokenizer if tokenizer is None else tokenizer,
            feature_extractor=feature_extractor,
            trust_remote_code=self.trust_remote_code if trust_remote_code is None else trust_remote_code,
        )

    def with_config_overrides(self, config_overrides: Mapping[str, Any], merge: bool = True) -> "HFCheckpointConverter":
        """This converter with further keys of config.json replaced; with `merge`, earlier overrides stay."""
        before = self.config_overrides if merge else {}
        return self._with(config_overrides={**before, **config_overrides})

    def _with(self, **changes: object) -> "HFCheckpointConverter":
        arguments = {
            "LevConfigClass": self.LevConfigClass,
            "reference_checkpoint": self.reference_checkpoint,
            "HfConfigClass": self.HfConfigClass,
            "tokenizer": self._tokenizer,
            "config_overrides": self.config_overrides,
            "trust_remote_code": self.trust_remote_code,
            "ignore_prefix": self.ignore_prefix,
        }
        return HFCheckpointConverter(**{**arguments, **changes})

    # --- configs ---

    def config_from_hf_config(
        self, hf_config: "PretrainedConfig | Mapping[str, Any]", overrides: Mapping[str, Any] | None = None
    ) -> LmConfig:
        """Converts a transformers config, or the mapping in a config.json, to our config."""
        document = dict(hf_config) if isinstance(hf_config, Mapping) else hf_config.to_dict()
        config = read_config({**document, **self.config_overrides}).config
        return dataclasses.replace(config, **dict(overrides or {}))

    def hf_config_from_config(self, config: LmConfig, vocab_size: int | None = None) -> "PretrainedConfig":
        """Converts our config to a transformers config."""
        from transformers import AutoConfig

        document = {**write_config(config, vocab_size=vocab_size), **self.config_overrides}
        return AutoConfig.for_model(**document)

    def config_from_hf_checkpoint(self, ref: Reference | None = None) -> LmConfig:
        """Our config, read from the files at `ref`."""
        where = self._reference(ref)
        return read_config({**hf_config(where), **self.config_overrides}, where=where).config

    def hf_config_from_hf_checkpoint(self, ref: Reference | None = None) -> "PretrainedConfig":
        """The transformers config, read from the files at `ref`."""
        from transformers import AutoConfig

        # `for_model` builds a config from its fields; `from_pretrained`
        # would download and may run a repository's code.
        return AutoConfig.for_model(**{**hf_config(self._reference(ref)), **self.config_overrides})

    @property
    def default_config(self) -> LmConfig:
        """Our config of the reference checkpoint."""
        return self.config_from_hf_checkpoint()

    @property
    def default_hf_config(self) -> "PretrainedConfig":
        """The transformers config of the reference checkpoint."""
        return self.hf_config_from_hf_checkpoint()

    @cached_property
    def tokenizer(self) -> FastTokenizer:
        """The tokenizer, read on first use."""
        reference = self._reference(None) if self._tokenizer is None else self._tokenizer
        if isinstance(reference, str | RepoRef):
            return load_tokenizer(reference)
        return reference if isinstance(reference, FastTokenizer) else from_transformers(reference)

    def HFAutoModelClass(self, auto_class: type | None = None) -> type:
        """The transformers class that reads such files, which needs torch."""
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM if auto_class is None else auto_class

    @property
    def Vocab(self) -> hax.Axis:
        """The axis of the tokenizer's ids."""
        return hax.Axis("vocab", self.tokenizer.vocab_size)

    # --- weights ---

    def load_state_dict(self, ref: Reference | None = None, dtype: DTypeLike | None = None) -> dict[str, jax.Array]:
        """The tensors of the files by their own names, sharded over the mesh in scope as their shapes allow.

        To load a model, use `load_pretrained`, which reads every parameter into its final shards.

        Args:
            ref: the files; default the reference checkpoint.
            dtype: dtype of floating-point arrays; default as stored.
        """
        source = open_checkpoint(self._reference(ref)).source
        mesh, _ = _placement({})
        return {name: _sharded_array(source, info, mesh, dtype) for name, info in source.tensors.items()}

    def load_pretrained(
        self,
        lm_model_cls: object = None,
        ref: Reference | None = None,
        config: LmConfig | None = None,
        axis_mapping: Mapping[str, Any] | None = None,
        resize_vocab_to_match_tokenizer: bool = False,
        dtype: DTypeLike | None = None,
    ) -> LmHeadModel:
        """Loads a model into its final shards on the mesh in scope, or on one device without a mesh.

        Args:
            lm_model_cls: accepted for compatibility; the config decides.
            ref: the files; default the reference checkpoint.
            config: the architecture; keys set in it must agree with the files. Default: the files' own.
            axis_mapping: logical axis → mesh axis for parameters (`heads` too); default the mapping in scope.
            resize_vocab_to_match_tokenizer: true is refused if the sizes differ: rows are neither added nor dropped.
            dtype: of the parameters; default as stored.

        Raises:
            CheckpointError: files or config are broken, or do not belong to one model.
            WeightMismatchError: tensors are missing, unexpected or of another shape.
            ShardingError: the mapping does not fit the model or the mesh.
        """
        del lm_model_cls
        checkpoint = open_checkpoint(self._reference(ref))
        architecture = self._architecture(checkpoint, config)
        Vocab = hax.Axis("vocab", checkpoint.vocab_size)
        if resize_vocab_to_match_tokenizer and self.Vocab.size != Vocab.size:
            raise ValueError(
                f"resize_vocab_to_match_tokenizer: the tokenizer has {self.Vocab.size} ids, {checkpoint.description} "
                f"has {Vocab.size} rows; leave it out; rows beyond the tokenizer's ids are harmless"
            )
        mesh, mapping = _placement(axis_mapping)
        # Shapes only: no weight exists until `load` reads each one into its shards.
        module = abstract(lambda: architecture.build(Vocab, key=jax.random.PRNGKey(0)))
        # The dtype of the parameters, so that the planner counts bytes of the arrays that will exist.
        module = cast(module, _stored(checkpoint) if dtype is None else np.dtype(dtype))
        spec = MeshSpec.from_mesh(mesh)
        sharding = plan_sharding(leaves(module), _mappings(architecture, Vocab, mapping, spec), spec)
        plan = plan_loading(sharding, architecture.weight_rules(Vocab), checkpoint.source, hosts=device_hosts(mesh))
        return with_arrays(module, load(plan, sharding, checkpoint.source, mesh).arrays)

    def save_pretrained(
        self,
        model: LmHeadModel,
        path: str | Path,
        upload_to_hf: bool | str | RepoRef = False,
        save_reference_code: bool | None = None,
        save_tokenizer: bool = True,
        max_shard_size: int = MAX_SHARD_BYTES,
        save_feature_extractor: bool = False,
        dtype: DTypeLike | None = None,
        generation_config: Mapping[str, Any] | None = None,
    ) -> None:
        """Writes a model as a folder that `transformers` reads; the folder must not exist.

        Raises:
            ValueError: an option of upstream that is not supported is set.
            ExportPathError: the folder exists.
        """
        options = {
            "upload_to_hf": upload_to_hf,
            "save_reference_code": save_reference_code,
            "save_feature_extractor": save_feature_extractor,
            "generation_config": generation_config,
        }
        if unsupported := [name for name, value in options.items() if value]:
            raise ValueError(
                f"{', '.join(unsupported)}: not supported; the folder gets config.json, weights and tokenizer"
            )
        assert isinstance(model.config, LmConfig)
        export(
            model,
            model.config,
            path,
            extras=ExportExtras(tokenizer=self.tokenizer if save_tokenizer else None, overrides=self.config_overrides),
            dtype=None if dtype is None else np.dtype(dtype),
            max_shard_bytes=max_shard_size,
        )

    def _reference(self, ref: Reference | None) -> Reference:
        reference = self.reference_checkpoint if ref is None else ref
        if reference is None:
            raise ValueError("no checkpoint is given: pass ref, or give the converter a reference_checkpoint")
        return reference

    def _architecture(self, checkpoint: PretrainedCheckpoint, config: LmConfig | None) -> LmConfig:
        document = {**checkpoint.document, **self.config_overrides}
        architecture, _ = as_stored(
            read_config(document, where=checkpoint.where).config, checkpoint.source, where=checkpoint.where
        )
        if self.LevConfigClass is not None and not isinstance(architecture, self.LevConfigClass):
            raise ValueError(
                f"{checkpoint.description} is a {type(architecture).__name__}, but the converter is for "
                f"{self.LevConfigClass.__name__}; HFCheckpointConverter.from_hf finds the right one"
            )
        if config is None:
            return architecture
        keys = ExplicitKeys.in_python(config).top
        # Only keys that the script set explicitly count; dataclass defaults must not contradict the files.
        checkpoint.check_model_block({k: v for k, v in plain(config).items() if k in keys or k == "type"})
        # vocab_size stays the checkpoint's: the rows in the file are what is loaded.
        return dataclasses.replace(architecture, **{k: getattr(config, k) for k in sorted(keys - {"vocab_size"})})


def _sharded_array(source: TensorSource, info: TensorInfo, mesh: Mesh, dtype: DTypeLike | None) -> jax.Array:
    stored = info.dtype
    target_dtype = stored if dtype is None or not jnp.issubdtype(stored, jnp.floating) else np.dtype(dtype)

    def read_shard(index: tuple[slice, ...] | None) -> np.ndarray:
        slices = (slice(None),) * len(info.shape) if index is None else index
        # make_array_from_callback may pass slices with None bounds; `indices` fills them in.
        whole = tuple(slice(*one.indices(size)[:2]) for one, size in zip(slices, info.shape, strict=True))
        return source.read(info.name, whole).astype(target_dtype)

    sharding = best_effort_sharding(info.shape, mesh=mesh, dtype=target_dtype)
    return jax.make_array_from_callback(info.shape, sharding, read_shard)


def _stored(checkpoint: PretrainedCheckpoint) -> np.dtype:
    """The dtype of most of a checkpoint's bytes."""
    # By bytes and not by count: norms in float32 are many but small.
    sizes: dict[np.dtype, int] = {}
    for info in checkpoint.source.tensors.values():
        sizes[info.dtype] = sizes.get(info.dtype, 0) + info.nbytes
    return max(sizes, key=lambda dtype: sizes[dtype])


def _placement(axis_mapping: Mapping[str, Any] | None) -> tuple[Mesh, Mapping[str, Any]]:
    """The mesh in scope with the mapping; without a mesh, one device and no mapping."""
    mesh = mesh_in_scope()
    if mesh is None:
        # Upstream's scripts convert checkpoints without a mesh; one device is enough for that.
        first = local_devices(MeshConfig()).devices[:1]
        return MeshSpec.of(data=1).build(first), {}
    if isinstance(mesh, AbstractMesh):
        raise ValueError("load_pretrained: the mesh in scope has no devices, so weights cannot be placed on it")
    return mesh, compute_mapping_in_scope() if axis_mapping is None else axis_mapping


def _mappings(config: LmConfig, Vocab: hax.Axis, mapping: Mapping[str, Any], spec: MeshSpec) -> Mappings:
    """The mapping resolved for this model, including `heads` and aliases; `batch` belongs to no parameter."""
    rules = {
        name: list(value) if isinstance(value, tuple) else value for name, value in mapping.items() if name != "batch"
    }
    mesh = MeshConfig(
        axes={name: size for name, size in spec.axes if name not in _DCN},
        dcn_axes={name: spec.shape.get(name, 1) for name in _DCN},
        # The config's default mappings for mlp and heads are off: only the caller's mapping counts.
        shared_mapping={"mlp": None, "heads": None},
        param_mapping=rules,
        # Only parameters are placed here; what activations do with a mesh axis is not known.
        allow_idle_axes=list(spec.names),
    )
    # `resolve` counts DCN axes in granules (slices or hosts), the others in devices of one slice.
    granules = spec.ways(tuple(name for name in _DCN if name in spec.shape))
    resolved = resolve(mesh, model_axes(config.axes, vocab=Vocab.size), devices=spec.size, granules=granules)
    return Mappings(params=resolved.mappings.params, declared=resolved.mappings.declared)
