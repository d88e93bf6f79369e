"""Calls of scripts of earlier generations that have another shape today: thin facades over today's code.

Nothing in the project uses them; `levanter.upstream.imports` points to them.
"""
