"""How processes of a Ray of this machine start: workers as forks, others as Ray starts them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ratoon.cluster import worker_start
from ratoon.cluster.worker_start import FORKED, ForkServer

# What a process of Ray would run: it tells what it was started with.
_SCRIPT = """
import json, os, signal, sys
json.dump({
    "command": sys.argv, "folder": sys.path[0], "parent": os.getppid(), "group": os.getpgrp(),
    "modules": [name for name in ("torch", "transformers", "ray") if name in sys.modules],
    "num_threads": len(os.listdir("/proc/self/task")),
    "variables": dict(os.environ), "score": open("/proc/self/oom_score_adj").read(),
    "waits_for_children": signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL,
    "chance": sys.modules["numpy"].random.random() if "numpy" in sys.modules else 0,
    "is_main": __name__ == "__main__",
}, sys.stdout)
"""


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A session's folder, and beside it the scripts of Ray."""
    folder = tmp_path_factory.mktemp("ray") / "session"
    (folder / "sockets").mkdir(parents=True)
    (folder / "default_worker.py").write_text(_SCRIPT)
    (folder / "setup_worker.py").write_text("import sys\nprint('set up', *sys.argv[1:])\n")
    return folder


@pytest.fixture(scope="module")
def server(session: Path) -> Iterator[subprocess.Popen[bytes]]:
    started = ForkServer()
    started.listen(session)
    yield started.process
    started.end()


def arguments(session: Path, **variables: str) -> list[str]:
    """As Ray gives them."""
    options = [f"--temp-dir={session.parent}", f"--session-name={session.name}"]
    command = ["-s", str(session / "default_worker.py"), *options, "--language=PYTHON"]
    if not variables:
        return command
    context = {"command_prefix": [], "env_vars": variables}
    return [*command, f"--serialized-runtime-env-context={json.dumps(context)}"]


def launched(asked: list[str]) -> str:
    """What the process says that is started."""
    launcher = [sys.executable, worker_start.__file__, *asked]
    done = subprocess.run(
        launcher, capture_output=True, text=True, check=True, process_group=0, timeout=300
    )
    return done.stdout


def forked(session: Path) -> dict[str, Any]:
    return json.loads(launched(arguments(session, **{FORKED: "1", "OWN": "2"})))


def test_a_worker_is_a_fork_that_is_as_if_it_was_started(
    session: Path, server: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_RAY", "1")
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    one, other = forked(session), forked(session)
    assert one["parent"] == other["parent"] == server.pid
    assert one["modules"] == ["torch", "transformers"]
    assert one["num_threads"] == 1
    script = str(session / "default_worker.py")
    assert one["command"] == [script, *arguments(session)[2:4]]
    assert (one["folder"], one["is_main"]) == (str(session), True)
    assert (one["variables"]["OF_RAY"], one["variables"]["OWN"]) == ("1", "2")
    assert "OPENBLAS_NUM_THREADS" not in one["variables"]
    assert one["waits_for_children"]
    # Its launcher's, which has ended: Ray ends a process with its group.
    assert one["group"] not in (os.getpgrp(), os.getpgid(server.pid), other["group"])
    assert one["chance"] != other["chance"]


def test_a_fork_is_as_likely_to_be_killed_for_memory_as_its_launcher(
    session: Path, server: subprocess.Popen[bytes]
) -> None:
    assert server.poll() is None
    own = Path("/proc/self/oom_score_adj")
    before = int(own.read_text())
    code = (
        "import sys; from pathlib import Path; from ratoon.cluster.worker_start import launch;"
        f"Path('/proc/self/oom_score_adj').write_text('{before + 7}'); launch(sys.argv[1:])"
    )
    asked = arguments(session, **{FORKED: "1"})
    done = subprocess.run(
        [sys.executable, "-c", code, *asked],
        stdout=subprocess.PIPE,
        check=True,
        process_group=0,
        timeout=300,
    )
    assert int(json.loads(done.stdout)["score"]) == before + 7


def test_a_process_that_has_begun_cuda_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = tmp_path / "device"
    monkeypatch.setattr(worker_start, "_CUDA", str(device))
    with device.open("wb"):
        assert worker_start._has_begun_cuda()
    assert not worker_start._has_begun_cuda()


def test_other_processes_start_as_ray_starts_them(
    session: Path, server: subprocess.Popen[bytes]
) -> None:
    plain = json.loads(launched(arguments(session)))
    assert plain["parent"] == os.getpid() != server.pid
    assert plain["modules"] == []
    assert plain["command"] == [str(session / "default_worker.py"), *arguments(session)[2:4]]
    asked = arguments(session, OWN="2")
    assert launched(asked) == f"set up {' '.join(asked)}\n"


def test_a_worker_starts_without_a_server(tmp_path: Path, session: Path) -> None:
    """Where there is none, and where it dies while it imports."""
    own = tmp_path / "s"
    (own / "sockets").mkdir(parents=True)
    for name in ("default_worker.py", "setup_worker.py"):
        (own / name).write_text((session / name).read_text())
    asked = arguments(own, **{FORKED: "1"})
    assert launched(asked).startswith("set up -s ")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(worker_start._address(own))
        listener.listen()
        launcher = [sys.executable, worker_start.__file__, *asked]
        with subprocess.Popen(launcher, stdout=subprocess.PIPE, text=True) as process:
            listener.accept()[0].close()
            assert process.stdout is not None
            assert process.stdout.read().startswith("set up -s ")


def test_the_server_ends_once_its_standard_input_is_closed(
    server: subprocess.Popen[bytes],
) -> None:
    """As it is when the process that started it ends, in whichever way. The last of this file."""
    assert server.poll() is None
    assert server.stdin is not None
    server.stdin.close()
    assert server.wait(300) == 0
