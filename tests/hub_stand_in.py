"""A local server that speaks the Hub's protocol, as far as huggingface_hub uses it for models.

Repositories have branches of commits; a commit holds the whole tree, path -> blob. Large files go through the Git LFS
batch API (`basic`, or `multipart` above `multipart_above` bytes) to a store that, like S3, takes signed URLs without
credentials. Xet is not spoken: clients run with HF_HUB_DISABLE_XET=1.

`fault(route, ...)` lets coming requests of a route fail: with a status, a dropped connection, or held until released.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

ROUTES = (
    ("whoami", "GET", r"/api/whoami-v2"),
    ("validate", "POST", r"/api/validate-yaml"),
    ("create", "POST", r"/api/repos/create"),
    ("preupload", "POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/preupload/(?P<rev>[^/]+)"),
    ("commit", "POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/commit/(?P<rev>[^/]+)"),
    ("branch", "POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/branch/(?P<rev>[^/]+)"),
    ("refs", "GET", r"/api/models/(?P<repo>[^/]+/[^/]+)/refs"),
    ("tree", "GET", r"/api/models/(?P<repo>[^/]+/[^/]+)/tree/(?P<rev>[^/]+)(/(?P<path>.+))?"),
    ("paths", "POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/paths-info/(?P<rev>[^/]+)"),
    ("info", "GET", r"/api/models/(?P<repo>[^/]+/[^/]+)(/revision/(?P<rev>[^/]+))?"),
    ("batch", "POST", r"/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch"),
    ("put", "PUT", r"/store/(?P<oid>[0-9a-f]{64})(/(?P<part>\d+))?"),
    ("complete", "POST", r"/store/(?P<oid>[0-9a-f]{64})/complete"),
    ("verify", "POST", r"/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/verify"),
    ("cdn", "GET", r"/store/(?P<oid>[0-9a-f]{64})"),
    ("resolve", "GET", r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<rev>[^/]+)/(?P<path>.+)"),
)
LFS_SUFFIXES = (".safetensors", ".bin", ".pt", ".model")
LFS_BYTES = 10 * 2**20


def git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass(frozen=True)
class Blob:
    content: bytes
    lfs: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def pointer(self) -> bytes:
        return (
            f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {len(self.content)}\n".encode()
        )

    @property
    def oid(self) -> str:
        """The git object id of what the git tree holds."""
        return git_sha1(self.pointer if self.lfs else self.content)


@dataclass(frozen=True)
class Commit:
    sha: str
    title: str
    parent: str | None
    files: dict[str, Blob]


@dataclass
class Repo:
    id: str
    private: bool
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def add(self, branch: str, title: str, files: dict[str, Blob]) -> Commit:
        parent = self.branches.get(branch)
        listing = sorted((path, blob.oid) for path, blob in files.items())
        sha = hashlib.sha1(repr((self.id, len(self.commits), parent, title, listing)).encode()).hexdigest()
        self.commits[sha] = Commit(sha, title, parent, files)
        self.branches[branch] = sha
        return self.commits[sha]

    def at(self, revision: str) -> Commit | None:
        return self.commits.get(self.branches.get(revision, revision))

    @property
    def files(self) -> dict[str, bytes]:
        return {path: blob.content for path, blob in self.commits[self.branches["main"]].files.items()}

    @property
    def log(self) -> list[str]:
        """Titles of main, oldest first."""
        titles, sha = [], self.branches.get("main")
        while sha is not None:
            titles.append(self.commits[sha].title)
            sha = self.commits[sha].parent
        return titles[::-1]


@dataclass
class Fault:
    """One coming fault. `status`: answer so. `drop`: close the connection after half of the body. `lose`: do the work
    and close the connection without an answer. `hold`: wait after half of the body until this is set. `before`: run
    this, then serve as usual."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: dict[str, Any] = field(default_factory=dict)
    drop: bool = False
    lose: bool = False
    hold: threading.Event | None = None
    before: Callable[[], object] | None = None
    reached: threading.Event = field(default_factory=threading.Event)


