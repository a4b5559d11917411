"""The losses of the Tinker wire as losses of the service.

Each is a sum over the tokens of all datums, without a division. A loss that is not in the table is
refused by name: nothing is trained with another loss than the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from ratoon.errors import invalid, shown, unsupported
from ratoon_proto.tinker import tinker_pb2
from ratoon_proto.v1 import training_pb2 as wire

# Fields of a rollout that hold one float a target.
Column = Literal["token_weights", "advantages", "sampler_logprobs", "reference_logprobs"]
Config = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class WireLoss:
    """A loss of the wire.

    `columns`: its tensors beside `target_tokens`, by the field of a rollout that each becomes.
    `config`: its numbers and their defaults. `is_mean`: the report's loss is a mean over trained
    tokens. `counts_all`: a token whose tensors are all 0 has a term too.
    """

    columns: Mapping[str, Column]
    make: Callable[[Config], wire.LossConfig]
    config: Config
    is_mean: bool = False
    counts_all: bool = False


def _cross_entropy(_: Config) -> wire.LossConfig:
    return wire.LossConfig(kind=wire.LOSS_KIND_CROSS_ENTROPY)


def _importance_sampling(_: Config) -> wire.LossConfig:
    return _of_advantages(wire.LOSS_KIND_IMPORTANCE_SAMPLING)


def _ppo(config: Config) -> wire.LossConfig:
    low, high = _bounds(config)
    return _of_advantages(wire.LOSS_KIND_PPO_CLIP, clip_low=1 - low, clip_high=high - 1)


def _cispo(config: Config) -> wire.LossConfig:
    low, high = _bounds(config)
    return _of_advantages(wire.LOSS_KIND_CISPO, clip_low=low, clip_high=high)


def _dro(config: Config) -> wire.LossConfig:
    kl = wire.KlConfig(
        kind=wire.KL_KIND_K2, coefficient=config["beta"], reference=wire.REFERENCE_KIND_GIVEN
    )
    return _of_advantages(wire.LOSS_KIND_REINFORCE, kl=kl)


def _of_advantages(kind: wire.LossKind.ValueType, **fields: object) -> wire.LossConfig:
    return wire.LossConfig(kind=kind, advantage=wire.ADVANTAGE_KIND_GIVEN, **fields)  # pyright: ignore[reportArgumentType]


def _bounds(config: Config) -> tuple[float, float]:
    """Return the bounds of the ratio. Raises INVALID_ARGUMENT where 1 is not between them."""
    low, high = config["clip_low_threshold"], config["clip_high_threshold"]
    if not 0 <= low <= 1:
        raise invalid("loss_fn_config.clip_low_threshold", low, "a bound of the ratio, from 0 to 1")
    if not high > 1:
        raise invalid("loss_fn_config.clip_high_threshold", high, "a bound of the ratio above 1")
    return low, high


_SAMPLED: Mapping[str, Column] = MappingProxyType(
    {"advantages": "advantages", "logprobs": "sampler_logprobs"}
)
_NO_NUMBERS: Config = MappingProxyType({})
_CLIPS = MappingProxyType({"clip_low_threshold": 0.8, "clip_high_threshold": 1.2})
LOSSES: Mapping[str, WireLoss] = MappingProxyType(
    {
        "cross_entropy": WireLoss(
            columns=MappingProxyType({"weights": "token_weights"}),
            make=_cross_entropy,
            config=_NO_NUMBERS,
            is_mean=True,
        ),
        "importance_sampling": WireLoss(
            columns=_SAMPLED, make=_importance_sampling, config=_NO_NUMBERS
        ),
        "ppo": WireLoss(columns=_SAMPLED, make=_ppo, config=_CLIPS, is_mean=True),
        "cispo": WireLoss(columns=_SAMPLED, make=_cispo, config=_CLIPS, is_mean=True),
        "dro": WireLoss(
            columns=MappingProxyType(
                {"advantages": "advantages", "logprobs": "reference_logprobs"}
            ),
            make=_dro,
            config=MappingProxyType({"beta": 0.05}),
            counts_all=True,
        ),
    }
)
# What to write in place of losses that are not served.
_INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        "stable_reinforce": "its formula is not published; write loss_fn=importance_sampling",
        "gspo": "its constants are not published; write loss_fn=ppo",
        "custom": "write forward_backward_custom, which computes the loss in the client",
    }
)


def loss_of(request: tinker_pb2.ForwardBackwardRequest) -> tuple[WireLoss, wire.LossConfig]:
    """Return the loss of a request.

    Raises UNSUPPORTED for one that is not served, INVALID_ARGUMENT for its numbers.
    """
    loss = LOSSES.get(request.loss_fn)
    if loss is None:
        served = ", ".join(LOSSES)
        instead = _INSTEAD.get(request.loss_fn)
        text = f"loss_fn: {shown(request.loss_fn)} is not served, {served} are"
        text += f": {instead}" if instead else ""
        raise unsupported("loss_fn", shown(request.loss_fn), f"one of {served}", text)
    return loss, loss.make({**loss.config, **_numbers(request, loss)})


def _numbers(request: tinker_pb2.ForwardBackwardRequest, loss: WireLoss) -> dict[str, float]:
    """Return the numbers of a request, which are sent in two maps for readers old and new."""
    old = dict(request.loss_fn_config)
    found = dict(old)
    for name, value in request.loss_fn_config_v2.items():
        if value.WhichOneof("value") != "number":
            raise invalid(f"loss_fn_config.{name[:64]}", "no number", "a number")
        if name in old and old[name] != value.number:
            expected = f"{old[name]}, as the other map says"
            raise invalid(f"loss_fn_config.{name[:64]}", value.number, expected)
        found[name] = value.number
    for name in found:
        if name not in loss.config:
            names = ", ".join(loss.config)
            expected = f"one of {names}" if names else f"none: {request.loss_fn} has no numbers"
            raise invalid("loss_fn_config", shown(name), expected)
    return found
