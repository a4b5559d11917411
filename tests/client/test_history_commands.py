"""What `ratoonctl` shows of a policy's steps and operations."""

from __future__ import annotations

import csv
import json
import math
import threading
import time
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ratoon_client import RatoonApiError, RatoonClient, RatoonClientError
from ratoon_client.cli import history, runs, steps
from ratoon_client.cli.steps import Step, follow_steps, read_steps
from ratoon_proto.v1 import operation_pb2
from ratoon_proto.v1.rollout_pb2 import KeptRollout
from ratoon_proto.v1.training_pb2 import Offender, StepReport, StepWarning
from tests.client.ctl import Ctl
from tests.client.fake_service import FakeService, Fault, LostAnswerError, RefusalError

ESCAPE = "\x1b]0;owned\x07"


@pytest.fixture
def wire() -> str:
    return "grpc"


@pytest.fixture
def ctl(url: str, capsys: pytest.CaptureFixture[str]) -> Ctl:
    return Ctl(url, capsys)


@pytest.fixture
def lived(service: FakeService) -> FakeService:
    """Three steps, the second with a warning, and a rollback before the third."""
    service.step(1, reward_mean=0.25, loss=0.5)
    service.step(2, reward_mean=0.5, loss=0.25, warnings=["sampler_kl"])
    service.policies["p"].version = 1
    service.mark(3, operation_pb2.OPERATION_KIND_LOAD_CHECKPOINT)
    service.step(4, loss=0.125)
    return service


def test_runs_has_a_line_a_policy(lived: FakeService, ctl: Ctl):
    lived.began_at = time.time() - 4 - 7205
    lived.policies["q"] = type(lived.policies["p"])(failure=f"lost {ESCAPE}")
    status, out, _ = ctl("runs")
    assert status == 0
    head, first, second = (line.split() for line in out.splitlines())
    assert head[:3] == ["policy", "state", "version"]
    assert first == ["p", "ready", "2", "4", "0.5", "2", "h", "2:", "sampler_kl"]
    assert second[:2] == ["q", "ready:"]
    assert "\x1b" not in out
    assert r"\x1b]0;owned\x07" in out
    one, other = ctl.json("runs")
    assert (one["figures"]["loss"], one["rewards"]) == (0.125, [0.25, 0.5])
    assert (other["step"], other["finished_at"]) == (None, None)


def test_a_policy_deleted_while_it_is_listed_has_no_line(lived: FakeService, ctl: Ctl):
    lived.faults = [Fault(name="ListSteps", error=RefusalError("POLICY_NOT_FOUND"))]
    assert ctl.json("runs") == []
    lived.faults = [Fault(name="ListSteps", error=RefusalError("POLICY_NOT_FOUND"))]
    assert "ratoonctl policies create" in ctl("runs")[2]


def test_top_draws_runs_curves_and_what_runs(lived: FakeService, client: RatoonClient, ctl: Ctl):
    lived.is_holding = True
    ctl("policies", "create", "busy", "--preset", "tiny")
    operation = next(iter(lived.operations.values()))
    operation.state = operation_pb2.OPERATION_STATE_RUNNING
    drawn = StringIO()
    Console(file=drawn, width=160).print(runs._screen(client, "http://here", 160))
    assert "▁█" in drawn.getvalue()
    assert "create_policy running" in drawn.getvalue()
    lived.faults = [Fault(name="ListPolicies", error=RefusalError("UNAUTHENTICATED"))]
    drawn = StringIO()
    Console(file=drawn, width=160).print(runs._screen(client, "http://here", 160))
    assert "UNAUTHENTICATED" in drawn.getvalue()
    assert ctl("top")[0] == 2


@pytest.mark.usefixtures("lived")
@pytest.mark.parametrize("width", [160, 80, 60, 40])
def test_top_leaves_columns_out_where_a_terminal_is_narrow(
    client: RatoonClient, width: int
) -> None:
    """Red before: every column was cut to a letter or two."""
    drawn = StringIO()
    Console(file=drawn, width=width).print(runs._screen(client, "http://here", width))
    assert "…" not in drawn.getvalue()
    (head,) = [
        line for line in drawn.getvalue().splitlines() if "policy" in line and "state" in line
    ]
    assert "reward" in head
    assert ("loss" in head) == (width == 160)


