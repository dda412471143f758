"""A model hub on this machine: the HTTP routes by which huggingface_hub pushes, tags and downloads; Git LFS."""

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import transformers
from huggingface_hub import constants

TOKENS = {"hf_owner": "owner", "hf_other": "other"}  # token -> the user whose repositories it may write
REPO = r"(?P<repo>[\w.-]+/[\w.-]+)"


class Failure(Exception):
    """An answer with an error status."""

    def __init__(self, status, code="", message=""):
        super().__init__(message)
        self.status, self.headers = status, {"X-Error-Code": code, "X-Error-Message": message}


class Hub:
    """Repositories as lists of commits (oid -> files by path), references by name, and large files by SHA-256."""

    def __init__(self):
        self.private, self.commits, self.refs, self.large = {}, {}, {}, {}
        self.log = []  # (method, path) of every request
        self.broken = {}  # pattern of a path -> status it answers with

    def files(self, repo, revision):
        """Return (commit, {path: content}) at a branch, a tag or a commit."""
        if repo not in self.commits:
            raise Failure(404, "RepoNotFound", "Repository not found")
        oid = self.refs[repo].get(revision, revision)
        if oid not in self.commits[repo]:
            raise Failure(404, "RevisionNotFound", "Revision not found")
        return oid, self.commits[repo][oid]

    def commit(self, repo, branch, changes):
        """Add a commit on top of a branch; None as content deletes the file."""
        parent = self.refs[repo].get(branch)
        files = {**self.commits[repo].get(parent, {}), **changes}
        oid = hashlib.sha1(f"{repo} {len(self.commits[repo])}".encode()).hexdigest()
        self.commits[repo][oid] = {path: content for path, content in files.items() if content is not None}
        self.refs[repo][branch] = oid
        return oid


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self):
        return self.server.hub

    @property
    def user(self):
        """The user of the request's token; a token that nobody has is refused."""
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token not in TOKENS:
            raise Failure(401, message="Invalid credentials in Authorization header")
        return TOKENS[token]

    def may_write(self, repo):
        if self.user != repo.split("/")[0]:
            raise Failure(403, message=f"You don't have the rights to write to {repo}")

    def may_read(self, repo):
        if self.hub.private.get(repo) and self.user != repo.split("/")[0]:
            raise Failure(404, "RepoNotFound", "Repository not found")

    def answer(self, status, body=b"", headers=None):
        body = json.dumps(body).encode() if isinstance(body, dict | list) else body
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def handle_request(self):
        path = unquote(urlsplit(self.path).path)
        self.body = self.read_body()
        self.hub.log.append((self.command, path))
        try:
            for pattern, status in self.hub.broken.items():
                if re.search(pattern, path):
                    raise Failure(status, message="broken for a test")
            for method, pattern, action in ROUTES:
                found = re.fullmatch(pattern, path)
                if found and method == self.command:
                    return action(self, **found.groupdict())
            raise Failure(404, message=f"no route {self.command} {path}")
        except Failure as failure:
            self.answer(failure.status, {"error": str(failure)}, failure.headers)

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def read_body(self):
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def log_message(self, *args):
        pass

    # ---- routes ----

    def create(self):
        wanted = json.loads(self.body)
        repo = f"{wanted['organization'] or self.user}/{wanted['name']}"
        self.may_write(repo)
        url = f"http://{self.headers['Host']}/{repo}"
        if repo in self.hub.commits:
            return self.answer(409, {"url": url})
        self.hub.private[repo] = wanted.get("visibility") == "private"
        self.hub.commits[repo], self.hub.refs[repo] = {}, {}
        self.hub.commit(repo, "main", {".gitattributes": b"*.safetensors filter=lfs\n"})
        self.answer(200, {"url": url})

    def validate(self):
        assert json.loads(self.body)["content"].startswith("---\n")
        self.answer(200, {"errors": [], "warnings": []})

    def preupload(self, repo, revision):
        self.may_write(repo)
        _, files = self.hub.files(repo, revision)
        answers = []
        for file in json.loads(self.body)["files"]:
            path, content = file["path"], files.get(file["path"])
            large = path.endswith(".safetensors")
            oid = None
            if content is not None:
                oid = hashlib.sha256(content).hexdigest() if large else git_oid(content)
            mode = "lfs" if large else "regular"
            answers.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self.answer(200, {"files": answers})

    def batch(self, repo):
        self.may_write(repo)
        objects = []
        for item in json.loads(self.body)["objects"]:
            href = f"http://{self.headers['Host']}/large/{item['oid']}"
            missing = item["oid"] not in self.hub.large
            objects.append({**item, **({"actions": {"upload": {"href": href}}} if missing else {})})
        self.answer(200, {"transfer": "basic", "objects": objects})

    def upload(self, oid):
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise Failure(400, message="other content than announced")
        self.hub.large[oid] = self.body
        self.answer(200)

    def commit(self, repo, revision):
        self.may_write(repo)
        self.hub.files(repo, revision)
        changes = {}
        for line in self.body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "file":
                changes[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                changes[value["path"]] = self.hub.large[value["oid"]]
            elif item["key"] == "deletedFile":
                changes[value["path"]] = None
        oid = self.hub.commit(repo, revision, changes)
        self.answer(200, {"commitUrl": f"http://{self.headers['Host']}/{repo}/commit/{oid}", "commitOid": oid})

    def tag(self, repo, revision):
        self.may_write(repo)
        oid, _ = self.hub.files(repo, revision)
        name = json.loads(self.body)["tag"]
        if name in self.hub.refs[repo]:
            raise Failure(409, message="Tag reference exists already")
        self.hub.refs[repo][name] = oid
        self.answer(200)

    def info(self, repo, revision="main"):
        self.may_read(repo)
        oid, files = self.hub.files(repo, revision)
        siblings = [{"rfilename": path} for path in files]
        self.answer(200, {"id": repo, "sha": oid, "private": self.hub.private[repo], "tags": [], "siblings": siblings})

    def tree(self, repo, revision):
        self.may_read(repo)
        _, files = self.hub.files(repo, revision)
        self.answer(
            200, [{"type": "file", "path": p, "size": len(c), "oid": git_oid(c)} for p, c in sorted(files.items())]
        )

    def resolve(self, repo, revision, path):
        self.may_read(repo)
        oid, files = self.hub.files(repo, revision)
        if path not in files:
            raise Failure(404, "EntryNotFound", "Entry not found")
        etag = hashlib.sha256(files[path]).hexdigest()
        self.answer(200, files[path], {"X-Repo-Commit": oid, "ETag": f'"{etag}"'})


ROUTES = [
    ("POST", "/api/repos/create", Handler.create),
    ("POST", "/api/validate-yaml", Handler.validate),
    ("POST", rf"/api/models/{REPO}/preupload/(?P<revision>.+)", Handler.preupload),
    ("POST", rf"/{REPO}\.git/info/lfs/objects/batch", Handler.batch),
    ("PUT", r"/large/(?P<oid>\w{64})", Handler.upload),
    ("POST", rf"/api/models/{REPO}/commit/(?P<revision>.+)", Handler.commit),
    ("POST", rf"/api/models/{REPO}/tag/(?P<revision>.+)", Handler.tag),
    ("GET", rf"/api/models/{REPO}", Handler.info),
    ("GET", rf"/api/models/{REPO}/revision/(?P<revision>.+)", Handler.info),
    ("GET", rf"/api/models/{REPO}/tree/(?P<revision>[^/]+)", Handler.tree),
    ("HEAD", rf"/{REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", Handler.resolve),
    ("GET", rf"/{REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", Handler.resolve),
]


def git_oid(content):
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def running_hub():
    """Yield (Hub, its address) while the server runs."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.hub = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.hub, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def hub_for_client(monkeypatch, folder):
    """Yield the Hub, with the client set to it as by HF_ENDPOINT and HF_HUB_DISABLE_XET, and the owner's token."""
    with running_hub() as (hub, address):
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + template)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # the address of xet's storage is the real Hub's
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder / "no_token"))
        monkeypatch.setattr(transformers.utils.hub, "_hf_api", None)  # a client that knows its address
        monkeypatch.setenv("HF_TOKEN", "hf_owner")
        yield hub
