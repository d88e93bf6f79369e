"""Old keys of `trainer:`, and what they mean in `trainer.mesh`, `trainer.profiler` and `trainer.tracker`.

The old generation had three physical axes, `replica`, `data` and `model`, the first two spanning slices and chips at
once. Its compute mapping was `axis_resources`, then `tensor_parallel_axes → model` over it, then `batch → (replica,
data)`; its parameter mapping was that, then `parameter_axis_resources`, then `fsdp_axis → data`. By default it did FSDP
over `embed`, no tensor parallelism, and one replica across slices (so `data` spanned them); the new generation
replicates across slices and always maps `mlp` and `heads`. A document with any old key therefore also gets the old
defaults spelled out, unless it has a `mesh:` block, whose defaults are the new ones.
"""

from collections.abc import Mapping
from typing import Any

from levanter.config.errors import did_you_mean
from levanter.config.upstream.changes import Change, Draft, Keys, OldKey, inline
from levanter.config.yaml_nodes import Entry, MapNode, to_plain

TRAINER: Keys = ("trainer",)
MESH: Keys = ("trainer", "mesh")
NEW_TP_DEFAULTS = ("mlp", "heads")


def _row(name: str, new: str, why: str, default: str = "") -> OldKey:
    return OldKey(block="trainer", name=name, new=new, why=why, default=default)


MESH_KEYS = (
    _row("replica_dcn_axis_size", "mesh.dcn_axes.replica_dcn", "a mesh size; `data` spans the other slices", "1"),
    _row("replica_ici_axis_size", "mesh.axes.replica", "a mesh size", "1"),
    _row("model_axis_size", "mesh.axes.model", "a mesh size", "1"),
    _row("batch_axis", "mesh.batch_axis_name", "the logical name of the batch axis", "batch"),
    _row("axis_resources", "mesh.shared_mapping", "a mapping for parameters and compute", "{}"),
    _row(
        "tensor_parallel_axes",
        "mesh.shared_mapping, each axis → model; null for mlp and heads where not listed",
        "a mapping for parameters and compute",
        "none",
    ),
    _row("parameter_axis_resources", "mesh.param_mapping", "a mapping for parameters and optimizer state", "{}"),
    _row("fsdp_axis", "mesh.param_mapping, each axis → data", "a mapping for parameters and optimizer state", "embed"),
)
PROFILER_KEYS = (
    _row("profiler", "profiler.enabled, with profiler.num_steps: 100", "the profiler has a block of its own", "false"),
    _row("profiler_start_step", "profiler.start_step", "the profiler has a block of its own", "5"),
    _row(
        "profiler_num_steps", "profiler.num_steps", "the profiler has a block of its own (default 25, was 100)", "100"
    ),
    _row("profiler_perfetto_link", "profiler.perfetto_link", "the profiler has a block of its own", "false"),
)
RAY = _row("ray", "nothing", "jobs do not run on Ray; the launcher starts one process per host")
WANDB = _row("wandb", "tracker: {type: wandb, …}", "wandb is one of several trackers")
TRAINER_KEYS = (*MESH_KEYS, *PROFILER_KEYS, RAY, WANDB)

_HEADS_WHY = (
    "a mapping for parameters and compute; `heads` now shards q, k, v and o alike, where it used to reach o only"
)


def translate_trainer(draft: Draft) -> None:
    """Translates every old key of `trainer:`."""
    block = draft.block(TRAINER)
    if block is None:
        return
    old = {row.name: entry for row in TRAINER_KEYS if (entry := block.entry(row.name)) is not None}
    # `profiler: {…}` is today's block, not the old switch of the same name.
    if isinstance(old.get("profiler") and old["profiler"].node, MapNode):
        del old["profiler"]  # the new spelling has the same name
    # `wandb` alone does not make a document old-style: both generations accept it.
    if any(name != WANDB.name for name in old):
        _Mesh(draft, old).translate()
    _profiler(draft, old)
    if RAY.name in old:
        draft.ignore(RAY, old[RAY.name], TRAINER)
    if WANDB.name in old:
        _wandb(draft, old[WANDB.name])


