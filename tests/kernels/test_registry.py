import functools
import logging
import subprocess
import sys
import types
from collections.abc import Iterator

import pytest
import torch

from ratoon_kernels import (
    BackendUnavailableError,
    list_backends,
    registry,
    select_backend,
    tree_attention,
    tree_attention_partial_forward,
)
from ratoon_kernels.tree_attention import reference
from tests.kernels.forests import NAMED, random_problem

OPS = ("tree_attention", "token_logprobs")
CPU = torch.device("cpu")


def _why_not(
    device: torch.device, _dtype: torch.dtype, head_dim: int, is_deterministic: bool
) -> str | None:
    if head_dim != 64:
        return f"head_dim {head_dim} on {device.type} is not supported"
    return "its sums have no fixed order" if is_deterministic else None


@pytest.fixture
def backend_for_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """A better backend than the reference: it needs a GPU, and a package that may be missing."""
    module = types.ModuleType("fast_attention")
    module.__dict__.update(
        missing="the package fast-attention is not installed",
        unavailable_reason=lambda: module.__dict__["missing"],
        unsupported_reason=_why_not,
    )
    backends = {"tree_attention": {"fast": module, "reference": reference}}
    monkeypatch.setattr(registry, "_BACKENDS", backends)
    registry._log_choice.cache_clear()
    yield module
    registry._log_choice.cache_clear()


def test_the_reference_serves_every_op_and_float_dtype() -> None:
    names = {
        (status.op, status.name, status.is_available, status.reason) for status in list_backends()
    }
    for op in OPS:
        assert (op, "reference", True, "") in names
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
            assert select_backend(op, "reference", CPU, dtype, 64) == "reference"
            assert select_backend(op, None, CPU, dtype, 64) == "reference"


def test_a_dtype_that_nothing_serves_is_an_error_with_reasons() -> None:
    with pytest.raises(BackendUnavailableError, match=r"'any'.*reference: no support.*int32"):
        select_backend("tree_attention", None, CPU, torch.int32, 64)


def test_an_unknown_backend_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(BackendUnavailableError, match=r"'cudnn'.*\['.*'reference'\]") as refusal:
        select_backend("tree_attention", "cudnn", CPU, torch.float32, 64)
    assert (refusal.value.op, refusal.value.backend) == ("tree_attention", "cudnn")


def test_a_backend_asked_for_by_name_is_never_replaced(backend_for_gpus: types.ModuleType) -> None:
    with pytest.raises(BackendUnavailableError, match="fast-attention is not installed"):
        select_backend("tree_attention", "fast", CPU, torch.float32, 64)
    backend_for_gpus.__dict__["missing"] = None
    assert select_backend("tree_attention", "fast", CPU, torch.float32, 64) == "fast"
    with pytest.raises(BackendUnavailableError, match="head_dim 80 on cpu is not supported"):
        select_backend("tree_attention", "fast", CPU, torch.float32, 80)


def test_the_best_that_can_serve_the_call_is_chosen_and_logged_once(
    backend_for_gpus: types.ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert select_backend("tree_attention", None, CPU, torch.float32, 64) == "reference"
    backend_for_gpus.__dict__["missing"] = None
    for head_dim, name in ((64, "fast"), (80, "reference"), (64, "fast"), (80, "reference")):
        assert select_backend("tree_attention", None, CPU, torch.float32, head_dim) == name
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        "kernel backend chosen: op=tree_attention backend=reference",
        "kernel backend chosen: op=tree_attention backend=fast",
    ]


def test_a_deterministic_call_takes_the_best_that_repeats_its_bits(
    backend_for_gpus: types.ModuleType,
) -> None:
    backend_for_gpus.__dict__["missing"] = None
    call = (CPU, torch.float32, 64)
    for deterministic, name in ((False, "fast"), (True, "reference")):
        chosen = select_backend("tree_attention", None, *call, deterministic=deterministic)
        assert chosen == name
    with pytest.raises(BackendUnavailableError, match="no fixed order"):
        select_backend("tree_attention", "fast", *call, deterministic=True)


def test_both_forms_of_the_op_ask_for_what_their_caller_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A deterministic call was given to a backend that refused it only when it ran."""
    module = types.SimpleNamespace(unavailable_reason=lambda: None, unsupported_reason=_why_not)
    backends = {"fast": module, "reference": reference}
    monkeypatch.setattr(registry, "_BACKENDS", {"tree_attention": backends})
    forest = NAMED["two_trees"]
    layout = forest.layout()
    problem = random_problem(
        forest.num_tokens, heads=2, kv_heads=1, head_dim=64, dtype=torch.float32, seed=0
    )
    qkv = (problem.q_TNH, problem.k_TKH, problem.v_TKH)
    whole = functools.partial(tree_attention, *qkv, layout, problem.scale, deterministic=True)
    part = functools.partial(
        tree_attention_partial_forward, *qkv, layout, problem.scale, query_start=0, key_start=0,
        deterministic=True,
    )  # fmt: skip
    compiled = torch.compile(whole, fullgraph=True, backend="aot_eager")
    for chosen, call in ((whole, whole), (part, part), (compiled, whole)):
        for got, expected in zip(chosen(), call(backend="reference"), strict=True):
            assert torch.equal(got, expected)
        with pytest.raises(BackendUnavailableError, match="no fixed order"):
            call(backend="fast")


def test_backends_are_listed_best_first_with_reasons(backend_for_gpus: types.ModuleType) -> None:
    listed = [(s.name, s.is_available, s.reason) for s in list_backends()]
    missing = backend_for_gpus.__dict__["missing"]
    assert listed == [("fast", False, missing), ("reference", True, "")]


def test_the_package_imports_nothing_of_the_service_nor_cuda_bindings() -> None:
    """torch imports the bindings where they are; ours must not need them."""
    code = (
        "import sys\n"
        "sys.modules['cuda'] = None\n"
        "import ratoon_kernels.jit, ratoon_kernels.jit.availability, ratoon_kernels.jit.prebuild\n"
        "from ratoon_kernels.tree_attention.cuda_specs import SPECS\n"
        "assert SPECS\n"
        "assert ratoon_kernels.jit.availability.unavailable_reason(())\n"
        "names = {name.partition('.')[0] for name in sys.modules}\n"
        "print(sorted(names & {'ratoon', 'ratoon_proto', 'ratoon_client', 'ray', 'transformers'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
