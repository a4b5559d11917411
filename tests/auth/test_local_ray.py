"""A Ray of our own: its token, its folders, its processes, and their logs on one stream."""

from __future__ import annotations

import io
import os
import re
import secrets
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from ray._common.utils import try_make_directory_shared

from ratoon.cluster import local_ray
from ratoon.cluster.local_ray import (
    RayLogs,
    SessionFolders,
    connect_ray,
    make_ray_folder,
    make_token_file,
    remove_session,
)
from ratoon.cluster.ray_private import LocalRay
from ratoon.config import RatoonConfig, RayConfig, ray_token_file
from ratoon.errors import RatoonError
from ratoon.log import ShownLogs


def test_the_token_is_made_once_and_for_its_owner(tmp_path: Path) -> None:
    """A second start must not take it from a Ray that runs with it."""
    file = make_token_file(tmp_path)
    token = file.read_text()
    assert len(token) == 64
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    assert make_token_file(tmp_path).read_text() == token


def test_the_token_of_rays_is_there_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red once: a start that was killed left an empty file, and every later Ray had no token."""

    def killed(_size: int) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(secrets, "token_hex", killed)
        with pytest.raises(KeyboardInterrupt):
            make_token_file(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        files = list(pool.map(make_token_file, [tmp_path] * 8))
    tokens = {file.read_text() for file in files}
    assert [len(token) for token in tokens] == [64]
    assert [path.name for path in files[0].parent.iterdir()] == ["ray-token"]


def test_a_ray_that_does_not_start_is_told_with_its_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red before: a traceback through Ray, of a bare Exception."""

    def late(**_: object) -> LocalRay:
        raise Exception("timed out")

    monkeypatch.setattr(local_ray, "LocalRay", late)
    config = RatoonConfig(data_root=tmp_path, ray=RayConfig(temp_folder="/tmp/ray-here"))
    with pytest.raises(RatoonError, match=r"timed out.*/tmp/ray-here/session_latest/logs"):
        connect_ray(config, shown=ShownLogs.NONE)


def test_a_data_root_is_made_for_its_owner(tmp_path: Path) -> None:
    """It will hold rollouts and weights; one that an operator has opened stays open."""
    make_token_file(tmp_path / "new" / "root")
    assert (tmp_path / "new/root").stat().st_mode & 0o777 == 0o700
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o755)
    make_token_file(tmp_path / "shared")
    assert (tmp_path / "shared").stat().st_mode & 0o777 == 0o755


def test_rays_own_variables_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    with ray_token_file(tmp_path / "ours"):
        assert os.environ["RAY_AUTH_TOKEN_PATH"] == str(tmp_path / "ours")
    assert "RAY_AUTH_TOKEN_PATH" not in os.environ
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "theirs")
    with ray_token_file(tmp_path / "ours"):
        assert os.environ["RAY_AUTH_TOKEN_PATH"] == "theirs"
    assert os.environ["RAY_AUTH_TOKEN_PATH"] == "theirs"
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "theirs")
    with ray_token_file(tmp_path / "ours"):
        assert "RAY_AUTH_TOKEN_PATH" not in os.environ


def test_rays_folder_is_closed_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder that all may write to, another user may have been there first."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    inner = make_ray_folder()
    folder = inner.parent
    assert folder.parent == tmp_path
    assert folder.stat().st_mode & 0o777 == 0o700
    try_make_directory_shared(str(inner))
    assert make_ray_folder() == inner
    folder.chmod(0o701)
    with pytest.raises(RatoonError, match=r"ray\.temp_folder"):
        make_ray_folder()
    inner.rmdir()
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(RatoonError, match=r"ray\.temp_folder"):
        make_ray_folder()


class Node:
    """What Ray has of the processes that it has started."""

    def __init__(self, *ended: str) -> None:
        self._ended = ended

    def dead_processes(self) -> list[tuple[str, object]]:
        return [(name, None) for name in self._ended]


@pytest.mark.parametrize(
    ("ended", "missed"),
    [((), []), (("agent",), []), (("raylet", "agent", "gcs_server"), ["raylet", "gcs_server"])],
)
def test_of_rays_processes_those_that_it_cannot_do_without_are_missed(
    ended: tuple[str, ...], missed: list[str]
) -> None:
    """A service whose raylet had gone answered nobody and was never started again."""
    local = LocalRay.__new__(LocalRay)
    vars(local)["_node"] = Node(*ended)
    assert local.ended_processes() == missed


def _session(folder: Path, name: str) -> Path:
    made = folder / f"session_{name}"
    (made / "logs").mkdir(parents=True)
    return made


def test_folders_of_killed_services_do_not_add_up(tmp_path: Path) -> None:
    """Every start left one for ever; the last is kept for its logs, and others' are not ours."""
    make_token_file(tmp_path)
    others = _session(tmp_path / "ray", "of-another")
    mine = [_session(tmp_path / "ray", str(index)) for index in range(4)]
    for folder in mine:
        SessionFolders(tmp_path).begin(folder)
    assert [folder.exists() for folder in mine] == [False, False, True, True]
    assert others.exists()


def test_a_session_goes_with_its_link(tmp_path: Path) -> None:
    ended, other = _session(tmp_path, "1"), _session(tmp_path, "2")
    latest = tmp_path / "session_latest"
    latest.symlink_to(ended)
    remove_session(ended)
    assert not latest.is_symlink()
    assert not ended.exists()
    latest.symlink_to(other)
    # Neither what is no session, nor where a link leads.
    remove_session(tmp_path / "elsewhere")
    remove_session(latest)
    assert other.exists()