class _Mesh:
    """The mesh keys of one document, which only together say what each means."""

    def __init__(self, draft: Draft, old: Mapping[str, Entry]):
        self.draft, self.old = draft, old
        mesh = draft.block(MESH)
        self.mixed = mesh is not None and bool(mesh.entries)
        self.has_param_mapping = mesh is not None and "param_mapping" in mesh
        # In a document with a `mesh:` block an absent key has no old default.
        self.replicas = self._int("replica_dcn_axis_size", None if self.mixed else 1)
        # -1 replicas: every slice is a replica, so `data` does not span slices and needs no DCN axis.
        self.spans = self.replicas is not None and self.replicas != -1
        self.data = ["data_dcn", "data"] if self.spans else ["data"]
        self.batch = self._text("batch_axis", self._batch_of_mesh())
        self.parallel = self._names("tensor_parallel_axes") or ()
        self.resources = self._mapping("axis_resources")

    def translate(self) -> None:
        for row in MESH_KEYS:
            edits = getattr(self, f"_{row.name}")()
            entry = self.old.get(row.name)
            if entry is not None:
                why = _HEADS_WHY if row.name == "tensor_parallel_axes" and "heads" in self.parallel else ""
                self.draft.move(row, entry, TRAINER, edits, why)
            elif edits:
                self._defaulted(row, edits)

    def _defaulted(self, row: OldKey, edits: list[tuple[Keys, Any]]) -> None:
        """Spells out an old default that differs from the new one."""
        mark = self.draft.document.mark
        for path, value in edits:
            self.draft.set(path, value, old=f"trainer.{row.name}", mark=mark)
        now = ", ".join(f"{'.'.join(path)}: {inline(value)}" for path, value in edits)
        why = "the default of the generation this file was written for"
        self.draft.changes.append(Change(key=f"trainer.{row.name}", was=f"(absent, {row.default})", now=now, why=why))

    # --- one method a row: the edits for its value or, where it is absent, for its old default ---

    def _replica_dcn_axis_size(self) -> list[tuple[Keys, Any]]:
        if self.replicas is None:
            return []
        if not self.spans:
            return [((*MESH, "dcn_axes"), {"replica_dcn": -1})]
        edits: list[tuple[Keys, Any]] = [((*MESH, "dcn_axes"), {"replica_dcn": self.replicas, "data_dcn": -1})]
        if self.batch is not None:
            # DCN axes first: the batch is split across slices before it is split inside of one.
            axes = ["replica_dcn", "data_dcn", "replica", "data"]
            edits.append(((*MESH, "compute_mapping", self.batch), axes))
        return edits

    def _replica_ici_axis_size(self) -> list[tuple[Keys, Any]]:
        size = self._int("replica_ici_axis_size", None)
        return [] if size is None else [((*MESH, "axes", "replica"), size)]

    def _model_axis_size(self) -> list[tuple[Keys, Any]]:
        size = self._int("model_axis_size", None)
        return [] if size is None else [((*MESH, "axes", "model"), size)]

    def _batch_axis(self) -> list[tuple[Keys, Any]]:
        return [((*MESH, "batch_axis_name"), self.batch)] if "batch_axis" in self.old else []

    def _axis_resources(self) -> list[tuple[Keys, Any]]:
        # Explicit tensor parallelism and the batch come after `axis_resources` in the old generation, and win.
        rules = {n: v for n, v in self.resources.items() if n not in self.parallel and n != self.batch}
        return [((*MESH, "shared_mapping"), rules)] if rules else []

    def _tensor_parallel_axes(self) -> list[tuple[Keys, Any]]:
        is_written = "tensor_parallel_axes" in self.old
        # Nothing is sharded over a model axis of size 1, so today's defaults change nothing there.
        if not is_written and (self.mixed or self._int("model_axis_size", 1) == 1):
            return []
        # Today mlp and heads are mapped by default. An old document that does not list them means replication, so they
        # are removed with null.
        rules: dict[str, str | None] = dict.fromkeys(self.parallel, "model")
        for name in NEW_TP_DEFAULTS:
            is_shared = self.draft.entry((*MESH, "shared_mapping", name)) is not None
            if name not in rules and name not in self.resources and not is_shared:
                rules[name] = None
        edits: list[tuple[Keys, Any]] = [((*MESH, "shared_mapping"), rules)] if rules else []
        if "heads" in self.parallel and self.draft.entry((*MESH, "split_heads")) is None:
            edits.append(((*MESH, "split_heads"), "auto"))
        return edits

    def _parameter_axis_resources(self) -> list[tuple[Keys, Any]]:
        rules = self._mapping("parameter_axis_resources")
        # The FSDP axes come last in the old generation, and win over the rules for single parameters.
        rules = {n: v for n, v in rules.items() if n not in (self._names("fsdp_axis", "embed") or ())}
        return [((*MESH, "param_mapping"), rules)] if rules else []

    def _fsdp_axis(self) -> list[tuple[Keys, Any]]:
        absent = "fsdp_axis" not in self.old
        if absent and self.mixed and (self.has_param_mapping or "parameter_axis_resources" not in self.old):
            return []  # the mesh block or its default sets it
        names = self._names("fsdp_axis", "embed")
        value = self.data[0] if len(self.data) == 1 else self.data
        rules = dict.fromkeys(names or (), value)
        if not rules and not self.has_param_mapping and self._mapping("parameter_axis_resources"):
            return []  # those rules are the whole mapping
        return [((*MESH, "param_mapping"), rules)]

    # --- reading values ---

    def _batch_of_mesh(self) -> str | None:
        entry = self.draft.entry((*MESH, "batch_axis_name"))
        value = "batch" if entry is None else to_plain(entry.node)
        return value if value is None or isinstance(value, str) else "batch"

    def _int(self, name: str, absent: int | None) -> int | None:
        entry = self.old.get(name)
        if entry is None:
            return absent
        value = to_plain(entry.node)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        self.draft.wrong(entry, f"trainer.{name}", f"expected an integer, got {inline(entry.node)}")
        return absent

    def _text(self, name: str, absent: str | None) -> str | None:
        entry = self.old.get(name)
        if entry is None:
            return absent
        value = to_plain(entry.node)
        if value is None or isinstance(value, str):
            return value
        self.draft.wrong(entry, f"trainer.{name}", f"expected a name or null, got {inline(entry.node)}")
        return absent

    def _names(self, name: str, absent: str | None = None) -> tuple[str, ...] | None:
        entry = self.old.get(name)
        value = absent if entry is None else to_plain(entry.node)
        if value is None:
            return None
        # No axis name has a comma: this is a list that was written as one string.
        if isinstance(value, str) and "," in value:
            assert entry is not None
            names = ", ".join(part.strip() for part in value.split(","))
            self.draft.wrong(entry, f"trainer.{name}", f"is a single string, {value!r}; write a list: [{names}]")
            return None
        if isinstance(value, str):
            return (value,)
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
        assert entry is not None
        self.draft.wrong(entry, f"trainer.{name}", f"expected an axis name or a list, got {inline(entry.node)}")
        return None

    def _mapping(self, name: str) -> dict[str, Any]:
        """A mapping to physical axes, with those of the old generation spelled as mesh axes."""
        entry = self.old.get(name)
        value = {} if entry is None else to_plain(entry.node)
        if value is None:
            return {}
        physical = {"data": self.data, "model": ["model"], "replica": ["replica_dcn", "replica"]}
        if not isinstance(value, dict):
            assert entry is not None
            self.draft.wrong(entry, f"trainer.{name}", f"expected a mapping, got {inline(entry.node)}")
            return {}
        result: dict[str, Any] = {}
        for axis, target in value.items():
            names = [target] if isinstance(target, str) else target or []
            unknown = [str(n) for n in names if n not in physical]
            if unknown and entry is not None and not self.mixed:
                message = f"{axis} → {', '.join(unknown)}: not a mesh axis of that generation (data, model, replica)"
                self.draft.wrong(entry, f"trainer.{name}", message + did_you_mean(unknown[0], physical))
            # In a mixed document a name that is not an old mesh axis is one of the new `mesh:` block.
            meshes = [m for n in names for m in physical.get(n, [n])]
            result[axis] = None if not meshes else meshes[0] if len(meshes) == 1 else meshes
        return result


