"""Training on preferences: `train_dpo` and `lora_dpo`."""
