"""The script of docs/trl.md against the real service; its steps are compared by tests/train."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ratoon_client import InvalidArgumentError, RatoonClient
from tests.running_service import Service
from tests.trl_site import NEEDS_TRL, trl_on_path, write_model

pytestmark = [pytest.mark.e2e, pytest.mark.more, NEEDS_TRL]
PAGE = Path(__file__).parents[2] / "docs" / "trl.md"


def test_a_model_is_sent_trained_saved_and_resumed(service: Service, tmp_path: Path) -> None:
    with trl_on_path():
        _run(f"grpc://{service.addresses.grpc}", write_model(tmp_path / "model"), tmp_path / "out")


def _run(url: str, folder: Path, out: Path) -> None:
    """The page's script, and then from its checkpoint to the same weights."""
    import torch

    (script,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    changes = {
        "my-sft-model": str(folder),
        "trl-out": str(out),
        "grpc://127.0.0.1:8443": url,
    }
    for old, new in changes.items():
        assert old in script
        script = script.replace(old, new)
    names: dict[str, Any] = {}
    exec(compile(script, "docs/trl.md", "exec"), names)  # noqa: S102 - the page's own script
    first = names["trainer"]
    assert first.state.global_step == 4
    saved = json.loads((out / "checkpoint-2" / "ratoon.json").read_text())
    assert saved == {"policy_id": first.policy_id, "checkpoint_id": "step-2"}
    done = {key: value.clone() for key, value in first.model.state_dict().items()}

    make: Callable[..., Any] = names["make_trainer"]
    again = make(policy_id=first.policy_id)
    with pytest.raises(InvalidArgumentError, match=r"^policy_id: "):
        again.train()
    other = make(policy_id="another")
    with pytest.raises(InvalidArgumentError, match=r"as saved$"):
        other.train(resume_from_checkpoint=str(out / "checkpoint-2"))
    resumed = make()
    resumed.train(resume_from_checkpoint=str(out / "checkpoint-2"))
    assert resumed.policy_id == first.policy_id
    assert resumed.state.global_step == 4
    for key, value in resumed.model.state_dict().items():
        assert torch.equal(value, done[key]), key
    with RatoonClient(url) as client:
        client.delete_policy(first.policy_id).result()
