"""The public client against the real service: over each wire the same calls, the same values."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import grpc
import httpx
import numpy as np
import pytest
import xxhash
from safetensors.numpy import load

from ratoon.app import ServiceAddresses
from ratoon_client import (
    ClientConfig,
    FromForward,
    Group,
    Kl,
    Lora,
    Loss,
    NumericsGuard,
    Operation,
    Optim,
    Publish,
    RatoonApiError,
    RatoonClient,
    SamplingParams,
    Segment,
    StepReport,
    group,
    rollout,
)
from ratoon_proto.types import PhaseSeconds
from ratoon_proto.v1 import service_pb2
from ratoon_proto.v1.service_pb2_grpc import PolicyServiceStub
from tests.running_service import Service

pytestmark = [pytest.mark.e2e, pytest.mark.more]
WIRES = ("gateway", "serve", "http")
# Every update makes a version, whatever its loss clips.
OPTIM = Optim(learning_rate=1e-3, max_grad_norm=1.0, step_on_zero_gradient=True)


@pytest.fixture(scope="module")
def clients(service: Service) -> Iterator[dict[str, RatoonClient]]:
    """One client a wire; the last one cuts every batch into parts."""
    addresses = service.addresses
    assert addresses.serve_http is not None
    targets = {"gateway": addresses.grpc, "serve": addresses.serve_http, "http": addresses.http}
    parts = ClientConfig(upload_above_bytes=0, part_bytes=1)
    with ExitStack() as stack:
        opened = {name: stack.enter_context(RatoonClient(targets[name])) for name in WIRES}
        opened["parts"] = stack.enter_context(RatoonClient(addresses.http, config=parts))
        yield opened


@pytest.fixture(scope="module")
def policies(clients: dict[str, RatoonClient]) -> Iterator[dict[str, str]]:
    """A policy a wire, all of one seed: what is done to them is compared."""
    handles = {
        name: clients[name].create_policy(
            f"client-{name}", preset="tiny", seed=3, reference="base", keep_rollouts="all"
        )
        for name in ("gateway", "http")
    }
    yield {name: handle.result().spec.policy_id for name, handle in handles.items()}
    for name in handles:
        clients[name].delete_policy(f"client-{name}").result()


def test_samples_are_those_of_the_trainers_weights(
    clients: dict[str, RatoonClient], tmp_path: Path
) -> None:
    """A full policy, one with an adapter, and one that publishes whole models with its adapter
    merged, by the process that the first sample starts."""
    rslora = Lora(rank=4, alpha=8.0, target_modules="all-linear", use_rslora=True)
    for name, lora, publish in (
        ("sampled", None, None),
        ("sampled-lora", Lora(rank=4, alpha=8.0), None),
        ("sampled-merged", rslora, Publish(merged=True)),
    ):
        client = clients["gateway"]
        client.create_policy(
            name, preset="tiny", seed=3, lora=lora, keep_versions=2, publish=publish
        ).result()
        client.policy(name).update(batch(), loss=Loss("grpo"), optim=OPTIM).result()
        prompt = [72, 101, 108, 108, 111]
        sampling = SamplingParams(num_samples=3, max_tokens=8, ignore_eos=True, temperature=0.5)
        for wire in WIRES:
            result = clients[wire].sample(name, prompt, sampling)
            assert result.version == 1
            rollouts = [
                rollout(response=each.tokens, temperature=0.5, reward=0.0)
                for each in result.sequences
            ]
            forward = client.forward(name, [group("g", prompt, rollouts)]).result()
            for own, trainers in zip(result.sequences, forward.logprobs, strict=True):
                assert np.abs(own.logprobs - trainers).max() <= 1e-5
        seeded = replace(sampling, seed=1)
        answers = [clients[wire].sample(name, prompt, seeded, version=1) for wire in WIRES]
        assert answers[0] == answers[1] == answers[2]
        first = clients["http"].sample(name, prompt, seeded, version=0)
        base = client.sample(name, prompt, seeded, base=True)
        assert first.sequences == base.sequences != answers[0].sequences
        with pytest.raises(RatoonApiError, match="WEIGHTS_NOT_FOUND"):
            client.sample(name, prompt, version=5)
        pulled = client.pull_weights(name, tmp_path / name)
        is_adapter = name == "sampled-lora"
        assert pulled.manifest.kind == ("adapter" if is_adapter else "full")
        assert (pulled.folder / "config.json").exists() == (not is_adapter)
        client.delete_policy(name).result()


def batch() -> list[Group]:
    """Two groups that share a prompt's beginning; one rollout is a conversation."""
    rng = np.random.default_rng(0)

    def sampled(length: int, reward: float):
        logprobs = -rng.random(length).astype(np.float32) - 5
        tokens = rng.integers(0, 256, length)
        return rollout(response=tokens, sampler_logprobs=logprobs, reward=reward, policy_version=0)

    conversation = rollout(
        segments=[Segment([5, 6], True), Segment([7, 8, 9], False), Segment([10], True)],
        sampler_logprobs=[-5.5] * 6,
        reward=0.25,
    )
    return [
        group("a", [1, 2, 3, 4], [sampled(3, 1.0), sampled(5, 0.0), conversation]),
        group("b", [1, 2, 3, 9], [sampled(2, 0.5), sampled(4, 0.75)]),
    ]


