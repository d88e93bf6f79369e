"""Layers on named axes: the parts that models are made of."""
