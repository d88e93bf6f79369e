"""Reads and writes adapters in peft's format: a folder with `adapter_config.json` and `adapter_model.safetensors`.

Format, seen in files of peft 0.21: for a module of the model, `base_model.model.<module>.lora_A.weight [r, in]` and
`….lora_B.weight [out, r]`, also where the module's own weight is stored `[in, out]`.
"""

from typing import TYPE_CHECKING

from haliax_ext.lazy_imports import export_on_demand

if TYPE_CHECKING:
    from levanter.compat.hf.peft.config import PeftConfig as PeftConfig
    from levanter.compat.hf.peft.names import UnsupportedTargetError as UnsupportedTargetError
    from levanter.compat.hf.peft.read import PeftAdapter as PeftAdapter
    from levanter.compat.hf.peft.read import open_peft as open_peft
    from levanter.compat.hf.peft.write import PeftPlan as PeftPlan
    from levanter.compat.hf.peft.write import gather_adapter as gather_adapter
    from levanter.compat.hf.peft.write import lazy_adapter as lazy_adapter
    from levanter.compat.hf.peft.write import plan_peft as plan_peft
    from levanter.compat.hf.peft.write import write_peft as write_peft

export_on_demand(__name__)
