"""`eval_harness`: a model on tasks of lm_eval."""
