"""Language-model training: `train_lm`, `lora_lm`, `sft`, `sft_mixture`."""
