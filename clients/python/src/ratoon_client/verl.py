"""verl's actor with its forwards and updates done by the service. Imports verl and torch.

`actor_rollout_ref.actor._target_=ratoon_client.verl.RatoonActorConfig` is all that a run changes:
verl keeps its trainer, rollouts, rewards and advantages; a mini-batch becomes one Update, and
log-probs become one Forward. Invariant: what verl's configuration does not describe, and what an
Update cannot express, is refused and never approximated.
"""

# Where verl is not installed, its classes have no type.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import json
import tempfile
import uuid
import weakref
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig
from torch import Tensor, nn
from verl.utils import tensordict_utils
from verl.utils.fsdp_utils import replace_lora_wrapper
from verl.workers.config import FSDPActorConfig
from verl.workers.engine.base import BaseEngine, BaseEngineCtx, EngineRegistry
from verl.workers.engine.fsdp import FSDPEngine
from verl.workers.utils.losses import ppo_loss

from ratoon_client.blocking import PolicySession, RatoonClient
from ratoon_client.config import default_url
from ratoon_client.errors import InvalidArgumentError
from ratoon_client.rollouts import Row, groups_of, rollout
from ratoon_client.values import Publish
from ratoon_client.verl_config import (
    adamw_of,
    check_actor,
    check_model,
    check_processes,
    dtype_of,
    lora_of,
    loss_of,
    optim_of,
)
from ratoon_client.verl_weights import Published, RatoonCheckpointEngine, device_tensors
from ratoon_proto.types import StepReport

_STATE_FILE = "ratoon.json"
_GIVEN = {"old_log_probs": "old_logprobs", "ref_log_prob": "reference_logprobs"}
_SHOWN = {
    "actor/pg_loss": "policy_gradient_loss",
    "actor/entropy_loss": "entropy",
    "kl_loss": "kl",
    "ratoon/packed_tokens": "packed_tokens",
    "ratoon/token_reduction": "token_reduction",
    "ratoon/update_norm": "update_norm",
}


@dataclass
class RatoonActorConfig(FSDPActorConfig):
    """verl's configuration of an actor, or of a reference, whose parameters are a policy's.

    Attributes:
        ratoon_url: The service. "": `RATOON_URL`, or one on this machine.
        policy_options: Fields of the policy's PolicySpec. The model is sent, unless `model_folder`
            names one that the service has.

    Raises:
        InvalidArgumentError: A setting has no counterpart in an Update. verl makes this object
            before it starts anything.
    """

    ratoon_url: str = ""
    policy_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # verl's configuration freezes its fields, and an engine knows no actor.
        object.__setattr__(self, "strategy", "ratoon")
        super().__post_init__()
        check_actor(self)
        object.__setattr__(self.engine, "ratoon_actor", self)

    def validate(self, n_gpus: int, train_batch_size: int, model_config: Any = None) -> None:
        """As verl's; raises InvalidArgumentError for several processes, or for such a model."""
        super().validate(n_gpus, train_batch_size, model_config)
        check_processes(n_gpus)
        check_model(model_config or {})


