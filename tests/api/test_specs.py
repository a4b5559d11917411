"""Specs of policies: what both wires refuse by field, and who says the tokens of a micro-batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from ratoon.api.convert.policy import SpecDefaults, policy_spec, spec_message
from ratoon.config import WorkerConfig
from ratoon.engine.journal.codec import from_text, to_text
from ratoon.errors import RatoonError
from ratoon_proto.types import FullTuning
from ratoon_proto.v1 import policy_pb2, service_pb2
from tests.api import requests
from tests.api.conftest import Api
from tests.api.wires import refused_by

AdamW, Guard = policy_pb2.AdamWConfig, policy_pb2.NumericsGuard
Muon, ParameterGroup = policy_pb2.MuonConfig, policy_pb2.ParameterGroup
ALL = ParameterGroup(pattern="a")
Lora, Parallel = policy_pb2.LoraTuning, policy_pb2.ParallelLayout
Source, Schedule = policy_pb2.CheckpointSource, policy_pb2.LearningRateSchedule
CONSTANT: dict[str, Any] = {"kind": "SCHEDULE_KIND_CONSTANT", "learning_rate": 0.0}
LINEAR: dict[str, Any] = {"kind": "SCHEDULE_KIND_LINEAR", "learning_rate": 1e-3}


def _limited(name: str, value: float) -> policy_pb2.NumericsGuard:
    guard = policy_pb2.NumericsGuard()
    setattr(guard, name, value)
    return guard


DIGEST = "0123456789abcdef" * 2


def _sent(*files: tuple[str, int, str]) -> policy_pb2.SentModel:
    message = policy_pb2.SentModel()
    for name, size_bytes, digest in files:
        message.files.add(name=name, size_bytes=size_bytes, digest=digest)
    return message


# The field that is named, below `spec`, and what else is set than in a right spec.
BAD_SPECS: list[tuple[str, dict[str, Any]]] = [
    ("policy_id", {"policy_id": "Tiny"}),
    ("policy_id", {"policy_id": "a/b"}),
    ("policy_id", {"policy_id": ""}),
    ("preset", {"preset": "huge"}),
    # Outside of the root, the root itself, a link that leads out, no folder, no name.
    *(
        ("model_folder", {"model_folder": folder})
        for folder in ("../outside", "/etc", ".", "escape", "absent", "real\0x", "x" * 5000)
    ),
    *(
        (f"sent_model.files{field}", {"sent_model": _sent(*files)})
        for field, files in (
            ("", []),
            ("[0].name", [("../config.json", 1, DIGEST)]),
            ("[0].name", [("", 1, DIGEST)]),
            ("[0].name", [("additional_chat_templates/../config.json", 1, DIGEST)]),
            ("[0].name", [("additional_chat_templates/", 1, DIGEST)]),
            ("[0].name", [("others/config.json", 1, DIGEST)]),
            ("[0].name", [("x" * 256, 1, DIGEST)]),
            ("[1].name", [("a", 1, DIGEST), ("a", 1, DIGEST)]),
            ("[0].size_bytes", [("a", -1, DIGEST)]),
            ("[0].digest", [("a", 1, "../" + DIGEST[3:])]),
        )
    ),
    ("keep_versions", {"keep_versions": 0}),
    ("keep_rollouts_bytes", {"keep_rollouts_bytes": 0}),
    ("from_checkpoint.policy_id", {"from_checkpoint": Source(checkpoint_id="sft")}),
    (
        "from_checkpoint.checkpoint_id",
        {"from_checkpoint": Source(policy_id="a", checkpoint_id="../sft")},
    ),
    *(
        (name, {name: seconds})
        for name in ("idle_release_s", "idle_ttl_s")
        for seconds in (0.0, -1.0, float("inf"), float("nan"))
    ),
    ("micro_batch_tokens", {"micro_batch_tokens": 0}),
    # Replay needs determinism.
    ("recovery", {"deterministic": False}),
    # The bounds of a step.
    *(("optimizer.beta1", {"optimizer": AdamW(beta1=value)}) for value in (-0.1, 1.0, 2.0)),
    *(("optimizer.beta2", {"optimizer": AdamW(beta2=value)}) for value in (-0.1, 1.0)),
    *(("optimizer.eps", {"optimizer": AdamW(eps=value)}) for value in (0.0, 1e-31, 1e31, 1e300)),
    *(
        ("optimizer.weight_decay", {"optimizer": AdamW(weight_decay=value)})
        for value in (-1.0, -0.1, 1e31, 1e300)
    ),
    *(
        (f"optimizer.schedule.{field}", {"optimizer": AdamW(schedule=Schedule(**changes))})
        for field, changes in (
            ("kind", {**CONSTANT, "kind": None}),
            ("learning_rate", {**CONSTANT, "learning_rate": None}),
            ("learning_rate", {**CONSTANT, "learning_rate": -1.0}),
            ("learning_rate", {**CONSTANT, "learning_rate": 2e4}),
            ("warmup_steps", {**CONSTANT, "warmup_steps": -1}),
            ("total_steps", {**CONSTANT, "total_steps": 9}),
            ("final_share", {**CONSTANT, "final_share": 0.5}),
            ("total_steps", LINEAR),
            ("total_steps", {**LINEAR, "warmup_steps": 9, "total_steps": 9}),
            ("final_share", {**LINEAR, "total_steps": 9, "final_share": 2.0}),
        )
    ),
    *(
        (f"optimizer.muon.{field}", {"optimizer": AdamW(muon=muon)})
        for field, muon in (
            ("momentum", Muon(momentum=-0.1)),
            ("momentum", Muon(momentum=1.0)),
            ("momentum", Muon(momentum=float("nan"))),
            ("ns_steps", Muon(ns_steps=0)),
            ("ns_steps", Muon(ns_steps=21)),
        )
    ),
    ("optimizer.muon", {"optimizer": AdamW(muon=Muon()), "lora": Lora(rank=4, alpha=1.0)}),
    *(
        (f"optimizer.groups[1].{field}", {"optimizer": AdamW(groups=[ALL, group])})
        for field, group in (
            ("pattern", ParameterGroup(lr_factor=1.0)),
            ("pattern", ParameterGroup(pattern="x" * 257)),
            *(
                ("lr_factor", ParameterGroup(pattern="b", lr_factor=factor))
                for factor in (-0.5, 2e4, float("inf"), float("nan"))
            ),
        )
    ),
    ("optimizer.groups", {"optimizer": AdamW(groups=[ALL] * 65)}),
    ("lora.rank", {"lora": Lora(rank=-1, alpha=1.0)}),
    ("lora.alpha", {"lora": Lora(rank=4, alpha=-1.0)}),
    ("publish.every_n", {"publish": policy_pb2.PublishConfig(every_n=4)}),
    # There is nothing to merge.
    ("publish.merged", {"publish": policy_pb2.PublishConfig(merged=True)}),
    ("parallel.num_workers", {"parallel": Parallel(num_workers=-1)}),
    ("parallel.sequence_ranks", {"parallel": Parallel(num_workers=4, sequence_ranks=3)}),
    ("numerics_guard.max_skipped_in_row", {"numerics_guard": Guard(max_skipped_in_row=-1)}),
    *(
        (f"numerics_guard.{name}", {"numerics_guard": _limited(name, value)})
        for name in ("max_grad_norm_to_step", "max_reference_kl_to_step", "max_sampler_kl_to_step")
        # Finite, but not in float32.
        for value in (0.0, -1.0, 1e39)
    ),
]


async def test_a_bad_spec_is_refused(api: Api, wire_name: str) -> None:
    for field, changes in BAD_SPECS:
        request = service_pb2.CreatePolicyRequest(spec=requests.spec(**changes))
        refused = await refused_by(api.wire(wire_name), "CreatePolicy", request)
        detail = refused.detail
        assert (detail.code, detail.field) == ("INVALID_ARGUMENT", f"spec.{field}"), changes
        assert str(api.models_root) not in detail.message
        assert api.engine.known_policies == {}


def test_all_linear_maps_are_what_no_names_mean(tmp_path: Path) -> None:
    defaults = SpecDefaults(models_root=tmp_path, micro_batch_tokens=None)

    def tuning(*targets: str) -> object:
        lora = Lora(rank=4, alpha=8.0, target_modules=targets)
        return policy_spec(requests.spec(lora=lora), defaults).model.tuning

    assert tuning("all-linear") == tuning()
    # Beside others it is refused by its place, once the model is known.
    assert tuning("q_proj", "all-linear") != tuning()


def test_a_version_has_a_whole_model_where_the_adapter_is_merged(tmp_path: Path) -> None:
    defaults = SpecDefaults(models_root=tmp_path, micro_batch_tokens=None)
    for is_merged in (False, True):
        publish = policy_pb2.PublishConfig(merged=is_merged)
        message = requests.spec(lora=Lora(rank=4, alpha=8.0, use_rslora=True), publish=publish)
        spec = policy_spec(message, defaults)
        assert isinstance(spec.published_model.tuning, FullTuning) == is_merged
        assert spec_message(spec, tmp_path).publish.merged == is_merged
        assert spec_message(spec, tmp_path).lora.use_rslora


def test_tokens_that_nobody_says_are_each_plans_own(tmp_path: Path) -> None:
    assert WorkerConfig().micro_batch_tokens is None
    defaults = SpecDefaults(models_root=tmp_path, micro_batch_tokens=None)
    spec = policy_spec(requests.spec(), defaults)
    assert spec.micro_batch_tokens is None
    assert from_text(to_text(spec)) == spec
    message = spec_message(spec, tmp_path)
    assert not message.HasField("micro_batch_tokens")
    assert policy_spec(message, SpecDefaults(models_root=tmp_path, micro_batch_tokens=7)) != spec


def test_a_model_that_was_sent_is_the_same_in_any_order(tmp_path: Path) -> None:
    """A retry is one by its spec, which the journal keeps and GetPolicy shows."""
    defaults = SpecDefaults(models_root=tmp_path, micro_batch_tokens=None)
    files = [("config.json", 2, DIGEST), ("model.safetensors", 10, DIGEST[::-1])]
    one, other = (
        policy_spec(requests.spec(sent_model=_sent(*order)), defaults)
        for order in (files, files[::-1])
    )
    assert one == other
    assert from_text(to_text(one)) == one
    message = spec_message(one, tmp_path)
    assert message.sent_model == _sent(*files)
    assert message.WhichOneof("base") == "sent_model"
    many = _sent(*((str(index), 1, DIGEST) for index in range(513)))
    with pytest.raises(RatoonError) as caught:
        policy_spec(requests.spec(sent_model=many), defaults)
    assert caught.value.field == "spec.sent_model.files"


def test_tokens_of_the_server_are_at_least_one() -> None:
    assert WorkerConfig(micro_batch_tokens=1).micro_batch_tokens == 1
    with pytest.raises(ValidationError):
        WorkerConfig(micro_batch_tokens=0)
