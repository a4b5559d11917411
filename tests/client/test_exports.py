"""Steps in experiment trackers: each once, whatever is interrupted, through their own libraries."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from ratoon_client import RatoonClient
from ratoon_client.cli import export, history
from ratoon_client.cli.export import ExportError, TensorBoard
from ratoon_client.cli.steps import Step
from tests.client.ctl import Ctl
from tests.client.fake_service import FakeService

RUN = "p-19700101T000000Z"


@pytest.fixture
def wire() -> str:
    return "grpc"


@pytest.fixture
def ctl(url: str, capsys: pytest.CaptureFixture[str]) -> Ctl:
    return Ctl(url, capsys)


def events_of(folder: Path) -> list[tuple[int, dict[str, float]]]:
    """Step and values of every record, by TensorBoard's own reader."""
    loader = import_module("tensorboard.backend.event_processing.event_file_loader")
    events = [
        event
        for file in sorted(folder.glob("events.*"))
        for event in loader.LegacyEventFileLoader(str(file)).Load()
    ]
    return [
        (event.step, {value.tag: value.simple_value for value in event.summary.value})
        for event in events
        if event.HasField("summary")
    ]


def _end_steps(service: FakeService, *seqs: int) -> None:
    for seq in seqs:
        service.step(seq, {"loss": seq / 2, "seconds.forward": 0.25})


def test_tensorboard_gets_each_step_once_over_several_exports(
    service: FakeService, ctl: Ctl, tmp_path: Path
):
    _end_steps(service, 1, 2)
    status, out, _ = ctl("log", "p", "--tensorboard", str(tmp_path))
    assert (status, len(out.splitlines())) == (0, 3)
    _end_steps(service, 5)
    service.mark(6, 9)
    _end_steps(service, 7)
    assert len(ctl("log", "p", "--tensorboard", str(tmp_path), "--jsonl")[1].splitlines()) == 2
    assert ctl("log", "p", "--tensorboard", str(tmp_path))[1].count("\n") == 1
    found = events_of(tmp_path / RUN)
    assert [step for step, _ in found] == [1, 2, 5, 7]
    assert found[2][1] == {"loss": 2.5, "seconds/forward": 0.25, "version": 3.0, "warnings": 0.0}


def test_a_record_that_was_cut_is_sent_again(service: FakeService, ctl: Ctl, tmp_path: Path):
    """A process that is killed while it writes leaves half a record, which readers leave out."""
    _end_steps(service, 1, 2, 3)
    ctl("log", "p", "--tensorboard", str(tmp_path))
    (file,) = (tmp_path / RUN).iterdir()
    os.truncate(file, file.stat().st_size - 5)
    ctl("log", "p", "--tensorboard", str(tmp_path))
    assert [step for step, _ in events_of(tmp_path / RUN)] == [1, 2, 3]


def test_a_policy_of_the_same_name_has_a_run_of_its_own(
    service: FakeService, ctl: Ctl, tmp_path: Path
):
    """Its seqs begin at 1 again, behind which the first one's run already is."""
    for created_at in (0, 86400):
        service.policies["p"].created_at = created_at
        _end_steps(service, 1, 2)
        ctl("log", "p", "--tensorboard", str(tmp_path))
    assert sorted(each.name for each in tmp_path.iterdir()) == [RUN, "p-19700102T000000Z"]
    assert all(len(events_of(each)) == 2 for each in tmp_path.iterdir())


class Flaky:
    """A target that keeps what it got, half of a batch too, and fails for a while."""

    def __init__(self, kept: list[int], failures: list[str]) -> None:
        if failures and failures[-1] == "open":
            raise ExportError(failures.pop())
        self.last_seq = max(kept, default=0)
        self._kept, self._failures = kept, failures

    def write(self, steps: Sequence[Step]) -> None:
        for step in steps:
            if self._failures and step.seq % 2 == 0:
                raise ExportError(self._failures.pop())
            self._kept.append(step.seq)

    def close(self) -> None:
        pass


