"""Serving a model over HTTP: what it needs, before there is a server."""
