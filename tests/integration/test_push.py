"""Publishing through huggingface_hub to a local server that speaks the Hub's protocol."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from huggingface_hub import constants, snapshot_download

from spec_train.errors import RunFailure, UserError
from spec_train.recipe import load_recipe
from spec_train.serving import hub, hub_errors
from spec_train.serving.export import export
from spec_train.serving.facts import public_recipe
from spec_train.serving.hub import Pushed, push
from spec_train.serving.push_plan import check_public, plan_push
from tests.heads import random_eagle3
from tests.hub_stand_in import Blob, HubStandIn, Repo
from tests.integration.test_run import write_recipe

TOKEN = "hf_abcdefghijklmnopqrstuvwxyz012345"
REPO = "me/head-of-someone"
Files = dict[str, Path | bytes]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStandIn]:
    tokens = {TOKEN: ("me", "write"), "hf_reader": ("reader", "read"), "hf_other": ("other", "write")}
    with HubStandIn(tokens) as stand_in:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, stand_in.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", stand_in.url)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr(hub_errors, "WAITS_S", (0.01,) * 4)
        monkeypatch.setattr(hub, "UPLOAD_WAITS_S", (0.01, 0.01))
        yield stand_in


@pytest.fixture(scope="module")
def export_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    head = random_eagle3()
    return export(
        head,
        tmp_path_factory.mktemp("export") / "plain",
        format="plain",
        target_id="someone/model",
        num_draft_tokens=3,
        golden={"states": head.tensors["fc.weight"]},
        provenance={},
    )


@pytest.fixture
def files(export_dir: Path) -> Files:
    return dict(plan_push(export_dir, REPO, (), None).files)


def content(files: Files) -> dict[str, bytes]:
    return {name: file if isinstance(file, bytes) else file.read_bytes() for name, file in files.items()}


def pushed(files: Files, **options: Any) -> Pushed:
    return push(files, REPO, **{"private": True, "message": "publish", **options})


def held(repo: Repo) -> dict[str, bytes]:
    return {name: file for name, file in repo.files.items() if name != ".gitattributes"}


def hub_environment(server: HubStandIn) -> dict[str, str]:
    return {"HF_ENDPOINT": server.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}


def command(server: HubStandIn, *arguments: object, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "spec_train", "push", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **hub_environment(server), **environment},
    )


def test_name_and_visibility_of_the_recipe(export_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"give REPO_ID as owner/name, or set hub\.repo_id in the recipe"):
        plan_push(export_dir, None, (), None)
    assert plan_push(export_dir, REPO, (), None).private
    assert not plan_push(export_dir, REPO, ["hub.private=false"], None).private
    recipe = load_recipe(write_recipe(tmp_path), ["hub.repo_id=me/mine", "hub.private=false"]).model_dump(mode="json")
    made = export(
        random_eagle3(),
        tmp_path / "head",
        format="plain",
        target_id="someone/model",
        num_draft_tokens=3,
        golden=None,
        provenance={"recipe": public_recipe(recipe)},
    )
    plan = plan_push(made, None, (), None)
    assert (plan.repo_id, plan.private) == ("me/mine", False)
    assert "recipe.yaml" in plan.files


def test_dry_run_shows_files_and_card_and_asks_nobody(server: HubStandIn, export_dir: Path, files: Files) -> None:
    program = command(server, export_dir, REPO, "--dry-run", HF_TOKEN="")
    out, _ = program.communicate(timeout=240)
    assert program.returncode == 0
    assert content(files)["README.md"].decode() in out
    listed = [line.split()[0] for line in out.splitlines() if line.startswith("  ")][-len(files) - 1 : -1]
    assert listed == list(files)
    assert f"model.safetensors {(export_dir / 'model.safetensors').stat().st_size / 1000:>10.1f} kB".split()[1] in out
    assert not server.calls


def test_killed_in_mid_upload_and_repeated(server: HubStandIn, export_dir: Path, files: Files) -> None:
    """Of two large files one is up when the program is killed; the repeat sends the other one, and commits once."""
    held_back = server.fault("put", after=1, hold=threading.Event())
    program = command(server, export_dir, REPO)
    while not held_back.reached.wait(0.1):
        assert program.poll() is None, program.communicate()
    os.kill(program.pid, signal.SIGKILL)
    first = program.communicate(timeout=240)
    assert held_back.hold is not None
    held_back.hold.set()
    repo = server.repos[REPO]
    assert repo.log == ["initial commit"]
    assert (len(server.store), server.calls["put"]) == (1, 2)

    repeat = command(server, export_dir, REPO)
    second = repeat.communicate(timeout=240)
    assert repeat.returncode == 0, second[1]
    assert len(repo.log) == 2
    assert (len(server.store), server.calls["put"]) == (2, 3)
    assert repo.private
    assert held(repo) == content(files)
    exported = {name for name in os.listdir(export_dir) if name.endswith((".safetensors", "config.json"))}
    assert all(repo.files[name] == (export_dir / name).read_bytes() for name in exported)
    assert TOKEN not in "".join(first + second)
    assert f"in commit {repo.branches['main'][:8]} of {REPO} (private)" in second[0]


def test_what_is_there_is_not_sent_again(server: HubStandIn, files: Files) -> None:
    made = pushed(files)
    assert made.created
    assert sorted(made.sent) == sorted(files)
    commits = len(server.repos[REPO].log)
    calls = server.calls["put"], server.calls["batch"], server.calls["commit"]
    again = pushed(files)
    assert not again.sent
    assert not again.created
    assert again.unchanged == len(files)
    assert len(server.repos[REPO].log) == commits == 2
    assert calls == (server.calls["put"], server.calls["batch"], server.calls["commit"])
    assert "no commit made" in hub.describe(again, REPO, True)


def test_update_is_one_commit_that_takes_stale_weights_away(server: HubStandIn, files: Files) -> None:
    pushed({**files, "model-00002-of-00002.safetensors": b"\0" * 8, "eval/old.json": b"{}"})
    server.repos[REPO].add("main", "mine", {**server.repos[REPO].at("main").files, "plot.png": Blob(b"png", True)})  # type: ignore[union-attr]
    puts = server.calls["put"]
    made = pushed({**files, "recipe.yaml": b"run: {name: other}\n"})
    assert made.sent == ["recipe.yaml"]
    assert sorted(made.deleted) == ["eval/old.json", "model-00002-of-00002.safetensors"]
    assert server.calls["put"] == puts
    assert len(server.repos[REPO].log) == 4
    assert "plot.png" in server.repos[REPO].files  # somebody's own file


def test_multipart_upload_and_download(
    server: HubStandIn, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.multipart_above = 50_000
    pushed(files)
    assert server.calls["complete"] == 1
    assert server.calls["put"] > 2
    folder = Path(snapshot_download(REPO, local_dir=tmp_path, token=TOKEN))
    got = {name: (folder / name).read_bytes() for name in files}
    assert got == content(files)


def test_branch(server: HubStandIn, files: Files) -> None:
    pushed(files, revision="trial")
    repo = server.repos[REPO]
    assert repo.log == ["initial commit"]
    assert set(repo.commits[repo.branches["trial"]].files) == {".gitattributes", *files}
    assert pushed(files, revision="trial").commit == repo.branches["trial"]


@pytest.mark.parametrize(
    "route", ["whoami", "info", "tree", "validate", "create", "preupload", "batch", "put", "commit"]
)
def test_one_outage_is_survived(server: HubStandIn, files: Files, route: str) -> None:
    server.fault(route, status=503)
    pushed(files)
    assert held(server.repos[REPO]) == content(files)
    assert len(server.repos[REPO].log) == 2


@pytest.mark.parametrize(
    ("route", "what"),
    [
        ("put", {"drop": True}),
        ("put", {"status": 403}),  # an expired link: a new one is asked for
        ("commit", {"drop": True}),
        ("commit", {"lose": True}),  # committed, but the answer was lost: no second commit
        ("create", {"lose": True}),
        ("info", {"drop": True}),
        ("commit", {"status": 429, "headers": {"Retry-After": "1"}}),
        ("whoami", {"status": 429, "headers": {"RateLimit": '"api";r=0;t=1'}}),
    ],
)
def test_one_fault_is_survived(server: HubStandIn, files: Files, route: str, what: dict[str, Any]) -> None:
    server.fault(route, **what)
    pushed(files)
    assert held(server.repos[REPO]) == content(files)
    assert len(server.repos[REPO].log) == 2


@pytest.mark.parametrize(
    ("route", "what", "kind", "line"),
    [
        ("whoami", {"status": 401}, UserError, "the Hub does not accept the token (401): set HF_TOKEN"),
        (
            "create",
            {"status": 403},
            UserError,
            "the token may not write to me/head-of-someone (403: injected): use one",
        ),
        ("validate", {"status": 400}, UserError, "the Hub refuses the push to me/head-of-someone (400): injected"),
        ("create", {"status": 404}, UserError, "me/head-of-someone does not exist on the Hub, or the token cannot"),
        ("info", {"status": 500, "times": 9}, RunFailure, "the Hub fails (500), after 5 attempts too: repeat the comm"),
        ("info", {"drop": True, "times": 9}, RunFailure, "failed (RemoteProtocolError"),
        (
            "create",
            {"status": 429, "headers": {"Retry-After": "3600"}},
            RunFailure,
            "(429): repeat the command in 3600",
        ),
    ],
)
def test_faults_before_anything_is_written(
    server: HubStandIn, files: Files, route: str, what: dict[str, Any], kind: type[Exception], line: str
) -> None:
    server.fault(route, **what)
    with pytest.raises(kind) as error:
        pushed(files)
    assert line in str(error.value)
    assert "\n" not in str(error.value)
    assert not server.repos
    server.faults.clear()
    pushed(files)
    assert held(server.repos[REPO]) == content(files)


@pytest.mark.parametrize(
    ("what", "kind", "line"),
    [
        ({"status": 403}, UserError, "the token may not write to me/head-of-someone (403: injected)"),
        ({"status": 409}, UserError, "me/head-of-someone was changed by somebody else during this push"),
        ({"status": 412}, UserError, "me/head-of-someone was changed by somebody else during this push"),
        ({"status": 502, "times": 9}, RunFailure, "the Hub fails (502)"),
        ({"status": 429, "headers": {"Retry-After": "900"}}, RunFailure, "(429): repeat the command in 900 seconds"),
        ({"status": 403, "body": {"error": f"bad {TOKEN}"}}, UserError, "(403: bad ***)"),
    ],
)
def test_failed_commit_says_what_exists_and_the_repeat_continues(
    server: HubStandIn, files: Files, what: dict[str, Any], kind: type[Exception], line: str
) -> None:
    server.fault("commit", **what)
    with pytest.raises(kind) as error:
        pushed(files)
    assert line in str(error.value)
    assert "me/head-of-someone was created (private) and is empty, which the repeat continues" in str(error.value)
    assert "\n" not in str(error.value)
    server.faults.clear()
    puts = server.calls["put"]
    assert not pushed(files).created
    assert server.calls["put"] == puts
    assert server.repos[REPO].log == ["initial commit", "publish"]
    assert held(server.repos[REPO]) == content(files)


def test_somebody_elses_change_is_not_overwritten(server: HubStandIn, files: Files) -> None:
    repo = server.create(REPO, private=True)
    theirs = {"README.md": Blob(b"theirs", False)}
    server.fault("preupload", before=lambda: repo.add("main", "theirs", theirs))
    with pytest.raises(UserError, match="was changed by somebody else during this push, which committed nothing"):
        pushed(files)
    assert repo.files == {"README.md": b"theirs"}


@pytest.mark.parametrize("private", [True, False])
def test_other_visibility_is_refused(server: HubStandIn, files: Files, private: bool) -> None:
    repo = server.create(REPO, private=not private)
    with pytest.raises(UserError, match=r"is (public|private) on the Hub, and this push is to be (private|public)"):
        pushed(files, private=private)
    assert repo.log == ["initial commit"]
    assert not server.store


def test_visibility_that_was_not_granted_is_refused(server: HubStandIn, files: Files) -> None:
    server.fault("tree", before=lambda: setattr(server.repos[REPO], "private", True))
    server.fault("info", after=1, before=lambda: setattr(server.repos[REPO], "private", True))
    with pytest.raises(UserError, match="is private on the Hub, and this push is to be public: pass --private"):
        pushed(files, private=False)
    assert not server.store


def test_edited_card_is_kept(server: HubStandIn, files: Files) -> None:
    repo = server.create(REPO, private=True)
    repo.add("main", "my words", {"README.md": Blob(b"---\nlicense: mit\n---\nMine.\n", False)})
    made = pushed(files)
    assert made.card_kept
    assert repo.files["README.md"] == b"---\nlicense: mit\n---\nMine.\n"
    assert repo.files["config.json"] == content(files)["config.json"]
    assert "README.md was edited on the Hub and is kept; --overwrite-card replaces it" in hub.describe(made, REPO, True)
    assert pushed(files, overwrite_card=True).sent == ["README.md"]
    assert repo.files["README.md"] == content(files)["README.md"]


def test_another_model_is_not_replaced(server: HubStandIn, files: Files) -> None:
    repo = server.create(REPO, private=True)
    repo.add("main", "a model", {"config.json": Blob(b"{}", False), "model.safetensors": Blob(b"weights", True)})
    with pytest.raises(UserError, match=r"holds something that spec-train did not push \(config.json, 2 files\)"):
        pushed(files)
    assert repo.log == ["initial commit", "a model"]


@pytest.mark.parametrize(
    ("token", "line"),
    [
        ("hf_unknown", "the Hub does not accept the token (401)"),
        ("hf_reader", "the access token may only read: make one with write access"),
        ("hf_other", "the token may not write to me/head-of-someone (403: You don't have the rights to write to me)"),
    ],
)
def test_wrong_tokens(server: HubStandIn, files: Files, monkeypatch: pytest.MonkeyPatch, token: str, line: str) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(UserError) as error:
        pushed(files)
    assert line in str(error.value)
    assert token not in str(error.value)
    assert not server.repos


def test_repository_that_the_token_cannot_see(
    server: HubStandIn, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.create("org/head", private=True)
    server.tokens["hf_member"] = ("org", "write")
    monkeypatch.setenv("HF_TOKEN", "hf_member")
    server.fault("info", times=2, status=404, headers={"X-Error-Code": "RepoNotFound"})
    with pytest.raises(UserError, match="org/head exists already, but the token cannot see it"):
        push(files, "org/head", private=True, message="publish")


def test_failing_xet_is_one_line_too(server: HubStandIn, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in has no Xet storage, which huggingface_hub takes first."""
    pytest.importorskip("hf_xet")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    with pytest.raises(RunFailure) as error:
        pushed(files)
    assert "HF_HUB_DISABLE_XET=1 uploads by plain HTTPS; me/head-of-someone was created (private)" in str(error.value)
    assert "\n" not in str(error.value)
    assert server.repos[REPO].log == ["initial commit"]


