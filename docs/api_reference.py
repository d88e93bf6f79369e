"""The API reference of the site: a page for each package, generated from its exports and their docstrings.

A package exports what its `__init__` imports by name (`from … import X as X`), and any module exports the names of its
`__all__`. mkdocstrings renders an exported name from the module that defines it. A module that exports nothing is
rendered with the public names that it defines.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, kw_only=True)
class ApiPage:
    """A page of the reference.

    Attributes:
        title: its heading.
        modules: what it documents, in this order.
        intro: the first paragraph.
    """

    title: str
    modules: tuple[str, ...]
    intro: str = ""


COMMANDS = tuple(
    f"levanter.main.{name}"
    for name in (
        *("eval_lm", "viz_logprobs", "eval_harness", "perplexity_gap", "eval_needles"),
        *("train_lm", "lora_lm", "train_dpo", "lora_dpo", "cache_dataset", "export_lm_to_hf"),
        *("generate", "serve", "eval_careless_lm", "eval_sliding_lm"),
    )
)
PAGES: Mapping[str, ApiPage] = {
    "api/haliax_ext.md": ApiPage(title="haliax_ext", modules=("haliax_ext",)),
    "api/commands.md": ApiPage(
        title="Commands",
        modules=(*COMMANDS, "levanter.commands.cli.devices", "levanter.runplan"),
        intro="A command from Python is its configuration class, `describe(config, target)`, which returns a plan, and "
        "`execute(plan, mesh)`, which returns the result ([examples](../python-api.md)).",
    ),
    "api/config.md": ApiPage(title="levanter.config", modules=("levanter.config",)),
    "api/mesh.md": ApiPage(title="levanter.mesh", modules=("levanter.mesh", "levanter.hardware")),
    "api/models.md": ApiPage(
        title="levanter.models",
        modules=(
            *("levanter.models", "levanter.models.registry", "levanter.models.family", "levanter.models.config_json"),
            *("levanter.models.base", "levanter.models.scoring", "levanter.models.decoder"),
        ),
        intro="[Model families](../porting-models.md) explains how these parts make a family.",
    ),
    "api/layers.md": ApiPage(
        title="levanter.layers",
        modules=(
            *(
                "levanter.layers.protocols",
                "levanter.layers.layer",
                "levanter.layers.linear",
                "levanter.layers.outputs",
            ),
            *("levanter.layers.norm", "levanter.layers.mlp", "levanter.layers.rotary", "levanter.layers.attention"),
        ),
        intro="[Kinds of layers](../extending/layer.md) explains how a mixer and a feed-forward part make a layer.",
    ),
    "api/data.md": ApiPage(title="levanter.data", modules=("levanter.data",)),
    "api/trainer.md": ApiPage(
        title="levanter.trainer",
        modules=(
            *("levanter.trainer", "levanter.trainer.objective", "levanter.trainer.loss"),
            *("levanter.trainer.trainable", "levanter.optim"),
        ),
        intro="[Objectives](../extending/objective.md) and [what is trained](../extending/trained.md) are the guides.",
    ),
    "api/inference.md": ApiPage(
        title="levanter.inference",
        modules=("levanter.inference.config", "levanter.inference.requests"),
    ),
    "api/evaluation.md": ApiPage(
        title="levanter.eval, levanter.memorization", modules=("levanter.eval", "levanter.memorization")
    ),
    "api/plan.md": ApiPage(
        title="levanter.plan",
        modules=("levanter.plan", "levanter.plan.target_from_name", "levanter.plan.preflight", "levanter.plan.search"),
    ),
    "api/checkpoint.md": ApiPage(
        title="levanter.checkpoint, levanter.tracker", modules=("levanter.checkpoint", "levanter.tracker")
    ),
}
"""Page of the site → what is on it."""


INTERNAL = frozenset({"main"})
"""Exports of commands that only the command line uses."""


def on_files(files: "Files", config: "MkDocsConfig") -> "Files":
    """Adds the pages of the reference."""
    from mkdocs.structure.files import File

    documented: set[str] = set()
    for name, page in PAGES.items():
        files.append(File.generated(config, name, content=markdown(page, documented)))
    return files


def markdown(page: ApiPage, documented: set[str]) -> str:
    """A page's text, with a directive of mkdocstrings for each name.

    Args:
        page: what is on it.
        documented: names that have a directive already, which this page's are added to.
    """
    lines = [f"# {page.title}", "", page.intro, ""]
    for module in page.modules:
        if len(page.modules) > 1:
            lines += [f"## {module}", ""]
        names = [name for name in exports(module) if is_shown(name.rpartition(".")[2])]
        lines += [f"::: {module}", *(["    options: {members: []}"] if names else []), ""]
        for name in (name for name in names if name not in documented):
            lines += [f"::: {name}", "    options: {show_root_heading: true}", ""]
        documented.update(names)
    return "\n".join(lines)


def is_shown(name: str) -> bool:
    """Whether a name is in the reference. Constants are not: their tables are in the guides."""
    return name not in INTERNAL and not name.isupper()


def exports(module: str) -> Iterator[str]:
    """The names that a module exports, by the modules that define them."""
    path = source(module)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    public, is_package = public_names(tree), path.name == "__init__.py"
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (is_package and alias.asname == alias.name) or (alias.asname or alias.name) in public:
                    yield f"{node.module}.{alias.name}"
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in public:
            yield f"{module}.{node.name}"


def public_names(tree: ast.Module) -> Sequence[str]:
    """What `__all__` lists; empty where there is none."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return ast.literal_eval(node.value)
    return ()


def source(module: str) -> Path:
    """The file of a module.

    Raises:
        FileNotFoundError: there is none.
    """
    base = (ROOT if module.startswith("haliax_ext") else ROOT / "src").joinpath(*module.split("."))
    path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    if not path.exists():
        raise FileNotFoundError(f"docs/api_reference.py documents {module}, which does not exist ({path})")
    return path
