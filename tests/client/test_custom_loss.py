"""A loss of the caller's: what it is given, what is sent back, and what is refused of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ratoon_client import InvalidArgumentError, RatoonClient, by_autograd
from ratoon_proto.codec import decode_tensor
from ratoon_proto.v1 import training_pb2
from tests.client.fake_service import FakeService
from tests.client.samples import OPTIM, one_group


@pytest.fixture
def wire() -> str:
    """Calls are the same over both wires."""
    return "grpc"


def test_a_custom_loss_is_a_forward_and_reinforce_with_its_gradients(
    service: FakeService, client: RatoonClient
):
    service.policies["p"].version = 5
    seen: list[list[Any]] = []

    def loss_of(logprobs: list[Any]) -> tuple[float, list[Any]]:
        seen.append([array.tolist() for array in logprobs])
        return 2.5, [np.full(3, 0.5), [0.0, 1.0, -2.0, 3.0]]

    loss, handle = client.policy("p").forward_backward_custom(one_group(), loss_of=loss_of)
    assert loss == 2.5
    # The fake's log-probs.
    assert seen == [[[0, -1, -2], [-3, -4, -5, -6]]]
    assert handle.seq == 2
    names = [name for name, _ in service.requests if "Forward" in name]
    assert names == ["Forward", "ForwardBackward"]
    request: Any = next(sent for name, sent in service.requests if name == "ForwardBackward")
    assert request.expected_version == 5
    assert request.loss.kind == training_pb2.LOSS_KIND_REINFORCE
    assert request.loss.advantage == training_pb2.ADVANTAGE_KIND_GIVEN
    assert request.loss.token_weight == training_pb2.TOKEN_WEIGHT_PER_TOKEN
    assert request.loss.shared_tokens == training_pb2.SHARED_TOKENS_SUM
    sent = [rollout for group in request.batch.groups for rollout in group.rollouts]
    weights = [decode_tensor(rollout.advantages, max_bytes=100).tolist() for rollout in sent]
    assert weights == [[-0.5, -0.5, -0.5], [0.0, -1.0, 2.0, -3.0]]
    assert not any(rollout.HasField("token_weights") for rollout in sent)
    step = client.policy("p").optim_step(optim=OPTIM)
    assert step.seq == 3


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ((1.0, [np.zeros(3)]), "gradients"),
        ((1.0, [np.zeros(3), np.zeros(3)]), "gradients[1]"),
        ((1.0, [np.zeros((3, 1)), np.zeros(4)]), "gradients[0]"),
        ((1.0, [np.zeros(3), np.array([0.0, np.nan, 0, 0])]), "gradients[1][1]"),
        ((float("inf"), [np.zeros(3), np.zeros(4)]), "loss"),
        (("two", [np.zeros(3), np.zeros(4)]), "loss"),
    ],
)
def test_what_is_no_loss_and_gradient_is_refused_before_it_is_sent(
    service: FakeService, client: RatoonClient, given: Any, field: str
):
    session = client.policy("p")
    with pytest.raises(InvalidArgumentError) as caught:
        session.forward_backward_custom(one_group(), loss_of=lambda _: given)
    assert caught.value.field == field
    assert "ForwardBackward" not in service.calls
    # The Forward has taken its seq.
    assert session.next_seq() == 2


def test_tensors_are_differentiated_by_their_library():
    arrays = [np.array([-1.0, -2.0], np.float32), np.array([-3.0], np.float32)]
    arrays[0].flags.writeable = False
    squares = by_autograd(lambda tensors: (tensors[0] ** 2).sum(), torch.from_numpy)
    loss, gradients = squares(arrays)
    assert loss == 5.0
    assert [np.asarray(gradient).tolist() for gradient in gradients] == [[-2.0, -4.0], [0.0]]
    constant = by_autograd(lambda _: torch.tensor(7.0), torch.from_numpy)
    assert [np.asarray(gradient).tolist() for gradient in constant(arrays)[1]] == [[0, 0], [0]]
