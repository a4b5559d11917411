"""Exports: folders of their own, of a whole model, an adapter, and both in one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file, save, save_file

from ratoon_client import InvalidArgumentError, RatoonClient
from tests.client.fake_service import FakeService
from tests.client.test_pull_published import Publisher

MODEL = {"model.safetensors": b"1" * 500, "config.json": b"{}", "tokenizer.json": b"[]"}
WEIGHT, HEAD = "model.layers.0.mlp.up_proj.weight", "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
BASE_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@pytest.fixture
def wire() -> str:
    """Files come by both wires in test_pull."""
    return "http"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A folder with one weight to adapt, and another."""
    folder = tmp_path / "base"
    folder.mkdir()
    for name in (*BASE_FILES, "README.md", ".hidden"):
        (folder / name).write_text(f'{{"is": "{name}"}}')
    return folder


def adapter_of(service: FakeService, **fields: object) -> dict[str, torch.Tensor]:
    """Publish an adapter of rank 2 and alpha 8, and give its factors."""
    torch.manual_seed(0)
    stem = f"base_model.model.{WEIGHT.removesuffix('.weight')}"
    factors = {
        f"{stem}.lora_A.weight": torch.randn(2, 5, dtype=torch.bfloat16),
        f"{stem}.lora_B.weight": torch.randn(4, 2, dtype=torch.bfloat16),
    }
    down, up = factors.values()
    # What is added to the first two weights is half a step of bfloat16.
    down[0, :2], up[0] = 1.0, torch.tensor([2.0**-10, 0.0])
    config = {"r": 2, "lora_alpha": 8.0, "base_model_name_or_path": None, "peft_type": "LORA"}
    files = {"adapter_config.json": json.dumps(config | fields).encode()}
    service.publish(3, files | {"adapter_model.safetensors": save(factors)})
    return factors


def front(folder: Path) -> str:
    return (folder / "README.md").read_text().split("---")[1]


