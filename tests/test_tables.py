"""Tables: what they show as text and on a page, and what they refuse."""

import pytest

from helpers.tables import table


def test_text_is_aligned_and_numbers_are_grouped():
    shown = repr(table(["layer", "numbers"], [["blocks.0", 4160], ["head", 18], ["a share", "0.5"]]))
    assert shown.splitlines() == ["layer     numbers", "blocks.0  4,160", "head      18", "a share   0.5"]


def test_page_has_headers_for_rows_and_columns_and_nothing_unescaped():
    page = table(["a", "b"], [["<x>", "1 & 2"]])._repr_html_()
    assert '<th scope="col">a</th>' in page and '<th scope="row">&lt;x&gt;</th>' in page
    assert "<td>1 &amp; 2</td>" in page


@pytest.mark.parametrize("header, rows", [(["a", "b"], [["x"]]), ([], [])])
def test_refuses_rows_that_do_not_fit(header, rows):
    with pytest.raises(ValueError, match="cells"):
        table(header, rows)
