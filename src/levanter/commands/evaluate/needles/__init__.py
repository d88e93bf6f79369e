"""`eval_needles`: RULER needle-in-a-haystack evaluation."""
