"""The packed model against stock Hugging Face models, one unpadded forward a sequence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ratoon.errors import ErrorCode, RatoonError
from ratoon.model.export import export_weights
from ratoon.model.policy_model import PolicyModel
from ratoon.model.spec import ModelDtype
from ratoon_proto.types import LoraTuning
from tests.model.builders import (
    LORA,
    LORA_ATTENTION,
    LORA_EXPERTS,
    TINY,
    hidden_of,
    least_bytes,
    load,
    randomize,
)
from tests.model.packing import Packed, branching_sequences, pack
from tests.model.stock import load_stock, sequence_outputs
from tests.tiny_models import ARCHITECTURES, write_folder


def path_weights(sequences: list[list[int]]) -> list[Tensor]:
    """Random, non-zero, different for every (sequence, predicted token)."""
    generator = torch.Generator().manual_seed(11)
    return [
        torch.randn(len(s) - 1, generator=generator, dtype=torch.float64) + 0.1 for s in sequences
    ]


def packed_logprobs(
    model: PolicyModel, hidden_TD: Tensor, packed: Packed, sequences: list[list[int]]
) -> list[Tensor]:
    logits_TV = hidden_TD @ model.lm_head_VD.T
    logprobs: list[Tensor] = []
    for sequence, path in zip(sequences, packed.paths, strict=True):
        rows = torch.log_softmax(logits_TV[path[:-1]], dim=-1)
        logprobs.append(rows.gather(1, torch.tensor(sequence)[1:, None])[:, 0])
    return logprobs


def weighted_sum(logprobs: list[Tensor], sequences: list[list[int]]) -> Tensor:
    terms = zip(path_weights(sequences), logprobs, strict=True)
    return torch.stack([(weight * logprob).sum() for weight, logprob in terms]).sum()


def relative(got: Tensor, expected: Tensor, *, floor: float = 0.0) -> float:
    got, expected = got.detach(), expected.detach()
    scale = max(float(expected.norm()), floor)
    assert scale > 0
    return float((got - expected).norm()) / scale


def assert_equal_run(
    model: PolicyModel,
    stock: nn.Module,
    sequences: list[list[int]],
    *,
    tolerance: float,
    floor: float = 1e-6,
) -> None:
    """Hidden states, log-probs and every gradient of the packed run equal the sequences' own.

    A gradient smaller than `floor` of all of them counts as that large.
    """
    packed = pack(sequences)
    hidden_TD = hidden_of(model, packed)
    logprobs = packed_logprobs(model, hidden_TD, packed, sequences)
    weighted_sum(logprobs, sequences).backward()

    outputs = [sequence_outputs(stock, sequence) for sequence in sequences]
    weighted_sum([logprob for _, logprob in outputs], sequences).backward()
    for path, logprob, (hidden, expected) in zip(packed.paths, logprobs, outputs, strict=True):
        assert relative(hidden_TD[path], hidden) <= tolerance
        assert relative(logprob, expected) <= tolerance

    expected_grads = {n: p.grad for n, p in stock.named_parameters() if p.requires_grad}
    trainable = model.named_trainable()
    assert list(trainable) == list(expected_grads)
    total = torch.cat([cast(Tensor, g).flatten() for g in expected_grads.values()]).norm()
    for name, parameter in trainable.items():
        expected_grad = cast(Tensor, expected_grads[name])
        assert float(expected_grad.norm()) > 0, name
        error = relative(cast(Tensor, parameter.grad), expected_grad, floor=floor * float(total))
        assert error <= tolerance, name


@pytest.mark.parametrize(
    ("architecture", "seed"),
    [*((name, 0) for name in (*ARCHITECTURES, "qwen3_moe_mixed")), ("qwen3_moe", 1)],
)
def test_packed_run_equals_each_sequence_alone(
    tmp_path: Path, architecture: str, seed: int
) -> None:
    folder = write_folder(tmp_path / "base", architecture, seed=seed)
    stock = load_stock(folder, dtype=torch.float64)
    assert_equal_run(load(folder), stock, branching_sequences(seed), tolerance=1e-10)


@pytest.mark.parametrize(
    ("architecture", "tuning"),
    [
        ("qwen3", LORA),
        ("llama", LORA),
        ("olmo3", LORA),
        ("qwen3_moe", LORA),
        ("qwen3_moe", LORA_ATTENTION),
        ("qwen3_moe", LORA_EXPERTS),
        ("qwen3_moe_mixed", LORA_ATTENTION),
    ],
)
def test_packed_lora_run_equals_each_sequence_alone(
    tmp_path: Path, architecture: str, tuning: LoraTuning
) -> None:
    folder = write_folder(tmp_path / "base", architecture)
    model = load(folder, tuning=tuning)
    # B is zero at first, which would hide A's gradient.
    randomize(model, seed=5)
    (tmp_path / "adapter").mkdir()
    export_weights(model, tmp_path / "adapter")
    stock = load_stock(folder, dtype=torch.float64, adapter=tmp_path / "adapter")
    assert_equal_run(model, stock, branching_sequences(0), tolerance=1e-10)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ],
    ids=lambda rope: str(rope["rope_type"]),
)
def test_packed_run_equals_with_scaled_rope(tmp_path: Path, rope: dict[str, Any]) -> None:
    folder = write_folder(tmp_path / "base", "llama")
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_theta": 10_000.0, **rope}
    (folder / "config.json").write_text(json.dumps(config))
    stock = load_stock(folder, dtype=torch.float64)
    assert_equal_run(load(folder), stock, branching_sequences(0), tolerance=1e-10)


@pytest.mark.parametrize(
    ("maximum", "rope", "expected"),
    [
        # Qwen3 as its cards say to lengthen it: rope_scaling in a config of 40960 positions.
        (
            40_960,
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768},
            131_072,
        ),
        (
            32_768,
            {"rope_type": "yarn", "factor": 1.5, "original_max_position_embeddings": 100},
            32_768,
        ),
        (
            131_072,
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768},
            131_072,
        ),
        (40_960, {"type": "yarn", "factor": 2.0}, 81_920),
        # These say what they reach in max_position_embeddings.
        (16_384, {"rope_type": "linear", "factor": 4.0}, 16_384),
        (40_960, None, 40_960),
    ],
    ids=["longer", "not shorter", "said already", "no original", "linear", "none"],
)
def test_longest_sequence_is_that_of_yarn(
    tmp_path: Path, maximum: int, rope: dict[str, Any] | None, expected: int
) -> None:
    """A folder that served 131072 tokens in a sampler was refused above 40960 here."""
    folder = write_folder(tmp_path / "base", "qwen3")
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    config |= {"max_position_embeddings": maximum, "rope_theta": 1e6, "rope_scaling": rope}
    (folder / "config.json").write_text(json.dumps(config))
    assert load(folder).info().max_sequence_tokens == expected


def said_padding(folder: Path, token: int | None) -> Path:
    config = json.loads((folder / "config.json").read_text())
    changes = {"pad_token_id": token, "eos_token_id": token, "bos_token_id": token}
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "qwen3_moe_mixed"])
def test_token_that_is_also_padding_is_trained_as_any_other(
    tmp_path: Path, architecture: str
) -> None:
    """Nothing is padded here, and many folders pad with a token that is trained, such as eos:
    transformers' embedding gave it no gradient."""
    sequences = branching_sequences(0)
    folder = write_folder(tmp_path / "base", architecture)
    stock = load_stock(said_padding(folder, None), dtype=torch.float64)
    model = load(said_padding(folder, sequences[0][1]), keep_reference=True)
    assert_equal_run(model, stock, sequences, tolerance=1e-10)


