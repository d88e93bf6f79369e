"""`eval_careless_lm`, `eval_sliding_lm` and `memorization_report`: what a model has memorized."""
