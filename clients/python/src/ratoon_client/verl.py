"""verl's training engine with its forwards and updates done by the service.

Importing this module registers the strategy `ratoon`: `actor.strategy=ratoon`, with
`model.external_lib=ratoon_client.verl`. verl keeps its trainer, rollouts, rewards and advantages; a
mini-batch becomes one Update, and log-probs become one Forward. Invariant: a batch whose loss is
none that verl's configuration describes never reaches the service.
"""

# Where verl is not installed, its engine has no type.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import json
import tempfile
import uuid
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from verl.utils import tensordict_utils
from verl.utils.torch_functional import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
)
from verl.workers.engine.base import BaseEngine, BaseEngineCtx, EngineRegistry
from verl.workers.utils.losses import ppo_loss

from ratoon_client.blocking import RatoonClient
from ratoon_client.config import default_url
from ratoon_client.errors import InvalidArgumentError
from ratoon_client.rollouts import Row, groups_of, rollout
from ratoon_client.verl_config import adamw_of, loss_of, optim_of
from ratoon_client.weights.hf_module import read_tensors
from ratoon_proto.types import StepReport

_STATE_FILE = "ratoon.json"
_DTYPES = {"float32": "float32", "fp32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16"}
_GIVEN = {"old_log_probs": "old_logprobs", "ref_log_prob": "reference_logprobs"}
_SHOWN = {
    "actor/pg_clipfrac": "clip_fraction_high",
    "actor/entropy_loss": "entropy",
    "kl_loss": "kl",
    "ratoon/token_reduction": "token_reduction",
    "ratoon/update_norm": "update_norm",
}


@EngineRegistry.register("language_model", backend="ratoon", device=["cpu", "cuda", "npu"])
class RatoonEngine(BaseEngine):
    """An engine that has no parameters: they are a policy's, of the service at `RATOON_URL`.

    Args:
        model_config: verl's HFModelConfig; `local_path` is sent when the policy is created.
        engine_config: verl's; `dtype` is the policy's.
        optimizer_config: verl's FSDPOptimizerConfig. None, of an engine that only runs forward: the
            learning rate and the moments are never used.
        checkpoint_config: Unused: a checkpoint is the policy's.

    Raises:
        InvalidArgumentError: A field has no counterpart, or there are several training processes.
    """

    def __init__(
        self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any
    ) -> None:
        self.mode: str | None = None
        self._model_config = model_config
        self._optim = optimizer_config
        self._dtype = _DTYPES.get(str(engine_config.dtype))
        if self._dtype is None:
            raise InvalidArgumentError("dtype", repr(engine_config.dtype), "float32 or bfloat16")
        if getattr(model_config, "lora_rank", 0):
            raise InvalidArgumentError("lora_rank", str(model_config.lora_rank), "0")
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            got = str(torch.distributed.get_world_size())
            expected = "1 training process: `parallel` of the policy has the others"
            raise InvalidArgumentError("n_gpus_per_node", got, expected)
        self._adamw = None if optimizer_config is None else adamw_of(optimizer_config)
        self._optimizer, self._schedule = _schedule_of(optimizer_config)
        self._policy_id = f"verl-{uuid.uuid4().hex[:8]}"
        self._client: Any = None
        self._session: Any = None
        self._grad_norm = 0.0
        self._num_updates = 0

    def initialize(self) -> None:
        """Create the policy from the model's folder, as version 0."""
        self._client = RatoonClient(default_url())
        self._client.create_policy(
            self._policy_id,
            send_folder=Path(self._model_config.local_path),
            optimizer=self._adamw,
            dtype=self._dtype,
        ).result()
        self._session = self._client.policy(self._policy_id)

    def forward_backward_batch(
        self, data: Any, loss_function: Any, forward_only: bool = False
    ) -> dict[str, Any]:
        """Log-probs of a batch, or one Update of it with the step that `optimizer_step` reports.

        Raises:
            InvalidArgumentError: The loss is no configured one of verl's.
        """
        if forward_only:
            return self._forward(data)
        actor = _actor_config(loss_function)
        loss = loss_of(actor)
        rows = rows_of(data, with_values=True, kind=str(loss.kind))
        asked = data.get("global_batch_size", len(rows))
        if int(asked) != len(rows):
            raise InvalidArgumentError("global_batch_size", str(asked), f"{len(rows)}, the rows")
        if self._optim is None:
            raise InvalidArgumentError("optim", "None", "an optimizer: the engine is to train")
        optim = optim_of(actor, self._optim, learning_rate=self._optimizer.param_groups[0]["lr"])
        self._num_updates += 1
        groups = groups_of(rows, name=str(self._num_updates))
        done = self._session.update(groups, loss=loss, optim=optim).result()
        self._grad_norm = done.report.grad_norm or 0.0
        return {
            "model_output": {},
            "loss": [done.report.loss or 0.0],
            "metrics": _metrics(done.report),
        }

    def _forward(self, data: Any) -> dict[str, Any]:
        rows = rows_of(data, with_values=False)
        # Answers are in the order of the groups' rollouts, which prompts have rearranged.
        places: dict[tuple[int, ...], list[int]] = {}
        for index, (prompt, _) in enumerate(rows):
            places.setdefault(prompt, []).append(index)
        order = [index for found in places.values() for index in found]
        with_entropy = bool(_plain(data, "calculate_entropy", default=False))
        groups = groups_of(rows, name="forward")
        result = self._session.forward(groups, with_entropy=with_entropy).result()
        outputs = {"log_probs": _nested(rows, order, result.logprobs)}
        if with_entropy:
            outputs["entropy"] = _nested(rows, order, result.entropy)
        return {"model_output": outputs, "loss": [1.0], "metrics": {}}

    def optimizer_zero_grad(self) -> None:
        """Nothing: an Update begins with no gradient."""

    def optimizer_step(self) -> float:
        """The gradient norm of the step that was taken with the batch."""
        return self._grad_norm

    def lr_scheduler_step(self) -> float:
        self._optimizer.step()
        self._schedule.step()
        return self._schedule.get_last_lr()[0]

    def get_per_tensor_param(self, **_: Any) -> tuple[Generator[tuple[str, Tensor]], None]:
        """The newest version's parameters by their names in the model's files."""
        return self._parameters(), None

    def _parameters(self) -> Generator[tuple[str, Tensor]]:
        with tempfile.TemporaryDirectory(prefix="ratoon-") as folder:
            pulled = self._client.pull_weights(self._policy_id, Path(folder))
            yield from read_tensors(pulled.folder).items()

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
        self._session.save_checkpoint(
            name, overwrite=True, keep_last=max_ckpt_to_keep or 0
        ).result()
        state = {
            "policy_id": self._policy_id,
            "checkpoint_id": name,
            "schedule": self._schedule.state_dict()["last_epoch"],
        }
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
            steps = int(state["schedule"])
        except (OSError, ValueError, KeyError, TypeError) as err:
            expected = f"a checkpoint of this engine, with {_STATE_FILE}"
            raise InvalidArgumentError("resume_from_path", local_path, expected) from err
        session = self._client.policy(policy_id)
        session.load_checkpoint(name).result()
        self._policy_id, self._session = policy_id, session
        self._optimizer, self._schedule = _schedule_of(self._optim)
        for _ in range(steps):
            self.lr_scheduler_step()

    def train_mode(self, **kwargs: Any) -> AbstractContextManager[Any]:
        return BaseEngineCtx(self, "train", **kwargs)  # pyright: ignore[reportReturnType]

    def eval_mode(self, **kwargs: Any) -> AbstractContextManager[Any]:
        return BaseEngineCtx(self, "eval", **kwargs)  # pyright: ignore[reportReturnType]

    def to(
        self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True
    ) -> None:
        """Nothing: this process has no parameters."""

    @property
    def is_param_offload_enabled(self) -> bool:
        return False

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        return False

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
    raise InvalidArgumentError("loss_fn", got, "verl's ppo_loss of an ActorConfig")


