"""Makes names of earlier generations importable where scripts expect them; `levanter/__init__.py` calls `install` once.

The project's modules do not know the names that such scripts use. Only if a name is missing does
`levanter.upstream.imports` look it up in a table and report, once, where it is now. Every `import levanter` runs this
file, so it imports only the standard library: it adds two finders to Python's own, and attributes to `levanter` itself.
"""

import os
import sys
import warnings
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

from levanter.upstream.draccus_help import MODULE as DRACCUS
from levanter.upstream.draccus_help import PARSER, patch_docstrings, patch_parsing

EARLIER_NAMES: dict[str, tuple[str, ...]] = {
    "levanter.checkpoint": (),
    "levanter.checkpoint.checkpointer": ("Checkpointer",),
    "levanter.compat.hf.converter": ("HFCheckpointConverter",),
    "levanter.compat.hf.tokenizer": ("FastTokenizer",),
    "levanter.config": (),
    "levanter.data": (),
    "levanter.data.config": ("LmDataConfig",),
    "levanter.data.loader": (),
    "levanter.data.mixture": (),
    "levanter.data.packing": (),
    "levanter.distributed": (),
    "levanter.eval": (),
    "levanter.inference.engine": (),
    "levanter.layers": (),
    "levanter.layers.attention": (),
    "levanter.layers.attention.mask": ("AttentionMask",),
    "levanter.layers.rotary": ("RotaryConfig",),
    "levanter.main.cache_dataset": (),
    "levanter.main.inference_repl": (),
    "levanter.main.lora_dpo": (),
    "levanter.main.lora_lm": (),
    "levanter.main.perplexity_gap": (),
    "levanter.main.sft": (),
    "levanter.main.sft_mixture": (),
    "levanter.main.train_dpo": (),
    "levanter.mesh": (),
    "levanter.mesh.config": ("MeshConfig",),
    "levanter.models.base": ("LmHeadModel", "ModelOutputs"),
    "levanter.models.gemma": (),
    "levanter.models.gpt2": (),
    "levanter.models.llama": (),
    "levanter.models.mistral": (),
    "levanter.models.mixtral": (),
    "levanter.models.olmo": (),
    "levanter.models.precision": ("PolicyText",),
    "levanter.models.qwen": (),
    "levanter.models.registry": ("LmConfig",),
    "levanter.optim": (),
    "levanter.optim.config": ("OptimizerConfig",),
    "levanter.optim.muon": (),
    "levanter.optim.skip_steps": ("SkipStepConfig",),
    "levanter.optim.sophia": (),
    "levanter.tracker": (),
    "levanter.tracker.background": (),
    "levanter.tracker.trackio": (),
    "levanter.tracker.wandb": (),
    "levanter.trainer": (),
    "levanter.trainer.config": ("TrainerConfig",),
    "levanter.trainer.config_blocks": ("CheckpointerConfig",),
}
"""Existing modules that had other names in earlier generations → their classes that had other members."""


EARLIER_CLASS_MEMBERS: dict[str, dict[str, tuple[str, ...]]] = {
    "levanter.models.registry": {"LmConfig": ("from_hf_config", "default_hf_checkpoint_converter")}
}
"""Members of those classes that are read from the class itself, not from an instance."""


EARLIER_KEYWORDS: dict[str, tuple[str, ...]] = {
    "levanter.commands.evaluate.eval_lm": ("EvalLmConfig",),
    "levanter.commands.train.config": ("TrainLmConfig",),
    "levanter.models.gemma.config": ("GemmaConfig", "Gemma2Config", "Gemma3Config"),
    "levanter.models.gpt2.config": ("Gpt2Config",),
    "levanter.models.llama.config": ("LlamaConfig",),
    "levanter.models.mistral.config": ("MistralConfig",),
    "levanter.models.mixtral.config": ("MixtralConfig", "Qwen3MoeConfig"),
    "levanter.models.olmo.config": ("Olmo2Config", "Olmo3Config"),
    "levanter.models.qwen.config": ("QwenConfig", "Qwen3Config"),
    "levanter.trainer.config": ("TrainerConfig",),
}
"""Modules → their configuration classes that took other keywords."""


EARLIER_CALLS: dict[str, dict[str, tuple[str, int, tuple[str, ...]]]] = {
    "levanter.layers.attention.mask": {"AttentionMask.materialize": ("materialize", 2, ("q_slice", "k_slice"))},
    "levanter.models.decoder.model": {"DecoderLmHeadModel.__call__": ("logits", 1, ("key", "pos_ids"))},
    "levanter.checkpoint.checkpointer": {
        "Checkpointer.__init__": ("new_checkpointer", 1, ("save_interval", "step_policies", "dt_now_injection"))
    },
}
"""Methods with an earlier signature → its function in `levanter.upstream.facades.models`, the number of positional
arguments that the method takes today, and keywords that it no longer has."""


