"""`ratoonctl update` and `watch`; an operation that fails makes the command fail."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ratoon_client.blocking import OperationHandle
from ratoon_client.cli.context import Seq, open_client, printable, show
from ratoon_client.cli.options import MessageOptions, takes
from ratoon_client.errors import InvalidArgumentError
from ratoon_client.jsonl import read_jsonl
from ratoon_client.operation import describe
from ratoon_client.rollouts import Group
from ratoon_proto.types import LossConfig, Operation, OptimStepConfig, StepResult
from ratoon_proto.v1 import training_pb2

LOSS = MessageOptions(
    message=training_pb2.LossConfig,
    title="Loss",
    names={"kind": "loss", "old_logprobs.forward_operation_id": "forward-operation-id"},
    bounds={
        "clip_low": (0, 1),
        "entropy_coefficient": (None, None),
        "kl.coefficient": (None, None),
    },
    defaults={"kind": "grpo"},
)
OPTIM = MessageOptions(
    message=training_pb2.OptimStepConfig,
    title="Optimizer step",
    also={"learning_rate": "--lr"},
)


@takes(LOSS, OPTIM)
def update(
    context: typer.Context,
    policy_id: str,
    file: Annotated[
        Path,
        typer.Argument(help="Groups as JSON lines, one a line.", exists=True, dir_okay=False),
    ],
    byte_tokens: Annotated[
        bool, typer.Option("--byte-tokens", help="Read texts of the file as one token per byte.")
    ] = False,
    seq: Seq = None,
    wait: Annotated[bool, typer.Option(help="Wait until the operation has ended.")] = True,
    **options: Any,
) -> None:
    """Update a policy once, on the groups of a file.

    A line of the file: {"group_id": "a", "prompt": [1, 2], "rollouts": [{"response": [3],
    "sampler_logprobs": [-0.5], "reward": 1.0}]}, with the arguments of rollout() by name.

    The command takes the policy's next seq. Unless the policy has sequencing "server", a session
    that trains it meanwhile then gets KEY_REUSED until its resync().
    """
    groups = _read(file, byte_tokens=byte_tokens)
    loss = LOSS.value(LossConfig, LOSS.given(options))
    optim = OPTIM.value(OptimStepConfig, OPTIM.given(options))
    with open_client(context) as client:
        handle = client.policy(policy_id).update(groups, loss=loss, optim=optim, seq=seq)
        if wait:
            _show_step(context, handle)
        else:
            state = handle.status()
            show(context, state, _operation_fields(state))


def watch(context: typer.Context, operation_id: str) -> None:
    """Follow an operation to its end."""
    with open_client(context) as client:
        handle = client.operation(operation_id)
        last = ""
        for state in handle.watch():
            progress = state.progress
            line = f"{describe(state)} {progress.micro_batches_done}"
            line += f"/{progress.micro_batches_planned} micro-batches"
            if line != last:
                typer.echo(printable(line), err=True)
            last = line
        final = handle.wait()
        show(context, final, _operation_fields(final))
        handle.result()


def _read(file: Path, *, byte_tokens: bool) -> list[Group]:
    try:
        return read_jsonl(file, byte_tokens=byte_tokens)
    except InvalidArgumentError as err:
        raise InvalidArgumentError(f"{file}: {err.field}", err.got, err.expected) from err
    except (OSError, UnicodeDecodeError) as err:
        raise InvalidArgumentError(str(file), str(err), "a file of JSON lines") from err


def _show_step(context: typer.Context, handle: OperationHandle[StepResult]) -> None:
    step = handle.result(progress=sys.stderr.isatty())
    report = step.report
    fields: dict[str, object] = {
        "operation": handle.operation_id,
        "seq": handle.seq,
        "version": step.version,
        "skipped": report.skip_reason or report.skipped,
        "loss": report.loss,
        "reward": report.reward_mean,
        "gradient norm": report.grad_norm,
        "trained tokens": report.trained_tokens,
        "token reduction": report.token_reduction,
        "tokens/s": report.tokens_per_second,
        "warnings": "; ".join(map(str, report.warnings)) or None,
    }
    show(context, {"operation_id": handle.operation_id, "seq": handle.seq, "step": step}, fields)


def _operation_fields(operation: Operation) -> dict[str, object]:
    return {
        "operation": operation.operation_id,
        "policy": operation.policy_id,
        "kind": operation.kind,
        "seq": operation.seq,
        "state": operation.state,
        "waits for seq": operation.blocked_by_seq or None,
        "version": operation.step.version if operation.step is not None else None,
        "error": operation.error.message if operation.error is not None else None,
    }
