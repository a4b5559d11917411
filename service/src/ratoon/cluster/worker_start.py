"""Starts the processes of a Ray of this machine. Workers are forks of one that has imported torch.

Ray runs this file in place of its own `setup_worker.py`. A process whose runtime environment is
`WORKER_ENVIRONMENT` is asked of the fork server, which has imported torch and transformers: that
takes seconds, and a fork milliseconds. Other processes, and those that the server does not start,
start as Ray starts them.

The server imports nothing of Ray, which reads its settings where it is imported, and does not
begin CUDA, which works in no fork of a process that has; so a worker imports torch's compiler
itself, which begins it. The server has one thread, as a fork has no others. It ends when its
standard input is closed.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess  # nosec B404
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

FORKED = "RATOONFORKED"
# With a workspace of this size cuBLAS is reproducible, and deterministic torch requires it.
# Expandable segments fragment less when most memory is in use; torch reads this where it is
# imported. Which GPUs there are is asked of the driver's library: with CUDA itself, as libraries
# ask it where flash-attn is installed, a process has chosen its GPUs before its ranks are told to
# see all.
GPU_ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
# Variables of workers, which their ranks take over, and of a sampler.
WORKER_ENVIRONMENT = {FORKED: "1", **GPU_ENVIRONMENT}
_HOST = "ratoon.engine.worker.host"
_TRAINER = "ratoon.train.trainer"
_SERVE = "--serve"
_CONTEXT, _LANGUAGE = "--serialized-runtime-env-context=", "--language="
_TAKEN = b"taken"
_LISTENS = b"!"
_MOST_BYTES = 2**20
_CUDA = "/dev/nvidia-uvm"
_OOM_SCORE = Path("/proc/self/oom_score_adj")


class ForkServer:
    """The server's process, which imports from here on: a Ray may start meanwhile."""

    def __init__(self) -> None:
        # OpenBLAS has threads otherwise.
        alone = {"OPENBLAS_NUM_THREADS": "1", **GPU_ENVIRONMENT}
        self._listener = _socket()
        number = self._listener.fileno()
        self.process = subprocess.Popen(  # nosec B603
            [sys.executable, "-P", "-m", __name__, _SERVE, str(number)],
            stdin=subprocess.PIPE,
            env=os.environ | alone,
            pass_fds=[number],
        )

    def listen(self, session_folder: Path) -> None:
        """Have it asked by the processes of the Ray with this session folder. It answers once it
        has torch."""
        address = _address(session_folder)
        with self._listener as listener:
            listener.bind(address)
            Path(address).chmod(0o600)
            listener.listen()
        # Where it has ended, processes start as Ray starts them.
        with suppress(BrokenPipeError):
            os.write(cast("Any", self.process.stdin).fileno(), _LISTENS)

    def end(self) -> None:
        """End the process; its forks stay."""
        self._listener.close()
        with self.process as process:
            process.kill()


def launch(arguments: list[str]) -> None:
    """Start the process of these arguments of `setup_worker.py`, as a fork or in place of this."""
    command = [each for each in arguments if not each.startswith((_CONTEXT, _LANGUAGE))]
    contexts = [each for each in arguments if each.startswith(_CONTEXT)]
    # Flags of Python come first.
    script = next(number for number, each in enumerate(command) if not each.startswith("-"))
    if contexts:
        variables = json.loads(contexts[0].removeprefix(_CONTEXT))["env_vars"]
        if FORKED in variables and _is_forked(command[script:], os.environ | variables):
            return
        command = [str(Path(command[script]).with_name("setup_worker.py")), *arguments]
    os.execv(sys.executable, [sys.executable, *command])  # nosec B606


def _is_forked(command: list[str], variables: dict[str, str]) -> bool:
    """Whether the server starts the process."""
    options = dict(each.removeprefix("--").split("=", 1) for each in command if "=" in each)
    # On macOS there is neither such a socket nor such a file.
    with suppress(OSError), _socket() as server:
        asked = {
            "command": command,
            "variables": variables,
            "group": os.getpgrp(),
            "oom_score": _OOM_SCORE.read_text("ascii"),
        }
        server.connect(_address(Path(options["temp-dir"], options["session-name"])))
        socket.send_fds(server, [json.dumps(asked).encode()], [0, 1, 2])
        if server.recv(len(_TAKEN)) == _TAKEN:
            # Ray knows the process by this one's group, which the fork joins before it lets go.
            server.recv(1)
            return True
    return False


def serve(listener: socket.socket) -> None:
    """Fork what `launch` asks for. Returns in each fork, which then is the process asked for."""
    from ratoon.garbage import frozen_imports

    # As all processes that Ray starts.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    # Nobody waits for a fork's end.
    of_children = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with frozen_imports():
        importlib.import_module(_HOST)
        importlib.import_module(_TRAINER)
    num_threads = len(list(Path("/proc/self/task").iterdir()))
    if num_threads > 1 or "ray" in sys.modules or _has_begun_cuda():
        sys.exit(f"fork server: {num_threads} threads, expected one, no Ray and no CUDA")
    if not os.read(sys.stdin.fileno(), len(_LISTENS)):
        sys.exit()
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        with listener.accept()[0] as launcher, suppress(ConnectionError):
            message, descriptors, _, _ = socket.recv_fds(launcher, _MOST_BYTES, 3)
            launcher.send(_TAKEN)
            if os.fork() == 0:
                listener.close()
                signal.signal(signal.SIGCHLD, of_children)
                _become(json.loads(message), descriptors)
                return
            for each in descriptors:
                os.close(each)
    sys.exit()


def _has_begun_cuda() -> bool:
    """Whether anything in this process has initialised CUDA, which keeps this device open."""
    opened = [*Path("/proc/self/fd").iterdir()]
    # One of them was the listing itself.
    return any(each.is_symlink() and str(each.readlink()) == _CUDA for each in opened)


def _become(asked: dict[str, Any], descriptors: list[int]) -> None:
    os.setpgid(0, asked["group"])
    _OOM_SCORE.write_text(asked["oom_score"], "ascii")
    for number, each in enumerate(descriptors):
        os.dup2(each, number)
        os.close(each)
    os.environ.clear()
    os.environ.update(asked["variables"])
    sys.argv[:] = asked["command"]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    # Python's own generator has been seeded by the fork.
    sys.modules["numpy"].random.seed()


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _address(session_folder: Path) -> str:
    """Beside Ray's own sockets, whose names are longer."""
    return str(session_folder / "sockets" / "forks")


if __name__ == "__main__":
    if sys.argv[1] == _SERVE:
        serve(socket.socket(fileno=int(sys.argv[2])))
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        launch(sys.argv[1:])
