"""The Tinker wire over the engine and the trainer, in this process: bits, steps and lifetimes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from ratoon.api.convert.policy import SpecDefaults
from ratoon.api.gate import build_gate
from ratoon.api.http.app import create_app
from ratoon.api.service import PolicyService
from ratoon.api.tinker.routes import tinker_routes
from ratoon.config import LimitsConfig, RatoonConfig, TinkerConfig
from ratoon.engine.client import EngineClient
from ratoon.engine.policy import controller, idle
from ratoon.engine.types import PolicySpec
from ratoon.model.export import export_weights
from ratoon.model.spec import ModelDtype
from ratoon.train.spec import TrainerSpec
from ratoon.train.trainer import Trainer
from ratoon_proto.tinker import tinker_pb2 as wire
from ratoon_proto.types import PolicyState
from tests.api.fake_engine import FakeSampler
from tests.api.test_tinker_wire import ADAM, Caller, ours
from tests.api.tinker_requests import datum, forward_backward
from tests.engine.fake_trainer import Faults
from tests.engine.test_engine import House, LocalCluster
from tests.engine.test_idle import Clock, pass_by
from tests.engine.test_recovery_bits import TrainingWorker
from tests.equivalence import assert_close, relative_errors
from tests.oracle import hf
from tests.tiny_models import write_folder
from tests.until import until

pytestmark = pytest.mark.more
BASE = "qwen3"
LOSSES: Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    # Sums over tokens, by z the log-prob, q `logprobs` and a `advantages`; the first: a `weights`.
    "cross_entropy": lambda z, _, a: -(a * z).sum(),
    "importance_sampling": lambda z, q, a: -((z - q).exp() * a).sum(),
    "ppo": lambda z, q, a: (
        -torch.minimum((z - q).exp() * a, (z - q).exp().clamp(0.8, 1.2) * a).sum()
    ),
    "cispo": lambda z, q, a: -((z - q).exp().clamp(0.8, 1.2).detach() * a * z).sum(),
    "dro": lambda z, q, a: -(z * a - 0.025 * (z - q) ** 2).sum(),
}


class TrainingCluster(LocalCluster):
    """Trains in `dtype`, whatever a policy says: no wire has float64."""

    dtype = ModelDtype.FLOAT32

    def trainer(self, spec: PolicySpec) -> TrainerSpec:
        made = super().trainer(spec)
        return replace(made, model=replace(made.model, dtype=self.dtype))

    def worker(self, policy_id: str, num_workers: int, host_key: str = "") -> TrainingWorker:
        assert host_key == "", "each is to be alone"
        found = self.workers.setdefault(policy_id, TrainingWorker(Faults()))
        assert isinstance(found, TrainingWorker)
        return found


class Cutting(httpx.AsyncBaseTransport):
    """Loses the answers of requests while `cuts`: the service has made them."""

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self.inner, self.cuts = inner, False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await self.inner.handle_async_request(request)
        if self.cuts:
            assert response.status_code == 200
            raise httpx.ReadError("cut")
        return response


class Rig:
    """A caller of the wire, over an engine with real trainers."""

    def __init__(self, root: Path) -> None:
        self.models = root / "models"
        self.folder = write_folder(self.models / BASE, BASE)
        (root / "data").mkdir()
        self.house = House(root / "data")
        self.cluster = self.house.cluster = TrainingCluster()
        self.house.engine = self.house.new()
        limits, tinker = LimitsConfig(), TinkerConfig(enabled=True, idle_ttl_s=1000.0)
        config = RatoonConfig(data_root=root / "data", models_root=self.models, tinker=tinker)
        service = PolicyService(
            engine=EngineClient(lambda call: call.on(self.house.engine), self.house.settings),
            sampler=FakeSampler(),
            limits=limits,
            defaults=SpecDefaults(models_root=self.models, micro_batch_tokens=4096),
            device="cpu",
        )
        gate = build_gate(config)
        app = create_app(service, limits, gate=gate, tinker=tinker_routes(service, gate, config))
        self.transport = Cutting(httpx.ASGITransport(app))
        client = httpx.AsyncClient(transport=self.transport, base_url="http://test", timeout=60)
        self.caller = Caller(client=client)

    def trainer(self, model_id: str) -> Trainer:
        runner = self.cluster.workers[ours(model_id)].core._runner
        assert runner is not None
        return runner.trainer

    def gradients(self, model_id: str) -> dict[str, Tensor]:
        """Copies of the sums of the open window."""
        named = self.trainer(model_id).model.named_trainable()
        return {
            n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in named.items()
        }

    async def passed(
        self, message: wire.ForwardBackwardRequest
    ) -> tuple[list[NDArray[np.float32]], Mapping[str, float]]:
        """Log-probs of each datum, and the metrics."""
        response = await self.caller.future(await self.caller.forward_backward(message))
        assert response.headers["content-type"] == "application/x-protobuf", response.text
        answer = wire.ForwardBackwardOutput.FromString(response.content)
        tensor = answer.loss_fn_outputs[0].fields["logprobs"]
        ends = np.frombuffer(tensor.offsets, "<i8")[1:-1] // 4
        return np.split(np.frombuffer(tensor.data, "<f4"), ends), answer.metrics

    async def step(self, model_id: str, seq: int, learning_rate: float) -> None:
        adam = {**ADAM, "learning_rate": learning_rate}
        body = {"model_id": model_id, "seq_id": seq, "adam_params": adam}
        assert "metrics" in await self.caller.result(await self.caller.post("optim_step", **body))


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    rig = Rig(tmp_path)
    await rig.house.engine.recover()
    yield rig
    await rig.caller.client.aclose()
    await rig.house.leave()


def logprobs_of(model: torch.nn.Module, tokens: list[int], targets: list[int]) -> Tensor:
    """Log-probs of the targets, one unpadded forward of transformers."""
    with hf.precision_of(model):
        logits_TV = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return logits_TV.log_softmax(-1).gather(1, torch.tensor(targets)[:, None])[:, 0]


async def test_gradients_of_each_loss_are_those_of_autograd(rig: Rig, tmp_path: Path) -> None:
    """In float64, of each datum alone and of all: a stock model, peft and the formulas."""
    rig.cluster.dtype = ModelDtype.FLOAT64
    model_id = await rig.caller.model(base_model=BASE)
    rng = np.random.default_rng(3)
    # Prefixes that are shared, wholly and in part.
    texts = [[5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 3, 2, 1, 4], [5, 6, 7, 8, 9, 10, 12], [40, 41]]
    first = datum(texts[1], weights=[1.0] * 8)
    await rig.passed(forward_backward(first, model_id=model_id, seq_id=1))
    await rig.step(model_id, 2, 1e-2)  # B of an adapter is 0 before.
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    export_weights(rig.trainer(model_id).model, adapter)
    oracle = hf.with_adapter(hf.load(rig.folder, dtype=torch.float64), adapter)
    named = {name: p for name, p in oracle.named_parameters() if p.requires_grad}
    data: list[tuple[list[int], list[int], list[float], list[float]]] = []
    for text in texts:
        targets = [*text[1:], 7]
        with torch.no_grad():
            near = logprobs_of(oracle, text, targets) + torch.tensor(rng.normal(0, 0.3, len(text)))
        advantages = rng.normal(0, 1, len(text)).astype(np.float32)
        data.append((text, targets, near.float().tolist(), advantages.tolist()))
    seq = 3
    for loss_fn, formula in LOSSES.items():
        is_supervised = loss_fn == "cross_entropy"
        for chosen in (*([one] for one in data), data):
            columns: list[dict[str, list[float]]] = [
                {"weights": a} if is_supervised else {"advantages": a, "logprobs": q}
                for _, _, q, a in chosen
            ]
            sent = [datum(t, None, **c) for (t, *_), c in zip(chosen, columns, strict=True)]
            message = forward_backward(*sent, loss_fn=loss_fn, model_id=model_id, seq_id=seq)
            found, metrics = await rig.passed(message)
            mine = rig.gradients(model_id)
            oracle.zero_grad()
            total = torch.zeros((), dtype=torch.float64)
            for own, (text, targets, q, a) in zip(found, chosen, strict=True):
                z = logprobs_of(oracle, text, targets)
                given = (torch.tensor(each, dtype=torch.float64) for each in (q, a))
                total = total + formula(z, *given)
                assert np.abs(own - z.detach().numpy()).max() <= 1e-5
            total.backward()
            theirs = {name: p.grad for name, p in named.items() if p.grad is not None}
            assert_close(relative_errors(mine, theirs), 1e-10)
            assert metrics["loss:sum"] == pytest.approx(total.item(), rel=1e-6), loss_fn
            await rig.step(model_id, seq + 1, 0.0)
            seq += 2


async def test_flat_datums_share_their_prompts_in_any_order(rig: Rig) -> None:
    """4 prompts and 8 samples of each, as a script sends them; each datum is run once."""
    model_id = await rig.caller.model(base_model=BASE)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(1, 60, 90).tolist() for _ in range(4)]
    texts = [[*prompt, *rng.integers(1, 60, 11).tolist()] for prompt in prompts for _ in range(8)]
    oracle = hf.load(rig.folder, dtype=torch.float32, attention="sdpa")
    with torch.no_grad():
        expected = [logprobs_of(oracle, text[:-1], text[1:]).numpy() for text in texts]
    order = rng.permutation(len(texts)).tolist()
    losses: list[float] = []
    for seq, at in ((1, range(len(texts))), (3, order)):
        data = [
            datum(
                texts[i][:-1],
                texts[i][1:],
                advantages=[0.0] * 89 + [i % 3 - 1.5] * 11,
                logprobs=[0.0] * 89 + expected[i][89:].tolist(),
            )
            for i in at
        ]
        message = forward_backward(
            *data, loss_fn="importance_sampling", model_id=model_id, seq_id=seq
        )
        found, metrics = await rig.passed(message)
        gaps = [np.abs(own - expected[i]).max() for own, i in zip(found, at, strict=True)]
        assert max(gaps) <= 1e-5
        assert metrics["rho:mean"] >= 4.5
        losses.append(metrics["loss:sum"])
        await rig.step(model_id, seq + 1, 0.0)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


async def test_a_step_whose_answer_is_lost_is_taken_once(rig: Rig) -> None:
    model_id = await rig.caller.model()
    begun = dict[str, Any]()
    for seq in range(1, 101):
        body = {"model_id": model_id, "seq_id": seq, "adam_params": ADAM}
        rig.transport.cuts = True
        with pytest.raises(httpx.ReadError):
            await rig.caller.post("optim_step", **body)
        rig.transport.cuts = False
        begun = await rig.caller.post("optim_step", **body)
    assert "metrics" in await rig.caller.result(begun)
    policy = await rig.house.engine.policy(ours(model_id))
    assert (policy.version, policy.next_seq) == (100, 101)
    assert rig.trainer(model_id).ranks.own.optimizer.state().num_steps == 100


async def test_a_client_that_vanishes_leaves_its_last_state(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has not finished its session: only heartbeats that no longer come tell."""
    clock, caller = Clock(), rig.caller
    for module in (idle, controller):
        monkeypatch.setattr(module, "time", clock)
    model_id = await caller.model()
    session = {"session_id": model_id.partition(":")[0]}
    await rig.passed(forward_backward(datum([1, 2], weights=[1, 1]), model_id=model_id))
    await rig.step(model_id, 2, 1e-2)
    own = await rig.house.engine._controller(ours(model_id))
    for _ in range(2):
        await pass_by(clock, own, 900.0)
        await caller.post("session_heartbeat", **session)
    assert own._run.state is PolicyState.READY
    await pass_by(clock, own, 1001.0)
    await until(lambda: own._run.state is PolicyState.ENDED)
    kept = (await caller.get("checkpoints"))["checkpoints"]
    path = f"tinker://{model_id}/weights/ended-v1"
    assert [each["tinker_path"] for each in kept] == [path]
    refusal = await caller.step(model_id, 3, 400)
    assert "nobody has called it" in refusal["detail"]
    await caller.post("session_heartbeat", **session)
    body = {**session, "model_seq_id": 1, "path": path, "optimizer": True}
    begun = await caller.post("load_weights", **body)
    assert (await caller.result(begun))["path"] == path
    await rig.step(begun["model_id"], 1, 1e-2)
    assert rig.trainer(begun["model_id"]).ranks.own.optimizer.state().num_steps == 2
