"""Digests of a Program for the compile cache: of the inputs of its trace, and of its lowered text.

The same lowered text compiles to the same executable, so the text identifies a Program (`lowered_digest`). But lowering
takes seconds to a minute, so there is a faster identity (`fingerprint`): a digest of everything that tracing can depend
on, computed without tracing. That is

- the Program's function, with all it closes over: code, constants, configurations, shapes;
- its inputs' shapes, dtypes and shardings, its outputs' shardings, mappings, donation, precision, compiler options,
mesh;
- the sources of this package and of others that are used in place, by content; installed distributions, by version
  (`environment_digest`);
- JAX's options, as the environment and the run's configuration set them.

A value of a type that the walk does not know has no fingerprint, and the Program is lowered. So equal Programs may have
different fingerprints, but different Programs do not share one, with one exception: state that a module keeps outside
of what a function closes over (a registry that a plug-in fills differently another day, from the same sources).
"""

import enum
import functools
import hashlib
import os
import re
import sys
import sysconfig
import time
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from haliax_ext.planner import ShardingPlan
from haliax_ext.program import Program, partition_spec
from levanter.runplan import RunPlan

_PACKAGES = ("levanter", "haliax_ext")
_ENVIRONMENT = ("JAX_", "XLA_", "LIBTPU_", "TPU_")
# Variables that `compile_pool.worker_environment` sets for every pod: they follow from the target.
_WORKER_VARIABLES = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD",
    "JAX_PLATFORMS",
    "TPU_ACCELERATOR_TYPE",
    "TPU_LOG_DIR",
    "TPU_MIN_LOG_LEVEL",
    "TPU_SKIP_MDS_QUERY",
    "TPU_STDERR_LOG_LEVEL",
    "TPU_WORKER_HOSTNAMES",
}
# Flags of XLA that do not affect the compiler of a pod.
_OF_THIS_MACHINE = ("--xla_force_host_platform_device_count", "--xla_cpu_")
_CODE = ("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_flags", "co_argcount")
_PLAIN = (bool, int, float, complex, str, bytes)


class _Unknown(Exception):
    """A value whose dependencies the walk does not know."""


def fingerprint(program: object, plan: object) -> str | None:
    """The digest of all that the trace of a Program depends on; None where the walk meets an unknown value."""
    if not isinstance(program, Program) or not isinstance(plan, RunPlan):
        return None
    walk = _Walk()
    try:
        traced = [
            walk.digest(part)
            for part in (
                program.name,
                program.function,
                tuple((argument.name, argument.value, argument.placement) for argument in program.inputs),
                program.mappings,
                program.out_placement,
                program.donate,
                program.matmul_precision,
                program.compiler_options,
                (plan.target.name, plan.target.platform, plan.target.kind),
                plan.mesh,
                _jax_options(plan),
            )
        ]
        # After the walk: only now is it known which packages the functions and types of the Program come from.
        foreign = walk.digest(tuple(sorted(_source_digest(name) for name in walk.packages)))
        around = environment_digest().encode()
    except _Unknown:
        return None
    return _hashed([*traced, foreign, around]).hex()


def _jax_options(plan: RunPlan) -> Mapping[str, Any]:
    trainer = getattr(getattr(plan.work, "config", None), "trainer", None)
    return dict(getattr(trainer, "jax_config", None) or {})


@functools.cache
def environment_digest() -> str:
    """A digest of all that a trace depends on besides the Program: Python, what is installed, our sources, options."""
    digest = hashlib.sha256()
    texts = [sys.version, *installed_distributions(), *compiler_environment()]
    for part in texts:
        digest.update(part.encode() + b"\0")
    for name in _PACKAGES:
        digest.update(_source_digest(name).encode())
    return digest.hexdigest()


def compiler_environment() -> list[str]:
    """The environment variables that JAX and the compilers of pods read, as `name=value`.

    XLA flags for the processors of this machine are left out: they do not change what a pod's compiler returns, so a
    test with eight virtual devices shares cache entries with a plan without them.
    """
    names = (name for name in os.environ if name.startswith(_ENVIRONMENT) and name not in _WORKER_VARIABLES)
    values = {name: os.environ[name] for name in sorted(names)}
    if (flags := values.pop("XLA_FLAGS", None)) is not None:
        xla_flags = [flag for flag in flags.split() if not flag.startswith(_OF_THIS_MACHINE)]
        values |= {"XLA_FLAGS": " ".join(xla_flags)} if xla_flags else {}
    return [f"{name}={value}" for name, value in sorted(values.items())]