def untimed(report: StepReport) -> StepReport:
    """Without what depends on the clock and the machine's memory."""
    nothing = PhaseSeconds(plan=0, forward=0, backward=0, optimizer=0, publish=0, digest=0)
    self_check = report.self_check
    return replace(
        report,
        seconds=nothing,
        self_check=None if self_check is None else replace(self_check, seconds=0.0),
        tokens_per_second=0.0,
        peak_memory_bytes=0,
        hardware_mfu=None,
        logical_mfu=None,
    )


def train(client: RatoonClient, policy_id: str, folder: Path):
    """Every kind of call once; gives all that must not depend on the wire."""
    session = client.policy(policy_id)
    groups = batch()
    before = client.forward(policy_id, groups, with_entropy=True).result()
    assert before.entropy is not None
    old = session.forward(groups)
    loss = Loss("grpo", old_logprobs=FromForward(old.operation_id), kl=Kl("k3", 0.1, "frozen"))
    loss = replace(loss, report_groups=True)
    first = session.update(groups, loss=loss, optim=OPTIM).result()
    assert [each.num_rollouts for each in first.report.groups] == [3, 2]
    seq = session.next_seq() - 1
    kept = client.rollouts(policy_id, seq)
    assert [(each.group_id, each.rollout) for each in kept.rollouts][-1] == ("b", 1)
    whole = client.rollout(policy_id, seq, 0, 2)
    assert whole.tokens == (1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
    assert whole.trained == (True, True, False, False, False, True)
    assert "".join(whole.texts) == bytes(whole.tokens).decode()
    session.forward_backward(groups, loss=Loss("dapo")).result()
    session.discard_gradients().result()
    parts = session.forward_backward(groups, loss=Loss("ppo_clip", clip_high=0.3)).result()
    second = session.optim_step(optim=replace(OPTIM, weight_decay=0.0)).result()
    session.save_checkpoint("after-two", ttl_s=3600.0).result()
    saved = session.save_checkpoint("after-two", overwrite=True, keep_last=1).result()
    third = session.update(groups, loss=Loss("reinforce"), optim=OPTIM, expected_version=2)
    assert third.result().version == 3
    steps = [first.report, second.report, third.result().report]
    loaded = session.load_checkpoint("after-two").result()
    listed = client.list_checkpoints(policy_id)
    deleted = client.delete_checkpoint(policy_id, "after-two")
    assert [deleted, *client.list_checkpoints(policy_id)] == listed
    pulled = client.pull_weights(policy_id, folder)
    named = session.publish_version(name="kept", ttl_s=3600.0).result()
    by_name = client.pull_weights(policy_id, folder / "kept", name="kept")
    assert (named.version, by_name.manifest.files) == (2, pulled.manifest.files)
    assert client.versions(policy_id).versions[-1].names == (named,)
    assert client.delete_version(policy_id, "kept") == named
    history = client.steps(policy_id, ("loss", "kl"))
    assert (history.seq, history.version, history.num_steps) == ((2, 6, 9), (1, 2, 3), 3)
    for series, name in zip(history.series, ("loss", "kl"), strict=True):
        figures = [getattr(report, name) for report in steps]
        assert repr(series.mean) == repr(tuple(math.nan if f is None else f for f in figures))
    assert [(mark.kind, mark.seq, mark.version) for mark in history.marks][-1] == (
        "load_checkpoint",
        10,
        2,
    )
    assert client.versions(policy_id).versions[-1].version == pulled.version
    return {
        "listed": [(one.kind, one.seq, one.state) for one in client.operations(policy_id)],
        "chosen": [one.seq for one in client.operations(policy_id, kinds=["update"])],
        "logprobs": [array.tobytes() for array in before.logprobs],
        "entropy": [array.tobytes() for array in before.entropy],
        "old": [array.tobytes() for array in old.result().logprobs],
        # As text, in which no number equals itself.
        "kept": (repr(kept), repr(whole)),
        "steps": [(step.version, untimed(step.report)) for step in (first, parts, second)],
        "checkpoint": (saved.checkpoint_id, saved.version, saved.seq),
        "loaded": (loaded.checkpoint_id, loaded.version),
        "weights": {file.name: file.digest for file in pulled.manifest.files},
        "next_seq": session.next_seq(),
    }


def test_training_does_not_depend_on_the_wire(
    clients: dict[str, RatoonClient], policies: dict[str, str], tmp_path: Path
):
    seen = {
        name: train(clients[name], policy_id, tmp_path / name)
        for name, policy_id in policies.items()
    }
    assert seen["gateway"] == seen["http"]
    gateway = seen["gateway"]
    assert [seq for _, seq, _ in gateway["listed"]] == [*range(11, -1, -1)]
    assert gateway["chosen"] == [9, 2]
    assert gateway["logprobs"] == gateway["old"]
    assert [version for version, _ in gateway["steps"]] == [1, 1, 2]
    assert gateway["steps"][0][1].ratio_max == pytest.approx(1.0, abs=1e-5)
    assert gateway["steps"][0][1].token_reduction > 1
    assert gateway["steps"][2][1].grad_norm > 0
    # Version 1 has one, version 0, where a GPU compiles, has none.
    assert gateway["steps"][0][1].self_check is None
    assert not gateway["steps"][1][1].self_check.exceeds_limits
    assert gateway["next_seq"] == 12
    for name in policies:
        latest = tmp_path / name / "latest"
        for file, digest in gateway["weights"].items():
            assert xxhash.xxh3_128_hexdigest((latest / file).read_bytes()) == digest


def test_versions_are_watched_over_every_wire_as_they_are_published(
    clients: dict[str, RatoonClient], policies: dict[str, str]
):
    policy_id = policies["http"]
    watches = [clients[name].watch_weights(policy_id) for name in WIRES]
    (newest,) = {next(watch).version for watch in watches}
    with ThreadPoolExecutor(len(watches)) as threads:
        upcoming = [threads.submit(next, watch) for watch in watches]
        step = clients["http"].policy(policy_id).update(batch(), loss=Loss("grpo"), optim=OPTIM)
        version = step.result().version
        assert version > newest
        assert {manifest.result().version for manifest in upcoming} == {version}


def streamed(addresses: ServiceAddresses, policy_id: str, known_version: int) -> set[int]:
    """The version that WatchWeights tells first: over gRPC, and as a server-sent event."""
    request = service_pb2.WatchWeightsRequest(policy_id=policy_id, known_version=known_version)
    with grpc.insecure_channel(addresses.grpc) as channel:
        versions = {next(PolicyServiceStub(channel).WatchWeights(request)).version}
    url = f"{addresses.http}/v1/policies/{policy_id}/weights/events?known_version={known_version}"
    with httpx.stream("GET", url, timeout=60) as events:
        data = next(line for line in events.iter_lines() if line.startswith("data: "))
    return {*versions, int(json.loads(data.removeprefix("data: "))["version"])}


@pytest.fixture(scope="module")
def published(clients: dict[str, RatoonClient], service: Service) -> Iterator[str]:
    """A policy that keeps four versions; its folder goes with it."""
    policy_id = "client-published"
    clients["http"].create_policy(policy_id, preset="tiny", seed=7, keep_versions=4).result()
    yield policy_id
    clients["http"].delete_policy(policy_id).result()
    assert service.config.weights_root is not None
    assert not (service.config.weights_root / policy_id).exists()


def updated(client: RatoonClient, policy_id: str, times: int = 1) -> int:
    # On policy, or in the end every term would be clipped, and the step skipped.
    loss, session = Loss("grpo", old_logprobs="on_policy"), client.policy(policy_id)
    steps = [session.update(batch(), loss=loss, optim=OPTIM) for _ in range(times)]
    return [step.result().version for step in steps][-1]


@pytest.mark.parametrize("wire", WIRES)
def test_what_an_ended_operation_made_is_what_every_reader_gets(
    clients: dict[str, RatoonClient], service: Service, published: str, wire: str, tmp_path: Path
):
    """A receiver in step with its trainer served the version before, in 19 of 20 steps."""
    client, addresses = clients[wire], service.addresses
    receiver = client.weight_receiver(published, tmp_path / "received")
    receiver.sync_once()
    readers: dict[str, Callable[[int], set[int]]] = {
        "poll": lambda n: {client.weight_manifest(published, known_version=n - 1).version},
        "pull": lambda _: {client.pull_weights(published, tmp_path / "pulled").version},
        "watch": lambda n: {next(client.watch_weights(published, known_version=n - 2)).version},
        "streams": lambda n: streamed(addresses, published, n - 2),
    }
    for times, wait_s in ((1, 0.0), (1, 60.0), (2, 0.0), (2, 60.0)):
        version = updated(client, published, times)
        received = receiver.sync_once(wait_s)
        assert received is not None
        assert received.version == version
    for name, read in readers.items():
        version = updated(client, published, 2)
        assert (name, read(version)) == (name, {version})
    version = updated(client, published)
    file = f"{addresses.http}/v1/policies/{published}/weights/{version}/files/config.json"
    assert httpx.get(file).status_code == httpx.codes.OK


def test_a_damaged_version_is_written_again_or_not_found_over_every_wire(
    clients: dict[str, RatoonClient], service: Service, published: str
):
    """The newest one was INTERNAL until the next step."""
    version = updated(clients["http"], published, 2)
    whole = clients["http"].weight_manifest(published)
    assert service.config.weights_root is not None
    root = service.config.weights_root / published
    (root / f"{version:08d}" / "manifest.json").write_bytes(b"{}")
    for name in WIRES:
        newest = clients[name].weight_manifest(published, known_version=version - 1)
        assert (newest.version, newest.files) == (version, whole.files)
    assert (root / f"damaged-{version:08d}" / "manifest.json").read_bytes() == b"{}"
    before = version - 1
    (root / f"{before:08d}" / "model.safetensors").unlink()
    for name in WIRES:
        with pytest.raises(RatoonApiError, match=f"version {before} is damaged") as caught:
            clients[name].weight_manifest(published, before)
        assert caught.value.code == "WEIGHTS_NOT_FOUND"


def test_gradients_read_over_every_wire_are_those_that_the_step_divides(
    clients: dict[str, RatoonClient], policies: dict[str, str]
):
    policy_id = policies["gateway"]
    session = clients["gateway"].policy(policy_id)
    names = ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"]
    with pytest.raises(RatoonApiError) as caught:
        clients["http"].gradient_manifest(policy_id, names)
    assert caught.value.code == "WINDOW_EMPTY"
    for _ in range(2):
        session.forward_backward(batch(), loss=Loss("grpo")).result()
    (manifest,) = {clients[name].gradient_manifest(policy_id, names) for name in WIRES}
    assert len(manifest.seqs) == 2
    (data,) = {clients[name].fetch_file(policy_id, manifest.file) for name in WIRES}
    sums = load(data)
    assert sorted(sums) == names
    asked = replace(OPTIM, tensor_grad_norms=True)
    report = session.optim_step(optim=asked).result().report
    found = {each.name: (each.norm, each.max_abs) for each in report.tensor_grad_norms}
    for name, values in sums.items():
        divided = values.astype(np.float64) / manifest.num_sequences
        expected = np.sqrt(np.square(divided).sum()), np.abs(divided).max()
        assert found[name] == pytest.approx(expected, rel=1e-9)
    assert set(found) > set(names)


def test_receivers_acknowledge_over_every_wire(
    clients: dict[str, RatoonClient], policies: dict[str, str], service: Service
):
    policy_id = policies["http"]
    newest = clients["http"].weight_manifest(policy_id).version
    for name in WIRES:
        client = clients[name]
        assert client.ack_weights(policy_id, name, version=newest, holds_version=newest) == newest
    session = clients["http"].policy(policy_id)
    for _ in range(3):
        session.update(batch(), loss=Loss("grpo"), optim=OPTIM).result()
    assert clients["gateway"].weight_manifest(policy_id, newest).version == newest
    # A read of the newest waits until it is there, and the oldest is gone.
    assert clients["gateway"].weight_manifest(policy_id).version == newest + 3
    for name in WIRES:
        assert clients[name].ack_weights(policy_id, name, version=newest) == newest + 3
    lines = httpx.get(f"{service.addresses.http}/metrics").text.splitlines()
    lag = f'ratoon_receiver_lag_versions{{policy_id="{policy_id}",receiver_id="%s"}} 3.0'
    assert {lag % name for name in WIRES} <= {*lines}
    session.update(batch(), loss=Loss("grpo"), optim=OPTIM).result()
    assert clients["http"].weight_manifest(policy_id).version == newest + 4
    with pytest.raises(RatoonApiError, match="WEIGHTS_NOT_FOUND"):
        clients["http"].weight_manifest(policy_id, newest)


@pytest.mark.parametrize("name", [*WIRES, "parts"])
def test_a_retry_over_another_wire_or_in_parts_is_the_same_operation(
    clients: dict[str, RatoonClient], policies: dict[str, str], name: str
):
    """The payload hash is over the validated form, so it does not know how the batch came."""
    policy_id = policies["gateway"]
    seq = clients["gateway"].get_policy(policy_id).next_seq
    first = (
        clients["gateway"]
        .policy(policy_id)
        .update(batch(), loss=Loss("grpo"), optim=OPTIM, seq=seq)
    )
    again = clients[name].policy(policy_id).update(batch(), loss=Loss("grpo"), optim=OPTIM, seq=seq)
    assert again.operation_id == first.operation_id
    assert again.result() == first.result()
    states: list[Operation] = list(clients[name].operation(first.operation_id).watch())
    assert states[-1].state == "done"
    with pytest.raises(RatoonApiError) as caught:
        clients[name].policy(policy_id).update(batch()[:1], loss=Loss("grpo"), optim=OPTIM, seq=seq)
    assert caught.value.code == "KEY_REUSED"


# A float32 whose product with an entropy is none.
OVERFLOWING = Loss("grpo", entropy_coefficient=3e38)


def test_steps_of_wrong_numbers_are_skipped_and_a_run_of_them_fails_the_policy(
    clients: dict[str, RatoonClient], service: Service, tmp_path: Path
):
    client, policy_id = clients["gateway"], "overflows"
    guard = NumericsGuard(max_grad_norm_to_step=1e6, max_skipped_in_row=2)
    created = client.create_policy(
        policy_id, preset="tiny", sequencing="server", numerics_guard=guard
    )
    assert created.result().spec.numerics_guard == guard
    by_name = {name: clients[name].policy(policy_id) for name in ("gateway", "http")}

    def update(name: str, loss: Loss) -> tuple[int, str | None]:
        step = by_name[name].update(batch(), loss=loss, optim=OPTIM).result()
        assert step.report.skipped == (step.report.skip_reason is not None)
        return step.version, step.report.skip_reason

    assert update("gateway", Loss("grpo")) == (1, None)
    weights = client.pull_weights(policy_id, tmp_path).manifest.files
    assert update("http", OVERFLOWING) == (1, "non_finite_loss")
    assert client.pull_weights(policy_id, tmp_path).manifest.files == weights
    assert update("gateway", Loss("grpo")) == (2, None)
    assert update("gateway", OVERFLOWING) == (2, "non_finite_loss")
    by_name["http"].forward_backward(batch(), loss=OVERFLOWING).result()
    last = by_name["http"].optim_step(optim=OPTIM).result()
    assert (last.version, last.report.skip_reason) == (2, "non_finite_loss")
    # The step's result comes first.
    while (policy := client.get_policy(policy_id)).state == "ready":
        time.sleep(0.05)
    assert (policy.state, policy.version) == ("failed", 2)
    assert policy.failure.startswith("2 optimizer steps in a row were skipped for their numbers")
    with pytest.raises(RatoonApiError) as caught:
        client.policy(policy_id).update(batch(), loss=Loss("grpo"), optim=OPTIM)
    assert caught.value.code == "POLICY_FAILED"
    assert policy.failure in caught.value.message
    assert client.pull_weights(policy_id, tmp_path).manifest.version == 2, "it has no worker"
    metrics = httpx.get(f"{service.addresses.http}/metrics").text
    labels = f'policy_id="{policy_id}",reason="non_finite_loss"'
    assert f"ratoon_skipped_steps_total{{{labels}}} 3.0" in metrics
    client.delete_policy(policy_id).result()


def test_a_custom_loss_has_the_gradient_of_the_same_loss_in_the_service(
    clients: dict[str, RatoonClient],
):
    """-sum A logp, written by the caller, is `reinforce` with advantages."""
    advantages = [[0.5, -1.0, 2.0], [1.5, -0.25]]
    rollouts = [rollout(response=[5, 6, 7], advantages=advantages[0])]
    rollouts.append(rollout(response=[5, 8], advantages=advantages[1]))
    groups = [group("a", [1, 2, 3], rollouts)]
    still = Optim(learning_rate=0.0, divide_by="none")

    def loss_of(logprobs: list[np.ndarray]) -> tuple[float, list[np.ndarray]]:
        gradients = [-np.array(values) for values in advantages]
        loss = sum(float(g @ p) for g, p in zip(gradients, logprobs, strict=True))
        return loss, gradients

    clients["http"].create_policy("client-custom", preset="tiny", sequencing="server").result()
    for name in ("gateway", "http"):
        client = clients[name]
        session = client.policy("client-custom")
        loss, handle = session.forward_backward_custom(groups, loss_of=loss_of)
        own = handle.result().report
        own_norm = session.optim_step(optim=still).result().report.grad_norm
        built_in = session.forward_backward(groups, loss=Loss("reinforce")).result().report
        norm = session.optim_step(optim=still).result().report.grad_norm
        assert norm is not None
        assert own_norm == pytest.approx(norm, rel=1e-5)
        assert norm > 0
        assert [own.loss, loss] == pytest.approx([built_in.loss, built_in.loss], rel=1e-5)
    clients["http"].delete_policy("client-custom").result()
    with pytest.raises(RatoonApiError, match="POLICY_NOT_FOUND"):
        clients["http"].get_policy("client-custom")