def rows_of(data: Any, *, with_values: bool, kind: str = "") -> list[Row]:
    """The rows of one of verl's batches, each with its prompt, in their order.

    Args:
        data: verl's TensorDict without padding: `input_ids` nested, per-token values of responses
            nested or padded on the right.
        with_values: Whether rollouts have advantages, log-probs and the loss's mask.
        kind: The loss's. gspo takes one advantage of a whole rollout.

    Weights of a rollout correction multiply every token's loss, and so its advantage.
    """
    temperature = _plain(data, "temperature", default=1.0)
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


def _plain(data: Any, name: str, *, default: Any) -> Any:
    return tensordict_utils.get(data, name, default) if name in data else default


def _number(value: Any, index: int) -> float:
    """A number of a batch, or of each of its rows."""
    if isinstance(value, Tensor):
        return float(value.flatten()[index if value.numel() > 1 else 0])
    return float(value)


def _nested(rows: Sequence[Row], order: Sequence[int], values: Sequence[Any]) -> Tensor:
    """Values of responses as verl has them: nested, at the position that predicts the token."""
    full: list[Any] = [None] * len(rows)
    for index, found in zip(order, values, strict=True):
        prompt, _ = rows[index]
        whole = torch.zeros(len(prompt) + len(found))
        whole[len(prompt) - 1 : -1] = torch.from_numpy(np.array(found, np.float32))
        full[index] = whole
    return torch.nested.as_nested_tensor(full, layout=torch.jagged)


def _metrics(report: StepReport) -> Mapping[str, list[float]]:
    found = {name: getattr(report, field) for name, field in _SHOWN.items()}
    return {name: [float(value)] for name, value in found.items() if value is not None}


def _schedule_of(optim: Any) -> tuple[Any, Any]:
    """verl's schedule of learning rates, over an optimizer of one number that is never used."""
    rate = 0.0 if optim is None else optim.lr
    optimizer = torch.optim.SGD([torch.zeros((), requires_grad=True)], lr=rate)
    if optim is None:
        return optimizer, get_constant_schedule_with_warmup(optimizer, num_warmup_steps=0)
    warmup, total = optim.lr_warmup_steps, optim.total_training_steps
    if warmup is None or warmup <= 0:
        warmup = int(optim.lr_warmup_steps_ratio * total)
    if optim.lr_scheduler_type == "constant":
        return optimizer, get_constant_schedule_with_warmup(optimizer, num_warmup_steps=warmup)
    return optimizer, get_cosine_schedule_with_warmup(
        optimizer=optimizer,
        num_warmup_steps=warmup,
        num_training_steps=total,
        min_lr_ratio=optim.min_lr_ratio,
        num_cycles=optim.num_cycles,
        zero_indexed_step=optim.zero_indexed_step,
    )
