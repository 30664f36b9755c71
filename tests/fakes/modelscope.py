"""A server that answers like ModelScope, as far as downloads ask it, and fails as the fake hub.

Paths and answers are those that modelscope-hub 0.5 asks for and reads: `…/repo/files` below
`/api/v1/models` for the list, and `…/repo` with ranges for a file. Not compared with modelscope.cn.
"""

import hashlib
import json
import re
from urllib.parse import parse_qs, urlsplit

from tests.fakes.hub import Handler

REVISION = "master"
_PATH = re.compile(r"/api/v1/models/(?P<repo>[^/]+/[^/]+)/repo(?P<list>/files)?")


class ModelScopeHandler(Handler):
    """Answers the requests of modelscope_hub."""

    def respond(self) -> None:
        """Answer one request."""
        hub, target = self.hub, urlsplit(self.path)
        found, query = _PATH.fullmatch(target.path), parse_qs(target.query)
        if found is None or found["repo"] != hub.repo or query["Revision"] != [REVISION]:
            return self._fail(404, "record not found")
        if hub.gated and not self.headers.get("authorization"):
            return self._fail(403, "no permission")
        if not found["list"]:
            return self.send_file(query["FilePath"][0])
        files = [
            {
                "Name": name.rpartition("/")[2],
                "Path": name,
                "Size": len(data),
                "Sha256": hashlib.sha256(data).hexdigest(),
                "Type": "blob",
            }
            for name, data in hub.files.items()
        ]
        return self._reply(200, {"Code": 200, "Data": {"Files": files}, "Success": True})

    def _fail(self, status: int, message: str) -> None:
        self._reply(status, {"Code": 10010000000 + status, "Message": message, "Success": False})

    def _reply(self, status: int, answer: object) -> None:
        self.send(status, json.dumps(answer).encode(), {"Content-Type": "application/json"})
