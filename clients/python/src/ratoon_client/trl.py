"""TRL's GRPOTrainer with its policy update done by the service. Imports TRL and torch.

TRL samples, scores and makes advantages as ever. The micro-batches of an accumulation window become
one Update, and the new version is copied into the module, which TRL samples from next. Invariant:
module and policy are of one version whenever a step begins.
"""

# Where TRL is not installed, its trainer has no type.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import json
import tempfile
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list, gather_object
from peft import PeftModel
from torch import Tensor, nn
from trl import GRPOTrainer

from ratoon_client.blocking import PolicySession, RatoonClient
from ratoon_client.config import DEFAULT_URL
from ratoon_client.errors import InvalidArgumentError, RatoonClientError
from ratoon_client.grpo_config import adamw_of, check_config, loss_of, optim_of
from ratoon_client.rollouts import Row, groups_of, rollout
from ratoon_client.values import PolicyOptions
from ratoon_client.weights.hf_module import ModuleAdapter
from ratoon_proto.types import StepResult

# In a checkpoint of TRL: which checkpoint of which policy belongs to it.
_STATE_FILE = "ratoon.json"
_DTYPES: Mapping[torch.dtype, str] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_SHOWN = ("token_reduction", "update_norm", "weight_norm", "zero_advantage_sequences")
_PER_TOKEN = {
    "old_per_token_logps": "old_logprobs",
    "ref_per_token_logps": "reference_logprobs",
    "sampling_per_token_logps": "sampler_logprobs",
}


