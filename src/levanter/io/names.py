"""Validation of names that become path components, such as run ids and data set names."""

LONGEST = 200
"""Most bytes of a component: file systems allow 255, and a prefix or suffix may be added."""


def name_problem(name: str, *, max_components: int = 1) -> str | None:
    """Returns why `name` cannot be used as a path component, or None if it can.

    Args:
        name: the name.
        max_components: how many components, joined by `/`, it may have; 0 for any number.
    """
    components = name.split("/")
    if not name:
        return "must not be empty"
    if max_components == 1 and len(components) > 1:
        return f"{name!r} must be one name, without `/`: it names something inside a folder"
    if max_components and len(components) > max_components:
        return f"{name!r} must have at most {max_components} parts"
    for part in components:
        # An empty component comes from a leading, trailing or doubled slash; `..` would leave the folder.
        if part in ("", ".", ".."):
            return f"{name!r} would leave its folder: {part!r} is not a name"
        if part != part.strip() or "\\" in part or not part.isprintable():
            return (
                f"{name!r} has a backslash, a control character or an outer blank, which names of folders must not have"
            )
        # Names from the command line may contain surrogates (bytes that are not UTF-8), which strict UTF-8 refuses.
        if len(part.encode(errors="surrogatepass")) > LONGEST:
            return f"{part[:20]!r}… is longer than {LONGEST} bytes"
    return None
