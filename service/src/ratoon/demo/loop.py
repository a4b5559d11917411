"""The demo's two ways to train one policy: in step with its sampler, and one version behind it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ratoon.demo.sampler import Sample, Sampler
from ratoon.demo.task import WORD_LENGTH, CopyTask, reward, tokens
from ratoon.demo.verdict import Round
from ratoon_client import (
    Correction,
    ForwardResult,
    FromForward,
    Group,
    Loss,
    Optim,
    PolicySession,
    RatoonClient,
    Staleness,
    StepReport,
    group,
    rollout,
)

POLICY_ID = "demo"
NUM_PROMPTS = 16
NUM_RESPONSES = 16
RESPONSE_TOKENS = WORD_LENGTH
ENTROPY_COEFFICIENT = 0.02
MAX_WEIGHT = 2.0
OPTIM = Optim(learning_rate=2e-3, max_grad_norm=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Groups of one version's samples, all of one length, and their mean reward."""

    groups: Sequence[Group]
    reward: float

    @property
    def halves(self) -> tuple[Sequence[Group], Sequence[Group]]:
        """Two mini-batches of whole groups; advantages are computed over each group."""
        middle = len(self.groups) // 2
        return self.groups[:middle], self.groups[middle:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One synchronous update."""

    reward: float
    report: StepReport


class Loop:
    """One policy and its sampler, which uses only weights that it pulled."""

    def __init__(
        self,
        *,
        client: RatoonClient,
        folder: Path,
        seed: int,
        shuffle_rewards: bool,
        optim: Optim = OPTIM,
        device: str = "cpu",
    ) -> None:
        """`device`: where samples are drawn."""
        self._optim = optim
        self._client = client
        self._folder = folder
        self._task = CopyTask.create(seed)
        self._session: PolicySession = client.policy(POLICY_ID)
        self._sampler = Sampler(
            preamble=self._task.preamble,
            max_new_tokens=RESPONSE_TOKENS,
            seed=seed,
            device=device,
        )
        # The generator must be repeatable, not secret.
        self._shuffle = random.Random(seed + 1) if shuffle_rewards else None  # nosec B311
        self._num_groups = 0
        self._pull()

    @property
    def version(self) -> int:
        """Version of the sampler's weights."""
        return self._sampler.version

    def evaluate(self) -> float:
        """Pull the newest weights; mean reward over the held-out queries."""
        self._pull()
        samples = self._sampler.sample(self._task.evaluation, 1)
        return float(np.mean([reward(s.query, s.text) for (s,) in samples]))

    def synchronous(self) -> Iterator[Update]:
        """Sample, update, pull: every batch is from the newest version, and used once."""
        loss = Loss("grpo", entropy_coefficient=ENTROPY_COEFFICIENT)
        while True:
            batch = self._sample()
            step = self._session.update(batch.groups, loss=loss, optim=self._optim).result()
            self._pull()
            yield Update(reward=batch.reward, report=step.report)

    def asynchronous(self) -> Iterator[Round]:
        """One Forward over a batch, then an Update per half, with its log-probs as the old ones.

        The next batch is sampled during the second Update, from the first one's version, so it is
        one version old when its turn comes.
        """
        batch = self._sample()
        next(self.synchronous())
        while True:
            forward = self._session.forward(batch.groups)
            loss = Loss(
                "grpo",
                old_logprobs=FromForward(forward.operation_id),
                correction=Correction(mode="truncate", level="token", high=MAX_WEIGHT),
                staleness=Staleness(max_versions=2, action="refuse"),
                entropy_coefficient=ENTROPY_COEFFICIENT,
            )
            first, second = (
                self._session.update(half, loss=loss, optim=self._optim) for half in batch.halves
            )
            self._pull(first.result().version)
            following = self._sample()
            yield Round(
                reward=batch.reward,
                weight=_mean_weight(batch.halves[0], forward.result()),
                first=first.result().report,
                second=second.result().report,
            )
            batch = following

    def _pull(self, version: int | None = None) -> None:
        pulled = self._client.pull_weights(POLICY_ID, self._folder, version)
        self._sampler.load(pulled.folder, pulled.version)

    def _sample(self) -> Batch:
        queries = self._task.training_queries(NUM_PROMPTS)
        samples = self._sampler.sample(queries, NUM_RESPONSES)
        rewards = np.array([[reward(s.query, s.text) for s in row] for row in samples])
        mean_reward = float(rewards.mean())
        if self._shuffle is not None:
            flat = rewards.ravel().tolist()
            self._shuffle.shuffle(flat)
            rewards = np.reshape(flat, rewards.shape)
        groups = [self._group(row, values) for row, values in zip(samples, rewards, strict=True)]
        return Batch(groups=groups, reward=mean_reward)

    def _group(self, samples: Sequence[Sample], rewards: Sequence[float]) -> Group:
        self._num_groups += 1
        prompt = tokens(self._task.preamble + samples[0].query.text)
        rollouts = [
            rollout(
                response=sample.response,
                sampler_logprobs=sample.logprobs,
                reward=float(value),
                policy_version=self._sampler.version,
            )
            for sample, value in zip(samples, rewards, strict=True)
        ]
        return group(str(self._num_groups), prompt, rollouts)


def _mean_weight(groups: Sequence[Group], forward: ForwardResult) -> float:
    """Mean of min(exp(Forward - sampler), high) over the tokens of the Forward's first groups."""
    sampled = [each.sampler_logprobs for group in groups for each in group.rollouts]
    pairs = zip(forward.logprobs, sampled, strict=False)
    gaps = np.concatenate([old - np.asarray(new) for old, new in pairs])
    return float(np.minimum(np.exp(gaps), MAX_WEIGHT).mean())