@functools.cache
def installed_distributions() -> tuple[str, ...]:
    """Every installed distribution, `name-version`."""
    names: set[str] = set()
    for folder in map(Path, filter(os.path.isdir, sys.path)):
        # Folder names are enough (`name-version.dist-info`); importlib.metadata would parse hundreds of files.
        names |= {entry.name for entry in folder.glob("*.dist-info")}
    return tuple(sorted(names))


@functools.cache
def _source_digest(package: str) -> str:
    """A digest of a package's sources; its name alone where it is installed, whose version is known.

    Raises:
        _Unknown: it has no sources that could be read.
    """
    # The standard library follows from `sys.version`, which `environment_digest` has.
    if package in sys.builtin_module_names or package in sys.stdlib_module_names:
        return package
    module = sys.modules.get(package)
    file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", [])), None)
    if file is None:
        raise _Unknown(f"module {package} has no file")
    path = Path(file)
    # Installed packages are identified by their version in
    # `environment_digest`; ours may be an editable install.
    if package not in _PACKAGES and any(path.is_relative_to(folder) for folder in _site_folders()):
        return package
    folder = path if path.is_dir() else path.parent
    files = sorted(folder.rglob("*.py")) if path.name == "__init__.py" or path.is_dir() else [path]
    digest, began = hashlib.sha256(), _process_began()
    for file_ in files:
        # The module in memory may be of an older content than the file: then
        # the digest of the file would be wrong.
        if began is not None and file_.stat().st_mtime > began:
            raise _Unknown(f"{file_} is newer than this process, which may have read what was there before")
        digest.update(str(file_.relative_to(folder)).encode() + b"\0" + hashlib.sha256(file_.read_bytes()).digest())
    return f"{package}:{digest.hexdigest()}"


@functools.cache
def _process_began() -> float | None:
    """When this process was started, in seconds since the epoch; None where the system does not say."""
    try:
        behind_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        up = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    # Field 22 of the line is the start in clock ticks since boot; the name in parentheses may hold
    # spaces, so fields are counted from behind it.
    return time.time() - up + int(behind_name[19]) / os.sysconf("SC_CLK_TCK")


@functools.cache
def _site_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple({paths["purelib"], paths["platlib"], paths["stdlib"]})


