"""A Hugging Face Hub of our own on this machine: repositories in memory, spoken to by the real client over HTTP."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlparse

TOKEN = "hf_good"


@dataclass
class Hub:
    """`repos[name][revision] = {file: content}`; what goes wrong is set between requests."""

    repos: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    breaks_after: int | None = None  # bytes of an answer, then the line is cut
    ends_at: int | None = None  # byte of every file: what comes after it never arrives
    ignores_range: bool = False
    damages: bool = False
    status: int | None = None  # answered to everything
    url: str = ""
    asked: list[str] = field(default_factory=list)  # "file" or "file from byte"

    def commit(self, repo: str, revision: str) -> str:
        content = sorted(self.repos[repo][revision].items())
        return hashlib.sha1(repr((repo, content)).encode()).hexdigest()


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        path = unquote(urlparse(self.path).path).strip("/")
        is_api = path.startswith("api/models/")
        repo = "/".join(path.removeprefix("api/models/").split("/")[:2])
        rest = path.removeprefix("api/models/").removeprefix(repo).strip("/")
        if self.hub.status is not None:
            return self._refuse(self.hub.status, "")
        if repo not in self.hub.repos:
            return self._refuse(401, "RepoNotFound")
        if repo in self.hub.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}" and not is_api:
            return self._refuse(403 if self.headers.get("Authorization") else 401, "GatedRepo")
        if is_api:
            return self._info(repo, rest.removeprefix("revision/") or "main")
        _, commit, name = rest.split("/", 2)
        for revision, files in self.hub.repos[repo].items():
            if self.hub.commit(repo, revision) == commit:
                return self._file(name, files[name])
        return self._refuse(404, "RevisionNotFound")

    def _info(self, repo: str, revision: str) -> None:
        if revision not in self.hub.repos[repo]:
            return self._refuse(404, "RevisionNotFound")
        siblings = []
        for name, content in self.hub.repos[repo][revision].items():
            entry = {"rfilename": name, "size": len(content)}
            if name.endswith((".safetensors", ".gguf")):
                entry["lfs"] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest(), "pointerSize": 1}
            else:
                entry["blobId"] = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
            siblings.append(entry)
        body = json.dumps({"id": repo, "sha": self.hub.commit(repo, revision), "siblings": siblings, "private": False})
        self._answer(200, body.encode(), {"Content-Type": "application/json"})

    def _file(self, name: str, content: bytes) -> None:
        start = 0
        if self.headers.get("Range") and not self.hub.ignores_range:
            start = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-"))
        self.hub.asked.append(name if start == 0 else f"{name} from {start}")
        if self.hub.damages:
            content = bytes(len(content))
        most = self.hub.breaks_after if self.hub.ends_at is None else max(0, self.hub.ends_at - start)
        self._answer(206 if start else 200, content[start:], {}, most)

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, b"{}", {"X-Error-Code": code} if code else {})

    def _answer(self, status: int, body: bytes, headers: dict[str, str], most: int | None = None) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body[:most])
        self.close_connection = True
