"""Figures of a compiled program: memory, collectives and cycles, read from the compiler's own text.

`read_figures(compiled.as_text(), mesh_spec)` gives `CompiledFigures`, `memory_figures(compiled.memory_analysis())`
gives `MemoryFigures`, `read_out_of_memory(message)` turns the compiler's refusal into an `OutOfMemory` value. No
device is touched, and nothing is guessed: what cannot be determined is listed in `CompiledFigures.unknown`.
"""

from typing import TYPE_CHECKING

from haliax_ext.lazy_imports import export_on_demand

if TYPE_CHECKING:
    from haliax_ext.hlo.memory import MemoryFigures as MemoryFigures
    from haliax_ext.hlo.memory import memory_figures as memory_figures
    from haliax_ext.hlo.oom import Allocation as Allocation
    from haliax_ext.hlo.oom import OutOfMemory as OutOfMemory
    from haliax_ext.hlo.oom import read_out_of_memory as read_out_of_memory
    from haliax_ext.hlo.op_metadata import Scope as Scope
    from haliax_ext.hlo.op_metadata import parse_scope as parse_scope
    from haliax_ext.hlo.parser import HloTextError as HloTextError
    from haliax_ext.hlo.parser import Shape as Shape
    from haliax_ext.hlo.replica_groups import AxisSpan as AxisSpan
    from haliax_ext.hlo.replica_groups import Network as Network
    from haliax_ext.hlo.stats import Collective as Collective
    from haliax_ext.hlo.stats import CompiledFigures as CompiledFigures
    from haliax_ext.hlo.stats import Kernel as Kernel
    from haliax_ext.hlo.stats import KernelEstimator as KernelEstimator
    from haliax_ext.hlo.stats import read_figures as read_figures

export_on_demand(__name__)
