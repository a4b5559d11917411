"""Muon of matrices beside AdamW: against the papers, and what holds for every optimizer here."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ratoon.errors import ErrorCode, RatoonError
from ratoon.model.loader import read_model
from ratoon.model.policy_model import muon_matrices, trained_parameters
from ratoon.model.spec import FolderBase, ModelDtype, ModelSpec
from ratoon.shards.parts import Matrices, parts_of
from ratoon.train.optim.adamw import Optimizer
from ratoon.train.optim.bf16_adamw import Bf16AdamW, make_optimizer
from ratoon.train.optim.digest import StateDigest
from ratoon.train.ranks.layout import load, needed_bytes
from ratoon.train.spec import OptimizerStates
from ratoon.train.trainer import Trainer
from ratoon_proto.types import (
    AdamWConfig,
    Decay,
    FullTuning,
    LossKind,
    MuonAdjustLr,
    MuonConfig,
    OptimStepConfig,
    ParameterGroup,
    Shard,
)
from tests.equivalence import assert_close
from tests.oracle.muon import PlainMuon
from tests.tiny_models import write_folder
from tests.train.equivalence_runs import (
    ADAMW,
    check_step,
    forward_backward,
    make_pair,
    make_request,
    random_batch_near,
    weight_errors,
)
from tests.train.optimizer_runs import (
    CONFIG,
    SPLIT,
    copied,
    make_gradients,
    make_parameters,
    masters_of,
    optim_step,
    take_step,
)
from tests.train.rank_runs import alone_of, ranked, update_over
from tests.train.rank_runs import weights_of as whole_weights
from tests.train.trainer_runs import assert_equal, make_trainer, state_of, update, weights_of

MUON = replace(CONFIG, muon=MuonConfig())
# The matrices of `make_parameters`.
MATRICES: Matrices = {"whole": (40, 128), "broken": (37, 131)}
RATE, DECAY = 1e-2, 0.3
STEP = optim_step(RATE, weight_decay=DECAY, max_grad_norm=math.inf)


def _run(optimizer: Optimizer, numbers: range) -> dict[str, Tensor]:
    for number in numbers:
        sums = make_gradients(number)
        if any(w.dtype is torch.float64 for w in optimizer.state().weights.values()):
            sums = {name: value.double() for name, value in sums.items()}
        assert not take_step(optimizer, sums, 1.0, STEP).skipped
    return copied(optimizer.state())


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust", list(MuonAdjustLr))
@pytest.mark.parametrize(("shape", "halves"), [((9, 14), 1), ((14, 9), 1), ((3, 8, 5), 2)])
def test_three_steps_are_those_of_the_papers(
    adjust: MuonAdjustLr, shape: tuple[int, ...], halves: int, *, nesterov: bool
) -> None:
    generator = torch.Generator().manual_seed(1)
    own = nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))
    plain, start = own.detach().clone(), own.detach().clone()
    config = MuonConfig(momentum=0.8, nesterov=nesterov, adjust_lr_fn=adjust)
    matrices = {"w": (shape[-2] // halves, shape[-1])}
    optimizer = make_optimizer(
        {"w": own}, replace(CONFIG, muon=config), OptimizerStates.FP32, 0, matrices
    )
    reference = PlainMuon(
        momentum=0.8, nesterov=nesterov, is_original=adjust is MuonAdjustLr.ORIGINAL
    )
    for _ in range(3):
        gradient = torch.randn(shape, generator=generator, dtype=torch.float64)
        reference.step("w", plain, gradient, rate=RATE, decay=DECAY, halves=halves)
        assert not take_step(optimizer, {"w": 2.0 * gradient}, 2.0, STEP).skipped
    assert float((own - plain).norm()) <= 1e-12 * float((plain - start).norm())
    assert float((plain - start).norm()) > 1e-3 * float(start.norm())


@pytest.mark.parametrize("kind", [OptimizerStates.FP32, *SPLIT])
@pytest.mark.parametrize("adjust", list(MuonAdjustLr))
def test_bfloat16_policies_step_as_torch_does(kind: OptimizerStates, adjust: MuonAdjustLr) -> None:
    """torch.optim.Muon over float32 masters, whose iterations are bfloat16 too."""
    parameters = make_parameters()
    config = replace(MUON, muon=MuonConfig(adjust_lr_fn=adjust))
    optimizer = Bf16AdamW(parameters, config, kind, 0, MATRICES)
    theirs = {name: nn.Parameter(parameters[name].detach().float()) for name in MATRICES}
    start = {name: parameter.detach().clone() for name, parameter in theirs.items()}
    muon = torch.optim.Muon(
        theirs.values(), lr=RATE, weight_decay=DECAY, momentum=0.95, adjust_lr_fn=adjust.value
    )
    for number in range(3):
        sums = make_gradients(number)
        for name, parameter in theirs.items():
            parameter.grad = sums[name].clone()
        assert not take_step(optimizer, sums, 1.0, STEP).skipped
        muon.step()
    for name, master in masters_of(optimizer.state()).items():
        if name in theirs:
            moved = theirs[name].detach() - start[name]
            # What rounding a momentum to 8 bits moves, and otherwise that of the iterations.
            is_coded = kind is OptimizerStates.BF16_SPLIT_8BIT
            limit = (0.1 if is_coded else 0.03) * float(moved.norm())
            assert float((master - theirs[name].detach()).norm()) <= limit


@pytest.mark.parametrize("kind", list(OptimizerStates))
def test_a_step_repeats_its_bits_and_keeps_a_momentum_alone(kind: OptimizerStates) -> None:
    runs = [_run(Bf16AdamW(make_parameters(), MUON, kind, 7, MATRICES), range(3)) for _ in range(2)]
    assert_equal(*runs)
    kept = {key for key in runs[0] if "exp_avg_sq" in key}
    assert kept == {"exp_avg_sq/few"}
    # As of AdamW, what is not a matrix takes the same steps whether or not Muon steps the others.
    adamw = _run(Bf16AdamW(make_parameters(), CONFIG, kind, 7), range(3))
    assert_equal(*({n: t for n, t in run.items() if "/few" in n} for run in (runs[0], adamw)))


@pytest.mark.parametrize("kind", list(OptimizerStates))
def test_a_state_that_is_loaded_goes_on_with_its_bits(kind: OptimizerStates) -> None:
    undisturbed = _run(Bf16AdamW(make_parameters(), MUON, kind, 7, MATRICES), range(4))
    half = Bf16AdamW(make_parameters(), MUON, kind, 7, MATRICES)
    _run(half, range(2))
    other = Bf16AdamW(make_parameters(1), MUON, kind, 7, MATRICES)
    other.load(half.state().on_host())
    digests = [StateDigest(torch.device("cpu")).of(each.state()) for each in (half, other)]
    assert digests[0] == digests[1]
    assert_equal(_run(other, range(2, 4)), undisturbed)


@pytest.mark.parametrize("kind", list(OptimizerStates))
def test_parts_are_whole_matrices_and_change_no_bit(kind: OptimizerStates) -> None:
    """But of experts: how many are multiplied at a time decides bits, and no rank decides it."""
    matrices = {"experts": (8, 32), "dense": (12, 64)}

    def run(part: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(3)
        shapes = {"experts": (4, 16, 32), "dense": (12, 64), "few": (7,)}
        parameters = {
            name: nn.Parameter(torch.randn(shape, generator=generator).to(torch.bfloat16))
            for name, shape in shapes.items()
        }
        parts = parts_of(parameters, part, matrices=matrices)
        for one in parts:
            size = math.prod(matrices.get(one.parameter, (1, 1)))
            assert one.start % size == one.stop % size == 0
        own = {one.name: one.of(parameters[one.parameter]) for one in parts}
        optimizer = Bf16AdamW(own, MUON, kind, 0, matrices)
        for _ in range(3):
            sums = {n: torch.randn(s, generator=generator) for n, s in shapes.items()}
            of_parts = {one.name: one.of(sums[one.parameter]) for one in parts}
            assert not take_step(optimizer, of_parts, 2.0, STEP).skipped
        assert len(parts) == {300: 8 + 1 + 1, 5120: 3}[part]
        return {name: parameter.detach() for name, parameter in parameters.items()}

    few, many = run(5120), run(300)
    torch.testing.assert_close(many.pop("experts"), few.pop("experts"), rtol=0.05, atol=0.05)
    assert_equal(many, few)


def test_a_step_that_would_not_be_finite_is_not_taken() -> None:
    """By the bounds, and by a trial of each tensor where these prove nothing."""
    for parameters, make in (
        ({n: nn.Parameter(p.detach().float()) for n, p in make_parameters().items()}, "float32"),
        (make_parameters(), "bfloat16"),
    ):
        kind = OptimizerStates.FP32 if make == "float32" else OptimizerStates.BF16_SPLIT
        optimizer = make_optimizer(parameters, MUON, kind, 0, MATRICES)
        _run(optimizer, range(1))
        before = copied(optimizer.state())
        far = {name: torch.full_like(p, 3e37) for name, p in make_parameters().items()}
        sums = {name: value.float() for name, value in far.items()}
        huge = optim_step(1e4, weight_decay=1e30, max_grad_norm=math.inf)
        assert take_step(optimizer, sums, 1.0, huge).skipped
        assert_equal(copied(optimizer.state()), before)


def _module(folder: Path) -> Any:
    spec = ModelSpec(
        base=FolderBase(folder=str(folder)), tuning=FullTuning(), dtype=ModelDtype.BFLOAT16, seed=0
    )
    return read_model(spec).module


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe", "gpt_oss", "qwen3_5"])
def test_the_matrices_are_those_of_the_layers(tmp_path: Path, architecture: str) -> None:
    """Neither embeddings nor the LM head, norms, biases, or the filters of a convolution."""
    module = _module(write_folder(tmp_path / "base", architecture))
    trained = trained_parameters(module)
    found = muon_matrices(MUON, module, trained)
    assert muon_matrices(CONFIG, module, trained) == {}
    assert found
    for name, parameter in trained.items():
        is_bias = name.endswith(("bias", "A_log"))
        is_matrix = ".layers." in name and not is_bias and "conv1d" not in name
        assert (name in found) == (is_matrix and parameter.ndim >= 2), name
        if name in found:
            rows, columns = found[name]
            assert parameter.numel() % (rows * columns) == 0
            assert columns == parameter.shape[-1]
    if architecture == "qwen3_moe":
        (fused, *_) = (name for name in found if name.endswith("gate_up_proj"))
        assert found[fused][0] * 2 == trained[fused].shape[1]


@pytest.mark.parametrize(
    "kind", [OptimizerStates.BF16_SPLIT, OptimizerStates.BF16_SPLIT_8BIT, OptimizerStates.FP32]
)
def test_planned_bytes_are_those_of_the_states(tmp_path: Path, kind: OptimizerStates) -> None:
    module = _module(write_folder(tmp_path / "base", "qwen3_moe"))
    trained = trained_parameters(module)
    matrices = muon_matrices(MUON, module, trained)
    optimizer = make_optimizer(dict(trained), MUON, kind, 0, matrices)
    own = [
        t for f, ts in optimizer.state().tensors().items() if f != "weights" for t in ts.values()
    ]
    own += [t for t in optimizer.state().weights.values() if t.dtype is not torch.bfloat16]
    sums = 4 * sum(p.numel() for p in trained.values())
    planned = needed_bytes(trained, kind, matrices=matrices)
    assert planned == pytest.approx(sum(t.nbytes for t in own) + sums, rel=0.05)
    assert planned < needed_bytes(trained, kind)


def _muon_spec(base: FolderBase, **changes: Any) -> Trainer:
    spec = make_trainer(base, tokens=32).spec
    return Trainer.create(replace(spec, optimizer=replace(MUON, weight_decay=0.1, **changes)))


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_three_updates_are_those_of_each_rollout_alone(tmp_path: Path, architecture: str) -> None:
    """With a rate of its own for the head, and without decay for the experts or the MLP."""
    folder = write_folder(tmp_path / "base", architecture)
    groups = (
        ParameterGroup("*.mlp.*", lr_factor=0.5, decays=False),
        ParameterGroup("*embed_tokens*", lr_factor=3.0),
    )
    config = replace(ADAMW, muon=MuonConfig(), groups=groups, decay=Decay.MATRICES)
    pair = make_pair(folder, scratch=tmp_path / "adapter", optimizer=config)
    module = pair.trainer.model.module
    matrices = muon_matrices(config, module, pair.trainer.model.named_trainable())
    halves = {
        name: p.shape[-2] // matrices[name][0]
        for name, p in pair.oracle.parameters().items()
        if name in matrices
    }
    pair.oracle.step_by_muon(
        halves,
        lambda name: 0.5 if ".mlp." in name else 3.0 if "embed_tokens" in name else 1.0,
        lambda name: ".mlp." not in name and "norm" not in name and "bias" not in name,
    )
    for seed in range(3):
        batch = random_batch_near(pair, seed)
        forward_backward(pair, batch, make_request(LossKind.GRPO))
        check_step(pair, OptimStepConfig(learning_rate=3e-3), divide_by="sequences")
    assert_close(weight_errors(pair), pair.tolerance)


def test_a_checkpoint_goes_on_with_its_bits(base: FolderBase, tmp_path: Path) -> None:
    one, two = _muon_spec(base), _muon_spec(base)
    for seed in range(2):
        update(one, seed)
    one.snapshot().write(tmp_path / "kept")
    two.load_checkpoint(tmp_path / "kept")
    assert two.state_digest() == one.state_digest()
    for trainer in (one, two):
        update(trainer, 2)
    assert two.state_digest() == one.state_digest()
    assert_equal(weights_of(two), weights_of(one))
    with pytest.raises(RatoonError) as caught:
        make_trainer(base, tokens=32).load_checkpoint(tmp_path / "kept")
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT


@pytest.mark.parametrize("shard", list(Shard))
@pytest.mark.parametrize("kind", [OptimizerStates.BF16_SPLIT, OptimizerStates.BF16_8BIT])
def test_two_ranks_have_the_bits_of_one(
    base: FolderBase, tmp_path: Path, shard: Shard, kind: OptimizerStates
) -> None:
    """Where one rank runs everything; and a checkpoint of two is one's."""
    alone = alone_of(base, dtype=ModelDtype.BFLOAT16)
    spec = replace(alone.spec, optimizer=MUON, optimizer_states=kind)
    alone = Trainer.create(spec)
    with ranked(spec, 2, 500, shard) as (two, _):
        for seed in range(2):
            update_over(alone, seed)
            assert not update_over(two, seed, (0,)).skipped
        assert_equal(whole_weights(two), whole_weights(alone))
        owned = state_of(two).exp_avg
        assert 0 < len(owned) < sum(1 for _ in parts_of(two.model.named_trainable(), 500))
        two.snapshot().write(tmp_path / "kept")
        digest = two.state_digest()
    with ranked(spec, 2, 500, shard) as (again, _):
        again.load_checkpoint(tmp_path / "kept")
        assert again.state_digest() == digest


