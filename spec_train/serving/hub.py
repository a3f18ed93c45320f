"""Publish an export in a repository on the Hugging Face Hub.

What can be known beforehand is settled before anything is written: the files and the card, the token and its rights,
the repository's visibility and what it holds. Then a missing repository is created, and all changes go into one commit
on top of the state that was looked at, so that somebody else's change meanwhile is never overwritten. Large files are
uploaded before the commit and known by their hash: a push that was killed, repeated, sends only what is missing.

Files that equal the repository's are not sent. Deleted are weights at its top, which vLLM would load beside the new
ones, and results and samples of an earlier push. Everything else in the repository stays.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import spec_train
from spec_train.errors import RunFailure, UserError
from spec_train.serving.card import edited_by_hand
from spec_train.serving.export import EXPORT_FILE
from spec_train.serving.hub_errors import (
    conflict,
    explaining,
    hub_exceptions,
    only_waits_in_log,
    patiently,
    pause,
    status_of,
)
from spec_train.serving.publication import CARD_FILE
from spec_train.serving.push_plan import Files, check_name, check_public, content_of, size_text, visibility

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.hf_api import RepoFile

# What a repository may hold before its first push.
_BYSTANDERS = re.compile(r"(\.git(attributes|ignore)|README\.md|LICENSE.*)")
# What a push replaces as a whole: weights at the top, and its own folders.
_OURS = re.compile(r"([^/]+\.safetensors(\.index\.json)?|golden/[^/]+\.safetensors|eval/[^/]+\.json)")
UPLOAD_WAITS_S = (2.0, 8.0)  # between attempts of what huggingface_hub has repeated by itself


@dataclass(frozen=True)
class Pushed:
    """What a push did. `commit`: the repository's state after it, a new one if anything was `sent` or `deleted`."""

    url: str
    commit: str
    created: bool
    sent: list[str]
    sent_bytes: int
    unchanged: int
    deleted: list[str]
    card_kept: bool


@dataclass(frozen=True)
class _Remote:
    """A repository at one commit. `head` is empty where the branch does not exist yet."""

    head: str
    files: dict[str, RepoFile]


@dataclass(frozen=True)
class _Change:
    sent: list[str]
    deleted: list[str]

    def __bool__(self) -> bool:
        return bool(self.sent or self.deleted)


def push(
    files: Files,
    repo_id: str,
    *,
    private: bool,
    message: str,
    revision: str = "main",
    overwrite_card: bool = False,
) -> Pushed:
    """Make `repo_id` on the Hub hold `files` (path in the repository -> local file or bytes), with one commit.

    `private`: the visibility; an existing repository of the other one is refused. `revision`: a branch, created where
    it is missing. `overwrite_card`: replace a README.md that was edited on the Hub, which is kept otherwise.
    The token is huggingface_hub's: HF_TOKEN, or of `hf auth login`.
    Raises UserError for what the user must mend, RunFailure where the Hub or the network fails.
    """
    from huggingface_hub import CommitOperationAdd, HfApi, get_token

    check_name(repo_id)
    token = get_token()
    if not token:
        raise UserError("no access token: set HF_TOKEN in the environment, or log in with `hf auth login`")
    check_public(files, token)
    only_waits_in_log()
    api = HfApi(token=token, library_name="spec-train", library_version=spec_train.__version__)
    additions = {name: CommitOperationAdd(name, content) for name, content in files.items()}
    with explaining(repo_id, token):
        _check_token(api)
        exists = _exists(api, repo_id, private)
        remote = _look(api, repo_id, revision) if exists else _Remote("", {})
        _refuse_other_content(remote, repo_id)
        card_kept = not overwrite_card and _card_was_edited(api, repo_id, remote, additions[CARD_FILE])
        if card_kept:
            del additions[CARD_FILE]
        else:
            _validate_card(api, files[CARD_FILE])
        if not exists:
            _create(api, repo_id, private)
    left = "" if exists else f"; {repo_id} was created ({visibility(private)}) and is empty, which the repeat continues"
    with explaining(repo_id, token, left):
        if not remote.head:
            if revision != "main":
                patiently(lambda: api.create_branch(repo_id, branch=revision, exist_ok=True))
            remote = _look(api, repo_id, revision)
        change = _change(remote, additions)
        commit = _commit(api, repo_id, revision, remote, additions, message) if change else remote.head
    return Pushed(
        url=f"{api.endpoint}/{repo_id}",
        commit=commit,
        created=not exists,
        sent=change.sent,
        sent_bytes=sum(additions[name].upload_info.size for name in change.sent),
        unchanged=len(additions) - len(change.sent),
        deleted=change.deleted,
        card_kept=card_kept,
    )


def _check_token(api: HfApi) -> None:
    """A token that may only read is refused before anything is hashed or written."""
    role = patiently(api.whoami).get("auth", {}).get("accessToken", {}).get("role")
    if role == "read":
        raise UserError("the access token may only read: make one with write access, https://hf.co/settings/tokens")


def _exists(api: HfApi, repo_id: str, private: bool) -> bool:
    """Whether the repository exists; refused if its visibility or its name is another."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        info = patiently(lambda: api.model_info(repo_id))
    except GatedRepoError:
        raise
    except RepositoryNotFoundError:
        return False
    if info.id != repo_id:
        raise UserError(f"{repo_id} is called {info.id} on the Hub: push to that name")
    if bool(info.private) != private:
        raise UserError(
            f"{repo_id} is {visibility(not private)} on the Hub, and this push is to be {visibility(private)}: "
            f"pass --{visibility(not private)}, or change the visibility in the repository's settings"
        )
    return True


def _create(api: HfApi, repo_id: str, private: bool) -> None:
    """Make the repository, and read its visibility back: an organisation may have its own rule."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        patiently(lambda: api.create_repo(repo_id, private=private))
    except HfHubHTTPError as error:
        if status_of(error) != 409:
            raise
    if not _exists(api, repo_id, private):  # 409 was not for an earlier attempt whose answer got lost
        raise UserError(f"{repo_id} exists already, but the token cannot see it: use one with access to it")


