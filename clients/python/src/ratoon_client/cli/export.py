"""Where `ratoonctl log` sends steps: experiment trackers, each by its own library.

The step axis is the operation's seq, which never repeats. A target says itself which seq it has
last, so that neither side keeps a record that could differ. A run of a tracker is one life of a
policy: its id and the time of its creation.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from ratoon_client.cli.steps import Step
from ratoon_client.errors import InvalidArgumentError, RatoonClientError
from ratoon_proto.types import Policy

# Most metrics of one call to MLflow.
_MLFLOW_METRICS = 1000
_EXPERIMENT = "ratoon"


class ExportError(RatoonClientError):
    """A target did not take steps. What it has it keeps, and it may be opened again."""


class Target(Protocol):
    """A run of a tracker, open for more steps."""

    @property
    def last_seq(self) -> int:
        """The seq of the newest step that the run has; 0: it has none."""
        ...

    def write(self, steps: Sequence[Step]) -> None:
        """Add steps behind `last_seq`, oldest first. Raises ExportError."""
        ...

    def close(self) -> None:
        """Write out what is on its way. Raises ExportError."""
        ...


def run_name(policy: Policy) -> str:
    """Name of a policy's run, which another policy of the same id does not have."""
    return f"{policy.spec.policy_id}-{policy.created_at:%Y%m%dT%H%M%SZ}"


def scalars(step: Step) -> dict[str, float]:
    """What a tracker gets of a step; figures of a part are grouped, as `seconds/forward`."""
    figures = {name.replace(".", "/"): value for name, value in step.figures.items()}
    return figures | {"version": float(step.version), "warnings": float(len(step.warnings))}


class TensorBoard:
    """Event files in `folder`/`run`; each step is one record, whole or absent."""

    def __init__(self, folder: str, run: str) -> None:
        with _installed("tensorboard"):
            library: Any = import_module("tensorboard.summary.writer.event_file_writer")
            self._event: Any = import_module("tensorboard.compat.proto.event_pb2").Event
        own = Path(folder) / run
        with _refusals("tensorboard", OSError):
            files = sorted(own.glob("events.out.tfevents.*"))
            self.last_seq = max((self._last_step(file) for file in files), default=0)
            self._writer: Any = library.EventFileWriter(str(own))

    def write(self, steps: Sequence[Step]) -> None:
        """Add one record a step."""
        with _refusals("tensorboard", OSError):
            for step in steps:
                event = self._event(step=step.seq, wall_time=step.finished_at)
                for name, value in scalars(step).items():
                    event.summary.value.add(tag=name, simple_value=value)
                self._writer.add_event(event)
                self.last_seq = step.seq
            self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        with _refusals("tensorboard", OSError):
            self._writer.close()

    def _last_step(self, file: Path) -> int:
        """The step of the last whole record: length, its checksum, the record, its checksum."""
        size, start, last = file.stat().st_size, 0, (0, 0)
        with file.open("rb") as stream:
            while len(head := stream.read(12)) == 12:
                (length,) = struct.unpack_from("<Q", head)
                stop = start + length + 16
                if stop > size:
                    break
                last, start = (start + 12, length), stop
                stream.seek(start)
            stream.seek(last[0])
            return self._event.FromString(stream.read(last[1])).step


