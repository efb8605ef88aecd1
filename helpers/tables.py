"""Tables of what a cell computed: an HTML table on a page, aligned text in a terminal."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, repr=False)
class Table:
    """Rows of text under a header, made by `table`; the first column names its row."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def _repr_html_(self) -> str:
        head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in self.header)
        body = "".join(f'<tr><th scope="row">{html.escape(first)}</th>'
                       + "".join(f"<td>{html.escape(cell)}</td>" for cell in rest) + "</tr>"
                       for first, *rest in self.rows)
        return f'<table class="dataframe"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'

    def __repr__(self) -> str:
        lines = [self.header, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        padded = (map(str.ljust, line, widths) for line in lines)
        return "\n".join("  ".join(cells).rstrip() for cells in padded)


def table(header: Sequence[str], rows: Iterable[Sequence]) -> Table:
    """A table with k names in its header and k cells in each row; cells are shown as `str` gives them.

    Whole numbers are written in groups of three digits (1,234). Raises ValueError for a row of another
    length.
    """
    rows = tuple(tuple(_text(cell) for cell in row) for row in rows)
    wrong = [row for row in rows if len(row) != len(header)]
    if wrong or not header:
        raise ValueError(f"a row needs {len(header)} cells, one for each of {list(header)}; got {wrong[:1]}")
    return Table(tuple(header), rows)


def _text(cell) -> str:
    return f"{cell:,}" if isinstance(cell, int) and not isinstance(cell, bool) else str(cell)
