"""The files of the browser: read once, served from memory under a path of their content.

The folder `static` holds `index.html` and the files that it names. `/` answers index.html, in which
each `href="NAME"` and `src="NAME"` of a file in the folder is rewritten to `/static/VERSION/NAME`;
write plain relative names there (`src="app.js"`). Modules and style sheets name each other
relatively (`./ui.js`), and so stay under that path. VERSION is the version of the package and a
digest of all files: answers under it are immutable, those under another VERSION are 404. Subfolders
work alike. Files of other types than `TYPES` are not served. Files are read at the start alone.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from routetrace.common.version import installed_version
from routetrace.page.errors import refusal

DIRECTORY = Path(__file__).parent / "static"

#: Content types by suffix; the system's own table may say otherwise, and browsers obey it.
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
}
_INDEX = "index.html"
_REFERENCE = re.compile(r'\b(href|src)="(?:\./)?([^":#?]+)"')


class StaticFiles:
    """The files of a folder, in memory.

    Args:
        directory: the folder; one that does not exist has no files.
    """

    def __init__(self, directory: Path = DIRECTORY) -> None:
        paths = sorted(path for path in directory.rglob("*") if path.suffix in TYPES)
        self._files = {
            path.relative_to(directory).as_posix(): path.read_bytes()
            for path in paths
            if path.is_file()
        }
        digest = hashlib.sha256()
        for name, content in self._files.items():
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
        self.version = f"{installed_version()}-{digest.hexdigest()[:12]}"
        self._index = self._rewritten(self._files.pop(_INDEX, b"").decode())

    def routes(self) -> list[Route]:
        """Return the routes of the files."""
        return [
            Route("/", self._answer_index),
            Route("/static/{version}/{name:path}", self._answer_file),
        ]

    def _rewritten(self, index: str) -> str:
        def name(found: re.Match[str]) -> str:
            if found[2] not in self._files:
                return found[0]
            return f'{found[1]}="/static/{self.version}/{found[2]}"'

        return _REFERENCE.sub(name, index)

    async def _answer_index(self, _: Request) -> Response:
        if not self._index:
            return refusal(404, f"{_INDEX} is not installed; expected it in the package.")
        return Response(self._index, media_type="text/html")

    async def _answer_file(self, request: Request) -> Response:
        name = request.path_params["name"]
        content = self._files.get(name)
        if content is None or request.path_params["version"] != self.version:
            return refusal(404, "No such file; expected one of the page's, of this version.")
        headers = {
            "Cache-Control": "public, max-age=31536000, immutable",
            "Content-Type": TYPES[Path(name).suffix],
        }
        return Response(content, headers=headers)