class Mlflow:
    """A run of the experiment `ratoon` at a tracking URI."""

    def __init__(self, uri: str, run: str) -> None:
        with _installed("mlflow"):
            library: Any = import_module("mlflow")
            self._metric: Any = import_module("mlflow.entities").Metric
        self._error: type[Exception] = library.exceptions.MlflowException
        with _refusals("mlflow", self._error, OSError):
            self._client: Any = library.MlflowClient(tracking_uri=uri)
            known = self._client.get_experiment_by_name(_EXPERIMENT)
            experiment = (
                known.experiment_id if known else self._client.create_experiment(_EXPERIMENT)
            )
            found = self._client.search_runs([experiment], f"tags.`ratoon.run` = '{run}'")
            opened = (
                found[0]
                if found
                else self._client.create_run(experiment, run_name=run, tags={"ratoon.run": run})
            )
            self._run_id = opened.info.run_id
            self.last_seq = int(opened.data.metrics.get("seq", 0))

    def write(self, steps: Sequence[Step]) -> None:
        """Add whole steps, as many in a call as MLflow takes; `seq` is the last metric of each."""
        batch: list[Any] = []
        for step in steps:
            values = scalars(step) | {"seq": float(step.seq)}
            if len(batch) + len(values) > _MLFLOW_METRICS:
                self._send(batch)
                batch = []
            at_ms = int(step.finished_at * 1000)
            batch += [self._metric(name, value, at_ms, step.seq) for name, value in values.items()]
        self._send(batch)

    def close(self) -> None:
        """Leave the run as it is: more steps may come."""

    def _send(self, batch: Sequence[Any]) -> None:
        if not batch:
            return
        with _refusals("mlflow", self._error, OSError):
            self._client.log_batch(self._run_id, metrics=batch)
        self.last_seq = batch[-1].step


class Wandb:
    """A run of a Weights & Biases project, which that library buffers and sends by itself.

    Offline there is no server that knows what a run has: a file beside the run's own says it.
    """

    def __init__(self, project: str, run: str) -> None:
        with _installed("wandb"):
            library: Any = import_module("wandb")
        self._error: type[Exception] = library.Error
        with _refusals("wandb", self._error, OSError):
            self._run: Any = library.init(
                project=project,
                id=run,
                name=run,
                resume="allow",
                settings=library.Settings(console="off", x_disable_stats=True, save_code=False),
            )
            own = Path(self._run.settings.wandb_dir)
            self._mark = own / f"ratoon-{project}-{run}.seq"
            told = self._run.summary.get("seq") or 0
            kept = self._mark.read_text("utf-8") if self._mark.exists() else "0"
            self.last_seq = max(int(told), int(kept))

    def write(self, steps: Sequence[Step]) -> None:
        """Hand over one row a step."""
        with _refusals("wandb", self._error, OSError):
            for step in steps:
                row = scalars(step) | {"seq": step.seq}
                self._run.log(row, step=step.seq, commit=True)
                self.last_seq = step.seq
            self._mark.write_text(str(self.last_seq), "utf-8")

    def close(self) -> None:
        """Wait until everything has been sent, or lies in the run's folder."""
        with _refusals("wandb", self._error, OSError):
            self._run.finish()


class Trackio:
    """A run of a Trackio project, on this machine or where TRACKIO_SPACE_ID says."""

    def __init__(self, project: str, run: str) -> None:
        with _installed("trackio"):
            self._library: Any = import_module("trackio")
        with _refusals("trackio", RuntimeError, ValueError, OSError), redirect_stdout(sys.stderr):
            self._run: Any = self._library.init(
                project=project,
                name=run,
                resume="allow",
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
            )
            # The step behind the last one that a resumed run has; there is no other way to ask.
            self.last_seq = max(0, int(self._run._next_step) - 1)

    def write(self, steps: Sequence[Step]) -> None:
        """Hand over one row a step."""
        with _refusals("trackio", RuntimeError, ValueError, OSError):
            for step in steps:
                self._run.log(scalars(step), step=step.seq)
                self.last_seq = step.seq

    def close(self) -> None:
        """Wait until everything has been written."""
        with _refusals("trackio", RuntimeError, OSError), redirect_stdout(sys.stderr):
            self._library.finish()


@contextmanager
def _installed(name: str) -> Generator[None]:
    """Import a tracker inside. Raises InvalidArgumentError that says how it is installed."""
    try:
        yield
    except ModuleNotFoundError as err:
        expected = f"its library: pip install 'ratoon-client[{name}]'"
        raise InvalidArgumentError(f"--{name}", f"no module {err.name}", expected) from err


@contextmanager
def _refusals(name: str, *kinds: type[Exception]) -> Generator[None]:
    """Errors of these kinds as ExportErrors."""
    try:
        yield
    except kinds as err:
        raise ExportError(f"{name} did not take it: {type(err).__name__}: {err}") from err
