"""What layers keep and run again, compiled or not: the gradients and which operations run."""

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode

from ratoon.errors import ErrorCode
from ratoon.model import layers
from ratoon.model.layers import most_tokens
from ratoon.model.offload import HostOffload
from ratoon.model.policy_model import PolicyModel
from ratoon.model.spec import ModelDtype
from ratoon.planner.activation_plan import Kept, max_tokens, peak_bytes, plan_activations
from ratoon.planner.layer_kinds import window_of
from ratoon_proto.types import FullTuning, LoraTuning
from tests.model.builders import (
    FULL,
    LORA,
    LORA_ATTENTION,
    TINY,
    error_of,
    hidden_of,
    least_bytes,
    load,
    randomize,
)
from tests.model.packing import Packed, branching_sequences, pack
from tests.tiny_models import write_folder

# Small models have none AWAY: to copy their products takes longer than to run all layers.
KINDS = tuple(kept for kept in Kept if kept is not Kept.AWAY)
DTYPES = (ModelDtype.FLOAT64, ModelDtype.FLOAT32, ModelDtype.BFLOAT16)


def _keep(model: PolicyModel, packed: Packed, kept: Kept) -> tuple[Kept, ...]:
    """The budget in which every layer keeps that; returns what each keeps in it.

    The last one may keep more: what it keeps is no longer made again while it runs backward.
    """
    tokens, sizes = len(packed.tokens_T), model.sizes
    budget = peak_bytes(sizes, (kept,) * sizes.num_layers, tokens, tokens)
    on_host = tokens * sizes.num_layers * sizes.kept_bytes(Kept.HOST) if kept is Kept.HOST else 0
    model.limit_activations(budget, host_bytes=on_host)
    # These tests' tensors are too small to be worth a copy by default.
    model._layers._offload = HostOffload(model.device, min_bytes=1)
    plan = plan_activations(sizes, tokens, tokens, budget, on_host)
    # With two layers on the host, both are on the device while one runs backward.
    assert plan[0] is kept or kept is Kept.HOST
    return plan


def _gradients(model: PolicyModel, packed: Packed) -> dict[str, Tensor]:
    hidden_TD = hidden_of(model, packed)
    weight_TD = torch.randn(hidden_TD.shape, generator=torch.Generator().manual_seed(5))
    hidden_TD.backward(weight_TD.to(hidden_TD.dtype))
    grads = {n: p.grad for n, p in model.named_trainable().items() if p.grad is not None}
    for parameter in model.named_trainable().values():
        parameter.grad = None
    return grads


