"""Adapters: where they may sit, how they start, and those of experts against a loop over tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from ratoon.errors import ErrorCode
from ratoon.model.experts import EXPERTS_NAME, register_grouped_experts
from ratoon.model.lora import LoraExperts
from ratoon.model.spec import ModelDtype
from ratoon_proto.types import LoraTuning
from tests.model.builders import (
    LORA,
    LORA_ATTENTION,
    LORA_EXPERTS,
    LORA_HEADS,
    TINY,
    error_of,
    load,
    logits_of,
    randomize,
)
from tests.model.packing import branching_sequences, pack
from tests.model.test_experts import CASES, Case, D, F, each_case
from tests.tiny_models import write_folder

ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}
RANK, ALPHA = 3, 7.5
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def targets(names: list[str]) -> set[str]:
    return {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in names}


def test_default_targets_are_every_linear_map(tmp_path: Path) -> None:
    model = load(write_folder(tmp_path / "base", "qwen3"), tuning=LORA)
    assert targets(list(model.named_trainable())) == ATTENTION | MLP
    assert len(model.named_trainable()) == 2 * 2 * len(ATTENTION | MLP)


@pytest.mark.parametrize("tuning", [LORA, replace(LORA, target_modules=(*MLP, *ATTENTION))])
def test_default_targets_of_a_model_with_experts_are_these_too(
    tmp_path: Path, tuning: LoraTuning
) -> None:
    model = load(write_folder(tmp_path / "base", "qwen3_moe"), tuning=tuning)
    trained = model.named_trainable()
    assert targets(list(trained)) == ATTENTION | MLP
    assert len(trained) == 2 * 2 * len(ATTENTION | MLP)
    assert all((p.ndim == 3) == (".experts." in name) for name, p in trained.items())


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gemma3", "olmo3", "qwen3_5"])
def test_default_targets_of_a_dense_model_are_all_linear_of_peft(
    tmp_path: Path, architecture: str
) -> None:
    """The wire's `all-linear` is the default."""
    folder = write_folder(tmp_path / "base", architecture)
    stock = AutoModelForCausalLM.from_pretrained(folder)
    config = LoraConfig(r=3, target_modules="all-linear", task_type="CAUSAL_LM")
    theirs = get_peft_model(stock, config)
    names = {name for name, p in theirs.named_parameters() if p.requires_grad}
    assert names
    assert {*load(folder, tuning=LORA).named_trainable()} == names


def test_experts_alone_are_adapted_by_name(tmp_path: Path) -> None:
    model = load(write_folder(tmp_path / "base", "qwen3_moe"), tuning=LORA_EXPERTS)
    assert targets(list(model.named_trainable())) == MLP


def test_a_part_of_the_projections_of_experts_is_refused(tmp_path: Path) -> None:
    """No engine takes an adapter that has but one of them."""
    folder = write_folder(tmp_path / "base", "qwen3_moe")
    for part in (("gate_proj",), ("up_proj", "q_proj", "gate_proj"), ("down_proj", "o_proj")):
        tuning = LoraTuning(rank=2, alpha=4.0, target_modules=part)
        error = error_of(lambda t=tuning: load(folder, tuning=t))
        assert (error.code, error.field) == (ErrorCode.UNSUPPORTED, "tuning.lora.target_modules")
        assert "alone of the projections of experts" in error.got
        assert "gate_proj, up_proj, down_proj" in error.expected


@pytest.mark.parametrize(
    ("architecture", "maps"),
    [
        ("qwen3_moe_mixed", "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"),
        (
            "deepseek_v3",
            "down_proj, gate_proj, kv_a_proj_with_mqa, kv_b_proj, o_proj, q_proj, up_proj",
        ),
        ("gpt_oss", "k_proj, o_proj, q_proj, v_proj"),
        ("qwen3_5_moe", "k_proj, o_proj, out_proj, q_proj, v_proj"),
    ],
)
def test_lora_without_targets_is_refused_where_mlps_would_stay_as_they_are(
    tmp_path: Path, architecture: str, maps: str
) -> None:
    """Attention alone was adapted, and nothing said that nine tenths of the model were not."""
    folder = write_folder(tmp_path / "base", architecture)
    error = error_of(lambda: load(folder, tuning=LORA))
    assert (error.code, error.field) == (ErrorCode.UNSUPPORTED, "tuning.lora.target_modules")
    assert "experts" in error.message
    assert error.expected.endswith(maps)