class _Walk:
    """Digests values by structure, and collects the packages that their types and functions come from."""

    def __init__(self) -> None:
        self.packages: set[str] = set()
        self._done: dict[int, bytes] = {}
        self._alive: list[object] = []  # keeps digested objects alive: the id of a dead object is reused
        self._inside: list[int] = []

    def digest(self, value: object) -> bytes:
        """The digest of a value.

        Raises:
            _Unknown: it has a part of a type that the walk does not know.
        """
        if value is None or (isinstance(value, _PLAIN) and type(value) in _PLAIN):
            return _hashed([type(value).__name__.encode(), repr(value).encode()])
        if id(value) in self._done:
            return self._done[id(value)]
        if id(value) in self._inside:
            # A cycle (a method whose object holds it): the digest of the distance
            # to the enclosing object stands for it.
            return _hashed([b"within", str(len(self._inside) - self._inside.index(id(value))).encode()])
        self._inside.append(id(value))
        digest = _hashed(list(self._content(value)))
        self._inside.pop()
        self._done[id(value)] = digest
        self._alive.append(value)
        return digest

    def _content(self, value: object) -> Iterator[bytes]:
        if isinstance(value, type):
            yield self._named(value)
        elif isinstance(value, types.FunctionType):
            yield from self._function(value)
        elif isinstance(value, types.CodeType):
            yield from self._code(value)
        elif isinstance(value, types.ModuleType):
            self.packages.add(value.__name__.partition(".")[0])
            yield value.__name__.encode()
        elif isinstance(value, functools.partial):
            yield from self._digests(b"partial", value.func, value.args, value.keywords)
        elif isinstance(value, types.MethodType):
            yield from self._digests(b"method", value.__func__, value.__self__)
        else:
            yield self._named(type(value))
            yield from self._value(value)

    def _value(self, value: object) -> Iterator[bytes]:
        if isinstance(value, ShardingPlan):
            # The rule that sharded a leaf and the findings change no trace; the resulting spec does.
            yield from self._digests(value.mesh, value.mappings, value.hbm_bytes)
            for leaf in value.leaves:
                yield from self._digests(leaf.leaf, partition_spec(leaf.leaf, value))
        elif value is ...:
            yield b"..."
        elif isinstance(value, slice):
            yield from self._digests(value.start, value.stop, value.step)
        elif isinstance(value, np.dtype):
            yield str(value).encode()
        elif isinstance(value, np.ndarray | np.generic):
            array = np.asarray(value)
            if array.dtype.hasobject:
                raise _Unknown("an array of objects")
            yield from (str((array.dtype, array.shape)).encode(), np.ascontiguousarray(array).tobytes())
        elif isinstance(value, jax.ShapeDtypeStruct):
            yield str((value.shape, value.dtype, value.sharding, value.weak_type)).encode()
        elif isinstance(value, PartitionSpec):
            yield from self._digests(*value)
        elif isinstance(value, enum.Enum):
            yield value.name.encode()
        elif isinstance(value, Mapping):
            yield from self._digests(*(part for item in value.items() for part in item))
            yield from self._attributes(value)
        elif isinstance(value, set | frozenset):
            # Iteration order of a set depends on the hash seed of the process.
            yield from sorted(map(self.digest, value))
        elif isinstance(value, tuple | list):
            yield from self._digests(*value)
        elif isinstance(value, re.Pattern):
            yield from self._digests(value.pattern, value.flags)
        elif isinstance(value, Path):
            yield str(value).encode()
        elif is_dataclass(value):
            for field in fields(value):
                yield from self._digests(field.name, getattr(value, field.name, None))
        elif isinstance(value, jax.tree_util.PyTreeDef):
            yield str(value).encode()
        elif isinstance(value, _PLAIN):
            yield repr(value).encode()
        # A module-level object (a jitted function, an operator): its package's sources say what it is.
        elif _by_name(value) is not None:
            yield self._named(value)
        elif type(value).__module__.partition(".")[0] in _PACKAGES:
            yield from self._attributes(value)
        else:
            raise _Unknown(f"{type(value).__module__}.{type(value).__qualname__}")

    def _attributes(self, value: object) -> Iterator[bytes]:
        """The attributes of an object, from its `__dict__` and its slots."""
        slots = (name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()))
        names = [*vars(value)] if hasattr(value, "__dict__") else []
        for name in sorted({*names, *slots} - {"__weakref__", "__dict__"}):
            yield from self._digests(name, getattr(value, name, None))

    def _function(self, value: types.FunctionType) -> Iterator[bytes]:
        yield self._named(value)
        yield self.digest(value.__code__)
        yield from self._digests(value.__defaults__, value.__kwdefaults__)
        for cell in value.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:
                # A cell that is not filled yet: a function that refers to itself while it is being defined.
                yield b"empty"
                continue
            yield self.digest(content)

    def _code(self, code: types.CodeType) -> Iterator[bytes]:
        yield from (repr(getattr(code, name)).encode() for name in _CODE)
        yield from self._digests(*code.co_consts)

    def _digests(self, *values: object) -> Iterator[bytes]:
        yield from (value if isinstance(value, bytes) else self.digest(value) for value in values)

    def _named(self, value: object) -> bytes:
        module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
        if not isinstance(module, str) or not isinstance(name, str):
            raise _Unknown(repr(value))
        self.packages.add(module.partition(".")[0])
        return f"{module}.{name}".encode()


def _by_name(value: object) -> str | None:
    """The name under which an object can be imported; None if importing it gives another object or none."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        return None
    target: object = sys.modules.get(module)
    for part in name.split("."):
        target = getattr(target, part, None)
    return f"{module}.{name}" if target is value else None


def _hashed(chunks: Iterable[bytes]) -> bytes:
    digest = hashlib.sha256()
    for part in chunks:
        # Lengths first, so that ("ab", "c") and ("a", "bc") have different digests.
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.digest()


# Debug text ends with lines `#loc5 = loc("name"(#loc3))` or `loc("file.py":10:4)`; operations refer to `#loc5`.
# A quoted name that is followed by `:<digit>` is a file, not the name of an operation.
_ALIAS = re.compile(r"^(#loc\d*) = loc\((.*)\)$", re.MULTILINE)
_QUOTED = re.compile(r'^"((?:[^"\\]|\\.)*)"(?!:\d)')
_USE = re.compile(r"loc\((#loc\d*)\)")


def lowered_digest(text: str) -> str:
    """The digest of a lowered Program's text, printed with its locations.

    The names of operations count, since figures are grouped by module; files and line numbers do not.

    Args:
        text: StableHLO with debug information.
    """
    names = {alias: match[1] if (match := _QUOTED.match(body)) else "" for alias, body in _ALIAS.findall(text)}
    plain = _USE.sub(lambda use: f"<{names.get(use[1], '')}>", _ALIAS.sub("", text))
    return hashlib.sha256(plain.encode()).hexdigest()
