"""Versions into a module in place: all of one, or none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from ratoon_client import EngineError
from ratoon_client.weights.hf_module import ModuleAdapter
from ratoon_proto.types import WeightKind
from tests.client.samples import manifest

FILE = "model.safetensors"


def llama(seed: int, *, tied: bool = True) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def save(module: Any, folder: Path) -> Path:
    module.save_pretrained(folder)
    return folder


def values(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def are_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


async def commit(module: nn.Module, folder: Path, version: int = 1) -> float:
    return await ModuleAdapter(module).commit(folder, manifest(version), previous=None)


@pytest.mark.parametrize("tied", [True, False])
async def test_a_version_is_copied_into_the_modules_own_tensors(tmp_path: Path, tied: bool):
    new, module = llama(2, tied=tied), llama(1, tied=tied)
    folder = save(new, tmp_path)
    assert ("lm_head.weight" in load_file(folder / FILE)) is not tied
    places = {name: value.data_ptr() for name, value in module.state_dict().items()}
    assert await commit(module, folder) > 0
    assert are_equal(values(module), values(new))
    assert {name: value.data_ptr() for name, value in module.state_dict().items()} == places
    tokens = torch.arange(8)[None]
    assert torch.equal(module(tokens).logits, new(tokens).logits)


async def test_a_version_in_several_files_is_one(tmp_path: Path):
    new, module = llama(2), llama(1)
    new.save_pretrained(tmp_path, max_shard_size="4KB")
    assert len(sorted(tmp_path.glob("*.safetensors"))) > 2  # noqa: ASYNC240
    await commit(module, tmp_path)
    assert are_equal(values(module), values(new))


async def test_buffers_that_a_version_has_not_stay(tmp_path: Path):
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2))
            self.count = nn.Buffer(torch.tensor(7))

    module = Counting()
    save_file({"weight": torch.ones(2)}, tmp_path / FILE)
    await commit(module, tmp_path)
    assert (module.weight.tolist(), module.count.item()) == ([1.0, 1.0], 7)
    save_file({"weight": torch.ones(2), "count": torch.tensor(9)}, tmp_path / FILE)
    await commit(module, tmp_path)
    assert module.count.item() == 9


def _last(tensors: dict[str, Tensor]) -> str:
    return max(tensors)


def reshape(tensors: dict[str, Tensor]) -> None:
    name = _last(tensors)
    tensors[name] = torch.cat([tensors[name], tensors[name]])


def recast(tensors: dict[str, Tensor]) -> None:
    tensors[_last(tensors)] = tensors[_last(tensors)].to(torch.bfloat16)


def drop(tensors: dict[str, Tensor]) -> None:
    del tensors[_last(tensors)]


def add(tensors: dict[str, Tensor]) -> None:
    tensors["model.more"] = torch.zeros(1)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (reshape, r"model\.norm\.weight: the version has torch\.float32 \(32,\), the module"),
        (recast, r"the version has torch\.bfloat16 \(16,\)"),
        (drop, r"1 tensors are not in the version: model\.norm\.weight"),
        (add, r"1 tensors are not the module's: model\.more"),
    ],
)
async def test_one_tensor_that_does_not_fit_leaves_all_values(
    tmp_path: Path, spoil: Callable[[dict[str, Tensor]], None], text: str
):
    """Half-written never: the last tensor by name is the wrong one."""
    module = llama(1)
    before = values(module)
    path = save(llama(2), tmp_path) / FILE
    tensors = {name: value.clone() for name, value in load_file(path).items()}
    spoil(tensors)
    save_file(tensors, path)
    with pytest.raises(EngineError, match=text):
        await commit(module, tmp_path)
    assert are_equal(values(module), before)


async def test_a_file_that_is_cut_leaves_all_values(tmp_path: Path):
    module = llama(1)
    before = values(module)
    path = save(llama(2), tmp_path) / FILE
    data = path.read_bytes()
    for length in (0, 7, 100, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(EngineError, match="is no file of tensors"):
            await commit(module, tmp_path)
    path.unlink()
    with pytest.raises(EngineError, match="are not in the version"):
        await commit(module, tmp_path)
    assert are_equal(values(module), before)


async def test_nothing_is_copied_while_the_module_generates(tmp_path: Path):
    new, module = llama(2), llama(1)
    before = values(module)
    folder = save(new, tmp_path)
    waited = threading.Event()

    class Lock:
        """Says when somebody waits for it."""

        def __init__(self) -> None:
            self.lock = threading.Lock()

        def __enter__(self) -> None:
            waited.set()
            self.lock.acquire()

        def __exit__(self, *_: object) -> None:
            self.lock.release()

    lock = Lock()
    adapter = ModuleAdapter(module, lock=cast("Any", lock))
    with lock.lock:
        committing = asyncio.create_task(adapter.commit(folder, manifest(1), previous=None))
        assert await asyncio.to_thread(waited.wait, 10)
        assert are_equal(values(module), before)
    await committing
    assert are_equal(values(module), values(new))


async def test_a_new_adapter_has_to_be_given_the_version(tmp_path: Path):
    folder = save(llama(2), tmp_path)
    adapter = ModuleAdapter(llama(1))
    tag = await adapter.tag()
    await adapter.commit(folder, manifest(1), previous=None)
    assert tag == await adapter.tag() != await ModuleAdapter(llama(1)).tag()


def _lora(seed: int, rank: int = 2, *others: str) -> PeftModel:
    """An adapter on the base of seed 1, whose halves are both random."""
    targets = ["q_proj", "v_proj", *others]
    config = LoraConfig(r=rank, target_modules=targets, task_type="CAUSAL_LM")
    model = get_peft_model(llama(1), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return cast("PeftModel", model).eval()


@pytest.mark.parametrize("others", [(), ("embed_tokens", "lm_head")])
async def test_a_lora_version_takes_the_place_of_the_one_before(
    tmp_path: Path, others: tuple[str, ...]
):
    folders = [save(_lora(seed, 2, *others), tmp_path / str(seed)) for seed in (1, 2, 3)]
    for folder in folders:
        # A version has the adapter alone, where peft saves the base's weights of these two, too.
        path = folder / "adapter_model.safetensors"
        save_file({n: v for n, v in load_file(path).items() if ".lora_" in n}, path)
    module = PeftModel.from_pretrained(llama(1), folders[0]).eval()
    adapter = ModuleAdapter(module)
    tokens = torch.arange(8)[None]
    for version, seed in ((1, 2), (2, 3), (1, 2)):
        await adapter.commit(
            folders[seed - 1], manifest(version, kind=WeightKind.ADAPTER), previous=None
        )
        assert len(module.peft_config) == 1
        assert torch.equal(module(tokens).logits, _lora(seed, 2, *others)(tokens).logits)


async def test_a_lora_version_that_does_not_fit_leaves_the_one_before(tmp_path: Path):
    module = PeftModel.from_pretrained(llama(1), save(_lora(1), tmp_path / "1")).eval()
    adapter = ModuleAdapter(module)
    tokens = torch.arange(8)[None]
    folder = save(_lora(2), tmp_path / "2")
    path = folder / "adapter_model.safetensors"
    whole = load_file(path)
    last = max(whole)
    for spoiled in ({**whole, last: torch.zeros(3, 3)}, {n: whole[n] for n in whole if n != last}):
        save_file(dict(spoiled), path)
        with pytest.raises(EngineError):
            await adapter.commit(folder, manifest(2, kind=WeightKind.ADAPTER), previous=None)
        assert len(module.peft_config) == 1
        assert torch.equal(module(tokens).logits, _lora(1)(tokens).logits)


async def test_a_module_without_adapters_takes_no_lora_version(tmp_path: Path):
    adapter = ModuleAdapter(llama(1))
    with pytest.raises(EngineError, match=r"LlamaForCausalLM takes no LoRA version"):
        await adapter.commit(tmp_path, manifest(1, kind=WeightKind.ADAPTER), previous=None)


async def test_a_folder_for_transformers_is_one_for_the_adapter(tmp_path: Path):
    """In bfloat16, as a sampler loads it."""
    folder = save(cast("Any", llama(2)).to(torch.bfloat16), tmp_path)
    module = cast("Any", AutoModelForCausalLM).from_pretrained(folder, dtype=torch.bfloat16)
    expected = values(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    await commit(module, folder)
    assert are_equal(values(module), expected)