def _profiler(draft: Draft, old: Mapping[str, Entry]) -> None:
    block: Keys = ("trainer", "profiler")
    for row in PROFILER_KEYS:
        entry = old.get(row.name)
        if entry is None:
            continue
        if row.name != "profiler":
            draft.move(row, entry, TRAINER, [((*block, row.name.removeprefix("profiler_")), entry.node)])
            continue
        edits: list[tuple[Keys, Any]] = [((*block, "enabled"), entry.node)]
        # The old profiler recorded 100 steps by default.
        if to_plain(entry.node) is True and "profiler_num_steps" not in old:
            edits.append(((*block, "num_steps"), 100))
        draft.move(row, entry, TRAINER, edits)


def _wandb(draft: Draft, entry: Entry) -> None:
    value = to_plain(entry.node)
    if value is None:
        draft.ignore(WANDB, entry, TRAINER)
        return
    if not isinstance(value, dict):
        draft.wrong(entry, "trainer.wandb", f"expected a mapping, got {inline(entry.node)}")
        return
    tracker = draft.entry(("trainer", "tracker"))
    why = ""
    if tracker is not None and to_plain(tracker.node) != {"type": "wandb", **value}:
        # As in upstream, the old key wins over the new one; the change reports it.
        why = f"it wins over `trainer.tracker` ({tracker.mark}), as upstream has it: {inline(tracker.node)} is not used"
    if tracker is not None:
        draft.remove(("trainer", "tracker"))
    draft.move(WANDB, entry, TRAINER, [(("trainer", "tracker"), {"type": "wandb", **value})], why=why)