OPERATORS = ("add", "getitem", "mul", "neg", "radd", "rmul", "rsub", "rtruediv", "sub", "truediv")
EARLIER_OPERATORS: dict[str, dict[str, tuple[str, ...]]] = {
    "levanter.compat.hf.tokenizer": {"FastTokenizer": ("call",)},
    "levanter.models.base": {"ModelOutputs": OPERATORS},
}
"""Modules → classes whose objects were of another type, and the operators of that type."""


EARLIER_SUBSCRIPTS: dict[str, tuple[str, ...]] = {"levanter.models.base": ("LmHeadModel",)}
"""Modules → classes that were generic."""


class _EarlierModules:
    """Finds modules of earlier generations, if there is no module of that name."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        del path, target
        # Called for every import that no other finder could satisfy; other packages are left alone.
        if not name.startswith("levanter."):
            return None
        # Imported late: the tables are read only if a script uses an earlier name.
        return import_module("levanter.upstream.imports").find_spec(name)


class _EarlierNamesIn(SourceFileLoader):
    """Loads a module as usual; names it lacks are then looked up among those it had."""

    def exec_module(self, module: ModuleType) -> None:
        # The module is loaded unchanged first; only then are its missing names added.
        super().exec_module(module)
        name = module.__name__
        # PEP 562: called for names that the module does not have, so existing ones cost nothing.
        vars(module)["__getattr__"] = _first(vars(module).get("__getattr__"), name)
        for cls in EARLIER_NAMES.get(name, ()):
            at = f"{name}:{cls}"
            # `__getattr__` of a class runs only for attributes that
            # lookup did not find. The default argument binds `at` now.
            vars(module)[cls].__getattr__ = lambda self, attribute, at=at: _earlier(at, attribute, self)
        for cls, operators in EARLIER_OPERATORS.get(name, {}).items():
            for operator in operators:
                setattr(vars(module)[cls], f"__{operator}__", _operator(f"{name}:{cls}", f"__{operator}__"))
        for cls in EARLIER_SUBSCRIPTS.get(name, ()):
            vars(module)[cls].__class_getitem__ = classmethod(_subscript)
        for cls, members in EARLIER_CLASS_MEMBERS.get(name, {}).items():
            for member in members:
                # A class's `__getattr__` is not called for attributes of the class itself; a descriptor is.
                setattr(vars(module)[cls], member, _ClassMember(f"{name}:{cls}", member))
        for cls in EARLIER_KEYWORDS.get(name, ()):
            _accept_earlier_keywords(vars(module)[cls])
        for method, call in EARLIER_CALLS.get(name, {}).items():
            cls, _, member = method.partition(".")
            _accept_earlier_calls(vars(module)[cls], member, *call)


def _subscript(cls: type, item: object) -> object:
    return import_module("levanter.upstream.facades.families").subscript(cls, item)


def _operator(at: str, name: str) -> Callable[..., Any]:
    # Python looks operators up in the class, never in `__getattr__`.
    return lambda self, *args, **keys: _earlier(at, "operator", self)(name, *args, **keys)


class _ClassMember:
    """A descriptor for a former class member, such as `LlamaConfig.from_hf_config`."""

    def __init__(self, at: str, name: str):
        self.at, self.name = at, name

    def __get__(self, instance: object, owner: type) -> object:
        # `owner` is the class that was asked, so that a subclass gets its own result.
        return _earlier(self.at, self.name, owner)


class _PatchedDraccus(SourceFileLoader):
    """Loads draccus's modules for docstrings and documents, and patches them for our classes."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        (patch_docstrings if module.__name__ == DRACCUS else patch_parsing)(module)


class _ModulesWithEarlierNames:
    """Finds the modules of the tables for `_EarlierNamesIn`, and draccus's for `_PatchedDraccus`."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        # A set test for every import of the process: cheap, since this finder comes first.
        if not any(name in known for known in (EARLIER_NAMES, EARLIER_KEYWORDS, EARLIER_CALLS, {DRACCUS, PARSER})):
            return None
        # PathFinder is asked directly; the import system would come back to this finder.
        spec = PathFinder.find_spec(name, path, target)
        # Another loader (a zip file, an instrumented import) is left alone.
        if spec is not None and type(spec.loader) is SourceFileLoader:
            loader = _PatchedDraccus if name in (DRACCUS, PARSER) else _EarlierNamesIn
            spec.loader = loader(spec.loader.name, spec.loader.path)
        return spec


def _first(current: Callable[[str], Any] | None, name: str) -> Callable[[str], Any]:
    """A module's `__getattr__`: first its own lazy attributes, if any, then earlier names."""

    def lookup(attribute: str) -> Any:
        if current is None:
            return _earlier(name, attribute)
        try:
            return current(attribute)
        except AttributeError:
            return _earlier(name, attribute)

    return lookup


