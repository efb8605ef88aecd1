"""Make an executed notebook depend on its code and its results alone: no clock, no machine, no random ids."""

from __future__ import annotations

import base64
import re
import struct

WIDGET = "application/vnd.jupyter.widget-view+json"
PNG_START = b"\x89PNG\r\n\x1a\n"
_DATA_PNG = re.compile(r"(data:image/png;base64,)([A-Za-z0-9+/=]+)")
_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}\b")


def normalise(notebook, forbidden: tuple[str, ...] = ()) -> None:
    """Rewrite metadata and outputs in place.

    Raises ValueError when an output holds one of the `forbidden` strings (paths of this machine).
    """
    notebook.metadata["kernelspec"] = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata["language_info"] = {"name": "python"}
    notebook.metadata.pop("widgets", None)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    seen: set[str] = set()
    count = 0
    for index, cell in enumerate(notebook.cells):
        cell["id"] = _identity(cell.get("id"), index, seen)
        for key in ("execution", "ExecuteTime", "collapsed", "scrolled", "trusted"):
            cell.metadata.pop(key, None)
        if cell.cell_type != "code":
            continue
        count += 1
        cell.execution_count = count
        cell.outputs = _merged(cell.outputs)
        for output in cell.outputs:
            _clean(output, count)
            _refuse(output, forbidden, count)


def _identity(identity: str | None, index: int, seen: set[str]) -> str:
    """The cell's own id where it has one and no cell before it has the same."""
    if not identity or identity in seen:
        identity = f"cell-{index:02d}"
    seen.add(identity)
    return identity


def _merged(outputs: list) -> list:
    """Neighbouring pieces of one stream joined: how a kernel cuts a stream is a matter of timing."""
    merged: list = []
    for output in outputs:
        stream = output.get("name") if output.output_type == "stream" else None
        if stream and merged and merged[-1].get("name") == stream:
            merged[-1].text += output.text
        else:
            merged.append(output)
    return merged


def _clean(output, count: int) -> None:
    if "execution_count" in output:
        output["execution_count"] = count
    if "text" in output:
        output.text = _ADDRESS.sub("0x0", output.text)
    data = output.get("data", {})
    data.pop(WIDGET, None)  # its id is random and its state not stored: text/plain says what it was
    for kind, value in data.items():
        if kind == "image/png":
            data[kind] = _plain_base64(value)
        elif kind == "text/html":
            data[kind] = _DATA_PNG.sub(lambda m: m[1] + _plain_base64(m[2]), value)
        elif kind == "text/plain":
            data[kind] = _ADDRESS.sub("0x0", value)


def _refuse(output, forbidden: tuple[str, ...], count: int) -> None:
    text = output.get("text", "") + "".join(v for v in output.get("data", {}).values() if isinstance(v, str))
    for string in forbidden:
        if string in text:
            raise ValueError(f"the output of code cell {count} names a path of this machine: {string!r}")


def _plain_base64(text: str) -> str:
    return base64.b64encode(plain_png(base64.b64decode(text))).decode()


def plain_png(data: bytes) -> bytes:
    """A PNG without its text and time chunks (matplotlib signs there); other bytes as they are."""
    if not data.startswith(PNG_START):
        return data
    kept, at = [PNG_START], len(PNG_START)
    while at < len(data):
        (length,) = struct.unpack(">I", data[at:at + 4])
        end = at + 12 + length  # length, type, data, checksum
        if data[at + 4:at + 8] not in (b"tEXt", b"zTXt", b"iTXt", b"tIME"):
            kept.append(data[at:end])
        at = end
    return b"".join(kept)
