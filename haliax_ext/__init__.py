"""Named axes on a mesh, planned: a toolkit on top of Haliax that knows nothing of language models.

- `MeshSpec`: the names and sizes of mesh axes, without devices.
- `AxisMapping`, `Mappings`: which logical axis goes to which mesh axes, for parameters, activations and the residual
  stream.
- `Leaf`, `leaves`, `abstract`: a module as a list of named arrays, without memory.
- `plan_sharding` → `ShardingPlan`: where every array goes, what it costs, and what is wrong, before JAX is called.
- `Program`, `named_jit`: a function with its abstract inputs and mappings; what is planned is what runs.
- `best_effort_sharding`: for arrays whose axes have no names.
"""

from typing import TYPE_CHECKING

from haliax_ext.lazy_imports import export_on_demand

if TYPE_CHECKING:
    from haliax_ext.abstract import Leaf as Leaf
    from haliax_ext.abstract import abstract as abstract
    from haliax_ext.abstract import leaves as leaves
    from haliax_ext.activations import Activation as Activation
    from haliax_ext.activations import check_activations as check_activations
    from haliax_ext.activations import plan_activations as plan_activations
    from haliax_ext.best_effort import best_effort_sharding as best_effort_sharding
    from haliax_ext.best_effort import explain_best_effort as explain_best_effort
    from haliax_ext.divisibility import legal_sizes as legal_sizes
    from haliax_ext.errors import AxisCollisionError as AxisCollisionError
    from haliax_ext.errors import IndivisibleError as IndivisibleError
    from haliax_ext.errors import ManyShardingErrors as ManyShardingErrors
    from haliax_ext.errors import MeshError as MeshError
    from haliax_ext.errors import ReplicationError as ReplicationError
    from haliax_ext.errors import ShardingError as ShardingError
    from haliax_ext.errors import UnknownAxisError as UnknownAxisError
    from haliax_ext.mapping import AxisMapping as AxisMapping
    from haliax_ext.mapping import DeclaredReplication as DeclaredReplication
    from haliax_ext.mapping import Mappings as Mappings
    from haliax_ext.mapping import mappings_in_scope as mappings_in_scope
    from haliax_ext.mapping import shard_attention as shard_attention
    from haliax_ext.mapping import shard_residual as shard_residual
    from haliax_ext.meshspec import MeshSpec as MeshSpec
    from haliax_ext.placement import Finding as Finding
    from haliax_ext.placement import LeafPlan as LeafPlan
    from haliax_ext.plan_report import plan_diff as plan_diff
    from haliax_ext.plan_report import plan_report as plan_report
    from haliax_ext.plan_report import summarize as summarize
    from haliax_ext.planner import ShardingPlan as ShardingPlan
    from haliax_ext.planner import plan_sharding as plan_sharding
    from haliax_ext.program import Input as Input
    from haliax_ext.program import Program as Program
    from haliax_ext.program import named_jit as named_jit
    from haliax_ext.sources import TensorInfo as TensorInfo
    from haliax_ext.sources import TensorSource as TensorSource

export_on_demand(__name__)
