"""`eval_harness`: evaluates a model on lm_eval's tasks."""