@pytest.mark.parametrize(
    ("tuning", "dtype"), [*((FULL, dtype) for dtype in DTYPES), (LORA, ModelDtype.FLOAT32)]
)
@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe", "qwen3_5"])
def test_what_is_kept_changes_no_bit(
    tmp_path: Path, model_type: str, tuning: FullTuning | LoraTuning, dtype: ModelDtype
) -> None:
    model = load(write_folder(tmp_path / "base", model_type), tuning=tuning, dtype=dtype)
    if tuning is LORA:
        randomize(model, seed=3)
    packed = pack(branching_sequences(0))
    expected = _gradients(model, packed)
    assert sum(int(grad.count_nonzero()) for grad in expected.values()) > 1000
    for kept in KINDS:
        _keep(model, packed, kept)
        got = _gradients(model, packed)
        assert got.keys() == expected.keys()
        for name, grad in expected.items():
            assert torch.equal(got[name], grad), (kept, name)


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.more)])
def test_what_is_on_the_host_is_there_until_its_backward(
    is_compiled: bool, graphs: list[GraphModule]
) -> None:
    """Compiled, all that a layer keeps; else its input alone."""
    model = load(TINY, dtype=ModelDtype.FLOAT32, compile_layers=is_compiled)
    packed = pack(branching_sequences(0))
    on_host = _keep(model, packed, Kept.HOST).count(Kept.HOST)
    offload = model._layers._offload
    assert on_host > 0
    assert offload is not None
    for _ in range(2):
        hidden_TD = hidden_of(model, packed)
        sizes, tokens = model.sizes, len(packed.tokens_T)
        of_token = sizes.kept_bytes(Kept.HOST) if is_compiled else 4 * sizes.hidden_size
        # And tables of the layout, which are small beside what is worth a copy.
        assert 0 <= offload.held_bytes - on_host * tokens * of_token < 40 * on_host * tokens
        hidden_TD.sum().backward()
        assert offload.held_bytes == 0
    assert bool(graphs) == is_compiled


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.more)])
def test_products_that_are_away_change_no_gradient_and_come_back_before_they_are_asked_for(
    is_compiled: bool, graphs: list[GraphModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(TINY, dtype=ModelDtype.FLOAT32, compile_layers=is_compiled)
    packed = pack(branching_sequences(0))
    expected = _gradients(model, packed)
    plan = (Kept.AWAY,) + (Kept.PRODUCTS,) * (model.sizes.num_layers - 1)
    monkeypatch.setattr(model, "_plan_activations", lambda _held: plan)
    offload = model._layers._offload = HostOffload(model.device, min_bytes=1)
    receive, were_there = offload._receive, []

    def received(packed: Any) -> Tensor:
        were_there.append(packed.saved.on_device is not None)
        return receive(packed)

    monkeypatch.setattr(offload, "_receive", received)
    hidden_TD = hidden_of(model, packed)
    of_layer = len(packed.tokens_T) * model.sizes.kept_bytes(Kept.AWAY)
    assert offload.held_bytes >= (of_layer if is_compiled else 1)
    assert model._layers.fetched_at == model.sizes.num_layers - 1
    hidden_TD.sum().backward()
    assert were_there
    assert all(were_there)
    assert offload.held_bytes == 0
    for parameter in model.named_trainable().values():
        parameter.grad = None
    got = _gradients(model, packed)
    for name, grad in expected.items():
        assert torch.equal(got[name], grad) if not is_compiled else torch.allclose(got[name], grad)
    assert bool(graphs) == is_compiled


class _Products(TorchDispatchMode):
    """Counts matrix products by output features, and operations of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if func is torch.ops.aten.mm.default:
            self.counts[f"mm {args[1].shape[1]}"] += 1
        if func is torch.ops.ratoon.grouped_linear.default:
            self.counts[f"grouped {args[1].shape[1]}"] += 1
        elif func.namespace == "ratoon":
            self.counts[func.name().removeprefix("ratoon::")] += 1
        return func(*args, **(kwargs or {}))


def _counts(model: PolicyModel, packed: Packed) -> Counter[str]:
    with _Products() as products:
        hidden_of(model, packed).square().sum().backward()
    return products.counts


@pytest.mark.parametrize("kept", [Kept.ATTENTION, Kept.NARROW, Kept.PRODUCTS])
def test_only_what_is_not_kept_runs_again(kept: Kept) -> None:
    model = load(TINY, dtype=ModelDtype.FLOAT32)
    sizes = model.sizes
    packed = pack(branching_sequences(0))
    once = _counts(model, packed)
    plan = _keep(model, packed, kept)
    counts = _counts(model, packed)
    assert counts["tree_attention"] == once["tree_attention"] == sizes.num_layers
    (layer,) = {*sizes.layers}
    wide, kv = f"mm {layer.mlp.width}", f"mm {2 * 32}"  # `tiny` has two key heads of 32.
    # Each layer has two of either: gate and up, k and v.
    assert counts[wide] - once[wide] == 2 * sum(layer is not Kept.PRODUCTS for layer in plan)
    assert counts[kv] - once[kv] == 2 * plan.count(Kept.ATTENTION)


@pytest.mark.parametrize("kept", [Kept.ATTENTION, Kept.NARROW, Kept.PRODUCTS])
def test_no_token_is_routed_twice(tmp_path: Path, kept: Kept) -> None:
    """Products of experts run again, those of gate and up among them, unless they are kept."""
    folder = write_folder(tmp_path / "base", "qwen3_moe")
    model, packed = load(folder, dtype=ModelDtype.FLOAT32), pack(branching_sequences(0))
    once = _counts(model, packed)
    plan = _keep(model, packed, kept)
    counts = _counts(model, packed)
    num_layers = model.sizes.num_layers
    for name in ("route", "sort_by_expert", "route_backward", "tree_attention"):
        assert counts[name] == once[name] == num_layers
    again = sum(layer is not Kept.PRODUCTS for layer in plan)
    gate_up = f"grouped {2 * model.config.moe_intermediate_size}"
    assert (once[gate_up], counts[gate_up]) == (num_layers, num_layers + again)


def test_a_forward_that_does_not_fit_is_refused() -> None:
    model = load(TINY, dtype=ModelDtype.FLOAT32)
    packed = pack(branching_sequences(0))
    budget = least_bytes(model, packed)
    model.limit_activations(budget - 1)
    error = error_of(lambda: hidden_of(model, packed))
    assert error.code is ErrorCode.RESOURCE_EXHAUSTED
    largest = max_tokens(model.sizes, budget - 1)
    assert f"at most {largest}" in str(error.expected)
    assert model.max_tokens() == largest < len(packed.tokens_T)
    with torch.no_grad():
        assert hidden_of(model, packed).isfinite().all()
    model.limit_activations(None)
    assert model.max_tokens() is None
    hidden_of(model, packed).sum().backward()


@pytest.mark.more
def test_compiled_layers_share_one_graph_a_kind(graphs: list[GraphModule]) -> None:
    """Each of the layers runs through the same one, and gradients are right to rounding."""
    packed = pack(branching_sequences(0))
    expected = _gradients(load(TINY, dtype=ModelDtype.FLOAT32), packed)
    model = load(TINY, dtype=ModelDtype.FLOAT32, compile_layers=True)
    assert model.sizes.num_layers > 1
    with torch.no_grad():
        hidden_of(model, packed)
    assert len(graphs) == 1
    seen: set[Kept] = set()
    for kept in KINDS:
        # What is on the host runs as what is kept of attention.
        plan = _keep(model, packed, kept)
        seen |= {Kept.ATTENTION if layer is Kept.HOST else layer for layer in plan}
        got = _gradients(model, packed)
        assert len(graphs) == 1 + len(seen)
        for name, grad in expected.items():
            error = (got[name] - grad).norm() / grad.norm()
            assert error < 1e-5, (kept, name)


@pytest.mark.more
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for a CPU by g++")
def test_graphs_of_one_start_are_there_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that keeps some of its results counts too; torch has to be told how to recognise
    it. All layers have one: g++ takes most of the test."""
    # With more tokens on a CPU, the compiler would make a graph narrower than its range.
    monkeypatch.setattr(layers, "_MOST_TOKENS", (61,))
    packed, found = pack(branching_sequences(0)), []
    with fresh_cache():
        for _ in range(2):
            with _compiled_anew():
                counters.clear()
                model = load(TINY, dtype=ModelDtype.FLOAT32, compile_layers=True)
                kept = (Kept.NARROW,) * model.sizes.num_layers
                vars(model)["_plan_activations"] = lambda _, kept=kept: kept
                _gradients(model, packed)
                found.append(Counter(counters["aot_autograd"]))
    assert found[0]["autograd_cache_saved"] == found[0]["total"] > 0
    assert found[1]["autograd_cache_hit"] == found[1]["total"] == found[0]["total"]


@contextmanager
def _compiled_anew() -> Iterator[None]:
    """Inside nothing is compiled yet, as in a new process; nor is it afterwards."""
    layers._compiled_again.cache_clear()
    torch.compiler.reset()
    yield
    layers._compiled_again.cache_clear()
    torch.compiler.reset()


def test_ranges_of_tokens_follow_one_another() -> None:
    assert most_tokens(1) == most_tokens(1, at_least=9) == 1
    least, num_ranges = 2, 0
    while least < 2**24:
        most = most_tokens(least)
        assert most_tokens(most) == most_tokens(2, at_least=most) == most
        assert most_tokens(most, at_least=least) == most
        least = most + 1
        num_ranges += 1
    assert num_ranges == 8


def test_fewer_tokens_run_by_the_graph_of_more_where_they_are_told_to(
    graphs: list[GraphModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "_MOST_TOKENS", (13, 61))
    model = load(TINY, dtype=ModelDtype.FLOAT32, compile_layers=True)
    few, many = pack([[*range(8)]]), pack(branching_sequences(0))
    with torch.no_grad():
        with model.run_as(len(many.tokens_T)):
            hidden_of(model, few)
        with pytest.raises(MemoryError), model.run_as(len(many.tokens_T)):
            raise MemoryError
        hidden_of(model, many)
        assert len(graphs) == 1
        # A range is compiled at its first size: else what a process meets first and second would
        # decide how all others are summed.
        for packed in (few, pack([[1, 2, 3, 4], [1, 0]])):
            hidden_of(model, packed)
            assert list(map(_is_of_a_range, graphs)) == [True, True]


def _is_of_a_range(graph: GraphModule) -> bool:
    """Whether its hidden states are of any number of tokens."""
    (node,) = (n for n in graph.graph.find_nodes(op="placeholder") if "hidden_states" in n.name)
    return not isinstance(node.meta["example_value"].shape[1], int)


def test_fewer_tokens_keep_what_more_do_where_they_are_told_to() -> None:
    model = load(TINY, dtype=ModelDtype.FLOAT32)
    few, many = pack([[*range(8)]]), pack(branching_sequences(0))
    plan, found = _keep(model, many, Kept.ATTENTION), []
    for tokens in (0, len(many.tokens_T)):
        with model.run_as(tokens):
            _gradients(model, few)
            found.append(model._layers.kept)
    assert found == [(Kept.PRODUCTS,) * model.sizes.num_layers, plan]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for a CPU by g++")
def test_bits_do_not_depend_on_what_ran_as_more_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_MOST_TOKENS", (13, 61))
    model = load(TINY, dtype=ModelDtype.FLOAT32, compile_layers=True)
    few, many = pack([[*range(8)]]), pack(branching_sequences(0))
    _keep(model, many, Kept.ATTENTION)
    found: list[list[dict[str, Tensor]]] = []
    for order in ((few, many), (few,), (many,)):
        with fresh_cache(), _compiled_anew():
            if len(order) > 1:
                with model.run_as(len(many.tokens_T)):
                    _gradients(model, few)
            found.append([_gradients(model, packed) for packed in order])
    together, *apart = found
    for got, (expected,) in zip(together, apart, strict=True):
        assert all(torch.equal(got[name], grad) for name, grad in expected.items())


@pytest.mark.more
@pytest.mark.parametrize("model_type", [pytest.param("qwen3", marks=pytest.mark.slow), "qwen3_moe"])
def test_adapters_are_part_of_the_graphs(
    tmp_path: Path, model_type: str, graphs: list[GraphModule]
) -> None:
    base = write_folder(tmp_path / "base", model_type)
    models = [
        load(base, tuning=LORA, dtype=ModelDtype.FLOAT32, compile_layers=is_compiled)
        for is_compiled in (False, True)
    ]
    for model in models:
        randomize(model, seed=3)
        vars(model)["_plan_activations"] = lambda _: (Kept.ATTENTION,) * 2
    packed = pack(branching_sequences(1))
    modules, compiled = (_gradients(model, packed) for model in models)
    assert modules.keys() == compiled.keys() != set()
    for name, grad in modules.items():
        assert (compiled[name] - grad).norm() <= 1e-5 * grad.norm(), name
    # The first layer, behind an embedding that is not trained, has the graph of the others.
    assert len(graphs) == 1
    # Gone, an adapter is another graph; the gradients are of the first.
    with models[1].reference():
        reference_TD = hidden_of(models[1], packed)
    assert not torch.equal(reference_TD, hidden_of(models[1], packed))
    assert len(graphs) == 2


def test_a_reference_has_the_graph_of_a_forward(graphs: list[GraphModule]) -> None:
    model = load(TINY, dtype=ModelDtype.FLOAT32, compile_layers=True, keep_reference=True)
    packed = pack(branching_sequences(1))
    with torch.no_grad():
        expected = hidden_of(model, packed)
        assert len(graphs) == 1
        with model.reference():
            assert torch.equal(hidden_of(model, packed), expected)
    assert len(graphs) == 1


@pytest.mark.more
@pytest.mark.parametrize(
    "dtype", [ModelDtype.FLOAT32, pytest.param(ModelDtype.BFLOAT16, marks=pytest.mark.slow)]
)
def test_experts_are_part_of_the_graphs(
    tmp_path: Path, dtype: ModelDtype, graphs: list[GraphModule]
) -> None:
    """One graph for all layers and any number of tokens, whatever the experts they go to."""
    base = write_folder(tmp_path / "base", "qwen3_moe")
    models = [load(base, dtype=dtype, compile_layers=each) for each in (False, True)]
    for model in models:
        vars(model)["_plan_activations"] = lambda _: (Kept.NARROW,) * 2
    for count in (5, 9, 14):
        packed = pack([[1, *range(2, count)], [1, 0]])
        modules, compiled = (_gradients(model, packed) for model in models)
        assert sum(int(grad.count_nonzero()) for grad in compiled.values()) > 1000
        for name, grad in modules.items():
            assert (compiled[name] - grad).norm() <= 1e-5 * grad.norm(), name
    assert len(graphs) == 1


@pytest.mark.more
def test_linear_and_full_attention_are_a_graph_each(
    tmp_path: Path, graphs: list[GraphModule]
) -> None:
    base = write_folder(tmp_path / "base", "qwen3_5")
    models = [load(base, dtype=ModelDtype.FLOAT32, compile_layers=each) for each in (False, True)]
    for model in models:
        vars(model)["_plan_activations"] = lambda _: (Kept.NARROW,) * 2
    for seed in range(2):
        packed = pack(branching_sequences(seed))
        modules, compiled = (_gradients(model, packed) for model in models)
        for name, grad in modules.items():
            assert (compiled[name] - grad).norm() <= 1e-5 * grad.norm(), name
    assert len(graphs) == 2


# Every term of the formula is in one of them.
_OF_ALL_TERMS = (
    ("qwen3_moe", FULL, Kept.PRODUCTS),
    ("qwen3_moe", LORA, Kept.PRODUCTS),
    ("qwen3_moe", LORA_ATTENTION, Kept.NARROW),
    ("qwen3", LORA, Kept.PRODUCTS),
    ("qwen3", FULL, Kept.ATTENTION),
)


@pytest.mark.parametrize(
    ("model_type", "tuning", "kept"),
    [
        _OF_ALL_TERMS[0],
        *(pytest.param(*case, marks=pytest.mark.more) for case in _OF_ALL_TERMS[1:]),
        pytest.param("gemma3", FULL, Kept.NARROW, marks=pytest.mark.more),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in product(
                ("qwen3", "qwen3_moe"),
                (FULL, LORA, LORA_ATTENTION),
                (Kept.ATTENTION, Kept.NARROW, Kept.PRODUCTS),
            )
            if case not in _OF_ALL_TERMS
        ),
    ],
)
def test_what_a_compiled_layer_keeps_is_what_is_planned(
    tmp_path: Path,
    model_type: str,
    tuning: FullTuning | LoraTuning,
    kept: Kept,
    graphs: list[GraphModule],
) -> None:
    """To the byte, beside parameters and the tables that all layers share."""
    folder = write_folder(tmp_path / "base", model_type)
    model = load(folder, tuning=tuning, dtype=ModelDtype.FLOAT32, compile_layers=True)
    vars(model)["_plan_activations"] = lambda _: (kept,) * 2
    packed = pack(branching_sequences(0))
    with _saved_by_layers(model) as saved:
        hidden_TD = hidden_of(model, packed)
    # Beside where each expert's rows stop, and the number of the router's counts.
    others = (4 * model.sizes.experts.num_experts + 8) * model.sizes.experts.is_routed
    if model_type == "gemma3":
        # Sines and cosines of 8 dimensions, which only layers of a kind share.
        others += len(packed.tokens_T) * 2 * 8 * 4
    assert _own_bytes(saved)[1] - others == len(packed.tokens_T) * model.sizes.kept_bytes(kept)
    hidden_TD.sum().backward()
    assert graphs


@pytest.mark.more
@pytest.mark.parametrize("kept", [Kept.PRODUCTS, pytest.param(Kept.NARROW, marks=pytest.mark.slow)])
def test_a_dense_layer_beside_experts_keeps_no_more_than_is_planned(
    tmp_path: Path, graphs: list[GraphModule], kept: Kept
) -> None:
    folder = write_folder(tmp_path / "base", "qwen3_moe_mixed")
    model = load(folder, dtype=ModelDtype.FLOAT32, compile_layers=True)
    packed = pack(branching_sequences(0))
    vars(model)["_plan_activations"] = lambda _: (kept,) * 2
    with _saved_by_layers(model) as saved:
        hidden_of(model, packed).sum().backward()
    others = 4 * model.sizes.experts.num_experts + 8
    planned = len(packed.tokens_T) * model.sizes.kept_bytes(kept) + others
    assert planned / 2 < max(_own_bytes(saved)) <= planned
    assert graphs


def _own_bytes(saved: list[list[Tensor]]) -> tuple[int, int]:
    """Bytes of each of two layers, without the tables that both have."""
    first, second = ({x.data_ptr(): x.nbytes for x in layer} for layer in saved)
    shared = sum(first[data] for data in first.keys() & second.keys())
    return sum(first.values()) - shared, sum(second.values()) - shared


@contextmanager
def _saved_by_layers(model: PolicyModel) -> Iterator[list[list[Tensor]]]:
    """What autograd saves inside each layer, but for the model's parameters."""
    saved: list[list[Tensor]] = []
    parameters = {p.data_ptr() for p in model.module.parameters()}

    def save(x: Tensor) -> Tensor:
        if x.data_ptr() not in parameters:
            saved[-1].append(x)
        return x

    def inside(*_: object) -> AbstractContextManager[Any]:
        saved.append([])
        return saved_tensors_hooks(save, lambda x: x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model._layers, "_where", inside)
        yield saved


@pytest.mark.more
def test_models_of_other_sizes_compile_in_one_process(
    tmp_path: Path, graphs: list[GraphModule]
) -> None:
    """Their attention has another scale, or other windows; of gemma3, in one of two layers."""
    packed = pack(branching_sequences(0))
    bases = [TINY, *(write_folder(tmp_path / name, name) for name in ("llama", "gemma3"))]
    for window in (3, 5):
        bases.append(write_folder(tmp_path / f"mistral-{window}", "mistral"))
        path = bases[-1] / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"sliding_window": window}))
    forms: set[tuple[float, int | None]] = set()
    for base in bases:
        expected = _gradients(load(base, dtype=ModelDtype.FLOAT32), packed)
        model = load(base, dtype=ModelDtype.FLOAT32, compile_layers=True)
        attention = cast(Any, model.module).get_decoder().layers[0].self_attn
        forms.add((attention.scaling, window_of(model.sizes.layers[0].mixer)))
        _keep(model, packed, Kept.PRODUCTS)
        got = _gradients(model, packed)
        for name, grad in expected.items():
            assert (got[name] - grad).norm() / grad.norm() < 1e-5, name
    assert len(forms) == len(bases)
    assert len(graphs) >= len(bases) + 1
