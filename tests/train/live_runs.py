"""Runs of a tiny policy and its own sampler, in process: what rollouts, good or bad, look like.

In: a preset and options. Out: batches that the policy itself has sampled, at any of its versions.
Invariant: the same seed gives the same run.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from ratoon.model.spec import ModelDtype, PresetBase
from ratoon.rollout.raw import RawGroup, RawRollout
from ratoon.rollout.validate import validate_groups
from ratoon.train.loss.resolve import resolve_loss
from ratoon_proto.types import (
    FullTuning,
    LoraTuning,
    LossConfig,
    LossKind,
    OldLogprobs,
    OldLogprobsKind,
    StepReport,
)
from tests import builders
from tests.train.trainer_runs import make_step, make_trainer

VOCAB_SIZE = 260
_PROMPT_TOKENS, _MAX_TOKENS = 6, 24
SAMPLER = OldLogprobs(kind=OldLogprobsKind.SAMPLER)
GRPO = LossConfig(kind=LossKind.GRPO, old_logprobs=SAMPLER)


class LiveRun:
    """A trainer of the preset tiny, and a sampler that may stay behind it by some versions."""

    def __init__(
        self,
        *,
        dtype: ModelDtype = ModelDtype.FLOAT32,
        tuning: FullTuning | LoraTuning | None = None,
        staleness: int = 0,
    ) -> None:
        base = PresetBase(name="tiny")
        self.trainer = make_trainer(base, dtype=dtype, tuning=tuning, tokens=4096)
        config: Any = deepcopy(self.trainer.model.config)
        self._model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        self._staleness = staleness
        self._kept = [self._weights()]
        self._rng = np.random.default_rng(0)
        self._generator = torch.Generator().manual_seed(0)

    @torch.inference_mode()
    def sample(
        self, *, num_groups: int = 4, num_rollouts: int = 4, temperature: float = 1.0
    ) -> list[RawGroup]:
        """Groups that the sampler's version draws at `temperature`, declared as 1; a reward is the
        share of even tokens."""
        age = min(self._staleness, len(self._kept) - 1)
        version = self.trainer.version - age
        self._model.load_state_dict(self._kept[-1 - age], strict=False)
        prompts = self._rng.integers(0, 256, (num_groups, _PROMPT_TOKENS))
        next_BT = torch.as_tensor(prompts).repeat_interleave(num_rollouts, dim=0)
        cache = DynamicCache(config=self._model.config)
        drawn: list[torch.Tensor] = []
        logprobs: list[torch.Tensor] = []
        for _ in range(_MAX_TOKENS):
            found = self._model(input_ids=next_BT, past_key_values=cache, use_cache=True)
            logits_BV = found.logits[:, -1].float() / temperature
            next_BT = torch.multinomial(logits_BV.softmax(-1), 1, generator=self._generator)
            logprobs.append(logits_BV.log_softmax(-1).gather(1, next_BT))
            drawn.append(next_BT)
        responses = torch.cat(drawn, dim=1).numpy()
        logprob_BT = torch.cat(logprobs, dim=1).numpy()
        lengths = self._rng.integers(_MAX_TOKENS // 2, _MAX_TOKENS + 1, len(responses))
        rollouts = [
            builders.rollout(
                response[:length],
                sampler_logprobs=logprob[:length],
                reward=float((response[:length] % 2 == 0).mean()),
                policy_version=version,
            )
            for response, logprob, length in zip(responses, logprob_BT, lengths, strict=True)
        ]
        return [
            builders.group(prompt, rollouts[g * num_rollouts : (g + 1) * num_rollouts], f"g{g}")
            for g, prompt in enumerate(prompts)
        ]

    def look(self, groups: Sequence[RawGroup], request: LossConfig = GRPO) -> StepReport:
        """The report of a forward-backward whose gradients are discarded."""
        batch = validate_groups(list(groups), builders.limits(vocab_size=VOCAB_SIZE))
        loss = resolve_loss(request, batch, has_frozen_reference=True)
        report = self.trainer.forward_backward(self.trainer.prepare(batch, loss))
        self.trainer.discard_gradients()
        return report

    def update(
        self, groups: Sequence[RawGroup], request: LossConfig = GRPO, **step: Any
    ) -> StepReport:
        """One update; keeps the version for the sampler."""
        batch = validate_groups(list(groups), builders.limits(vocab_size=VOCAB_SIZE))
        loss = resolve_loss(request, batch, has_frozen_reference=True)
        fields = {"learning_rate": 1e-3} | step
        report = self.trainer.update(
            self.trainer.prepare(batch, loss), make_step(self.trainer, loss, **fields)
        )
        if not report.skipped:
            kept = [*self._kept, self._weights()]
            self._kept = kept[-1 - self._staleness :]
        return report

    def _weights(self) -> dict[str, torch.Tensor]:
        model: Any = self.trainer.model.module
        adapted = [each for each in model.modules() if hasattr(each, "lora_A")]
        for each in adapted:
            each.merge()
        found = {
            _plain_name(name): value.detach().clone()
            for name, value in model.state_dict().items()
            if "lora_" not in name
        }
        for each in adapted:
            each.unmerge()
        return found


def _plain_name(name: str) -> str:
    """A parameter's name in the model without adapters."""
    return name.removeprefix("base_model.model.").replace(".base_layer", "")


def changed(groups: Sequence[RawGroup], group: int, rollout: int, **fields: Any) -> list[RawGroup]:
    """`groups` with other fields of one rollout."""
    return mapped(
        groups, lambda g, n, raw: replace(raw, **fields) if (g, n) == (group, rollout) else raw
    )


def mapped(groups: Sequence[RawGroup], of: Any) -> list[RawGroup]:
    """`groups` with each rollout replaced by `of(group, index, rollout)`."""
    found: list[RawGroup] = []
    for g, each in enumerate(groups):
        rollouts: list[RawRollout] = [of(g, n, raw) for n, raw in enumerate(each.rollouts)]
        found.append(replace(each, rollouts=tuple(rollouts)))
    return found