PRIVATE = {
    "_apply_rotary_pos_emb",
    "_blockwise_cross_entropy_loss",
    "_convert_to_jnp",
    "_get_builder_actor",
    "_get_fs_and_plain_path",
    "_load_metadata",
    "_rotate_half",
    "_sniff_format_for_dataset",
    "_stack_batch_encodings",
}
"""Upstream's names with a leading underscore that its tests import; no others are looked up."""


def _earlier(at: str, name: str, *instance: object) -> Any:
    # Python and its tools probe dunder names (`__path__`, `__wrapped__`) all the time; these must stay cheap.
    if name.startswith("_") and name not in PRIVATE:
        raise AttributeError(f"{at} has no attribute {name!r}")
    return import_module("levanter.upstream.imports").look_up(at, name, *instance)


def _accept_earlier_keywords(cls: type) -> None:
    """Makes a configuration class accept its earlier keywords: `LlamaConfig(seq_len=…)`."""
    init = cls.__init__
    known = set(cls.__dataclass_fields__)  # pyright: ignore[reportAttributeAccessIssue]

    @wraps(init)
    def __init__(self: Any, *args: Any, **keys: Any) -> None:
        # Current code, which has no unknown keywords, imports nothing.
        if not keys.keys() <= known:
            keys = import_module("levanter.upstream.facades.keywords").translate_keywords(type(self), keys)
        init(self, *args, **keys)

    cls.__init__ = __init__


def _accept_earlier_calls(cls: type, member: str, facade: str, positional: int, keywords: tuple[str, ...]) -> None:
    """Makes a method accept its earlier calls: `model(ids, mask, key=key)`."""
    current = vars(cls)[member]

    @wraps(current)
    def method(self: object, *args: object, **keys: object) -> object:
        # A call that fits the current signature goes there directly; only earlier forms load the facade.
        # Earlier masks were NamedArrays under today's keyword, so
        # the type must be checked, by name to avoid an import.
        by_name = any(name in keys for name in keywords) or type(keys.get("attn_mask")).__name__ == "NamedArray"
        if len(args) <= positional and not by_name:
            return current(self, *args, **keys)
        return getattr(import_module("levanter.upstream.facades.models"), facade)(current, self, *args, **keys)

    setattr(cls, member, method)


def _part(name: str) -> Any:
    """`levanter.__getattr__`: `levanter.trainer` works after `import levanter` alone, as in earlier generations."""
    if name == "__version__":
        return import_module("levanter.io.package_version").version()
    if name.startswith("_"):
        raise AttributeError(f"module 'levanter' has no attribute {name!r}")
    try:
        return import_module(f"levanter.{name}")
    except ModuleNotFoundError as error:
        # The module exists, and an import inside of it failed: that error must not be hidden.
        if error.name != f"levanter.{name}":
            raise
    return _earlier("levanter", name)


UPSTREAM_DISTRIBUTIONS = ("levanter", "marin_levanter")
"""Upstream's distributions, as their metadata folders are called. Their package is called `levanter` too."""


def warn_of_upstream(site: str) -> None:
    """Warns if upstream is installed in this package's folder: the files of both are mixed there.

    Args:
        site: the folder that contains this package. In a checkout it contains no distributions.
    """
    # One listing, 0.2 ms in a folder of 500 packages: importing `importlib.metadata` alone would cost 20 ms.
    try:
        names = [name for name in os.listdir(site) if name.endswith(".dist-info")]
    except OSError:  # imported from a zip file
        return
    mixed = sorted(name for name in names if name.partition("-")[0] in UPSTREAM_DISTRIBUTIONS)
    if mixed:
        others = [name.partition("-")[0].replace("_", "-") for name in mixed]
        warnings.warn(
            f"{' and '.join(others)} and levanter-fork are installed in the same environment; both have the package "
            "`levanter`, and their files overwrite each other. Install levanter-fork into an environment of its own, "
            f"or remove both (pip uninstall {' '.join(others)} levanter-fork) and install levanter-fork again",
            RuntimeWarning,
            stacklevel=3,
        )


def install() -> None:
    """Adds the two finders to `sys.meta_path` and a `__getattr__` to `levanter`. A second call adds no finders."""
    # Set through `vars`, so that type checkers do not see it and still report misspelt names.
    vars(sys.modules["levanter"])["__getattr__"] = _part
    if _EarlierModules in sys.meta_path:
        return
    warn_of_upstream(os.path.dirname(os.path.dirname(os.path.dirname(__file__))))
    # First, because it wraps the loaders of existing modules. The other finder is last, so that it only sees names
    # that no module has.
    sys.meta_path.insert(0, _ModulesWithEarlierNames)  # pyright: ignore[reportArgumentType]
    sys.meta_path.append(_EarlierModules)  # pyright: ignore[reportArgumentType]
    # A script may have imported draccus first; then its loader cannot be wrapped any more.
    if DRACCUS in sys.modules:
        patch_docstrings(sys.modules[DRACCUS])
    if PARSER in sys.modules:
        patch_parsing(sys.modules[PARSER])
