"""Classes of upstream's that scripts import beside others: the import works, each use is refused."""

_SPEECH = "this project trains on text only (docs/migrating.md)"


class AudioTextUrlDataSource:
    """Upstream's source of recordings and their texts.

    Raises:
        NotImplementedError: it is used.
    """

    def __init__(self, *_: object, **__: object):
        raise NotImplementedError(f"AudioTextUrlDataSource: {_SPEECH}")