class HubStandIn:
    """Use as a context manager. `tokens`: token -> (user, role), role of `read`, `write`."""

    def __init__(self, tokens: dict[str, tuple[str, str]], multipart_above: int = 2**40) -> None:
        self.tokens, self.multipart_above = tokens, multipart_above
        self.repos: dict[str, Repo] = {}
        self.store: dict[str, bytes] = {}
        self.parts: dict[tuple[str, int], bytes] = {}
        self.calls: Counter[str] = Counter()
        self.faults: dict[str, list[Fault]] = {}
        self.lock = threading.Lock()
        stand_in = self

        class Handler(_Handler):
            hub = stand_in

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.store_url = self.url.replace("127.0.0.1", "localhost")  # another origin, to which clients send no token

    def __enter__(self) -> HubStandIn:
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def fault(self, route: str, times: int = 1, after: int = 0, **what: Any) -> Fault:
        """The next `times` requests of `route` fail, once `after` more have passed."""
        fault = Fault(**what)
        self.faults.setdefault(route, []).extend([Fault()] * after + [fault] * times)
        return fault

    def create(self, repo_id: str, private: bool) -> Repo:
        repo = self.repos[repo_id] = Repo(repo_id, private)
        attributes = Blob(b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n", False)
        repo.add("main", "initial commit", {".gitattributes": attributes})
        return repo


class _Refusal(Exception):
    def __init__(self, status: int, message: str, code: str = "") -> None:
        self.status, self.message, self.code = status, message, code


class _Handler(BaseHTTPRequestHandler):
    hub: HubStandIn
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._serve("GET")

    def do_HEAD(self) -> None:
        self._serve("GET")

    def do_POST(self) -> None:
        self._serve("POST")

    def do_PUT(self) -> None:
        self._serve("PUT")

    def _serve(self, method: str) -> None:
        url = urlsplit(self.path)
        self.query = {name: values[0] for name, values in parse_qs(url.query).items()}
        matches = ((name, re.fullmatch(pattern, url.path)) for name, verb, pattern in ROUTES if verb == method)
        route, match = next((found for found in matches if found[1]), ("", None))
        if match is None:
            self._body()
            self._answer({"error": f"no such route: {method} {url.path}"}, 404)
            return
        with self.hub.lock:
            self.hub.calls[route] += 1
            waiting = self.hub.faults.get(route)
            fault = waiting.pop(0) if waiting else Fault()
        if fault.drop or fault.hold:
            self.rfile.read(int(self.headers.get("Content-Length", 0)) // 2)
            fault.reached.set()
            if fault.hold:
                fault.hold.wait()
            self.close_connection = True
            return
        body = self._body()
        if fault.before:
            fault.before()
        if fault.status:
            self._answer(fault.body or {"error": "injected"}, fault.status, fault.headers)
            return
        try:
            with self.hub.lock:
                found = {name: unquote(part) if part else part for name, part in match.groupdict().items()}
                result = getattr(self, f"_{route}")(body, **found)
        except _Refusal as refusal:
            headers = {"X-Error-Message": refusal.message} | ({"X-Error-Code": refusal.code} if refusal.code else {})
            self._answer({"error": refusal.message}, refusal.status, headers)
            return
        if fault.lose:
            self.close_connection = True
        elif result is not None:
            self._answer(result)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            chunks = []
            while size := int(self.rfile.readline(), 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(chunks)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._send(json.dumps(value).encode(), status, {"Content-Type": "application/json", **(headers or {})})

    def _send(self, content: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    # Who asks, and for what

    def _user(self, write: str = "") -> str:
        """The name behind the token, empty without one. `write`: the namespace it must be allowed to write to."""
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token not in self.hub.tokens:
            raise _Refusal(401, "Invalid credentials in Authorization header")
        user, role = self.hub.tokens.get(token, ("", ""))
        if write and not user:
            raise _Refusal(401, "Invalid username or password.")
        if write and (user != write or role != "write"):
            raise _Refusal(403, f"You don't have the rights to write to {write}")
        return user

    def _repo(self, repo_id: str, write: bool = False) -> Repo:
        repo, user = self.hub.repos.get(repo_id), self._user()
        if repo is None or (repo.private and user != repo_id.split("/")[0]):
            raise _Refusal(404 if user else 401, "Repository not found", "RepoNotFound")
        if write:
            self._user(write=repo_id.split("/")[0])
        return repo

    def _at(self, repo_id: str, revision: str) -> tuple[Repo, Commit]:
        repo = self._repo(repo_id)
        commit = repo.at(revision)
        if commit is None:
            raise _Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return repo, commit

    # Accounts and repositories

    def _whoami(self, body: bytes) -> Any:
        user = self._user()
        if not user:
            raise _Refusal(401, "Invalid username or password.")
        role = next(role for name, role in self.hub.tokens.values() if name == user)
        return {
            "type": "user",
            "name": user,
            "orgs": [],
            "auth": {"type": "access_token", "accessToken": {"role": role}},
        }

    def _validate(self, body: bytes) -> Any:
        self._user()
        content = json.loads(body)["content"]
        if not content.startswith("---\n"):
            return {"errors": [], "warnings": [{"message": "empty or missing yaml metadata in repo card"}]}
        if content.find("\n---\n", 4) < 0:
            raise _Refusal(400, "Invalid YAML front matter")
        return {"errors": [], "warnings": []}

    def _create(self, body: bytes) -> Any:
        asked = json.loads(body)
        user = self._user()
        owner = asked["organization"] or user
        self._user(write=owner)
        repo_id = f"{owner}/{asked['name']}"
        if repo_id in self.hub.repos:
            raise _Refusal(409, "You already created this model repo")
        self.hub.create(repo_id, private=asked.get("visibility") == "private" or asked.get("private", False))
        return {"url": f"{self.hub.url}/{repo_id}", "name": repo_id}

    def _info(self, body: bytes, repo: str, rev: str | None) -> Any:
        found, commit = self._at(repo, rev or "main")
        siblings = [{"rfilename": path} for path in commit.files]
        state = {"private": found.private, "gated": False, "disabled": False, "tags": [], "siblings": siblings}
        return {"id": found.id, "modelId": found.id, "sha": commit.sha, **state}

    def _refs(self, body: bytes, repo: str) -> Any:
        branches = self._repo(repo).branches
        named = [{"name": n, "ref": f"refs/heads/{n}", "targetCommit": sha} for n, sha in branches.items()]
        return {"branches": named, "tags": [], "converts": []}

    def _branch(self, body: bytes, repo: str, rev: str) -> Any:
        found = self._repo(repo, write=True)
        if rev in found.branches:
            raise _Refusal(409, "Reference already exists")
        found.branches[rev] = found.branches["main"]
        return {}

    # Reading

    def _entry(self, path: str, blob: Blob) -> dict[str, Any]:
        entry = {"type": "file", "path": path, "size": len(blob.content), "oid": blob.oid}
        if blob.lfs:
            entry["lfs"] = {"oid": blob.sha256, "size": len(blob.content), "pointerSize": len(blob.pointer)}
        return entry

    def _tree(self, body: bytes, repo: str, rev: str, path: str | None) -> Any:
        _, commit = self._at(repo, rev)
        inside = f"{path}/" if path else ""
        entries: dict[str, dict[str, Any]] = {}
        for name, blob in sorted(commit.files.items()):
            if not name.startswith(inside):
                continue
            folder, _, rest = name[len(inside) :].partition("/")
            if rest:
                entries[inside + folder] = {"type": "directory", "path": inside + folder, "size": 0, "oid": "0" * 40}
            if not rest or self.query.get("recursive", "").lower() == "true":
                entries[name] = self._entry(name, blob)
        if inside and not entries:
            raise _Refusal(404, f"{path} does not exist", "EntryNotFound")
        return list(entries.values())

    def _paths(self, body: bytes, repo: str, rev: str) -> Any:
        _, commit = self._at(repo, rev)
        asked = json.loads(body)["paths"]
        return [self._entry(path, commit.files[path]) for path in asked if path in commit.files]

    def _resolve(self, body: bytes, repo: str, rev: str, path: str) -> None:
        _, commit = self._at(repo, rev)
        blob = commit.files.get(path)
        headers = {"X-Repo-Commit": commit.sha}
        if blob is None:
            raise _Refusal(404, "Entry not found", "EntryNotFound")
        if blob.lfs:
            linked = {"X-Linked-Size": str(len(blob.content)), "X-Linked-Etag": f'"{blob.sha256}"'}
            self._send(b"", 302, {**headers, **linked, "Location": f"{self.hub.store_url}/store/{blob.sha256}"})
        else:
            self._send(blob.content, 200, {**headers, "ETag": f'"{blob.oid}"', "Accept-Ranges": "none"})

    def _cdn(self, body: bytes, oid: str) -> None:
        content = self.hub.store[oid]
        start = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        first = int(start[1]) if start else 0
        range_header = {"Content-Range": f"bytes {first}-{len(content) - 1}/{len(content)}"} if start else {}
        self._send(content[first:], 206 if start else 200, {"ETag": f'"{oid}"', **range_header})

    # Writing

    def _preupload(self, body: bytes, repo: str, rev: str) -> Any:
        self._repo(repo, write=True)
        _, commit = self._at(repo, rev)
        answers = []
        for file in json.loads(body)["files"]:
            large = file["path"].endswith(LFS_SUFFIXES) or file["size"] > LFS_BYTES
            answer = {"path": file["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
            if blob := commit.files.get(file["path"]):
                answer["oid"] = blob.sha256 if blob.lfs else blob.oid
            answers.append(answer)
        return {"files": answers}

    def _batch(self, body: bytes, repo: str) -> Any:
        self._repo(repo, write=True)
        objects = []
        for asked in json.loads(body)["objects"]:
            oid, size = asked["oid"], asked["size"]
            answer: dict[str, Any] = {"oid": oid, "size": size}
            if oid not in self.hub.store:
                upload: dict[str, Any] = {"href": f"{self.hub.store_url}/store/{oid}?X-Amz-Signature=signed"}
                if size > self.hub.multipart_above:
                    chunk = self.hub.multipart_above
                    parts = range(1, -(-size // chunk) + 1)
                    urls = {str(n): f"{self.hub.store_url}/store/{oid}/{n}?X-Amz-Signature=signed" for n in parts}
                    upload = {
                        "href": f"{self.hub.url}/store/{oid}/complete",
                        "header": {"chunk_size": str(chunk), **urls},
                    }
                answer["actions"] = {"upload": upload, "verify": {"href": f"{self.hub.url}/{repo}.git/info/lfs/verify"}}
            objects.append(answer)
        return {"transfer": "basic", "objects": objects}

    def _put(self, body: bytes, oid: str, part: str | None) -> None:
        if "Authorization" in self.headers or self.query.get("X-Amz-Signature") != "signed":
            raise _Refusal(400, "Only one auth mechanism allowed")
        if part:
            self.hub.parts[oid, int(part)] = body
        else:
            self._store(oid, body)
        self._send(b"", 200, {"ETag": f'"{hashlib.md5(body).hexdigest()}"'})

    def _complete(self, body: bytes, oid: str) -> Any:
        numbers = [part["partNumber"] for part in json.loads(body)["parts"]]
        self._store(oid, b"".join(self.hub.parts[oid, number] for number in numbers))
        return {"success": True}

    def _store(self, oid: str, content: bytes) -> None:
        if hashlib.sha256(content).hexdigest() != oid:
            raise _Refusal(400, "The content does not have the hash that was announced")
        self.hub.store[oid] = content

    def _verify(self, body: bytes, repo: str) -> Any:
        asked = json.loads(body)
        if len(self.hub.store.get(asked["oid"], b"")) != asked["size"]:
            raise _Refusal(400, "The object was not uploaded")
        return {}

    def _commit(self, body: bytes, repo: str, rev: str) -> Any:
        found = self._repo(repo, write=True)
        _, parent = self._at(repo, rev)
        files, header = dict(parent.files), {}
        for line in body.splitlines():
            item = json.loads(line)
            key, value = item["key"], item["value"]
            if key == "header":
                header = value
            elif key == "file":
                files[value["path"]] = Blob(base64.b64decode(value["content"]), False)
            elif key == "lfsFile":
                if value["oid"] not in self.hub.store:
                    raise _Refusal(400, f"LFS pointer points to a file that does not exist: {value['path']}")
                files[value["path"]] = Blob(self.hub.store[value["oid"]], True)
            elif key == "deletedFile":
                if files.pop(value["path"], None) is None:
                    raise _Refusal(404, "A file with this name doesn't exist", "EntryNotFound")
            else:
                raise _Refusal(400, f"unknown operation {key}")
        if header.get("parentCommit", parent.sha) != parent.sha:
            raise _Refusal(412, "A commit has happened since. Please refresh and try again.")
        if rev not in found.branches:
            raise _Refusal(400, f"{rev} is not a branch")
        made = found.add(rev, header["summary"], files)
        return {"success": True, "commitOid": made.sha, "commitUrl": f"{self.hub.url}/{repo}/commit/{made.sha}"}
