"""`eval_lm` and `viz_logprobs`: what a model makes of a text."""
