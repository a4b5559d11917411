"""Settings of other trainers and what the page of them says they are here, row by row.

The rows of docs/from-other-trainers.md are the cases: the cell of another trainer is computed by
`tests.oracle.peers`, the cell under *here* is run from the client's values through validation,
preparation, the LM head and the loss, by micro-batches.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import yaml
from numpy.typing import NDArray

import ratoon_client
from ratoon.api.convert.checks import read
from ratoon.api.submissions import loss_request
from ratoon.api.tinker import losses as tinker_losses
from ratoon.model.lm_head import LmHead
from ratoon.planner.planning import cpu_planner
from ratoon.rollout.raw import RawSamplingMask
from ratoon.rollout.validate import validate_groups
from ratoon.train.gradient_window import divide_number
from ratoon.train.loss.batch_loss import BatchLoss
from ratoon.train.loss.resolve import resolve_loss
from ratoon.train.loss.spec import Normalisation
from ratoon.train.loss.sums import LossSums
from ratoon.train.micro_batches import (
    HeadPart,
    packed_micro_batches,
    run_head,
    to_device,
)
from ratoon.train.optim.adamw import MasterAdamW
from ratoon.train.optim.resolve import resolve_optim
from ratoon.train.prepare import prepare
from ratoon.train.rollout_figures import TokenParts
from ratoon.train.spec import NO_HOOKS
from ratoon_client import AdamW, Loss, Optim, grpo_config, verl_config
from ratoon_client.wire import loss_message, optim_message
from ratoon_proto.tinker import tinker_pb2
from ratoon_proto.types import DivideBy, OldLogprobsKind, OptimStepConfig, TokenWeight
from tests import builders
from tests.oracle import peers
from tests.oracle.peer_steps import step_rule, stepped
from tests.oracle.peers import Samples
from tests.train.optimizer_runs import take_step

PAGE = Path(__file__).parents[2] / "docs" / "from-other-trainers.md"
HEADER = "| verl | TRL | NeMo-RL | Tinker | here |"
# As the page says of each of its rows.
TINKER = '`old_logprobs="sampler"`, `divide_by="none"`'
MEAN = Normalisation(token_weight=TokenWeight.PER_TOKEN, default_divide_by=DivideBy.TOKENS)
CPU, VOCAB_SIZE, NUM_STEPS = torch.device("cpu"), 7, 12
Fields = dict[str, Any]
Floats = NDArray[np.float64]


def _tables() -> list[list[dict[str, str]]]:
    """The rows of each table by column; the first table is the row that all others change."""
    tables: list[list[dict[str, str]]] = []
    names = [name.strip() for name in HEADER.strip("|").split("|")]
    for part in PAGE.read_text(encoding="utf-8").split(HEADER)[1:]:
        lines = part.strip("\n").split("\n\n")[0].splitlines()[1:]
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        tables.append([dict(zip(names, row, strict=True)) for row in cells])
    return tables


START, *_LOSSES, _STEPS = _tables()


def _cases(tables: Sequence[list[dict[str, str]]]) -> list[Any]:
    return [
        pytest.param(peer, cell, row["here"], id=f"{peer}: {cell.replace('`', '')}")
        for table in tables
        for row in table
        for peer, cell in row.items()
        if peer != "here" and cell
    ]


def _settings(cell: str) -> Fields:
    """Settings by their full name, as YAML reads them."""
    found: Fields = {}
    for span in re.findall(r"`([^`]+)`", cell):
        name, _, text = span.partition("=")
        value = math.inf if text == "inf" else yaml.safe_load(text)
        found |= dict(_flat(name, value))
    return found


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}", inner)
    else:
        yield name, value


def _here(cell: str, **names: Any) -> Fields:
    """Arguments as Python has them, with the client's names and `names`."""
    source = ", ".join(re.findall(r"`([^`]+)`", cell))
    return eval(f"dict({source})", {**vars(ratoon_client), "np": np, **names})  # noqa: S307