@pytest.mark.parametrize(
    ("patterns", "index", "expected"),
    [
        (("*.q_proj.*", "nothing"), 1, "a trained parameter's name"),
        (("*layers.0.*", "*.q_proj.*"), 1, "leaves model.layers.0.self_attn.q_proj.weight to"),
    ],
)
def test_patterns_are_refused_by_name_before_anything_is_made(
    base: FolderBase, patterns: tuple[str, ...], index: int, expected: str
) -> None:
    groups = tuple(ParameterGroup(pattern) for pattern in patterns)
    spec = make_trainer(base).spec
    with pytest.raises(RatoonError) as caught:
        load(replace(spec, optimizer=AdamWConfig(groups=groups)))
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    assert caught.value.field == f"spec.optimizer.groups[{index}].pattern"
    assert patterns[index] in str(caught.value.got)
    assert expected in str(caught.value.expected)


@pytest.mark.parametrize("kind", [None, *OptimizerStates])
def test_a_group_has_its_own_rate_and_decay(kind: OptimizerStates | None) -> None:
    """As torch's AdamW has them by groups; a factor of 0 leaves the weights as they are."""
    groups = (ParameterGroup("whole", lr_factor=0.0), ParameterGroup("f*w", decays=False))
    config, makes = replace(CONFIG, groups=groups), make_parameters
    parameters: dict[str, Any] = makes()
    if kind is None:
        parameters = {n: nn.Parameter(p.detach().double()) for n, p in parameters.items()}
    before = {name: p.detach().clone() for name, p in parameters.items()}
    optimizer = make_optimizer(parameters, config, kind or OptimizerStates.FP32, 0)
    _run(optimizer, range(2))
    assert torch.equal(parameters["whole"], before["whole"])
    assert not torch.equal(parameters["broken"], before["broken"])
    if kind is not None:
        return
    few = nn.Parameter(before["few"].clone())
    theirs = torch.optim.AdamW([few], lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    for number in range(2):
        few.grad = make_gradients(number)["few"].double()
        theirs.step()
    torch.testing.assert_close(parameters["few"], few, rtol=1e-12, atol=0.0)
