"""Preflight of one run on one target, in stages that share one state."""
