"""lm_eval's templates in the sandbox of chat templates: a task's file comes with a download, as a chat template does.

lm_eval renders every prompt, target and choice of a task with Jinja's plain environment, in which a template can call
any function of Python. Imported only after lm_eval.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import lm_eval.utils
from jinja2 import StrictUndefined, Template, TemplateError
from jinja2.filters import FILTERS

from levanter.data.template_sandbox import Sandbox, run

TEMPLATE_ERRORS = (TemplateError,)
"""What a task's template raises: it is invalid, refers to something that is not there, or leaves the sandbox."""


class _TaskTemplate(Template):
    """A template that is rendered within the sandbox's time limit."""

    def render(self, *args: object, **variables: object) -> str:
        render: Callable[..., str] = super().render
        return run(lambda: render(*args, **variables))


class TaskSandbox(Sandbox):
    """The sandbox with the settings of lm_eval's environment, so that tasks render as they do there."""

    template_class = _TaskTemplate

    def __init__(self) -> None:
        super().__init__()
        self.trim_blocks = self.lstrip_blocks = False
        self.keep_trailing_newline = True
        self.undefined = StrictUndefined
        # Unlike in chat templates, JSON has its HTML characters escaped.
        self.filters["tojson"] = FILTERS["tojson"]
        self.filters["regex_replace"] = lm_eval.utils.regex_replace


@contextmanager
def sandboxed_templates() -> Iterator[None]:
    """Renders lm_eval's templates in the sandbox."""
    environment = lm_eval.utils.env
    lm_eval.utils.env = TaskSandbox()
    try:
        yield
    finally:
        lm_eval.utils.env = environment
