"""Table of accelerators: name → chips, hosts, topology, memory, speeds. Does not import JAX.

`parse_accelerator("v4-256")` is an `Accelerator`: a *generation* (the properties of one chip) × a *topology* (the torus
of chips in a slice) × a number of slices. Names are those of the vendors: `v4-256` and `v5p-512` count
TensorCores (two a chip), `v5litepod-16`, `v5e-16` and `v6e-256` count chips, `tpu7x-16` counts cores (two a chip, and
each core is a device of its own), `2xv5p-128` is two slices joined by the data-center network, `v6e:4x8` names the
torus itself, `h100x16` is two hosts of eight GPUs, and `gb200x144` two NVLink domains of 72.

A *chip* is the unit of sale, a *device* the unit that JAX addresses; they are the same except on tpu7x. *ICI* are the
links between the chips of a slice, *DCN* is the data-center network between hosts, which joins slices.
"""

from levanter.hardware.accelerator import Accelerator as Accelerator
from levanter.hardware.accelerator import AcceleratorError as AcceleratorError
from levanter.hardware.accelerator import default_topologies as default_topologies
from levanter.hardware.accelerator import find_accelerator as find_accelerator
from levanter.hardware.accelerator import find_generation as find_generation
from levanter.hardware.accelerator import parse_accelerator as parse_accelerator
from levanter.hardware.accelerator import unit_name as unit_name
from levanter.hardware.compiler import compiler_options as compiler_options
from levanter.hardware.generations import GENERATIONS as GENERATIONS
from levanter.hardware.generations import Generation as Generation
from levanter.hardware.generations import Precision as Precision