def test_a_target_that_is_away_gets_what_it_missed_and_nothing_twice(
    service: FakeService,
    client: RatoonClient,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    """The service's history is the buffer: nothing is held here meanwhile."""
    monkeypatch.setattr(history, "_PAUSE_S", 0.01)
    kept: list[int] = []
    failures = ["write", "open", "open", "write"]
    _end_steps(service, 1, 2, 3)
    threading.Timer(0.5, _end_steps, (service, 4, 5)).start()
    printed: list[int] = []

    def write(step: Step) -> None:
        printed.append(step.seq)
        if step.seq == 5:
            raise KeyboardInterrupt

    opened: Callable[[], Any] = lambda: Flaky(kept, failures)  # noqa: E731
    with pytest.raises(KeyboardInterrupt):
        history._export(client, client.get_policy("p"), opened, (), write, is_following=True)
    assert kept == [1, 2, 3, 4, 5]
    assert failures == []
    assert printed[-2:] == [4, 5]
    assert "again in" in capsys.readouterr().err
    failures.append("open")
    with pytest.raises(ExportError):
        history._export(client, client.get_policy("p"), opened, (), write, is_following=False)


def test_a_step_reaches_a_file_within_a_second(
    service: FakeService, client: RatoonClient, tmp_path: Path
):
    _end_steps(service, 1)
    ended: list[float] = []
    threading.Timer(0.6, lambda: (_end_steps(service, 2), ended.append(time.monotonic()))).start()

    def write(step: Step) -> None:
        assert events_of(tmp_path / RUN)[-1][0] == step.seq
        if step.seq == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        history._export(
            client,
            client.get_policy("p"),
            lambda: TensorBoard(str(tmp_path), RUN),
            (),
            write,
            is_following=True,
        )
    assert time.monotonic() - ended[0] < 1.0


def test_a_tracker_that_is_not_installed_or_one_too_many_is_refused_by_name(
    ctl: Ctl, monkeypatch: pytest.MonkeyPatch
):
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(export, "import_module", missing)
    for tracker in ("tensorboard", "wandb", "mlflow", "trackio"):
        status, _, err = ctl("log", "p", f"--{tracker}", "x")
        assert status == 2
        assert f"pip install 'ratoon-client[{tracker}]'" in err
    status, _, err = ctl("log", "p", "--wandb", "x", "--mlflow", "y")
    assert (status, "--wandb and --mlflow" in err) == (2, True)


def _mlflow_rows(folder: Path) -> list[tuple[int, float]]:
    client = import_module("mlflow").MlflowClient(tracking_uri=f"file:{folder}")
    (run,) = client.search_runs([client.get_experiment_by_name("ratoon").experiment_id])
    assert run.info.run_name == RUN
    return [(row.step, row.value) for row in client.get_metric_history(run.info.run_id, "loss")]


def _trackio_rows(folder: Path) -> list[tuple[int, float]]:
    """Read by another process: the library reads the name of its folder when it is imported."""
    code = (
        "import json; from trackio.sqlite_storage import SQLiteStorage; "
        f"print(json.dumps(SQLiteStorage.get_logs('curves', {RUN!r})))"
    )
    environment = os.environ | {"TRACKIO_DIR": str(folder)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return [(row["step"], row["loss"]) for row in json.loads(done.stdout)]


def _log_records(data: bytes) -> Iterator[bytes]:
    """Records of a log in LevelDB's format, behind 7 bytes of wandb's own."""
    place, parts = 7, b""
    while place + 7 <= len(data):
        left = -place % 32768
        _, length, kind = struct.unpack_from("<IHB", data, place)
        if 0 < left < 7 or not kind:
            place += left or 32768
            continue
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # Whole, or the last of several.
            yield parts
            parts = b""


def _wandb_rows(folder: Path) -> list[tuple[int, float]]:
    """Rows of every file that an offline run has, which `wandb sync` would send."""
    record_type = import_module("wandb.proto.wandb_internal_pb2").Record
    rows: list[tuple[int, float]] = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for record in map(record_type.FromString, _log_records(file.read_bytes())):
            if record.HasField("history"):
                items = {item.key or item.nested_key[0]: item for item in record.history.item}
                values = {name: json.loads(item.value_json) for name, item in items.items()}
                rows.append((values["_step"], values["loss"]))
    return rows


TRACKERS: dict[str, tuple[str, Callable[[Path], list[tuple[int, float]]]]] = {
    "mlflow": ("file:{}", _mlflow_rows),
    "trackio": ("curves", _trackio_rows),
    "wandb": ("curves", _wandb_rows),
}


@pytest.mark.more
@pytest.mark.parametrize("tracker", list(TRACKERS))
def test_a_tracker_gets_each_step_once_over_several_exports(
    service: FakeService,
    url: str,
    tmp_path: Path,
    tracker: str,
    monkeypatch: pytest.MonkeyPatch,
):
    """Each export is a process of its own, as the library may have state in its process."""
    place, rows = TRACKERS[tracker]
    environment = os.environ | {
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "TRACKIO_DIR": str(tmp_path),
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
    }
    words = ["--url", url, "log", "p", f"--{tracker}", place.format(tmp_path), "--jsonl"]
    for seqs in ((1, 2), (5,), ()):
        _end_steps(service, *seqs)
        done = subprocess.run(
            [sys.executable, "-c", "from ratoon_client.cli import main; main()", *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert [json.loads(line)["seq"] for line in done.stdout.splitlines()] == list(seqs)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    assert rows(tmp_path) == [(1, 0.5), (2, 1.0), (5, 2.5)]
