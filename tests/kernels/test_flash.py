"""What the flash backend says on machines and for calls that it cannot serve; no GPU is needed."""

import importlib.metadata
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ratoon_kernels import (
    BackendUnavailableError,
    list_backends,
    select_backend,
)
from ratoon_kernels.tree_attention import cuda, flash, flex

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """torch says that there is an H200; whether the package is installed is not read yet."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    flash._installed_version.cache_clear()
    yield monkeypatch
    flash._installed_version.cache_clear()


def test_a_machine_without_a_gpu_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status = next(x for x in list_backends() if x.name == "flash")
    assert (status.is_available, status.reason) == (False, "torch finds no CUDA GPU")
    with pytest.raises(BackendUnavailableError, match="no CUDA GPU") as refusal:
        select_backend("tree_attention", "flash", CPU, torch.bfloat16, 128)
    assert refusal.value.backend == "flash"


def test_a_missing_package_or_another_version_is_named_with_the_cure(
    gpu: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    gpu.setattr(importlib.metadata, "version", missing)
    reason = flash.unavailable_reason() or ""
    assert "flash-attn-4 is not installed: pip install ratoon-kernels[flash]" in reason
    flash._installed_version.cache_clear()
    gpu.setattr(importlib.metadata, "version", lambda _name: "4.0.0b3")
    reason = flash.unavailable_reason() or ""
    assert "flash-attn-4 has version 4.0.0b3: pip install ratoon-kernels[flash]" in reason
    assert flash.VERSION in reason
    flash._installed_version.cache_clear()
    gpu.setattr(importlib.metadata, "version", lambda _name: flash.VERSION)
    assert flash.unavailable_reason() is None


def test_the_extra_installs_the_version_that_the_backend_asks_for() -> None:
    path = Path(__file__).parents[2] / "kernels" / "pyproject.toml"
    extra = tomllib.loads(path.read_text())["project"]["optional-dependencies"]["flash"]
    assert f"flash-attn-4[cu13]=={flash.VERSION}" in extra


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "reason"),
    [
        (CPU, torch.bfloat16, 128, "not on cpu"),
        (CUDA, torch.float32, 128, "dtype torch.float32"),
        (CUDA, torch.float64, 128, "dtype torch.float64"),
        (CUDA, torch.bfloat16, 96, "head_dim 96"),
        (CUDA, torch.float16, 256, "head_dim 256"),
    ],
)
def test_a_call_it_cannot_serve_is_refused_with_the_reason(
    device: torch.device, dtype: torch.dtype, head_dim: int, reason: str
) -> None:
    assert reason in (flash.unsupported_reason(device, dtype, head_dim, False) or "")
    assert flash.unsupported_reason(CUDA, torch.bfloat16, 128, False) is None
    assert flash.unsupported_reason(CUDA, torch.float16, 64, False) is None


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (12, 0)])
def test_a_gpu_it_cannot_serve_is_refused_with_its_name(
    gpu: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    gpu.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    expected = f"sm_{capability[0]}{capability[1]}, only for sm_90 and sm_100"
    assert expected in (flash.unsupported_reason(CUDA, torch.bfloat16, 128, False) or "")


def test_a_deterministic_call_is_refused_and_goes_to_the_next_backend(
    gpu: pytest.MonkeyPatch,
) -> None:
    for backend, reason in ((cuda, "no nvrtc"), (flash, None), (flex, None)):
        gpu.setattr(backend, "unavailable_reason", lambda reason=reason: reason)
    call = (CUDA, torch.bfloat16, 128)
    assert select_backend("tree_attention", None, *call) == "flash"
    assert select_backend("tree_attention", None, *call, deterministic=True) == "flex"
    with pytest.raises(BackendUnavailableError, match="no fixed order"):
        select_backend("tree_attention", "flash", *call, deterministic=True)
