"""A policy's spec where neither it nor the server says how many tokens a micro-batch has."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from ratoon.api.convert.policy import SpecDefaults, policy_spec, spec_message
from ratoon.config import WorkerConfig
from ratoon.engine.journal.codec import from_text, to_text
from tests.api import requests


def test_tokens_that_nobody_says_are_each_plans_own(tmp_path: Path) -> None:
    assert WorkerConfig().micro_batch_tokens is None
    defaults = SpecDefaults(models_root=tmp_path, micro_batch_tokens=None)
    spec = policy_spec(requests.spec(), defaults)
    assert spec.micro_batch_tokens is None
    assert from_text(to_text(spec)) == spec
    message = spec_message(spec, tmp_path)
    assert not message.HasField("micro_batch_tokens")
    assert policy_spec(message, SpecDefaults(models_root=tmp_path, micro_batch_tokens=7)) != spec


def test_tokens_of_the_server_are_at_least_one() -> None:
    assert WorkerConfig(micro_batch_tokens=1).micro_batch_tokens == 1
    with pytest.raises(ValidationError):
        WorkerConfig(micro_batch_tokens=0)