def test_named_targets_adapt_the_attention_of_a_model_with_experts(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "base", "qwen3_moe")
    model = load(folder, tuning=LORA_ATTENTION)
    assert targets(list(model.named_trainable())) == ATTENTION
    assert len(model.named_trainable()) == 2 * 2 * len(ATTENTION)


def test_named_targets_are_the_only_ones() -> None:
    tuning = LoraTuning(rank=2, alpha=4.0, target_modules=("v_proj", "q_proj"))
    model = load(TINY, tuning=tuning)
    assert targets(list(model.named_trainable())) == {"q_proj", "v_proj"}


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gemma3", "qwen3_moe"])
def test_embedding_and_head_are_adapted_by_name_alone(tmp_path: Path, architecture: str) -> None:
    """As peft names and shapes them; tied or not, each has factors of its own."""
    folder = write_folder(tmp_path / "base", architecture)
    model = load(folder, tuning=LORA_HEADS)
    stock = AutoModelForCausalLM.from_pretrained(folder)
    config = LoraConfig(r=3, target_modules=[*LORA_HEADS.target_modules], task_type="CAUSAL_LM")
    theirs = get_peft_model(stock, config)
    shapes = {name: p.shape for name, p in theirs.named_parameters() if p.requires_grad}
    assert {name: p.shape for name, p in model.named_trainable().items()} == shapes
    assert targets([*shapes]) == {"v_proj", "embed_tokens", "lm_head"}
    if architecture != "qwen3_moe":
        assert targets([*load(folder, tuning=LORA).named_trainable()]) == ATTENTION | MLP