@EngineRegistry.register("language_model", backend="ratoon", device=["cpu", "cuda", "npu"])
class RatoonEngine(BaseEngine):
    """An engine that has no parameters: they are a policy's, created before its first use.

    Args:
        model_config: verl's HFModelConfig; the files of `local_path` are sent.
        engine_config: That of a RatoonActorConfig.
        optimizer_config: verl's FSDPOptimizerConfig, which nothing is read of if `engine_config`
            says `forward_only`.
        checkpoint_config: Unused: a checkpoint is the policy's.

    Raises:
        InvalidArgumentError: The model has no counterpart, or there are several processes.
    """

    is_param_offload_enabled = is_optimizer_offload_enabled = False

    def __init__(
        self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any
    ) -> None:
        if torch.distributed.is_initialized():
            check_processes(torch.distributed.get_world_size())
        check_model(model_config)
        self.mode: str | None = None
        # What verl makes a schedule from.
        self.rank, self.optimizer_config = 0, optimizer_config
        self._model_folder = Path(model_config.local_path)
        self._is_trained = not engine_config.forward_only
        self._lora = lora_of(model_config) if self._is_trained else None
        # Whether rollouts take the adapter as a part of the whole model.
        self._is_merged = bool((model_config.get("lora") or {}).get("merge"))
        self._use_reference = False
        self._actor: RatoonActorConfig = engine_config.ratoon_actor
        self._schedule = self._new_schedule() if self._is_trained else None
        self._policy_id = f"verl-{uuid.uuid4().hex[:8]}"
        self._url = self._actor.ratoon_url or default_url()
        self._client: Any = None
        self._session: Any = None
        self._version = self._num_updates = 0
        # What verl copies of the parameters, and would restore: which version they are.
        self.module = nn.Module()
        self.module.register_parameter(
            "version", nn.Parameter(torch.zeros((), dtype=torch.int64), requires_grad=False)
        )
        self._grad_norm = float("nan")
        self._mirror = tempfile.TemporaryDirectory(prefix="ratoon-")
        if self._is_trained:
            RatoonCheckpointEngine.source = weakref.WeakMethod(self.published)

    def initialize(self) -> None:
        """Connect; the policy is not created yet, as verl may load a checkpoint first."""
        self._client = RatoonClient(self._url)

    def _begin(self) -> PolicySession:
        """The policy's session; without a policy it is created from the model's folder."""
        if self._session is None:
            options: dict[str, Any] = {
                "optimizer": adamw_of(self.optimizer_config) if self._is_trained else None,
                "dtype": dtype_of(self._actor.engine),
                **self._actor.policy_options,
            }
            if self._lora is not None:
                publish = options.get("publish") or Publish()
                options |= {
                    "lora": self._lora,
                    "publish": replace(publish, merged=self._is_merged),
                    "reference": "base",
                }
            if options.get("model_folder") is None:
                options["send_folder"] = self._model_folder
            self._client.create_policy(self._policy_id, **options).result()
            self._session = self._client.policy(self._policy_id)
        return self._session

    def forward_backward_batch(
        self, data: Any, loss_function: Any, forward_only: bool = False
    ) -> dict[str, Any]:
        """Log-probs of a batch, or one Update of it with the step that `optimizer_step` reports.

        Raises:
            InvalidArgumentError: The loss is no configured one of verl's, or the batch is none of
                text alone.
        """
        if forward_only:
            return self._forward(data)
        actor = _actor_config(loss_function)
        loss = loss_of(actor)
        rows = rows_of(data, with_values=True, kind=str(loss.kind))
        asked = tensordict_utils.get(data, "global_batch_size", len(rows))
        if int(asked) != len(rows):
            raise InvalidArgumentError("global_batch_size", str(asked), f"{len(rows)}, the rows")
        assert self._schedule is not None, "verl trains no engine that only runs forward"
        optim = optim_of(actor, learning_rate=self._schedule.get_last_lr()[0])
        self._num_updates += 1
        groups = groups_of(rows, name=str(self._num_updates))
        done = self._begin().update(groups, loss=loss, optim=optim).result()
        self._reach(done.version)
        report = done.report
        nan = float("nan")
        self._grad_norm = nan if report.grad_norm is None else report.grad_norm
        return {
            "model_output": {},
            "loss": [nan if report.loss is None else report.loss],
            "metrics": _metrics(report),
        }

    def _reach(self, version: int) -> None:
        self._version = version
        self.module.get_parameter("version").fill_(version)

    def _forward(self, data: Any) -> dict[str, Any]:
        wanted = int(self.module.get_parameter("version"))
        if wanted != self._version:
            raise InvalidArgumentError(
                "trainer.v1.separate_async.parameter_sync_step",
                f"log-probs of version {wanted} after {self._version}",
                "1, or algorithm.rollout_correction.bypass_mode",
            )
        rows = rows_of(data, with_values=False)
        # Answers are in the order of the groups' rollouts, which prompts have rearranged.
        first: dict[tuple[int, ...], int] = {}
        for index, (prompt, _) in enumerate(rows):
            first.setdefault(prompt, index)
        order = sorted(range(len(rows)), key=lambda index: first[rows[index][0]])
        with_entropy = bool(tensordict_utils.get(data, "calculate_entropy", False))
        groups = groups_of(rows, name="forward")
        forward = self._begin().forward(
            groups, with_entropy=with_entropy, use_reference=self._use_reference
        )
        result = forward.result()
        offsets = data["input_ids"].offsets().cpu()
        outputs = {"log_probs": _nested(offsets, order, result.logprobs)}
        if result.entropy is not None:
            outputs["entropy"] = _nested(offsets, order, result.entropy)
        return {"model_output": outputs, "loss": [1.0], "metrics": {}}

    def optimizer_zero_grad(self) -> None:
        """Nothing: an Update begins with no gradient."""

    def optimizer_step(self) -> float:
        """The gradient norm of the step that was taken with the batch."""
        return self._grad_norm

    def _new_schedule(self) -> Any:
        """verl's schedule, over an optimizer of one number that has no gradient."""
        optimizer = torch.optim.SGD([torch.zeros(())], lr=self.optimizer_config.lr)
        return FSDPEngine._build_lr_scheduler(self, optimizer)

    def lr_scheduler_step(self) -> float:
        assert self._schedule is not None, "an engine that only runs forward has no schedule"
        self._schedule.optimizer.step()
        self._schedule.step()
        return self._schedule.get_last_lr()[0]

    @contextmanager
    def disable_adapter(self) -> Generator[None]:
        """Within the context log-probs are those of the model without its adapter."""
        self._use_reference = self._lora is not None
        try:
            yield
        finally:
            self._use_reference = False

    def get_per_tensor_param(
        self, base_sync_done: bool = False, **_: Any
    ) -> tuple[Iterable[tuple[str, Tensor]], dict[str, Any] | None]:
        """Parameters of the version of the last step, by their names in the model's files.

        Args:
            base_sync_done: Of an adapter that is not merged: whether its factors are asked for, and
                not what it stands on.

        Returns:
            Pairs of name and tensor, which are read as they are taken, and peft's configuration of
            an adapter that is not merged.
        """
        if self._lora is None or self._is_merged:
            return self._parameters(), None
        folder = self._pull()
        stored = LoraConfig.from_json_file(str(folder / "adapter_config.json"))
        config = LoraConfig.from_peft_type(**stored)
        if base_sync_done:
            return device_tensors(folder), config.to_dict()
        base = device_tensors(self._model_folder)
        named = ((replace_lora_wrapper(name, config), value) for name, value in base)
        return named, config.to_dict()

    def _parameters(self) -> Generator[tuple[str, Tensor]]:
        yield from device_tensors(self._pull())

    def _pull(self) -> Path:
        self._begin()
        root = self._mirror.name
        return self._client.pull_weights(self._policy_id, root, self._version).folder

    def published(self) -> Published:
        """The version of the last step, which rollouts pull with the checkpoint engine `ratoon`.

        Raises:
            InvalidArgumentError: It is an adapter alone.
        """
        if self._lora is not None and not self._is_merged:
            raise InvalidArgumentError(
                "actor_rollout_ref.model.lora.merge",
                "False",
                "True: a checkpoint engine brings rollouts whole models",
            )
        self._begin()
        return Published(url=self._url, policy_id=self._policy_id, version=self._version)

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **_: Any,
    ) -> None:
        """Save the policy's checkpoint `step-N`, and name it in `local_path`/ratoon.json."""
        name = f"step-{global_step}"
        # One more than verl has: its newest is whole before ours is.
        keep_last = max_ckpt_to_keep + 1 if max_ckpt_to_keep else 0
        self._begin().save_checkpoint(name, overwrite=True, keep_last=keep_last).result()
        steps = 0 if self._schedule is None else self._schedule.last_epoch
        state = {"policy_id": self._policy_id, "checkpoint_id": name, "schedule_steps": steps}
        folder = Path(local_path)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _STATE_FILE).write_text(json.dumps(state) + "\n")

    def load_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        del_local_after_load: bool = True,
        **_: Any,
    ) -> None:
        """Bring the policy that `local_path` names back to its checkpoint.

        Raises:
            InvalidArgumentError: The folder has no checkpoint of this engine.
        """
        try:
            state = json.loads((Path(local_path) / _STATE_FILE).read_text())
            policy_id, name = str(state["policy_id"]), str(state["checkpoint_id"])
            steps = int(state["schedule_steps"])
        except (OSError, ValueError, KeyError, TypeError) as err:
            expected = f"a checkpoint of this engine, with {_STATE_FILE}"
            raise InvalidArgumentError("trainer.resume_from_path", local_path, expected) from err
        session = self._client.policy(policy_id)
        self._reach(session.load_checkpoint(name).result().version)
        self._policy_id, self._session = policy_id, session
        self._schedule = self._new_schedule()
        for _step in range(steps):
            self.lr_scheduler_step()

    def train_mode(self, **kwargs: Any) -> AbstractContextManager[Any]:
        return BaseEngineCtx(self, "train", **kwargs)  # pyright: ignore[reportReturnType]

    def eval_mode(self, **kwargs: Any) -> AbstractContextManager[Any]:
        return BaseEngineCtx(self, "eval", **kwargs)  # pyright: ignore[reportReturnType]

    def get_data_parallel_size(self) -> int:
        return 1

    def get_data_parallel_rank(self) -> int:
        return 0

    def get_data_parallel_group(self) -> Any:
        return torch.distributed.group.WORLD if torch.distributed.is_initialized() else None

    def is_mp_src_rank_with_outputs(self) -> bool:
        return True


