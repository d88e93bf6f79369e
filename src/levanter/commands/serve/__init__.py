"""Serving a model over HTTP."""