class Batch:
    """Four groups of 3 or 4 rollouts, one of equal rewards, and a policy's logits.

    Some responses are truncated, and some of their tokens are not trained.
    """

    def __init__(self) -> None:
        rng = np.random.default_rng(7)
        sizes = (4, 3, 4, 3)
        self.groups = np.repeat(np.arange(len(sizes)), sizes)
        num = len(self.groups)
        self.lengths = rng.integers(1, 9, num)
        self.rewards = _float32(rng.normal(size=num))
        self.rewards[self.groups == 2] = 0.5
        self.rewards[0] = 0.0
        self.greedy = _float32(rng.normal(size=len(sizes)))[self.groups]
        self.truncated = rng.random(num) < 0.3
        self.prompts = rng.integers(0, VOCAB_SIZE, (len(sizes), 3))
        self.responses: list[list[int]] = []
        self.logits: list[Floats] = []
        # After the same tokens a policy has the same logits.
        known: dict[tuple[int, ...], Floats] = {}
        for group, length in zip(self.groups, self.lengths, strict=True):
            tokens: list[int] = []
            rows: list[Floats] = []
            for _ in range(length):
                row = known.setdefault((int(group), *tokens), rng.normal(size=VOCAB_SIZE))
                rows.append(row)
                tokens.append(int(rng.choice(np.argsort(row)[-4:])))
            self.responses.append(tokens)
            self.logits.append(np.array(rows))
        self.masks = [rng.random(length) < 0.8 for length in self.lengths]
        for mask in self.masks:
            mask[0] = True
        plain = self.logprobs(1.0, None)
        self.columns = {
            name: [
                _float32(np.minimum(row + 0.7 * rng.normal(size=len(row)), -1e-3)) for row in plain
            ]
            for name in ("old", "sampler", "reference", "teacher")
        }

    def rows(self, temperature: float, top_k: int | None) -> list[Floats]:
        """Log-probs of the vocabulary at each response token."""
        divisor = _float32(temperature)
        return [_log_softmax(logits / divisor, top_k) for logits in self.logits]

    def logprobs(self, temperature: float, top_k: int | None) -> list[Floats]:
        rows = self.rows(temperature, top_k)
        return [
            row[np.arange(len(ids)), ids] for row, ids in zip(rows, self.responses, strict=True)
        ]

    def trained(self, values: Sequence[Floats]) -> Floats:
        parts = [value[mask] for value, mask in zip(values, self.masks, strict=True)]
        return np.concatenate(parts)

    def samples(self) -> Samples:
        counts = [int(mask.sum()) for mask in self.masks]
        return Samples(
            group=self.groups,
            reward=self.rewards,
            greedy=self.greedy,
            length=self.lengths,
            truncated=self.truncated,
            rollout=np.repeat(np.arange(len(counts)), counts),
            **{name: self.trained(values) for name, values in self.columns.items()},
        )

    def names(self, group: int) -> dict[str, Any]:
        """What the page's expressions for a group's advantages are made of."""
        own = np.flatnonzero(self.groups == group)
        samples, means = self.samples(), np.zeros(len(self.groups))
        for name in np.unique(self.groups):
            means[self.groups == name] = self.rewards[self.groups == name].mean()
        gaps = samples.sum(samples.old - samples.reference)
        columns = {}
        for name, values in self.columns.items():
            columns[name] = np.empty(len(own), object)
            columns[name][:] = [values[index] for index in own]
        return {
            "R": self.rewards,
            "N": samples.tokens,
            "D": self.rewards - means,
            "r": self.rewards[own],
            "n": samples.tokens[own],
            "d": (self.rewards - means)[own],
            "k": gaps[own],
            "greedy": self.greedy[own],
            **columns,
        }


def _float32(values: Any) -> Floats:
    """What a float32 holds: columns of a batch are sent as such."""
    return np.asarray(values, np.float32).astype(np.float64)


def _log_softmax(logits: Floats, top_k: int | None) -> Floats:
    if top_k is not None:
        least = np.sort(logits, axis=1)[:, -top_k, None]
        logits = np.where(logits >= least, logits, -np.inf)
    logits = logits - logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def _entropies(rows: Floats) -> Floats:
    share = np.exp(rows)
    return -(share * np.where(share > 0, rows, 0.0)).sum(axis=1)


@cache
def _batch() -> Batch:
    return Batch()


def _expected(peer: str, cell: str, *, sends_advantages: bool) -> tuple[float, Floats, Floats]:
    """Loss, gradients and log-probs by another trainer's settings."""
    own, batch = peers.PEERS[peer], _batch()
    settings = {**own.off, **_settings(START[0][peer]), **_settings(cell)}
    temperature, top_k = (settings[name] for name in own.sampling)
    rows, samples = batch.rows(temperature, top_k), batch.samples()
    logp = batch.trained(batch.logprobs(temperature, top_k))
    advantage = own.advantages(settings, samples)
    if sends_advantages:
        advantage = _float32(advantage)
    entropy = batch.trained([_entropies(row) for row in rows])
    return *own.gradients(settings, samples, advantage, logp, entropy), logp


