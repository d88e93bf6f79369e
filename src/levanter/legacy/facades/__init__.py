"""What scripts of earlier generations call and the project has in another shape: small faces over what is here.

Nothing in the project uses these; `levanter.legacy.imports` points to them.
"""
