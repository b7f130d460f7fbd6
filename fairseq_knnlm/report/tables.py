"""Tables that people can read."""


def table(header: list[str], rows: list[list[str]], markdown: bool = False, left: tuple[str, ...] = ()) -> str:
    """Aligned columns for people (numbers to the right, the columns in ``left`` to the left); Markdown for pages."""
    if markdown:
        lines = [header, ["---"] * len(header), *rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)
    widths = [max(len(line[column]) for line in [header, *rows]) for column in range(len(header))]
    justify = [str.ljust if name in left else str.rjust for name in header]
    lines = [[j(cell, width) for j, cell, width in zip(justify, line, widths)] for line in [header, *rows]]
    return "\n".join("  ".join(line).rstrip() for line in lines)