def _found(here: Fields) -> tuple[float, Floats, Floats]:
    """Loss, gradients and log-probs of trained tokens by the service's own code."""
    batch = _batch()
    of_loss = {one.name: here.pop(one.name) for one in fields(Loss) if one.name in here}
    of_step = {one.name: here.pop(one.name) for one in fields(Optim) if one.name in here}
    groups = [_group(group, here) for group in range(len(batch.prompts))]
    checked = validate_groups(groups, builders.limits(vocab_size=VOCAB_SIZE))
    asked = loss_request(loss_message(Loss(**of_loss)))
    loss = resolve_loss(asked, checked, has_frozen_reference=False)
    config = read(optim_message(Optim(learning_rate=0.0, **of_step)), OptimStepConfig, "optim")
    step = resolve_optim(config, loss.normalisation, AdamW())
    old = loss.old_logprobs
    known: dict[str, Any] = {}
    if old is not None and old.kind is OldLogprobsKind.FROM_FORWARD:
        known["old_logprobs_J"] = checked.old_logprobs
        entropies = [_entropies(rows) for rows in batch.rows(1.0, None)]
        known["entropy_J"] = np.concatenate(entropies)
    prepared = prepare(checked, loss, version=0, plan=cpu_planner(24), **known)
    assert len(prepared.plan.micro_batches) > 1
    logits_JV = torch.from_numpy(np.concatenate(batch.logits))
    # A rollout without a gradient is not run.
    values, found = np.zeros((3, len(logits_JV))), TokenParts()
    values[0] = np.nan
    sums = []
    for part in packed_micro_batches(CPU, prepared, prepared.term_mask_J, NO_HOOKS):
        packed, device = part.packed, to_device(part.packed, CPU)
        hidden_RD = torch.zeros(len(packed.row_index), VOCAB_SIZE, dtype=torch.float64)
        token_L = torch.from_numpy(packed.term_token)
        hidden_RD[device.term_row_L] = logits_JV[token_L]
        every = slice(None)
        head = LmHead(weight_VD=torch.eye(VOCAB_SIZE, dtype=torch.float64))
        out = run_head(head, hidden_RD, device, HeadPart(every, every, every))
        logp_L = out.logprob_M[device.term_target_L]
        entropy_L = out.entropy_R[device.term_row_L]
        reference_L = None
        if checked.reference_logprobs is not None and loss.kl is not None:
            reference_L = torch.from_numpy(checked.reference_logprobs)[token_L]
        terms = np.arange(len(token_L))
        made = BatchLoss(prepared, packed, reference_L, found, logits_JV)
        gradients = made.of(terms, logp_L, entropy_L)
        sums.append(made.sums(terms, logp_L, entropy_L))
        values[0, token_L] = logp_L
        values[1, token_L] = gradients.grad_logprob_L
        if gradients.grad_entropy_L is not None:
            values[2, token_L] = gradients.grad_entropy_L
    divisor = divide_number(step.divisor, prepared.counters)
    values = values[:, np.concatenate(batch.masks)]
    return LossSums.total(sums).loss / divisor, values[1:] / divisor, values[0]


def _group(group: int, here: Fields) -> Any:
    """A group as it is sent; values that are expressions are this group's."""
    batch = _batch()
    own = np.flatnonzero(batch.groups == group)
    members = []
    for place, index in enumerate(own):
        sent: Fields = {
            "loss_mask": batch.masks[index],
            "truncated": bool(batch.truncated[index]),
            "old_logprobs": batch.columns["old"][index],
            "sampler_logprobs": batch.columns["sampler"][index],
            "reference_logprobs": batch.columns["reference"][index],
        }
        for name, value in here.items():
            one = cast("Any", value)(group)[place] if callable(value) else value
            sent[name] = _sent_mask(one, index) if name == "sampling_mask" else one
        advantage = sent.get("advantages")
        if advantage is None:
            sent["reward"] = float(batch.rewards[index])
        else:
            sent["advantages"] = np.broadcast_to(advantage, int(batch.lengths[index]))
        members.append(builders.rollout(batch.responses[index], **sent))
    return builders.group(batch.prompts[group], members, f"group-{group}")


def _sent_mask(top_k: int, index: np.intp) -> RawSamplingMask:
    ids = [np.argsort(row)[-top_k:] for row in _batch().logits[index]]
    return RawSamplingMask(
        token_ids=np.concatenate(ids).astype(np.int32),
        lengths=np.full(len(ids), top_k),
        untrain_outside=False,
    )


