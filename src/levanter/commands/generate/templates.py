"""Chat templates in a configuration: Jinja, or the path of a file that has it."""

from collections.abc import Iterator

from levanter.data.chat import is_template
from levanter.io import exists
from levanter.runplan import Check


def template_checks(given: str | None) -> Iterator[Check]:
    """Looks for the file of a template."""
    if given is not None and not is_template(given) and not exists(given):
        error = ValueError(f"chat_template: {given}: no such file, and no Jinja either")
        yield Check(name="chat_template", status="unchecked", message=str(error), error=error)
