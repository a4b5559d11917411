"""`ratoonctl update` and `watch`; an operation that fails makes the command fail."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from ratoon_client.blocking import OperationHandle
from ratoon_client.cli.context import Seq, open_client, show
from ratoon_client.errors import InvalidArgumentError
from ratoon_client.jsonl import read_jsonl
from ratoon_client.operation import describe
from ratoon_client.rollouts import Group
from ratoon_client.values import Loss, Optim
from ratoon_proto.types import AdvantageKindName, LossKindName, Operation, StepResult

LearningRate = Annotated[
    float, typer.Option("--learning-rate", "--lr", help="Learning rate of this step.", min=0.0)
]


def update(
    context: typer.Context,
    policy_id: str,
    file: Annotated[
        Path,
        typer.Argument(
            help="Groups as JSON lines, one group per line.", exists=True, dir_okay=False
        ),
    ],
    learning_rate: LearningRate,
    loss: Annotated[LossKindName, typer.Option(help="Kind of loss: see docs/api.md.")] = "grpo",
    advantage: Annotated[
        AdvantageKindName | None,
        typer.Option(help="Default: the loss's."),
    ] = None,
    old_logprobs: Annotated[
        Literal["sampler", "given", "on_policy"] | None,
        typer.Option(help="Default: the loss's."),
    ] = None,
    clip_low: Annotated[
        float | None, typer.Option(help="Default: the loss's.", min=0.0, max=1.0)
    ] = None,
    clip_high: Annotated[float | None, typer.Option(help="Default: the loss's.", min=0.0)] = None,
    entropy_coefficient: Annotated[
        float, typer.Option(help="Coefficient of the entropy term; 0: none.")
    ] = 0.0,
    allow_truncated_sampling: Annotated[
        bool, typer.Option(help="Allow log-probs sampled under top-p or top-k in a ratio.")
    ] = False,
    weight_decay: Annotated[
        float | None, typer.Option(help="Default: the policy's.", min=0.0)
    ] = None,
    max_grad_norm: Annotated[
        float | None,
        typer.Option(help="Global norm to clip to; 0: none. Default: the service's.", min=0.0),
    ] = None,
    byte_tokens: Annotated[
        bool, typer.Option("--byte-tokens", help="Read texts of the file as one token per byte.")
    ] = False,
    seq: Seq = None,
    wait: Annotated[bool, typer.Option(help="Wait until the operation has ended.")] = True,
) -> None:
    """Update a policy once, on the groups of a file.

    The command takes the policy's next seq. Unless the policy has sequencing "server", a session
    that trains it meanwhile then gets KEY_REUSED until its resync().
    """
    groups = _read(file, byte_tokens=byte_tokens)
    loss_config = Loss(
        loss,
        advantage=advantage,
        old_logprobs=old_logprobs,
        clip_low=clip_low,
        clip_high=clip_high,
        entropy_coefficient=entropy_coefficient,
        allow_truncated_sampling=allow_truncated_sampling,
    )
    optim = Optim(
        learning_rate=learning_rate, weight_decay=weight_decay, max_grad_norm=max_grad_norm
    )
    with open_client(context) as client:
        handle = client.policy(policy_id).update(groups, loss=loss_config, optim=optim, seq=seq)
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
                typer.echo(line, err=True)
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
