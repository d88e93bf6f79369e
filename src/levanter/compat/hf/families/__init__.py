"""The model families that cross between config.json and our configs, one file each."""

from collections.abc import Mapping
from types import MappingProxyType

from levanter.compat.hf.families import gemma, gpt2, gpt_neox, llama, mistral, mixtral, olmo, phi, qwen, smollm3
from levanter.compat.hf.families.base import ExpectedTensor, Family, Fields, Finding

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        family.model_type: family
        for family in (
            llama.FAMILY,
            gpt2.FAMILY,
            gpt_neox.FAMILY,
            mistral.FAMILY,
            mixtral.MIXTRAL,
            qwen.QWEN_2,
            qwen.QWEN_3,
            mixtral.QWEN_3_MOE,
            gemma.GEMMA_1,
            gemma.GEMMA_2,
            gemma.GEMMA_3,  # before the one below: a Gemma 3 is written as text only
            gemma.GEMMA_3_WITH_VISION,
            olmo.OLMO_2,
            olmo.OLMO_3,
            phi.FAMILY,
            smollm3.FAMILY,
        )
    }
)
"""Families by `model_type`."""

__all__ = ["FAMILIES", "ExpectedTensor", "Family", "Fields", "Finding"]