def test_a_log_in_a_terminal_has_the_figures_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red before: every line of seven figures was folded."""
    assert history._room(37) is None
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    for columns, figures in (("120", 6), ("80", 3), ("40", 1)):
        monkeypatch.setenv("COLUMNS", columns)
        assert history._room(37) == figures


@pytest.mark.usefixtures("lived")
def test_a_refused_log_prints_no_head(ctl: Ctl) -> None:
    for form in ((), ("--csv",)):
        status, out, err = ctl("log", "nosuch", *form)
        assert (status, out) == (1, "")
        assert "POLICY_NOT_FOUND" in err


@pytest.mark.parametrize(
    ("seconds", "text"), [(-5, "0 s"), (119, "119 s"), (120, "2 min"), (7200, "2 h"), (2e5, "2 d")]
)
def test_an_age_is_in_its_unit(seconds: float, text: str):
    assert runs.age(seconds) == text


@pytest.mark.parametrize(
    ("values", "text"), [([], ""), ([2.0, 2.0], "▁▁"), ([0.0, 1.0, 0.5], "▁█▅")]
)
def test_a_curve_spans_its_values(values: list[float], text: str):
    assert runs.curve(values) == text


@pytest.mark.usefixtures("lived")
def test_log_prints_every_step_as_a_table_json_lines_or_csv(ctl: Ctl):
    status, out, _ = ctl("log", "p")
    table = [line.split() for line in out.splitlines()]
    assert status == 0
    assert [row[:2] for row in table[1:]] == [["1", "1"], ["2", "2"], ["3", "1"], ["4", "2"]]
    assert table[2][4:6] == ["0.5", "0.25"]
    assert table[2][-1] == "sampler_kl"
    assert table[3][2] == "load_checkpoint"
    assert table[4][4:6] == ["-", "0.125"]

    lines = [json.loads(line) for line in ctl("log", "p", "--jsonl")[1].splitlines()]
    assert [line["seq"] for line in lines] == [1, 2, 3, 4]
    assert (lines[1]["reward_mean"], lines[1]["warnings"]) == (0.5, ["sampler_kl"])
    assert (lines[2]["kind"], lines[2]["finished_at"]) == ("load_checkpoint", None)
    assert "reward_mean" not in lines[3]

    rows = list(csv.DictReader(StringIO(ctl("log", "p", "--csv", "--after-seq", "1")[1])))
    assert [row["seq"] for row in rows] == ["2", "3", "4"]
    assert (rows[0]["loss"], rows[2]["reward_mean"], rows[0]["warnings"]) == (
        "0.25",
        "",
        "sampler_kl",
    )
    chosen = ctl("log", "p", "--csv", "--figures", "loss")[1].splitlines()[0]
    assert chosen == "seq,version,kind,finished_at,loss,skip_reason,warnings"
    assert ctl("log", "p", "--csv", "--jsonl")[0] == 2
    assert ctl("log", "nobody")[0] == 1


def test_a_csv_has_a_column_for_every_figure_of_a_report():
    """The header is written before the first step, and a later step may have one more."""
    names = steps.figure_names()
    assert {"loss", "skipped", "staleness_max", "seconds.forward"} <= set(names)
    assert not {"warnings", "seconds", "skip_reason", "routers"} & set(names)


def test_a_long_life_is_read_whole_a_range_at_a_time(
    service: FakeService, client: RatoonClient, monkeypatch: pytest.MonkeyPatch
):
    """An answer joins steps where there are more than it may have points."""
    monkeypatch.setattr(steps, "_WINDOW", 10)
    seqs = [*range(1, 28), *range(95, 101)]
    for seq in seqs:
        service.step(seq, loss=float(seq))
    policy = client.get_policy("p")
    found = [step for batch in read_steps(client, policy, after_seq=0) for step in batch]
    assert [step.seq for step in found] == seqs
    assert [step.figures["loss"] for step in found] == seqs
    behind = [step.seq for batch in read_steps(client, policy, after_seq=26) for step in batch]
    assert behind == seqs[26:]


def test_a_step_is_told_within_a_second_and_once(lived: FakeService, client: RatoonClient):
    told: list[str] = []
    following = follow_steps(client, client.get_policy("p"), after_seq=2, tell=told.append)
    assert [step.seq for step in next(following)] == [3, 4]
    lived.faults = [Fault(name="GetPolicy", error=RefusalError("UNAVAILABLE", retryable=True))] * 4
    began = time.monotonic()
    threading.Timer(0.5, lived.step, (5,), {"loss": 1.0}).start()
    assert [step.seq for step in next(following)] == [5]
    assert time.monotonic() - began < 1.5
    del lived.policies["p"]
    with pytest.raises(RatoonApiError, match="POLICY_NOT_FOUND"):
        next(following)


def test_a_service_that_is_away_is_asked_again(
    lived: FakeService, hasty_client: RatoonClient, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(steps, "_LOOK_S", 0.01)
    told: list[str] = []
    policy = hasty_client.get_policy("p")
    following = follow_steps(hasty_client, policy, after_seq=0, tell=told.append)
    assert next(following)[-1].seq == 4
    lost = [Fault(name="GetPolicy", error=LostAnswerError()) for _ in range(200)]
    lived.faults = list(lost)
    threading.Timer(1.3, lambda: (lived.faults.clear(), lived.step(5))).start()
    assert [step.seq for step in next(following)] == [5]
    assert "again in" in told[0]


def test_a_policy_made_anew_is_not_taken_for_the_old_one(
    lived: FakeService, client: RatoonClient, monkeypatch: pytest.MonkeyPatch
):
    """Its seqs begin again: a follower would wait for the old one's next."""
    monkeypatch.setattr(steps, "_LOOK_S", 0.01)
    following = follow_steps(client, client.get_policy("p"), after_seq=0, tell=print)
    next(following)
    lived.policies["p"].created_at = 5
    with pytest.raises(RatoonClientError, match="created anew"):
        next(following)