class RatoonGRPOTrainer(GRPOTrainer):
    """A GRPOTrainer whose optimizer is a policy of the service.

    Args:
        *args: As of GRPOTrainer.
        ratoon_url: The service.
        policy_id: The policy's id. Default: a new one, or when training is resumed the
            checkpoint's.
        policy_options: Fields of its PolicySpec. The model is sent, unless `model_folder` names
            one with the same weights that the service has; the dtype is the module's.
        **kwargs: As of GRPOTrainer.

    Raises:
        InvalidArgumentError: A field of the GRPOConfig, or an argument, has a value without a
            counterpart in an Update.
    """

    def __init__(
        self,
        *args: Any,
        ratoon_url: str = DEFAULT_URL,
        policy_id: str | None = None,
        policy_options: PolicyOptions | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        check_config(self.args, num_processes=self.accelerator.num_processes)
        module = self.accelerator.unwrap_model(self.model)
        _check_module(module, has_aux_loss=self.aux_loss_enabled)
        if self.optimizer is not None:
            raise InvalidArgumentError("optimizers", "an optimizer", "None: the service has it")
        self._url = ratoon_url
        self._client = RatoonClient(ratoon_url)
        self._policy_id = policy_id or f"trl-{uuid.uuid4().hex[:8]}"
        self._is_named = policy_id is not None
        self._policy_options: PolicyOptions = {} if policy_options is None else policy_options
        self._session: PolicySession | None = None
        self._mirror = tempfile.TemporaryDirectory(prefix="ratoon-")
        self._receiver: Any = None
        # The module's; None: its weights are the caller's own.
        self._version: int | None = None
        self._window: list[dict[str, Any]] = []
        self._grad_norm = 0.0

    @property
    def policy_id(self) -> str:
        return self._policy_id

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """An optimizer whose steps do nothing, for the loop and its schedule."""
        if self.optimizer is None:
            module = self.model if model is None else model
            self.optimizer = _NoOptimizer(module.parameters(), self.args.learning_rate)
        return self.optimizer

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> Tensor:
        """Keep a micro-batch; the window's last one makes its Update, and has its loss."""
        begun = time.perf_counter()
        # Otherwise TRL takes the batch for one of an evaluation.
        model.train()
        self._begin()
        self._window.append(self._prepare_inputs(inputs))
        self._step += 1
        loss = 0.0
        if self.accelerator.sync_gradients:
            window, self._window = self._window, []
            loss = self._update(window)
        self._current_train_step_time += time.perf_counter() - begun
        if self.accelerator.sync_gradients:
            self._metrics["train"]["step_time"].append(self._current_train_step_time)
            self._current_train_step_time = 0.0
        return torch.tensor(loss, device=self.accelerator.device)

    def _update(self, window: Sequence[Mapping[str, Any]]) -> float:
        """The loss of an Update of all processes' micro-batches; the module has its version."""
        rows = gather_object([row for inputs in window for row in self._rows(inputs)])
        result: StepResult | None = None
        if self.accelerator.is_main_process:
            has_old = window[0].get("old_per_token_logps") is not None
            optim = optim_of(
                self.args,
                learning_rate=self._get_learning_rate(),
                num_micro_batches=len(window),
                num_rows=len(rows),
                num_items=float(window[0]["num_items_in_batch"]),
            )
            groups = groups_of(rows, name=str(self.state.global_step))
            loss = loss_of(self.args, has_old_logprobs=has_old)
            result = self._ready.update(groups, loss=loss, optim=optim).result()
        done: StepResult = self._from_main(result)
        self._pull(done.version)
        report = done.report
        self._grad_norm = report.grad_norm or 0.0
        shown = {f"ratoon/{name}": getattr(report, name) for name in _SHOWN}
        shown |= {
            "kl": report.kl,
            "entropy": report.entropy,
            "clip_ratio/low_mean": report.clip_fraction_low,
            "clip_ratio/high_mean": report.clip_fraction_high,
        }
        for name, value in shown.items():
            if value is not None:
                self._metrics["train"][name].append(float(value))
        return 0.0 if report.loss is None else report.loss

    def _rows(self, inputs: Mapping[str, Any]) -> list[Row]:
        """The completions of a micro-batch, each with its prompt."""
        given = {
            name: value.cpu().numpy() for name, value in inputs.items() if isinstance(value, Tensor)
        }
        sampling = {"temperature": self.temperature}
        if self.top_p < 1:
            sampling["top_p"] = self.top_p
        if self.top_k:
            sampling["top_k"] = self.top_k
        return rows_of(given, sampling)

    def _clip_grad_norm(self, model: nn.Module) -> float:
        return self._grad_norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: float | None = None) -> float:
        return self._grad_norm

    def _begin(self) -> None:
        """Create the policy with the module's weights, unless it is there."""
        if self._session is not None:
            return
        if self.accelerator.is_main_process:
            with tempfile.TemporaryDirectory(prefix="ratoon-") as folder:
                options = self._options(Path(folder))
                policy = self._client.create_policy(self._policy_id, **options).result()
            now = self._client.get_policy(policy.spec.policy_id)
            if (now.version, now.next_seq) != (0, 1):
                raise InvalidArgumentError(
                    "policy_id",
                    f"{self._policy_id!r}, at version {now.version}",
                    "a new one, or train(resume_from_checkpoint=...)",
                )
        self._attach(version=0)

    def _options(self, folder: Path) -> PolicyOptions:
        """What the policy is created from: the module as it is, written into `folder`."""
        module = self.accelerator.unwrap_model(self.model)
        options: dict[str, Any] = {
            "optimizer": adamw_of(self.args),
            "dtype": _DTYPES[module.dtype],
            **self._policy_options,
        }
        if options.get("model_folder") is None:
            module.save_pretrained(folder)
            self.processing_class.save_pretrained(folder)
            options["send_folder"] = folder
        return options  # pyright: ignore[reportReturnType]

    def _attach(self, version: int) -> None:
        """Begin to follow the policy, by this version: what does not fit the module is seen now."""
        self.accelerator.wait_for_everyone()
        self.accelerator.print(f"policy {self._policy_id} of {self._url}, at version {version}")
        self._session = self._client.policy(self._policy_id)
        adapter = ModuleAdapter(self.accelerator.unwrap_model(self.model))
        self._receiver = self._client.weight_receiver(self._policy_id, self._mirror.name, adapter)
        self._pull(version)

    @property
    def _ready(self) -> PolicySession:
        assert self._session is not None, "no window is before the first step"
        return self._session

    def _pull(self, version: int) -> None:
        """Copy a version into the module, unless it has it. Raises RatoonClientError."""
        received = self._receiver.sync_once()
        if received is not None:
            self._version = received.version
        if self._version != version:
            raise RatoonClientError(
                f"the module has version {self._version} of {self._policy_id} and not {version}:"
                " another caller trains this policy"
            )

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save what TRL saves, and the policy's checkpoint that belongs to it."""
        super()._save_checkpoint(model, trial)
        if not self.accelerator.is_main_process or self._session is None:
            return
        name, limit = f"step-{self.state.global_step}", self.args.save_total_limit
        # One more than TRL has: its newest is whole before ours is.
        keep_last = 0 if limit is None else limit + 1
        self._session.save_checkpoint(name, overwrite=True, keep_last=keep_last).result()
        folder = Path(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")
        state = {"policy_id": self._policy_id, "checkpoint_id": name}
        (folder / _STATE_FILE).write_text(json.dumps(state) + "\n")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load what TRL saved, and bring the policy back to its checkpoint."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        try:
            state = json.loads((Path(checkpoint) / _STATE_FILE).read_text())
            policy_id, checkpoint_id = str(state["policy_id"]), str(state["checkpoint_id"])
        except (OSError, ValueError, KeyError, TypeError) as err:
            expected = f"a checkpoint of this trainer, with {_STATE_FILE}"
            raise InvalidArgumentError("resume_from_checkpoint", checkpoint, expected) from err
        if self._is_named and policy_id != self._policy_id:
            raise InvalidArgumentError("policy_id", self._policy_id, f"{policy_id}, as saved")
        self._policy_id, version = policy_id, None
        if self.accelerator.is_main_process:
            loading = self._client.policy(policy_id).load_checkpoint(checkpoint_id)
            version = loading.result().version
        self._attach(self._from_main(version))

    def _from_main(self, value: Any) -> Any:
        """The main process's value in every process."""
        if self.accelerator.num_processes == 1:
            return value
        return broadcast_object_list([value])[0]


def rows_of(inputs: Mapping[str, np.ndarray[Any, Any]], sampling: Mapping[str, Any]) -> list[Row]:
    """Completions of one of TRL's micro-batches, with their prompts; pure.

    Args:
        inputs: TRL's tensors [rows, tokens], padded; prompts on the left, completions on the right.
        sampling: What each rollout says of how it was sampled.

    A completion that is masked as truncated has one token, which is not trained.
    """
    rows: list[Row] = []
    for index, mask in enumerate(inputs["completion_mask"].astype(bool)):
        prompt = inputs["prompt_ids"][index][inputs["prompt_mask"][index].astype(bool)]
        length = max(int(np.max(np.nonzero(mask)[0], initial=0)) + 1, 1)
        trained = mask & inputs["tool_mask"][index].astype(bool) if "tool_mask" in inputs else mask
        advantages = np.broadcast_to(inputs["advantages"][index], mask.shape)
        values: dict[str, Any] = {
            name: inputs[theirs][index][:length].astype(np.float32)
            for theirs, name in _PER_TOKEN.items()
            if theirs in inputs
        }
        if "sampler_logprobs" in values:
            values |= _sampler_values(values)
        made = rollout(
            response=inputs["completion_ids"][index][:length],
            loss_mask=trained[:length],
            advantages=advantages[:length].astype(np.float32),
            **values,
            **sampling,
        )
        rows.append((tuple(prompt.tolist()), made))
    return rows


def _sampler_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Sampler log-probs as TRL takes them: the weight of one that is not known is 1."""
    given, old = values["sampler_logprobs"], values.get("old_logprobs")
    is_known = ~np.isnan(given)
    if is_known.all():
        return {"sampler_logprobs": given, "sampler_logprobs_kind": "processed"}
    if old is None:
        return {"sampler_logprobs": None}
    known = np.where(is_known, given, old)
    return {"sampler_logprobs": known, "sampler_logprobs_kind": "processed"}


class _NoOptimizer(torch.optim.Optimizer):
    """Has a learning rate, which the schedule sets; the step itself is the service's."""

    def __init__(self, parameters: Iterable[nn.Parameter], learning_rate: float) -> None:
        super().__init__(list(parameters), {"lr": learning_rate})

    def step(self, closure: Any = None) -> Any:
        return None


def _check_module(module: nn.Module, *, has_aux_loss: bool) -> None:
    """Raises InvalidArgumentError for a module that is no policy's."""
    if isinstance(module, PeftModel):
        raise InvalidArgumentError("peft_config", "an adapter", "None: every parameter is trained")
    frozen = next((n for n, p in module.named_parameters() if not p.requires_grad), None)
    if frozen is not None:
        raise InvalidArgumentError("model", f"{frozen}, frozen", "every parameter trained")
    dtypes = {parameter.dtype for parameter in module.parameters()}
    if len(dtypes) != 1 or not dtypes <= _DTYPES.keys():
        got = ", ".join(sorted(map(str, dtypes)))
        raise InvalidArgumentError("model", got, "float32 or bfloat16 alone")
    if has_aux_loss:
        expected = "0: the balance loss of a micro-batch has no counterpart"
        raise InvalidArgumentError("router_aux_loss_coef", "the model's", expected)