def _actor_config(loss_function: Any) -> Any:
    """The ActorConfig of verl's configured loss. Raises InvalidArgumentError for another."""
    if (
        isinstance(loss_function, partial)
        and loss_function.func is ppo_loss
        and not loss_function.args
        and loss_function.keywords.keys() == {"config"}
    ):
        return loss_function.keywords["config"]
    inner = loss_function.func if isinstance(loss_function, partial) else loss_function
    got = getattr(inner, "__name__", repr(inner))
    raise InvalidArgumentError("loss_fn", got, "verl's ppo_loss, which policy_loss configures")


def rows_of(data: Any, *, with_values: bool, kind: str = "") -> list[Row]:
    """The rows of one of verl's batches, each with its prompt, in their order.

    Args:
        data: verl's TensorDict without padding: `input_ids` nested, per-token values of responses
            nested or padded on the right.
        with_values: Whether rollouts have advantages, log-probs and the loss's mask.
        kind: The loss's. gspo takes one advantage of a whole rollout.

    Weights of a rollout correction multiply every token's loss, and so its advantage.

    Raises:
        InvalidArgumentError: A row has images, or gspo several advantages.
    """
    if any(tensordict_utils.get(data, "multi_modal_inputs", ())):
        raise InvalidArgumentError("multi_modal_inputs", "images", "rows of text alone")
    temperature = tensordict_utils.get(data, "temperature", 1.0)
    rows: list[Row] = []
    for index, (ids, length) in enumerate(_sequences(data)):
        prompt, response = ids[: len(ids) - length], ids[len(ids) - length :]
        values: dict[str, Any] = {"temperature": _number(temperature, index)}
        if with_values:
            mask = _value(data, "response_mask", index, length).astype(bool)
            advantages = _value(data, "advantages", index, length)
            if "rollout_is_weights" in data:
                advantages = advantages * _value(data, "rollout_is_weights", index, length)
            trained = advantages[mask]
            if kind == "gspo" and trained.size and np.ptp(trained):
                raise InvalidArgumentError(
                    f"advantages[{index}]", "several values", "one, with gspo"
                )
            values |= {"loss_mask": mask, "advantages": np.where(mask, advantages, 0)}
            for theirs, name in _GIVEN.items():
                if theirs in data and not (kind == "reinforce" and name == "old_logprobs"):
                    values[name] = _value(data, theirs, index, length)
        else:
            values["reward"] = 0.0
        rows.append((tuple(prompt.tolist()), rollout(response=response, **values)))
    return rows