def test_a_whole_model_is_exported_as_it_was_published(
    service: FakeService, client: RatoonClient, tmp_path: Path
):
    service.publish(2, MODEL)
    out = client.export_weights("p", tmp_path / "out")
    assert (out.version, out.folder) == (2, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    for name, data in MODEL.items():
        assert (tmp_path / "out" / name).read_bytes() == data
    assert front(tmp_path / "out") == "\nlibrary_name: transformers\n"
    refused: list[tuple[dict[str, Any], str]] = [
        ({"folder": tmp_path / "out"}, "folder"),
        ({"folder": tmp_path / "new", "base": "some/model"}, "base"),
        ({"folder": tmp_path / "new", "merge": True}, "base"),
    ]
    for options, field in refused:
        with pytest.raises(InvalidArgumentError) as caught:
            client.export_weights("p", **options)
        assert caught.value.field == field
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


def test_an_export_is_no_link_into_the_services_folder(
    service: FakeService, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Who edits an exported config would have edited the published one."""
    publisher = Publisher(service, tmp_path / "published")
    publisher.publish(2, MODEL)
    monkeypatch.setenv("RATOON_WEIGHTS_ROOT", str(publisher.weights_root))
    with RatoonClient(url) as client:
        out = client.export_weights("p", tmp_path / "out")
    assert out.fetched_bytes == 0
    (out.folder / "config.json").write_bytes(b"edited")
    assert publisher.path(2, "config.json").read_bytes() == b"{}"


def test_an_adapter_names_its_base_and_has_its_tokenizer(
    service: FakeService, client: RatoonClient, tmp_path: Path, base: Path
):
    factors = adapter_of(service)
    with pytest.raises(InvalidArgumentError, match="base"):
        client.export_weights("p", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    for name, given, written in (
        ("here", base, str(base.resolve())),
        ("hub", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
    ):
        out = client.export_weights("p", tmp_path / name, base=given).folder
        config = json.loads((out / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == written
        assert front(out) == f"\nlibrary_name: peft\nbase_model: {given}\ntags: [lora]\n"
        own = {"adapter_config.json", "adapter_model.safetensors", "README.md"}
        assert {path.name for path in out.iterdir()} == own | (
            set(BASE_FILES[1:]) if given is base else set[str]()
        )
        sent = load_file(out / "adapter_model.safetensors")
        assert all(torch.equal(sent[key], value) for key, value in factors.items())


@pytest.mark.parametrize(
    ("dtype", "use_rslora"),
    [
        (torch.float32, False),
        (torch.float32, True),
        (torch.bfloat16, False),
        (torch.float16, False),
    ],
)
def test_an_adapter_is_merged_in_float32_and_rounded_once(
    service: FakeService,
    client: RatoonClient,
    tmp_path: Path,
    base: Path,
    dtype: torch.dtype,
    use_rslora: bool,
):
    factors = adapter_of(service, use_rslora=use_rslora)
    scale = 8.0 / (2**0.5 if use_rslora else 2)
    down, up = (value.float() for value in factors.values())
    weights = {WEIGHT: torch.randn(4, 5).to(dtype), HEAD: torch.randn(3, 5).to(dtype)}
    weights[WEIGHT][0, :2] = torch.tensor([1.0, 1 + 2.0**-7])
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    before = (base / "model.safetensors").read_bytes()
    out = client.export_weights("p", tmp_path / "out", base=base, merge=True).folder
    assert (base / "model.safetensors").read_bytes() == before
    merged = load((out / "model.safetensors").read_bytes())
    expected = weights[WEIGHT].double() + scale * (up.double() @ down.double())
    exact = expected.to(torch.float32).to(dtype)
    rounding = 2e-6 if dtype is torch.float32 else 0.0
    torch.testing.assert_close(merged[WEIGHT], exact, rtol=rounding, atol=rounding)
    assert torch.equal(merged[HEAD], weights[HEAD])
    assert {path.name for path in out.iterdir()} == {*BASE_FILES, "model.safetensors", "README.md"}
    assert front(out) == f"\nlibrary_name: transformers\nbase_model: {base}\ntags: [lora]\n"


def of_heads(service: FakeService) -> dict[str, torch.Tensor]:
    """Publish an adapter of rank 2 and alpha 8 of the embedding and the LM head."""
    torch.manual_seed(1)
    factors = {
        "base_model.model.model.embed_tokens.lora_embedding_A": torch.randn(2, 7),
        "base_model.model.model.embed_tokens.lora_embedding_B": torch.randn(5, 2),
        "base_model.model.lm_head.lora_A.weight": torch.randn(2, 5),
        "base_model.model.lm_head.lora_B.weight": torch.randn(7, 2),
    }
    config = json.dumps({"r": 2, "lora_alpha": 8.0}).encode()
    files = {"adapter_config.json": config, "adapter_model.safetensors": save(factors)}
    service.publish(3, files)
    return factors


def test_an_adapter_of_embedding_and_head_is_merged(
    service: FakeService, client: RatoonClient, tmp_path: Path, base: Path
) -> None:
    """The embedding's weight has a row for each token, its adapter a column."""
    a, b, down, up = (value.double() for value in of_heads(service).values())
    weights = {EMBEDDING: torch.randn(7, 5), HEAD: torch.randn(7, 5)}
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    out = client.export_weights("p", tmp_path / "out", base=base, merge=True).folder
    merged = load((out / "model.safetensors").read_bytes())
    terms = {EMBEDDING: (b @ a).T, HEAD: up @ down}
    for name, term in terms.items():
        expected = (weights[name].double() + 4.0 * term).float()
        torch.testing.assert_close(merged[name], expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("words", [{}, {"tie_word_embeddings": True}])
def test_an_adapter_of_a_tied_weight_is_not_merged(
    service: FakeService, client: RatoonClient, tmp_path: Path, base: Path, words: dict[str, bool]
) -> None:
    """What it adds to one use of the weight would be added to the other, too."""
    of_heads(service)
    weights = {EMBEDDING: torch.randn(7, 5)}
    weights |= {HEAD: weights[EMBEDDING].clone()} if words else {}
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    (base / "config.json").write_text(json.dumps(words))
    with pytest.raises(InvalidArgumentError, match="ties"):
        client.export_weights("p", tmp_path / "out", base=base, merge=True)
    assert {path.name for path in tmp_path.iterdir()} == {"base"}


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ({HEAD: torch.zeros(3, 5)}, f"one without {WEIGHT}"),
        ({WEIGHT: torch.zeros(5, 4)}, r"shape \(5, 4\), expected \(4, 5\)"),
        ({WEIGHT: torch.zeros(4, 5, dtype=torch.int32)}, "got I32"),
    ],
)
def test_a_base_of_another_model_is_refused_and_nothing_is_left(
    service: FakeService,
    client: RatoonClient,
    tmp_path: Path,
    base: Path,
    weights: dict[str, torch.Tensor],
    says: str,
):
    adapter_of(service)
    save_file(weights, base / "model.safetensors")
    with pytest.raises(InvalidArgumentError, match=says):
        client.export_weights("p", tmp_path / "out", base=base, merge=True)
    assert {path.name for path in tmp_path.iterdir()} == {"base"}
