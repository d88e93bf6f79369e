"""`class MyModel(LmHeadModel[MyConfig])`: upstream's way to add a model family, which is refused with ours.

The subscript is an annotation, too: `def train(model: LmHeadModel[LlamaConfig])` works.
"""

from typing import NoReturn

from levanter.models.base import LmHeadModel


class FamilyRefusedError(ValueError, TypeError):
    """A class that derives from `LmHeadModel[Config]`."""


class ModelAnnotation:
    """`LmHeadModel[Config]`, of which no class can be derived."""

    def __init__(self, config: object):
        self.config = config

    def __mro_entries__(self, bases: object) -> NoReturn:
        """Python asks for the bases of a class that is being defined.

        Raises:
            FamilyRefusedError: always.
        """
        name = getattr(self.config, "__name__", self.config)
        raise FamilyRefusedError(
            f"class …(LmHeadModel[{name}]): a model family is a `Family` value here, not a class: its configuration "
            "(a DecoderConfig), the rules of its weights and its config.json, registered with `register_family`; one "
            "of another package is found through the entry-point group `levanter.families`. docs/porting-models.md "
            "ports a model step by step"
        )

    def __repr__(self) -> str:
        return f"LmHeadModel[{getattr(self.config, '__name__', self.config)}]"


def subscript(cls: type[LmHeadModel], config: object) -> ModelAnnotation:
    """`LmHeadModel[config]`."""
    del cls
    return ModelAnnotation(config)