def _sequences(data: Any) -> list[tuple[np.ndarray[Any, Any], int]]:
    """Token ids of each row, and how many of them are its response."""
    ids, responses = data["input_ids"], data["responses"]
    if responses.is_nested:
        lengths = responses.offsets().diff().tolist()
    else:
        width = responses.shape[1]
        lengths = data["attention_mask"][:, -width:].sum(-1).tolist()
    return [(one.cpu().numpy(), int(n)) for one, n in zip(ids.unbind(), lengths, strict=True)]


def _value(data: Any, name: str, index: int, length: int) -> np.ndarray[Any, Any]:
    value = data[name]
    row = value.unbind()[index] if value.is_nested else value[index]
    return row[:length].detach().float().cpu().numpy()


def _number(value: Any, index: int) -> float:
    """A number of a batch, or of each of its rows."""
    if isinstance(value, Tensor):
        return float(value.flatten()[index if value.numel() > 1 else 0])
    return float(value)


def _nested(offsets: Tensor, order: Sequence[int], values: Sequence[Any]) -> Tensor:
    """Values of responses as verl has them: nested, at the position that predicts the token."""
    flat = torch.zeros(int(offsets[-1]))
    for index, found in zip(order, values, strict=True):
        end = int(offsets[index + 1]) - 1
        flat[end - len(found) : end] = torch.from_numpy(np.array(found, np.float32))
    return torch.nested.nested_tensor_from_jagged(flat, offsets)


def _metrics(report: StepReport) -> Mapping[str, list[float]]:
    found = {name: getattr(report, name_here) for name, name_here in _SHOWN.items()}
    low, high = report.clip_fraction_low, report.clip_fraction_high
    found["actor/pg_clipfrac"] = None if low is None or high is None else low + high
    return {name: [float(value)] for name, value in found.items() if value is not None}