def test_tied_adapters_warn_nobody(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """The service has them apart on purpose."""
    load(write_folder(tmp_path / "base", "qwen3"), tuning=LORA_HEADS)
    assert not [each for each in recwarn if "tie_word_embeddings" in str(each.message)]


def test_an_embedding_begins_as_peft_has_it(tmp_path: Path) -> None:
    """A zero and B normal, of the seed: the gradient of A is the first that is not zero."""
    folder = write_folder(tmp_path / "base", "llama")
    first, again, other = (
        load(folder, tuning=LORA_HEADS, seed=seed).named_trainable() for seed in (1, 1, 2)
    )
    stem = "base_model.model.model.embed_tokens.lora_embedding"
    assert first[f"{stem}_A.default"].count_nonzero() == 0
    assert 0.5 < first[f"{stem}_B.default"].std() < 1.5
    assert torch.equal(first[f"{stem}_B.default"], again[f"{stem}_B.default"])
    assert not torch.equal(first[f"{stem}_B.default"], other[f"{stem}_B.default"])


@pytest.mark.parametrize("targets", [("lm_head",), ("embed_tokens",), ("o_proj", "lm_head")])
def test_an_adapter_of_a_tied_weight_is_not_published_merged(
    tmp_path: Path, targets: tuple[str, ...]
) -> None:
    """The weight has two uses, of which the adapter changes one."""
    tuning = replace(LORA, target_modules=targets)
    for architecture, is_tied in (("qwen3", True), ("llama", False)):
        folder = write_folder(tmp_path / architecture, architecture)
        if not is_tied:
            load(folder, tuning=tuning, publishes_merged=True)
            continue
        error = error_of(lambda f=folder: load(f, tuning=tuning, publishes_merged=True))
        assert (error.code, error.field) == (ErrorCode.UNSUPPORTED, "spec.publish.merged")
        load(folder, tuning=tuning)
        load(folder, tuning=replace(tuning, target_modules=("o_proj",)), publishes_merged=True)


@pytest.mark.parametrize(
    ("architecture", "target"),
    [
        ("qwen3", "norm"),
        ("qwen3", "proj"),
        ("qwen3", "q_norm"),
        ("qwen3_moe", "experts"),
        ("qwen3_moe", "gate_up_proj"),
        ("qwen3_moe", "gate"),
        ("qwen3_moe_mixed", "experts"),
        ("glm4_moe", "shared_experts"),
        ("qwen3_5_moe", "gate_proj"),
        ("gpt_oss", "down_proj"),
    ],
)
def test_other_targets_are_refused_by_index(tmp_path: Path, architecture: str, target: str) -> None:
    folder = write_folder(tmp_path / "base", architecture)
    tuning = LoraTuning(rank=2, alpha=4.0, target_modules=("q_proj", target))
    error = error_of(lambda: load(folder, tuning=tuning))
    assert (error.code, error.field) == (
        ErrorCode.UNSUPPORTED,
        "tuning.lora.target_modules[1]",
    )
    assert (error.got, error.expected.split()[0]) == (target, "one")


@pytest.mark.parametrize(
    ("rank", "alpha", "field"),
    [
        (0, 4.0, "rank"),
        (-1, 4.0, "rank"),
        (2, 0.0, "alpha"),
        (2, float("nan"), "alpha"),
        (2, float("inf"), "alpha"),
        (2, 1e30, "alpha"),
        (2, 1e-30, "alpha"),
        # Keys and values of `tiny` are the narrowest, 64.
        (65, 4.0, "rank"),
        (10**9, 4.0, "rank"),
        (2**63, 4.0, "rank"),
    ],
)
def test_rank_and_alpha_out_of_range_are_refused(rank: int, alpha: float, field: str) -> None:
    """A rank of 1e9 was allocated first."""
    error = error_of(lambda: load(TINY, tuning=LoraTuning(rank=rank, alpha=alpha)))
    assert (error.code, error.field) == (ErrorCode.INVALID_ARGUMENT, f"tuning.lora.{field}")


@pytest.mark.parametrize(
    ("targets", "most"),
    [
        ((), 16),
        (("gate_proj", "up_proj", "down_proj"), 16),
        (("q_proj",), 16),
        (("lm_head",), 16),
        (("embed_tokens",), 16),
    ],
)
def test_a_rank_goes_up_to_the_smallest_dimension_of_what_is_adapted(
    tmp_path: Path, targets: tuple[str, ...], most: int
) -> None:
    folder = write_folder(tmp_path / "base", "qwen3_moe")
    tuning = LoraTuning(rank=most, alpha=4.0, target_modules=targets)
    assert load(folder, tuning=tuning).info().num_trainable_parameters > 0
    error = error_of(lambda: load(folder, tuning=replace(tuning, rank=most + 1)))
    assert (error.field, error.got) == ("tuning.lora.rank", str(most + 1))
    assert str(most) in error.expected


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("tuning", [LORA, LORA_HEADS])
def test_fresh_adapter_changes_nothing(
    tmp_path: Path, architecture: str, tuning: LoraTuning
) -> None:
    packed, folder = pack(branching_sequences(0)), write_folder(tmp_path / "base", architecture)
    plain = logits_of(load(folder), packed)
    assert torch.equal(logits_of(load(folder, tuning=tuning), packed), plain)


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gemma3"])
def test_the_reference_of_an_adapted_head_is_the_base(tmp_path: Path, architecture: str) -> None:
    packed, folder = pack(branching_sequences(0)), write_folder(tmp_path / "base", architecture)
    plain, model = logits_of(load(folder), packed), load(folder, tuning=LORA_HEADS)
    randomize(model, seed=3)
    assert (logits_of(model, packed) - plain).norm() > 0.1 * plain.norm()
    with model.reference():
        assert torch.equal(logits_of(model, packed), plain)


def test_factors_of_experts_begin_as_those_of_linear_maps(tmp_path: Path) -> None:
    """A uniform on +-1/sqrt(fan in), another for each expert and layer, of the seed; B zero."""
    folder = write_folder(tmp_path / "base", "qwen3_moe")
    first, again, other = (
        load(folder, tuning=LORA_EXPERTS, seed=seed).named_trainable() for seed in (1, 1, 2)
    )
    seen: set[float] = set()
    for name, parameter in first.items():
        assert torch.equal(parameter, again[name])
        if ".lora_B." in name:
            assert parameter.count_nonzero() == 0
            continue
        assert not torch.equal(parameter, other[name])
        bound = parameter.shape[-1] ** -0.5
        assert 0.8 * bound < parameter.abs().max() <= bound
        seen |= {float(expert.detach().sum()) for expert in parameter}
    assert len(seen) == 2 * 3 * 4


@pytest.mark.parametrize(("use_rslora", "scale"), [(False, 10.0 / 4), (True, 10.0 / 2)])
def test_adapter_scale_is_alpha_over_rank_or_its_root(use_rslora: bool, scale: float) -> None:
    """y = W x + scale * B A x, at one projection of known input."""
    model = load(TINY, tuning=LoraTuning(rank=4, alpha=10.0, use_rslora=use_rslora))
    layer = model.module.get_submodule("model.layers.0.self_attn.q_proj")
    a_RD = model.named_trainable()[
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"
    ]
    b_DR = model.named_trainable()[
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight"
    ]
    with torch.no_grad():
        b_DR.fill_(0.25)
    x_TD = torch.randn(3, 128, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weight = layer.get_submodule("base_layer").get_parameter("weight")
    expected = x_TD @ weight.T + scale * (x_TD @ a_RD.T) @ b_DR.T
    assert torch.allclose(layer(x_TD), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_adapter_has_the_dtype_of_its_base(tmp_path: Path, architecture: str) -> None:
    folder = write_folder(tmp_path / "base", architecture)
    model = load(folder, tuning=LORA, dtype=ModelDtype.BFLOAT16)
    assert {p.dtype for p in model.named_trainable().values()} == {torch.bfloat16}


def test_base_of_an_adapted_preset_is_the_full_preset_of_its_seed() -> None:
    """A reader of adapters gets the base so, see docs/api.md."""
    full = dict(load(TINY).module.named_parameters())
    adapted = load(TINY, tuning=LORA).module.named_parameters()
    base = {name.replace(".base_layer", ""): p for name, p in adapted if ".lora_" not in name}
    assert base.keys() == full.keys()
    assert all(torch.equal(base[name], parameter) for name, parameter in full.items())


def _experts(case: Case, dtype: torch.dtype = torch.float64) -> LoraExperts:
    register_grouped_experts()
    config = Qwen3MoeConfig(num_experts=case.num_experts, hidden_size=D, moe_intermediate_size=F)
    config._experts_implementation = EXPERTS_NAME
    base = Qwen3MoeExperts(config).to(dtype)
    layer = LoraExperts(base, "default", r=RANK, scale=ALPHA / RANK)
    base.requires_grad_(requires_grad=False)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=dtype))
    return layer


def _inputs(case: Case, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    shapes = {"x": (len(case.expert_TC), D), "weight": case.expert_TC.shape}
    return {
        name: torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()
        for name, shape in shapes.items()
    }


def _token_by_token(case: Case, layer: LoraExperts, inputs: dict[str, Tensor]) -> Tensor:
    """By the formula, of the weights W + alpha / r B A of each expert."""
    scale = ALPHA / RANK

    def merged(expert: int) -> list[Tensor]:
        base: Any = layer.base_layer
        weights = [*base.gate_up_proj[expert].split(F), base.down_proj[expert]]
        factors: list[Any] = [getattr(layer, name) for name in PROJECTIONS]
        return [
            weight + scale * each.lora_B.weight[expert] @ each.lora_A.weight[expert]
            for weight, each in zip(weights, factors, strict=True)
        ]

    rows: list[Tensor] = []
    for token, chosen in enumerate(case.expert_TC.tolist()):
        total = torch.zeros(D, dtype=torch.float64)
        for place, expert in enumerate(chosen):
            gate, up, down = merged(expert)
            x = inputs["x"][token]
            product = (gate @ x) * torch.sigmoid(gate @ x) * (up @ x)
            total = total + inputs["weight"][token, place] * (down @ product)
        rows.append(total)
    return torch.stack(rows)


def _gradients(out_TD: Tensor, layer: LoraExperts, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    leaves = inputs | {n: p for n, p in layer.named_parameters() if p.requires_grad}
    assert len(leaves) == 2 + 2 * len(PROJECTIONS)
    generator = torch.Generator().manual_seed(3)
    dout_TD = torch.randn(out_TD.shape, generator=generator, dtype=torch.float64)
    grads = torch.autograd.grad(out_TD, list(leaves.values()), dout_TD.to(out_TD.dtype))
    return dict(zip(leaves, grads, strict=True))


def _adapted(case: Case, layer: LoraExperts, inputs: dict[str, Tensor]) -> Tensor:
    return layer(inputs["x"], case.expert_TC, inputs["weight"])


@pytest.mark.usefixtures("poisoned_memory")
@each_case
def test_adapted_experts_are_those_of_each_token_alone(case: Case) -> None:
    layer, inputs = _experts(case), _inputs(case)
    got, expected = _adapted(case, layer, inputs), _token_by_token(case, layer, inputs)
    assert (got - expected).norm() <= 1e-14 * expected.norm()
    grads, truth = _gradients(got, layer, inputs), _gradients(expected, layer, inputs)
    for name, grad in truth.items():
        assert grad.norm() > 0
        assert (grads[name] - grad).norm() <= 1e-13 * grad.norm(), name


@pytest.mark.usefixtures("poisoned_memory")
@each_case
def test_factors_of_an_expert_without_rows_have_gradients_of_zeros(case: Case) -> None:
    layer, inputs = _experts(case), _inputs(case)
    grads = _gradients(_adapted(case, layer, inputs), layer, inputs)
    visited = case.expert_TC.long().unique()
    is_empty = torch.ones(case.num_experts, dtype=torch.bool).index_fill_(0, visited, value=False)
    for name in grads.keys() - inputs.keys():
        assert grads[name][is_empty].count_nonzero() == 0
        assert grads[name][~is_empty].flatten(1).any(1).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_repeat_has_the_same_bits(dtype: torch.dtype) -> None:
    case = CASES["random"]
    layer, inputs = _experts(case, dtype), _inputs(case, dtype)
    first, second = (_gradients(_adapted(case, layer, inputs), layer, inputs) for _ in range(2))
    for name, grad in first.items():
        assert torch.equal(second[name], grad), name


def test_without_its_adapters_a_layer_is_its_base() -> None:
    case = CASES["random"]
    layer, inputs = _experts(case), _inputs(case)
    expected = layer.base_layer(inputs["x"], case.expert_TC, inputs["weight"])
    assert not torch.equal(_adapted(case, layer, inputs), expected)
    layer.enable_adapters(False)
    assert torch.equal(_adapted(case, layer, inputs), expected)
    layer.enable_adapters(True)
    assert not torch.equal(_adapted(case, layer, inputs), expected)


class _WeightGradients(TorchDispatchMode):
    """Counts gradients of weights by the features of these."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[int, int]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if func is torch.ops.ratoon.grouped_weight_gradient.default:
            self.counts[args[0].shape[1], args[1].shape[1]] += 1
        return func(*args, **(kwargs or {}))


def test_no_gradient_of_a_frozen_weight_is_computed() -> None:
    case = CASES["random"]
    layer, inputs = _experts(case), _inputs(case)
    with _WeightGradients() as gradients:
        _gradients(_adapted(case, layer, inputs), layer, inputs)
    # Counts for gate and up, then for down.
    assert gradients.counts == {(RANK, D): 2, (F, RANK): 2, (RANK, F): 1, (D, RANK): 1}
