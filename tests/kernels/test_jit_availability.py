from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ratoon_kernels.jit import KernelSpec, availability
from ratoon_kernels.jit.availability import unavailable_reason, unsupported_reason
from ratoon_kernels.jit.calls import CudaCallError
from ratoon_kernels.jit.compiler import read_sources

CAPABILITIES = {0: (8, 0), 1: (9, 0)}


def _forget() -> None:
    unavailable_reason.cache_clear()
    availability._capability.cache_clear()


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A machine with an A100 and an H100, where all is installed."""
    _forget()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(CAPABILITIES))
    monkeypatch.setattr(torch.cuda, "get_device_capability", CAPABILITIES.__getitem__)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(availability, "driver", lambda: None)
    monkeypatch.setattr(availability, "nvrtc_version", lambda: "13.0")
    yield monkeypatch
    _forget()


def _raise(error: Exception) -> object:
    def call() -> None:
        raise error

    return call


@pytest.fixture
def spec(tmp_path: Path) -> KernelSpec:
    (tmp_path / "k.cu").write_text("")
    return KernelSpec(source=str(tmp_path / "k.cu"), entry="k", defines=(), params=())


def test_a_complete_machine_has_no_reason(spec: KernelSpec) -> None:
    assert unavailable_reason((spec,)) is None


def test_each_missing_part_is_named(machine: pytest.MonkeyPatch, spec: KernelSpec) -> None:
    for target, name, value, words in (
        (torch.version, "cuda", None, "is built without CUDA"),
        (torch.cuda, "is_available", lambda: False, "no CUDA device"),
        (torch.cuda, "get_device_capability", lambda _: (10, 0), r"only [(10, 0), (10, 0)]"),
        (availability, "driver", _raise(ImportError("no cuda")), "cuda-bindings is not installed"),
        (availability, "driver", _raise(RuntimeError("no libcuda")), "not answer: no libcuda"),
        (availability, "driver", _raise(CudaCallError("cuInit", 100, "none")), "cuInit failed"),
        (availability, "nvrtc_version", _raise(RuntimeError("absent")), "NVRTC is not installed"),
    ):
        with machine.context() as patch:
            _forget()
            patch.setattr(target, name, value)
            assert words in str(unavailable_reason((spec,)))


def test_prebuilt_kernels_need_no_compiler(machine: pytest.MonkeyPatch, spec: KernelSpec) -> None:
    machine.setattr(availability, "nvrtc_version", _raise(ImportError("absent")))
    assert str(unavailable_reason((spec,))).endswith("and there is no prebuilt k")
    _forget()
    key = read_sources(spec).key("")
    machine.setattr(availability, "read_manifest", lambda _: {key: {}})
    assert unavailable_reason((spec,)) is None
    spec.path.write_text("// changed")
    _forget()
    assert str(unavailable_reason((spec,))).endswith("and there is no prebuilt k")
    spec.path.unlink()
    _forget()
    assert "there is no file" in str(unavailable_reason((spec,)))


def test_a_device_of_another_kind_has_a_reason() -> None:
    assert unsupported_reason(torch.device("cpu")) == "no support for cpu"
    assert unsupported_reason(torch.device("cuda:1")) is None
    assert unsupported_reason(torch.device("cuda")) is None
    refused = "cuda:0 has compute capability (8, 0), expected (9, 0)"
    assert unsupported_reason(torch.device("cuda:0")) == refused
