"""Pictures in foreign records: data URLs, or files named relative to the record's own file."""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from urllib.parse import unquote

from tasks.conversations.conversation import UnfitError
from tools.base import Picture
from tools.errors import ToolError

_PNG = b"\x89PNG\r\n\x1a\n"


class PictureLoader:
    """Reads each picture once. `folder` is where relative names start."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[str, Picture] = {}

    def __call__(self, reference: object) -> Picture:
        """The picture behind a data URL or a file name, as PNG: other formats are encoded anew, PNG bytes stay.

        Raises UnfitError.
        """
        if not isinstance(reference, str) or not reference:
            raise UnfitError(f"a picture must be a data URL or a file name, not {str(reference)[:60]!r}")
        if reference not in self._read:
            self._read[reference] = _as_png(*self._bytes(reference))
        return self._read[reference]

    def _bytes(self, reference: str) -> tuple[bytes, str]:
        """The encoded bytes, and what to call them in a message."""
        if reference.startswith("data:"):
            head, _, body = reference.partition(",")
            if not head.endswith(";base64"):
                raise UnfitError("a data URL that is not base64")
            try:
                return base64.b64decode(body, validate=True), "the picture in the data URL"
            except (binascii.Error, ValueError):
                raise UnfitError("a data URL whose base64 is broken") from None
        if reference.startswith(("http://", "https://")):
            raise UnfitError(f"{reference[:80]}: pictures are not downloaded; save it and name the file")
        name = unquote(reference.removeprefix("file://")) if reference.startswith("file://") else reference
        path = self._folder / name
        try:
            return path.read_bytes(), f"picture {name}"
        except (OSError, ValueError):  # ValueError: a null byte in the name
            raise UnfitError(f"picture {name[:120]}: no such file beside the data") from None


def _as_png(data: bytes, what: str) -> Picture:
    picture = Picture(data)
    try:
        pixels = picture.decode()
    except ToolError:
        raise UnfitError(f"{what} is not an image") from None
    return picture if data.startswith(_PNG) else Picture.from_rgb(pixels)


def data_url(picture: Picture) -> str:
    return "data:image/png;base64," + base64.b64encode(picture.png).decode()
