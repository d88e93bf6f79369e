"""Needles: can a model find, in a long text, what was hidden there? Texts, questions, scores, files, page."""
