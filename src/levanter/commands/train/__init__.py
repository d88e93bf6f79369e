"""`train_lm`: training, its evaluation, checkpoints and exports."""