def test_padding_of_presets_is_trained_as_any_other_token(tmp_path: Path) -> None:
    model = load(TINY)
    export_weights(model, tmp_path)
    stock = load_stock(said_padding(tmp_path, None), dtype=torch.float64)
    padded = [[256, *sequence, 256] for sequence in branching_sequences(0)]
    assert_equal_run(model, stock, padded, tolerance=1e-10)


def test_packed_run_equals_in_float32(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "base", "qwen3")
    stock = load_stock(folder, dtype=torch.float32)
    model = load(folder, dtype=ModelDtype.FLOAT32)
    assert_equal_run(model, stock, branching_sequences(0), tolerance=1e-5)


def test_packed_index_as_position_is_another_model(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "base", "qwen3")
    model = load(folder)
    packed = pack(branching_sequences(0))
    index_T = torch.arange(len(packed.tokens_T))
    right = hidden_of(model, packed)
    wrong = model.forward_hidden(packed.tokens_T, index_T, packed.layout)
    branched = int((index_T != packed.position_T).nonzero()[0])
    assert torch.equal(wrong[:branched], right[:branched])
    assert relative(wrong[branched:], right[branched:]) > 1e-3


class _SquareTensors(TorchDispatchMode):
    """Records the outputs of operators that have two sides of at least `side`."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        for value in output if isinstance(output, tuple | list) else (output,):
            if isinstance(value, Tensor) and sum(n >= self.side for n in value.shape) >= 2:
                self.found.append(f"{func}: {tuple(value.shape)}")
        return output


def test_no_tensor_of_tokens_by_tokens_is_built(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "base", "qwen3_moe", vocab_size=300)
    prompt = list(range(200))
    sequences = [prompt + [200 + i] * 40 for i in range(8)]
    packed = pack(sequences)
    num_tokens = len(packed.tokens_T)
    assert num_tokens == 520
    model = load(folder, dtype=ModelDtype.FLOAT32)
    with _SquareTensors(num_tokens) as mode:
        hidden_of(model, packed).sum().backward()
    assert mode.found == []

    stock = load_stock(folder, dtype=torch.float32)
    cast(Any, stock).set_attn_implementation("eager")
    with _SquareTensors(num_tokens) as mode:
        stock(input_ids=packed.tokens_T[None])
    assert mode.found != []


def test_forward_is_a_pure_function() -> None:
    model = load(TINY, dtype=ModelDtype.FLOAT32)
    packed = pack(branching_sequences(3))
    model.limit_activations(least_bytes(model, packed))
    before = torch.random.get_rng_state()
    first = hidden_of(model, packed)
    assert torch.equal(hidden_of(model, packed), first)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    "load_policy",
    [
        lambda folder: load(folder, keep_reference=True),
        lambda folder: load(folder, tuning=LORA),
    ],
    ids=["full", "lora"],
)
def test_reference_answers_with_the_initial_weights(
    tmp_path: Path, load_policy: Callable[[Path], PolicyModel]
) -> None:
    model = load_policy(write_folder(tmp_path / "base", "qwen3"))
    packed = pack(branching_sequences(0))
    with torch.no_grad():
        initial = hidden_of(model, packed) @ model.lm_head_VD.T
    randomize(model, seed=2)
    trainable = list(model.named_trainable())
    trained = hidden_of(model, packed) @ model.lm_head_VD.T
    with model.reference():
        reference = hidden_of(model, packed) @ model.lm_head_VD.T
        assert not reference.requires_grad
    assert torch.equal(reference, initial)
    assert relative(trained, initial) > 1e-3
    assert list(model.named_trainable()) == trainable
    again = hidden_of(model, packed) @ model.lm_head_VD.T
    assert torch.equal(again, trained)
    assert again.requires_grad


def test_reference_that_raises_gives_the_policy_back() -> None:
    model = load(TINY, keep_reference=True)
    head = model.lm_head_VD

    def fail_inside() -> None:
        with model.reference():
            assert model.lm_head_VD is not head
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert model.lm_head_VD is head


def test_reference_that_was_not_kept_is_an_error() -> None:
    with pytest.raises(RatoonError) as caught, load(TINY).reference():
        pass
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT


def test_trainable_parameters_are_all_once_or_the_adapter(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "base", "qwen3")
    full = load(folder)
    assert list(full.named_trainable()) == [name for name, _ in full.module.named_parameters()]
    assert "lm_head.weight" not in full.named_trainable()
    assert full.lm_head_VD is full.named_trainable()["model.embed_tokens.weight"]
    adapter = load(folder, tuning=LORA)
    names = list(adapter.named_trainable())
    assert len(names) == 2 * 2 * 7
    assert all(".lora_A." in name or ".lora_B." in name for name in names)


def test_info_counts_parameters(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "base", "qwen3_untied")
    info = load(folder).info()
    stock = load_stock(folder, dtype=torch.float32)
    assert info.num_parameters == sum(p.numel() for p in stock.parameters())
    assert info.num_trainable_parameters == info.num_parameters
    assert (info.vocab_size, info.max_sequence_tokens) == (64, 32_768)
    assert info.attention_backend == "reference"
    # Rank 3 on q, k, v, o (heads of 8, 4 for q and 2 for k and v) and the MLP, two layers.
    per_layer = (16 + 32) * 2 + (16 + 16) * 2 + (16 + 24) * 3
    lora = load(folder, tuning=LORA).info()
    assert lora.num_trainable_parameters == 2 * 3 * per_layer
    assert lora.num_parameters == info.num_parameters + 2 * 3 * per_layer