def test_operations_are_listed_and_shown(service: FakeService, ctl: Ctl, tmp_path: Path):
    path = tmp_path / "groups.jsonl"
    rollout = {"response": [2], "sampler_logprobs": [-0.5], "reward": 1.0}
    path.write_text(json.dumps({"group_id": "a", "prompt": [1], "rollouts": [rollout]}))
    for _ in range(3):
        assert ctl("update", "p", str(path), "--lr", "0.1")[0] == 0
    ctl("checkpoints", "save", "p")
    listed: Any = ctl.json("operations", "list", "p")
    assert [each["seq"] for each in listed] == [4, 3, 2, 1]
    asked = ("operations", "list", "--kind", "update", "--state", "done", "--limit", "2")
    assert [each["seq"] for each in ctl.json(*asked)] == [3, 2]
    assert [each["seq"] for each in ctl.json("operations", "list", "--seq", "2")] == [2]
    service.fail("op-1", RefusalError(f"WORKER_LOST{ESCAPE}"))
    status, out, _ = ctl("operations", "show", "op-1")
    assert (status, "\x1b" in out, "WORKER_LOST" in out) == (0, False, True)
    status, out, _ = ctl("operations", "show", "op-2")
    assert (status, "token_reduction" in out, "loss" in out) == (0, True, True)
    assert "\x1b" not in ctl("operations", "list")[1]


def test_an_error_of_the_service_is_shown_without_escapes(service: FakeService, ctl: Ctl):
    service.faults = [Fault(name="GetPolicy", error=RefusalError(f"NO{ESCAPE}"))]
    status, _, err = ctl("policies", "get", "p")
    assert (status, "\x1b" in err, r"\x1b" in err) == (1, False, True)


def test_rollouts_of_a_step_are_listed_worst_first_and_one_is_shown(service: FakeService, ctl: Ctl):
    service.policies["p"].kept = [
        KeptRollout(group=0, rollout=0, group_id="easy", gap_max=0.1, response_tokens=9),
        KeptRollout(group=0, rollout=1, group_id="none", response_tokens=3),
        KeptRollout(
            group=1,
            rollout=0,
            group_id=f"[red]{ESCAPE}",
            reward=1e6,
            gap_max=3.5,
            gap_max_token=1,
            prompt_tokens=1,
            response_tokens=3,
            tokens=[7, 8, 9, 10],
            texts=["<b>", "one ", ESCAPE, "three"],
            gaps=[0.5, -3.5, math.nan],
            ratios=[1.0, 33.0, math.nan],
            trained=[True, True, False],
            truncated=True,
        ),
    ]
    status, out, _ = ctl("rollouts", "p", "4")
    rows = [line.split() for line in out.splitlines()]
    assert status == 0
    assert [row[:2] for row in rows[1:]] == [["1", "0"], ["0", "0"], ["0", "1"]]
    assert "\x1b" not in out
    assert r"[red]\x1b]0;owned\x07" in out
    by_length = ctl.json("rollouts", "p", "4", "--by", "length", "--limit", "1")
    assert [each["group_id"] for each in by_length] == ["easy"]
    status, out, _ = ctl("rollouts", "p", "4", "1", "0")
    assert (status, "\x1b" in out) == (0, False)
    assert r"<b>one \x1b]0;owned\x07three" in out
    worst = [line.split() for line in out.splitlines()[-2:]]
    assert [[row[0], row[1], row[-3]] for row in worst] == [["1", "9", "-3.5"], ["0", "8", "0.5"]]
    assert ctl("rollouts", "p", "4", "9", "9")[0] == 1
    assert ctl("rollouts", "p", "4", "1")[0] == 2


def test_a_warning_names_its_offenders(service: FakeService, ctl: Ctl):
    service.step(1)
    operation = service._new_operation(operation_pb2.OPERATION_KIND_UPDATE, "p", seq=1)
    named = [Offender(group=3, group_id="q-3", rollout=17, token=5, value=2.5)]
    warning = StepWarning(kind="sampler_kl", message="the log-probs are wrong", offenders=named)
    report = StepReport(loss=0.5, warnings=[warning])
    service._finish(operation, step=operation_pb2.StepResult(version=1, report=report))
    out = ctl("operations", "show", "op-1")[1]
    assert "the log-probs are wrong" in out
    assert "group 3 (q-3), rollout 17, token 5: 2.5" in out
    assert "the log-probs are wrong" in ctl("operations", "list")[1]


@pytest.mark.usefixtures("lived")
def test_a_step_without_marks_is_an_update(client: RatoonClient):
    (found,) = read_steps(client, client.get_policy("p"), after_seq=0)
    assert [(step.seq, step.kind, step.is_step) for step in found] == [
        (1, "update", True),
        (2, "update", True),
        (3, "load_checkpoint", False),
        (4, "update", True),
    ]
    assert isinstance(found[0], Step)
