"""The values of the keys that say how weights are held; apart, so that `--help` imports nothing that runs."""

from typing import Literal

Quantize = Literal["int8"]
"""In what the projections of a model are held, where that is not the compute dtype."""
TiedHead = Literal["copy", "share"]
"""What a head that is the embedding table multiplies by: an int8 copy of it, or the table itself."""