def _adapted(peer: str, settings: Fields) -> Fields:
    """The loss and the divisor that an adapter of this project makes of the settings."""
    batch = _batch()
    if peer == "Tinker":
        numbers = tinker_losses.LOSSES[settings["loss_fn"]].config
        request = tinker_pb2.ForwardBackwardRequest(
            loss_fn=settings["loss_fn"],
            loss_fn_config={name: settings[name] for name in numbers},
        )
        served, message = tinker_losses.loss_of(request)
        asked = loss_request(message)
        sent: Fields = {one.name: getattr(asked, one.name) for one in fields(Loss)}
        if "reference_logprobs" in served.columns.values():
            sent["reference_logprobs"] = lambda group: batch.names(group)["sampler"]
        return sent | {"divide_by": "none"}
    if peer == "verl":
        own = {name.removeprefix("actor."): value for name, value in settings.items()}
        own["policy_loss"] = {"loss_mode": own["policy_loss.loss_mode"]}
        # What bounds nothing, as a number.
        own["clip_ratio_c"] = min(own["clip_ratio_c"], 1e6)
        actor = SimpleNamespace(**own, optim=SimpleNamespace(clip_grad=1.0))
        loss, step = verl_config.loss_of(actor), verl_config.optim_of(actor, learning_rate=0.0)
    else:
        given = {
            "use_vllm": settings["vllm_importance_sampling_mode"] is not None,
            "vllm_importance_sampling_correction": True,
            "gradient_accumulation_steps": 1,
            "steps_per_generation": 1,
            "weight_decay": 0.0,
            "max_grad_norm": 1.0,
            "use_bias_correction_kl": True,
        }
        args = SimpleNamespace(**(given | settings))
        grpo_config.check_config(args, num_processes=1)
        loss = grpo_config.loss_of(args, has_old_logprobs=args.num_iterations > 1)
        step = grpo_config.optim_of(
            args,
            learning_rate=0.0,
            num_micro_batches=1,
            num_rows=len(batch.groups),
            num_items=float(sum(mask.sum() for mask in batch.masks)),
        )
    made = {one.name: getattr(loss, one.name) for one in fields(Loss)}
    return made | {name: getattr(step, name) for name in ("divide_by", "divide_constant")}


def _run_here(cells: Sequence[str]) -> tuple[float, Floats, Floats]:
    """The cells, each over those before it; what is made of a group's values is so for each."""

    def made(group: int) -> Fields:
        names = _batch().names(group)
        found: Fields = {}
        for cell in cells:
            found |= _here(cell, operation="forward-1", kept=4, **names)
        return found

    here = made(0)
    for name in ("advantages", "reference_logprobs"):
        if name in here:
            here[name] = lambda group, name=name: made(group)[name]
    if "advantages" in here:
        here["advantage"] = "given"
    return _found(here)


def _close(got: Any, expected: Any) -> None:
    np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(("peer", "cell", "here"), _cases([START, *_LOSSES]))
def test_a_setting_is_here_what_its_row_says(peer: str, cell: str, here: str) -> None:
    """Both ways a row's loss and gradients are others than those of the first row."""
    is_start, sends = cell == START[0][peer], "advantages=" in here
    changes = [*([TINKER] if peer == "Tinker" else []), *([] if is_start else [here])]
    loss, gradients, logp = _run_here([START[0]["here"], *changes])
    expected = _expected(peer, cell, sends_advantages=sends)
    _close(logp, np.where(np.isnan(logp), np.nan, expected[2]))
    _close(loss, expected[0])
    _close(gradients, expected[1])
    assert np.abs(gradients[0]).max() > 1e-3
    if not is_start:
        start = _expected(peer, START[0][peer], sends_advantages=sends)
        assert not np.allclose(start[1], expected[1], rtol=1e-6)


# Settings of these rows that an adapter refuses: theirs are a micro-batch's, or take the place of a
# reference.
_NOT_ADAPTED = ("loss_mode=dro", "loss_mode=geo_mean", "top_entropy_quantile", "entropy_coef=")


def _has_adapter(peer: str, cell: str) -> bool:
    """Whether it is of the loss alone: rows and advantages come from the other trainer."""
    if peer == "verl":
        return all(name.startswith("actor.") for name in _settings(cell))
    return peer != "NeMo-RL" and "mask_truncated_completions" not in cell


