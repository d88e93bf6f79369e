"""The model of a run: where it comes from, how it is described, loaded and adapted."""
