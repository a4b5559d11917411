"""A value head: where its numbers come from, where they are written, and what it computes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from ratoon.errors import ErrorCode, RatoonError
from ratoon.model import value_head
from ratoon.model.export import WeightsCopy, export_weights
from ratoon.model.folder import ModelFolder
from ratoon.model.policy_model import PolicyModel
from ratoon.model.safetensors_files import WEIGHTS_NAME
from ratoon.model.spec import ModelDtype
from ratoon.model.value_head import BIAS, FILE, WEIGHT, ValueHead
from ratoon.stream.files import digest_file
from ratoon.train.imported import read_weights
from ratoon_proto.types import FullTuning, LoraTuning
from tests.model.builders import FULL, LORA, TINY, hidden_of, load, randomize
from tests.model.packing import pack
from tests.tiny_models import write_folder

HIDDEN = 16


def _numbers(seed: int = 2) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {WEIGHT: torch.randn(1, HIDDEN, generator=rng), BIAS: torch.randn(1, generator=rng)}


def _folder(folder: Path, tensors: dict[str, Tensor], *, is_apart: bool) -> Path:
    """A small model with a head's tensors in a file of their own, or among the model's."""
    write_folder(folder, "qwen3")
    if is_apart:
        (folder / "value_head").mkdir()
        save_file(tensors, folder / FILE)
    else:
        own = load_file(folder / WEIGHTS_NAME)
        save_file(own | tensors, folder / WEIGHTS_NAME, metadata={"format": "pt"})
    return folder


def _head_of(model: PolicyModel) -> ValueHead:
    assert model.value_head is not None
    return model.value_head


@pytest.mark.parametrize(
    ("prefix", "is_apart"),
    [("value_head.", True), ("value_head.", False), ("score.", False), ("v_head.summary.", False)],
)
def test_a_head_is_read_by_every_name_that_it_has(
    tmp_path: Path, prefix: str, is_apart: bool
) -> None:
    """The service's own names, those of transformers' classifiers, and those of TRL."""
    numbers = _numbers()
    named = {prefix + name.rpartition(".")[2]: each for name, each in numbers.items()}
    folder = _folder(tmp_path / "base", named, is_apart=is_apart)
    head = _head_of(load(folder, value_head=True))
    assert torch.equal(head.weight.float(), numbers[WEIGHT])
    assert torch.equal(head.bias.float(), numbers[BIAS])


def test_a_head_begins_with_zeros_and_a_bias_that_is_not_there_is_zero(tmp_path: Path) -> None:
    for model in (
        load(TINY, value_head=True),
        load(write_folder(tmp_path / "without", "qwen3"), value_head=True),
    ):
        assert not any(each.any() for each in _head_of(model).parameters())
    folder = _folder(tmp_path / "base", {"score.weight": _numbers()[WEIGHT]}, is_apart=False)
    head = _head_of(load(folder, value_head=True))
    assert head.weight.all()
    assert not head.bias.any()


@pytest.mark.parametrize("kind", ["SequenceClassification", "TokenClassification"])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_classifier_is_a_critic(tmp_path: Path, family: str, kind: str) -> None:
    """Its values are its scores, and its versions models with the embedding as LM head."""
    write_folder(tmp_path / "base", family)
    auto: Any = getattr(transformers, f"AutoModelFor{kind}")
    torch.manual_seed(0)
    classifier = auto.from_pretrained(tmp_path / "base", num_labels=1, dtype=torch.float32)
    classifier.config.classifier_dropout = 0.0
    classifier.save_pretrained(tmp_path / "classifier")
    with pytest.raises(RatoonError) as refused:
        load(tmp_path / "classifier")
    assert refused.value.field == "config.architectures"
    model = load(tmp_path / "classifier", value_head=True, dtype=ModelDtype.FLOAT32)
    ids = [5, 9, 2, 7, 1]
    with torch.no_grad():
        values_T = _head_of(model)(hidden_of(model, pack([ids])))
        # A classifier of sequences has the scores of all tokens in another function.
        theirs = classifier.eval().model(input_ids=torch.tensor([ids])).last_hidden_state[0]
        torch.testing.assert_close(values_T, classifier.score(theirs)[:, 0], rtol=1e-4, atol=1e-5)
    _export(model, tmp_path / "out")
    again = cast("Any", AutoModelForCausalLM).from_pretrained(tmp_path / "out")
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert torch.equal(
        _head_of(load(tmp_path / "out", value_head=True, dtype=ModelDtype.FLOAT32)).weight,
        _head_of(model).weight,
    )


def test_a_policy_without_a_head_reads_none(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "apart", _numbers(), is_apart=True)
    assert load(folder).value_head is None
    folder = _folder(tmp_path / "among", {"score.weight": _numbers()[WEIGHT]}, is_apart=False)
    with pytest.raises(RatoonError) as refused:
        load(folder)
    assert "score.weight" in refused.value.field


REFUSED: dict[str, dict[str, Tensor]] = {
    "of two labels": {WEIGHT: torch.zeros(2, HIDDEN), BIAS: torch.zeros(2)},
    "of another width": {WEIGHT: torch.zeros(1, HIDDEN + 1), BIAS: torch.zeros(1)},
    "not finite": {WEIGHT: torch.full((1, HIDDEN), float("nan")), BIAS: torch.zeros(1)},
    "of integers": {WEIGHT: torch.zeros(1, HIDDEN, dtype=torch.int32), BIAS: torch.zeros(1)},
    "without a weight": {BIAS: torch.zeros(1)},
    "with a layer": _numbers() | {"value_head.0.weight": torch.zeros(1)},
}


@pytest.mark.parametrize("kind", REFUSED)
def test_another_head_is_refused_by_its_name(tmp_path: Path, kind: str) -> None:
    folder = _folder(tmp_path / "base", REFUSED[kind], is_apart=True)
    with pytest.raises(RatoonError) as refused:
        load(folder, value_head=True)
    assert refused.value.code in (ErrorCode.INVALID_ARGUMENT, ErrorCode.UNSUPPORTED)
    assert "value_head." in refused.value.field


def test_a_head_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "base", _numbers(), is_apart=True)
    own = load_file(folder / WEIGHTS_NAME)
    save_file(own | {"score.weight": _numbers()[WEIGHT]}, folder / WEIGHTS_NAME)
    with pytest.raises(RatoonError) as refused:
        load(folder, value_head=True)
    assert "twice" in refused.value.message


def _export(model: PolicyModel, out: Path, **options: Any) -> dict[str, str]:
    out.mkdir()
    return export_weights(model, out, **options)


@pytest.mark.parametrize(
    ("tuning", "is_merged"), [(FULL, False), (LORA, False), (LORA, True)], ids=str
)
@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe", "gemma3_vl"])
def test_a_version_has_the_head_in_a_folder_of_its_own(
    tmp_path: Path, architecture: str, tuning: FullTuning | LoraTuning, is_merged: bool
) -> None:
    """All other files are those of a version without one, whose readers see no other tensor."""
    base = write_folder(tmp_path / "base", architecture)
    options: dict[str, Any] = {"tuning": tuning, "dtype": ModelDtype.BFLOAT16}
    options["publishes_merged"] = is_merged
    model, plain = load(base, value_head=True, **options), load(base, **options)
    randomize(model, 3)
    ours = model.named_trainable()
    with torch.no_grad():
        for name, parameter in plain.named_trainable().items():
            parameter.copy_(ours[name])
    digests = _export(model, tmp_path / "out", is_merged=is_merged)
    others = _export(plain, tmp_path / "plain", is_merged=is_merged)
    assert digests == others | {FILE: digest_file(tmp_path / "out" / FILE)}
    for path in (tmp_path / "plain").iterdir():
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()
    stored = load_file(tmp_path / "out" / FILE)
    assert torch.equal(stored[WEIGHT], _head_of(model).weight)
    assert torch.equal(stored[BIAS], _head_of(model).bias)
    if tuning is FULL:
        again = _head_of(load(tmp_path / "out", value_head=True, dtype=ModelDtype.BFLOAT16))
        assert torch.equal(again.weight, _head_of(model).weight)
        assert torch.equal(again.bias, _head_of(model).bias)


@pytest.mark.parametrize(("tuning", "is_merged"), [(FULL, False), (LORA, True)], ids=str)
def test_a_later_version_has_the_later_head(
    tmp_path: Path, tuning: FullTuning | LoraTuning, is_merged: bool
) -> None:
    """What an adapter leaves of its base is copied once; the head is not of it."""
    base = write_folder(tmp_path / "base", "qwen3")
    model = load(base, tuning=tuning, value_head=True, publishes_merged=is_merged)
    copy = WeightsCopy(model, is_merged=is_merged)
    for seed in (1, 2):
        randomize(model, seed)
        copy.take()
        (tmp_path / str(seed)).mkdir()
        copy.write(tmp_path / str(seed))
        stored = load_file(tmp_path / str(seed) / FILE)
        assert torch.equal(stored[WEIGHT], _head_of(model).weight)


@pytest.mark.parametrize("tuning", [FULL, LORA], ids=str)
def test_an_import_brings_the_head(tmp_path: Path, tuning: FullTuning | LoraTuning) -> None:
    base = write_folder(tmp_path / "base", "qwen3")
    model = load(base, tuning=tuning, value_head=True)
    randomize(model, 3)
    _export(model, tmp_path / "out")
    found = read_weights(model, ModelFolder.of(tmp_path / "out"), "")
    ours = model.named_trainable()
    assert found.values.keys() == ours.keys()
    for name, value in found.values.items():
        assert torch.equal(value.double(), ours[name]), name
    again = read_weights(model, ModelFolder.of(tmp_path / "out"), found.digest)
    assert again.digest == found.digest
    save_file(_numbers(5), tmp_path / "out" / FILE)
    with pytest.raises(RatoonError, match="digest"):
        read_weights(model, ModelFolder.of(tmp_path / "out"), found.digest)


def test_an_import_without_a_head(tmp_path: Path) -> None:
    """A whole model is refused; an adapter alone leaves the head as it was at first."""
    base = _folder(tmp_path / "base", _numbers(), is_apart=True)
    for tuning in (FULL, LORA):
        model = load(base, tuning=tuning, value_head=True)
        randomize(model, 3)
        out = tmp_path / str(tuning is FULL)
        _export(model, out)
        shutil.rmtree(out / "value_head")
        folder = ModelFolder.of(out)
        if tuning is FULL:
            with pytest.raises(RatoonError) as refused:
                read_weights(model, folder, "")
            assert "value_head." in refused.value.field
            continue
        values = read_weights(model, folder, "").values
        assert torch.equal(values[f"base_model.model.{WEIGHT}"].float(), _numbers()[WEIGHT])
        sums = read_weights(model, folder, "", adds=True).values
        assert not sums[f"base_model.model.{WEIGHT}"].any()


def test_peft_and_transformers_read_versions_beside_a_head(tmp_path: Path) -> None:
    from peft import PeftModel

    base = write_folder(tmp_path / "base", "qwen3")
    for tuning in (FULL, LORA):
        model = load(base, tuning=tuning, value_head=True, dtype=ModelDtype.FLOAT32)
        randomize(model, 3)
        out = tmp_path / str(tuning is FULL)
        _export(model, out)
        module = cast("Any", AutoModelForCausalLM).from_pretrained(base if tuning is LORA else out)
        if tuning is LORA:
            module = PeftModel.from_pretrained(module, str(out), autocast_adapter_dtype=False)
        theirs = dict(module.named_parameters())
        for name, value in model.named_trainable().items():
            if not value_head.is_of_head(name):
                assert torch.equal(theirs[name], value), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_a_linear_map(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks of three rows; sums of a narrow model's are of float32."""
    monkeypatch.setattr(value_head, "_BLOCK_ROWS", 3)
    rng = torch.Generator().manual_seed(0)
    head = ValueHead(HIDDEN, dtype)
    with torch.no_grad():
        head.weight.copy_(torch.randn(1, HIDDEN, generator=rng))
        head.bias.copy_(torch.randn(1, generator=rng))
    hidden_RD = torch.randn(10, HIDDEN, generator=rng).to(dtype).requires_grad_()
    seed_R = torch.randn(10, generator=rng).to(torch.promote_types(dtype, torch.float32))
    value_R = head(hidden_RD)
    assert value_R.dtype is seed_R.dtype
    value_R.backward(seed_R)
    wide = [each.detach().double().requires_grad_() for each in (hidden_RD, head.weight, head.bias)]
    expected_R = torch.nn.functional.linear(*wide)[:, 0]
    expected_R.backward(seed_R.double())
    torch.testing.assert_close(value_R.double(), expected_R.detach(), rtol=1e-6, atol=1e-6)
    for got, leaf in zip((hidden_RD, head.weight, head.bias), wide, strict=True):
        assert got.grad is not None
        assert leaf.grad is not None
        bound = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2**-8}[dtype]
        assert (got.grad.double() - leaf.grad).abs().max() <= bound * leaf.grad.abs().max() * 1.01


def test_new_adapters_begin_with_the_head_of_the_folder(tmp_path: Path) -> None:
    base = _folder(tmp_path / "base", _numbers(), is_apart=True)
    model = load(base, tuning=LORA, value_head=True)
    randomize(model, 3)
    fresh = model.new_adapter(7)
    assert torch.equal(fresh[f"base_model.model.{WEIGHT}"].float(), _numbers()[WEIGHT])
    model.bind(fresh)
    assert torch.equal(_head_of(model).weight.float(), _numbers()[WEIGHT])
