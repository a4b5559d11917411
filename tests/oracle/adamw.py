"""The trainer side of the oracle: one backward a rollout, one division, torch's clip and AdamW.

States: no gradients; gradients summed by `forward_backward` calls; `optim_step` or `discard` goes
back to no gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tests.oracle import hf
from tests.oracle.advantages import NOTHING, Counters, count, has_gradient, select
from tests.oracle.losses import path_loss
from tests.oracle.muon import PlainMuon
from tests.oracle.paths import OracleLoss, Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Sums of a forward-backward over all counted paths, undivided, and its counters.

    `entropy` and `weight`, that of the terms, are over the paths that have a gradient.
    """

    total: float
    policy_gradient: float
    kl: float
    entropy: float
    weight: float
    counters: Counters


class OracleTrainer:
    """A policy trained one rollout at a time."""

    def __init__(
        self,
        model: nn.Module,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        self.model = model
        self.version = 0
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(
            trained, lr=0.0, betas=betas, eps=eps, weight_decay=weight_decay
        )
        self._counters = NOTHING
        self._muon, self._halves = PlainMuon(), dict[str, int]()
        self._lr_factor: Callable[[str], float] = lambda _name: 1.0
        self._decays: Callable[[str], bool] = lambda _name: True

    def parameters(self) -> dict[str, Tensor]:
        """Trained parameters by name."""
        return {n: p for n, p in self.model.named_parameters() if p.requires_grad}

    def gradients(self) -> dict[str, Tensor]:
        """Summed, undivided gradients by parameter name; zeros where nothing flowed."""
        return {
            name: torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in self.parameters().items()
        }

    def forward_backward(self, paths: list[Path], loss: OracleLoss) -> Sums:
        """Add the gradient of each path's loss, one forward and one backward a path."""
        remaining = select(paths, loss, self.version)
        counters = count(remaining)
        totals = [0.0, 0.0, 0.0, 0.0, 0.0]
        for counted in remaining:
            if not counted.own.any():
                continue
            rows = None
            if loss.divergence is None:
                found = hf.logprobs(self.model, counted.path)
            else:
                rows = hf.distributions(self.model, counted.path)
                found = hf.of_distributions(rows, counted.path)
            values = None
            if loss.value_coefficient is not None:
                values = hf.values(self.model, counted.path)
            sums = path_loss(counted, loss, *found, rows, values)
            sums.total.backward()
            is_run = has_gradient(counted, loss)
            weight = 1.0 if loss.token_weight == "per_sequence" else float(counted.own.sum())
            figures = (sums.total, sums.policy_gradient, sums.kl, sums.entropy * is_run)
            for slot, value in enumerate(figures):
                totals[slot] += value.item()
            totals[4] += weight * is_run
        self._counters = self._counters + counters
        return Sums(
            total=totals[0],
            policy_gradient=totals[1],
            kl=totals[2],
            entropy=totals[3],
            weight=totals[4],
            counters=counters,
        )

    def divisor(self, divide_by: str, constant: float | None = None) -> float:
        """What the window's sums are divided by.

        `constant` is that of Dr. GRPO's equation, which divides a group of G by G times the
        constant (arXiv 2503.20783, section 3.1 and listing 1).
        """
        counters = self._counters
        if divide_by == "constant":
            assert constant is not None
            return constant * counters.sequences
        return {
            "none": 1.0,
            "tokens": float(counters.tokens),
            "sequences": float(counters.sequences),
            "groups": float(len(counters.groups)),
        }[divide_by]

    def optim_step(
        self,
        *,
        learning_rate: float,
        divide_by: str,
        constant: float | None = None,
        max_grad_norm: float | None = None,
        weight_decay: float | None = None,
    ) -> float:
        """Divide, clip, step; the gradient norm after division and before clipping.

        `max_grad_norm` 0: none; left out: 1, none where nothing divides.
        """
        divisor = self.divisor(divide_by, constant)
        trained = list(self.parameters().values())
        for parameter in trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad /= divisor
        if max_grad_norm is None:
            max_grad_norm = 0.0 if divide_by == "none" else 1.0
        limit = max_grad_norm or float("inf")
        norm = float(nn.utils.clip_grad_norm_(trained, limit))
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate * group.get("factor", 1.0)
            if weight_decay is not None and group.get("decays", True):
                group["weight_decay"] = weight_decay
        self._optimizer.step()
        for name, halves in self._halves.items():
            parameter = self.parameters()[name]
            assert parameter.grad is not None
            own = self._optimizer.defaults["weight_decay"] if weight_decay is None else weight_decay
            self._muon.step(
                name,
                parameter,
                parameter.grad,
                rate=learning_rate * self._lr_factor(name),
                decay=own if self._decays(name) else 0.0,
                halves=halves,
            )
        self.version += 1
        self.discard()
        return norm

    def decay_only(self, decays: Callable[[Tensor], bool]) -> None:
        """Leave the weights of all other parameters out of weight decay; before the first step."""
        trained = list(self.parameters().values())
        groups = [[p for p in trained if decays(p) is wanted] for wanted in (True, False)]
        defaults = self._optimizer.defaults
        self._optimizer = torch.optim.AdamW(
            [{"params": group} for group in groups],
            lr=0.0,
            betas=defaults["betas"],
            eps=defaults["eps"],
            weight_decay=defaults["weight_decay"],
        )
        self._optimizer.param_groups[1].update(weight_decay=0.0, decays=False)

    def step_by_muon(
        self,
        halves: Mapping[str, int],
        lr_factor: Callable[[str], float],
        decays: Callable[[str], bool],
    ) -> None:
        """Step the parameters of `halves` by `PlainMuon`; before the first step.

        `halves`: how many matrices follow one another in each one's rows. The functions tell each
        parameter's factor of the learning rate, and whether it decays, by name.
        """
        defaults = self._optimizer.defaults
        self._muon, self._halves = PlainMuon(), dict(halves)
        self._lr_factor, self._decays = lr_factor, decays
        self._optimizer = torch.optim.AdamW(
            [
                {"params": [p], "factor": lr_factor(n), "decays": decays(n)}
                | ({} if decays(n) else {"weight_decay": 0.0})
                for n, p in self.parameters().items()
                if n not in halves
            ],
            lr=0.0,
            betas=defaults["betas"],
            eps=defaults["eps"],
            weight_decay=defaults["weight_decay"],
        )

    def forget_moments(self) -> None:
        """And the number of steps: the next one is a first one."""
        self._optimizer.state.clear()

    def discard(self) -> None:
        """Forget the window."""
        self.model.zero_grad(set_to_none=True)
        self._counters = NOTHING