@pytest.mark.e2e
@pytest.mark.more
def test_a_ray_of_our_own_is_small_closed_and_leaves_nothing(tmp_path: Path) -> None:
    """Each service left its sockets and logs in /tmp, for good."""
    code = (
        "import os, sys; from pathlib import Path; import grpc, psutil, ray;"
        "from ratoon.config import RatoonConfig;"
        "from ratoon.cluster.local_ray import connect_ray, ended_processes, leave_ray;"
        "from ratoon.log import ShownLogs;"
        "connect_ray(RatoonConfig(data_root=Path(sys.argv[1])), shown=ShownLogs.ALL);"
        "say = ray.remote(lambda: print('said by a worker'));"
        "ray.get(say.remote());"
        "nice = ray.remote(lambda: os.nice(0));"
        "assert ray.get(nice.remote()) == os.nice(0);"
        "context = ray.get_runtime_context();"
        "print(ended_processes());"
        "children = psutil.Process().children(recursive=True);"
        "names = sorted({' '.join(child.cmdline())[:300] for child in children});"
        "print(sum('dashboard.py' in n or 'monitor.py' in n for n in names), len(children) > 2);"
        "call = '/ray.rpc.NodeInfoGcsService/GetAllNodeInfo';"
        "stranger = grpc.insecure_channel(context.gcs_address).unary_unary(call);"
        "print(stranger.future(b'', timeout=60).code().name);"
        "print(ray._private.worker._global_node.get_session_dir_path());"
        "leave_ray();"
        "print([c.pid for c in psutil.wait_procs(children, timeout=20)[1]])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    ended, processes, refusal, folder, left = done.stdout.splitlines()
    assert (ended, processes, left) == ("[]", "0 True", "[]")
    assert refusal == "UNAUTHENTICATED"
    assert "said by a worker" in done.stderr
    assert Path(folder).name.startswith("session_")
    assert not Path(folder).exists()


def _append(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def test_whole_lines_are_copied_once_with_the_actor_that_wrote_them(tmp_path: Path) -> None:
    stream = io.StringIO()
    logs = RayLogs(tmp_path, stream, ShownLogs.ALL)
    worker = tmp_path / "worker-0a1b-01000000-77.err"
    _append(worker, ":job_id:01000000\n:actor_name:EngineActor\none\ntw")
    logs.copy()
    assert stream.getvalue() == "(EngineActor pid=77) one\n"
    _append(worker, "o\n\n")
    _append(tmp_path / "worker-0c-ffffffff-78.out", "early\n")
    logs.copy()
    logs.copy()
    lines = ["(EngineActor pid=77) one", "(EngineActor pid=77) two", "(pid=78) early"]
    assert stream.getvalue().splitlines() == lines


def test_other_files_are_not_shown_and_one_that_shrank_is_read_again(tmp_path: Path) -> None:
    stream = io.StringIO()
    logs = RayLogs(tmp_path, stream, ShownLogs.ALL)
    _append(tmp_path / "gcs_server.out", "chatter\n")
    _append(tmp_path / "python-core-worker-1.log", "chatter\n")
    raylet = tmp_path / "raylet.err"
    _append(raylet, "a first failure\n")
    logs.copy()
    raylet.write_text("another\n")
    logs.copy()
    assert stream.getvalue().splitlines() == ["(raylet) a first failure", "(raylet) another"]


def test_what_is_written_until_the_stop_is_copied(tmp_path: Path) -> None:
    stream = io.StringIO()
    logs = RayLogs(tmp_path, stream, ShownLogs.ALL)
    logs.start()
    _append(tmp_path / "worker-1-2-3.out", "the last words\n")
    logs.stop()
    assert stream.getvalue() == "(pid=3) the last words\n"


EVENT = (
    '{"component": "run", "policy_id": "p", "seq": 3, "kind": "update", "state": "done",'
    ' "version": 2, "loss": -0.0123456, "clip": 0.25, "warnings": ["lag"],'
    ' "event": "operation ended", "level": "warning", "timestamp": "2026-11-28T12:00:00Z"}'
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("shown", [ShownLogs.OWN, ShownLogs.ALL])
def test_ray_and_serve_speak_of_themselves_only_where_asked(
    tmp_path: Path, shown: ShownLogs
) -> None:
    """Events of the service's own processes are whole lines of JSON, or short on a terminal."""
    piped, terminal = io.StringIO(), Terminal()
    logs = [RayLogs(tmp_path, piped, shown), RayLogs(tmp_path, terminal, shown)]
    serve = tmp_path / "worker-0a-01000000-5.err"
    _append(serve, f":actor_name:ServeController\nWARNING nodes\n{EVENT}\n")
    _append(tmp_path / "raylet.err", "a node\n")
    _append(tmp_path / "worker-0b-01000000-6.err", ":actor_name:WorkerActor\nSegmentation fault\n")
    for log in logs:
        log.copy()
    inner = {"(raylet) a node", "(ServeController pid=5) WARNING nodes"}
    own = {EVENT, "(WorkerActor pid=6) Segmentation fault"}
    assert {*piped.getvalue().splitlines()} == own | (inner if shown is ShownLogs.ALL else set())
    said = "p #3 update, v2, loss -0.0123, clip 25.0%, warnings: lag"
    assert said in re.sub(r"\x1b\[\d+m", "", terminal.getvalue())
    assert "component" not in terminal.getvalue()