def test_offline_mode(server: HubStandIn, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set"):
        pushed(files)
    assert not server.calls


def test_refusal_is_one_line_and_status_2(server: HubStandIn, export_dir: Path) -> None:
    wrong = TOKEN[::-1]
    program = command(server, export_dir, REPO, HF_TOKEN=wrong)
    out, complaints = program.communicate(timeout=240)
    assert program.returncode == 2
    said = [line for line in complaints.splitlines() if not line.startswith("push: the card does not know")]
    assert said == [
        "error: the Hub does not accept the token (401): set HF_TOKEN to a valid one, or log in with `hf auth login`"
    ]
    assert wrong not in out + complaints
    assert list(server.calls) == ["whoami"]


def test_no_token_and_bad_names(
    server: HubStandIn, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("head", "me/head/more", "me/he ad"):
        with pytest.raises(UserError, match="not the name of a repository"):
            push(files, name, private=True, message="publish")
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(UserError, match="no access token: set HF_TOKEN"):
        pushed(files)
    assert not server.calls


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("config.json", json.dumps({"a": {"b": TOKEN}}), r"config.json: a.b looks like an access token"),
        ("recipe.yaml", f"hub: {{token: {TOKEN}}}", r"recipe.yaml: hub.token looks like an access token"),
        ("README.md", f"words\n{TOKEN}\n", r"README.md: line 2 looks like an access token"),
        ("config.json", json.dumps({"a": "HERE/model"}), r"config.json names a path of this machine, /.*/.*/\.\.\."),
        ("config.json", json.dumps({"a": "path:HERE/model"}), r"config.json names a path of this machine, /.*/.*/"),
        ("README.md", "[x](file://HERE/model)", r"README.md names a path of this machine, file:///"),
        ("README.md", "file:///srv/of/another", r"README.md names a path of this machine, file:///srv/of/"),
        ("README.md", "file://localhost/srv/of/another", r"README.md names a path of this machine, file://localhost"),
        ("recipe.yaml", "a: file:/srv/of/another", r"recipe.yaml names a path of this machine, file:/srv/of/"),
        ("recipe.yaml", "a: 'C:\\Users\\me\\model'", r"recipe.yaml names a path of this machine, C:\\Users\\me"),
        ("config.json", json.dumps({"a": "C:\\Users\\me"}), r"config.json names a path of this machine, C:"),
        ("README.md", "in ~/HOMEDIR/x", r"README.md names a path of this machine, ~/HOMEDIR/"),
        ("README.md", "QUOTED%2Fmodel", r"README.md names a path of this machine, /.*/.*/"),
    ],
)
def test_what_must_not_be_published(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, line: str
) -> None:
    (tmp_path / "HOMEDIR").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    text = text.replace("QUOTED", quote(str(tmp_path), safe="")).replace("HERE", str(tmp_path))
    with pytest.raises(UserError, match=line) as error:
        check_public({**files, name: text.encode()})
    assert TOKEN not in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "https://huggingface.co/home/x and https://example.com/tmp/a",
        "see /usr/bin/env, and/or; 3~4/5; a profile:/a/b that is not there; ~nobody-of-that-name/x",
    ],
)
def test_what_is_no_path_of_this_machine_may_be_published(files: Files, text: str) -> None:
    check_public({**files, "README.md": text.encode()})


def test_the_token_itself_is_looked_for(files: Files) -> None:
    with pytest.raises(UserError, match=r"vocab.txt holds your access token"):
        check_public({**files, "vocab.txt": b"my-odd-token-"}, token="my-odd-token-")