_ADAPTED = [case for case in _cases(_LOSSES) if _has_adapter(*case.values[:2])]


@pytest.mark.parametrize(("peer", "cell", "here"), _ADAPTED)
def test_an_adapter_makes_the_same_of_a_setting(peer: str, cell: str, here: str) -> None:
    """Advantages are given, as the other trainer computes them."""
    own, batch = peers.PEERS[peer], _batch()
    settings = {**own.off, **_settings(START[0][peer]), **_settings(cell)}
    if any(name in cell for name in _NOT_ADAPTED):
        with pytest.raises(ratoon_client.InvalidArgumentError) as caught:
            _adapted(peer, settings)
        assert caught.value.field.rpartition(".")[2] in cell, here
        return
    advantage = np.zeros(sum(batch.lengths))
    advantage[np.concatenate(batch.masks)] = own.advantages(settings, batch.samples())
    by_rollout = np.split(advantage, np.cumsum(batch.lengths)[:-1])

    def of_group(group: int) -> list[Floats]:
        return [by_rollout[index] for index in np.flatnonzero(batch.groups == group)]

    made = _adapted(peer, settings) | {"temperature": settings[own.sampling[0]]}
    if made["advantage"] is not None:
        made["advantages"] = of_group
    loss, gradients, _ = _found(made)
    expected = _expected(peer, cell, sends_advantages=True)
    _close(loss, expected[0])
    _close(gradients, expected[1])


def test_every_value_that_an_adapter_takes_is_on_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    known = set(re.findall(r"[=`]([\w+-]+)`", page))
    taken = {*verl_config.LOSS_MODES, *verl_config.AGGREGATIONS, *grpo_config.LOSS_TYPES}
    estimators = {name.removesuffix("+") for name in verl_config.KL_TYPES}
    assert taken - known == {"vanilla"}
    assert estimators <= known
    assert TINKER in page


def _refused() -> Iterator[tuple[str, str, Any]]:
    """Settings without a counterpart that an adapter reads: of whom, name and value."""
    table = PAGE.read_text(encoding="utf-8").split("| setting | instead |")[1].split("\n\n")[0]
    for row in table.splitlines()[2:]:
        cell, name = row.strip("|").split("|")[0], ""
        for span in re.findall(r"`([^`]+)`", cell):
            # A value alone is another one of the setting before it.
            name, value = span.split("=") if "=" in span else (name, span)
            peer = cell.split(":")[0].strip()
            if peer == "TRL" or name.startswith("actor."):
                yield peer, name, yaml.safe_load(value)


@pytest.mark.parametrize(("peer", "name", "value"), list(_refused()))
def test_an_adapter_refuses_what_has_no_counterpart(peer: str, name: str, value: Any) -> None:
    start = {**peers.PEERS[peer].off, **_settings(START[0][peer]), "actor.use_kl_loss": True}
    _adapted(peer, start | {"actor.kl_loss_coef": 0.1, "actor.kl_loss_type": "k3"})
    changed = {"actor.kl_loss_coef": 0.1, "actor.kl_loss_type": "k3"} | {name: value}
    with pytest.raises(ratoon_client.InvalidArgumentError) as caught:
        _adapted(peer, start | changed)
    assert name.endswith(caught.value.field.removeprefix("actor_rollout_ref."))


@pytest.mark.parametrize(("peer", "cell", "here"), _cases([_STEPS]))
def test_steps_are_here_what_their_row_says(peer: str, cell: str, here: str) -> None:
    rng = np.random.default_rng(1)
    names = ("model.layers.0.mlp.up_proj.weight", "model.norm.weight")
    weights = {name: rng.normal(size=5) for name in names}
    gradients = [{name: rng.normal(size=5) for name in names} for _ in range(NUM_STEPS)]
    masters = {name: torch.tensor(value) for name, value in weights.items()}
    config = _here(here, t=0)["optimizer"]
    optimizer = MasterAdamW(masters, config)
    for t, own in enumerate(gradients):
        asked = {name: value for name, value in _here(here, t=t).items() if name != "optimizer"}
        message = optim_message(Optim(**asked))
        step = resolve_optim(read(message, OptimStepConfig, "optim"), MEAN, config)
        take_step(optimizer, {name: torch.tensor(g) for name, g in own.items()}, 1.0, step)
    expected = stepped(step_rule(peer, _settings(cell)), weights, gradients)
    for name, value in expected.items():
        _close(masters[name].numpy(), value)
        assert np.abs(value - weights[name]).max() > 1e-3