def _look(api: HfApi, repo_id: str, revision: str) -> _Remote:
    """The files of a branch, at one commit."""
    from huggingface_hub.errors import RevisionNotFoundError

    try:
        head = patiently(lambda: api.model_info(repo_id, revision=revision)).sha
    except RevisionNotFoundError:
        return _Remote("", {})
    return _Remote(str(head), _files_at(api, repo_id, str(head)))


def _files_at(api: HfApi, repo_id: str, commit: str) -> dict[str, RepoFile]:
    from huggingface_hub.hf_api import RepoFile

    entries = patiently(lambda: list(api.list_repo_tree(repo_id, recursive=True, revision=commit)))
    return {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}


def _refuse_other_content(remote: _Remote, repo_id: str) -> None:
    """Somebody's model under the same name is not ours to replace."""
    others = [path for path in sorted(remote.files) if not _BYSTANDERS.fullmatch(path)]
    if others and EXPORT_FILE not in remote.files:
        raise UserError(
            f"{repo_id} holds something that spec-train did not push ({others[0]}, {len(others)} files): "
            "choose another name, or empty the repository"
        )


def _card_was_edited(api: HfApi, repo_id: str, remote: _Remote, card: CommitOperationAdd) -> bool:
    """Whether the repository's README.md holds somebody's own words, which no push replaces unasked."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status  # type: ignore[attr-defined]

    if CARD_FILE not in remote.files or not _differs(card, remote.files[CARD_FILE]):
        return False
    url = hf_hub_url(repo_id, CARD_FILE, revision=remote.head, endpoint=api.endpoint)

    def read() -> str:
        answer = get_session().get(url, headers=build_hf_headers(token=api.token))
        hf_raise_for_status(answer)
        return str(answer.content.decode(errors="replace"))

    return edited_by_hand(patiently(read))


def _validate_card(api: HfApi, card: Path | bytes) -> None:
    """The Hub's own check of the metadata, before a repository is created for it."""
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status  # type: ignore[attr-defined]

    def ask() -> None:
        url, asked = f"{api.endpoint}/api/validate-yaml", {"content": content_of(card).decode(), "repoType": "model"}
        hf_raise_for_status(get_session().post(url, json=asked, headers=build_hf_headers(token=api.token)))

    patiently(ask)


def _change(remote: _Remote, additions: Mapping[str, CommitOperationAdd]) -> _Change:
    """What differs between the repository and what is to be in it."""
    sent = [n for n, file in additions.items() if n not in remote.files or _differs(file, remote.files[n])]
    stale = [path for path in remote.files if path not in additions and _OURS.fullmatch(path)]
    return _Change(sent, stale)


def _differs(file: CommitOperationAdd, remote: RepoFile) -> bool:
    """By hash: of the content for a large file, of the git object for others."""
    if remote.size != file.upload_info.size:
        return True
    if remote.lfs is not None:
        return bool(remote.lfs.sha256 != file.upload_info.sha256.hex())
    with file.as_file() as opened:
        content = opened.read()
    return bool(remote.blob_id != hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest())


def _commit(
    api: HfApi,
    repo_id: str,
    revision: str,
    remote: _Remote,
    additions: Mapping[str, CommitOperationAdd],
    message: str,
) -> str:
    """Upload and commit on top of `remote`; the new commit's hash.

    A commit whose answer got lost is found by looking again, so that no attempt makes a second one.
    """
    from huggingface_hub import CommitOperationDelete

    change = _change(remote, additions)
    operations = [additions[name] for name in change.sent] + [CommitOperationDelete(path) for path in change.deleted]
    for wait in (*UPLOAD_WAITS_S, None):
        try:
            made = api.create_commit(
                repo_id, operations, commit_message=message, revision=revision, parent_commit=remote.head
            )
            commit = made.oid
            break
        except hub_exceptions() as error:
            if wait is None or not pause(error, wait):
                raise
        now = _look(api, repo_id, revision)
        if now.head != remote.head:
            if _change(now, additions):
                raise UserError(conflict(repo_id))
            commit = now.head
            break
    wrong = _change(_Remote(commit, _files_at(api, repo_id, commit)), additions)
    if wrong:
        raise RunFailure(f"{repo_id} does not hold what was sent at {commit[:8]}: {[*wrong.sent, *wrong.deleted][0]}")
    return commit


def describe(done: Pushed, repo_id: str, private: bool) -> str:
    """What a push did, for the terminal."""
    if done.sent or done.deleted:
        parts = [f"{len(done.sent)} files with {size_text(done.sent_bytes)} sent", f"{done.unchanged} unchanged"]
        if done.deleted:
            parts.append(f"{len(done.deleted)} deleted ({', '.join(done.deleted)})")
        line = f"push: {', '.join(parts)}, in commit {done.commit[:8]} of {repo_id} ({visibility(private)})"
    else:
        line = f"push: {repo_id} ({visibility(private)}) holds these very files at {done.commit[:8]}: no commit made"
    if done.card_kept:
        line += f"\npush: its {CARD_FILE} was edited on the Hub and is kept; --overwrite-card replaces it"
    return f"{line}\n{done.url}"
