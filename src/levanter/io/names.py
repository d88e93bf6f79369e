"""Names that become a part of a path: of runs, of data sets. They name something inside of a folder, nothing else."""

LONGEST = 200
"""Bytes of a name: most disks take 255, and something may be put before or behind it."""


def name_problem(name: str, *, parts: int = 1) -> str | None:
    """What keeps a name from being a part of a path; None where nothing does.

    Args:
        name: the name.
        parts: of how many names it may consist, joined by `/`; 0 for any number.
    """
    given = name.split("/")
    if not name:
        return "must not be empty"
    if parts == 1 and len(given) > 1:
        return f"{name!r} must be one name, without `/`: it names something inside a folder"
    if parts and len(given) > parts:
        return f"{name!r} must have at most {parts} parts"
    for part in given:
        if part in ("", ".", ".."):
            return f"{name!r} leads out of its folder, or nowhere: {part!r} is not a name"
        if part != part.strip() or "\\" in part or not part.isprintable():
            return (
                f"{name!r} has a backslash, a control character or an outer blank, which names of folders must not have"
            )
        if len(part.encode(errors="surrogatepass")) > LONGEST:
            return f"{part[:20]!r}… is longer than {LONGEST} bytes"
    return None
