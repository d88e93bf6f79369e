"""The model families that cross between config.json and our configs, one file each."""

from collections.abc import Mapping
from types import MappingProxyType

from levanter.compat.hf.families import llama
from levanter.compat.hf.families.base import ExpectedTensor, Family, Fields, Finding

FAMILIES: Mapping[str, Family] = MappingProxyType({family.model_type: family for family in (llama.FAMILY,)})
"""Families by `model_type`."""

__all__ = ["FAMILIES", "ExpectedTensor", "Family", "Fields", "Finding"]
