"""Folders of models with a tower: the decoder is trained, everything else passes to each version.

In: folders that transformers itself wrote. Invariant: what is compared with is its own model of the
whole folder, and the folder's bytes.
"""

from __future__ import annotations

import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText

from ratoon.errors import ErrorCode
from ratoon.model.export import export_weights, exported_like
from ratoon.model.policy_model import PolicyModel
from ratoon.model.spec import ModelDtype
from ratoon.stream.versions import find_named, list_versions, prune_versions, publish_version
from ratoon.train.imported import read_weights
from ratoon_proto.types import LoraTuning, WeightKind
from tests.model.builders import (
    LORA_ATTENTION,
    LORA_HEADS,
    error_of,
    hidden_of,
    load,
    logits_of,
    randomize,
)
from tests.model.packing import branching_sequences, pack
from tests.tiny_models import IMAGE_TOKEN, WRAPPED, write_folder
from tests.work_units import rows

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# What engines read images with.
PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def whole(folder: Path, dtype: torch.dtype | str = "auto") -> nn.Module:
    """The folder's model of transformers, tower and all."""
    return cast(Any, AutoModelForImageTextToText).from_pretrained(
        folder, dtype=dtype, experts_implementation="eager"
    )


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """All tensors, by the files that an index names, or of the only one."""
    names = {WEIGHTS}
    if (folder / INDEX).exists():
        names = {*json.loads((folder / INDEX).read_text())["weight_map"].values()}
    return {k: v for name in sorted(names) for k, v in load_file(folder / name).items()}


def shard(folder: Path, **tensors: Tensor) -> None:
    """Two files that each have some of the decoder and of the tower, and further tensors.

    Experts are one tensor a layer there, as in released folders.
    """
    found = fused(load_file(folder / WEIGHTS)) | tensors
    names = sorted(found)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: found[name] for name in part}, folder / file, {"format": "pt"})
    (folder / WEIGHTS).unlink()
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def fused(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {name: each for name, each in tensors.items() if ".experts." not in name}
    for layer in {n.split(".experts.")[0] for n in tensors if ".experts." in n}:
        num_experts = sum(n.startswith(f"{layer}.experts.") for n in tensors) // 3
        gate, up, down = (
            torch.stack([tensors[f"{layer}.experts.{e}.{map_}.weight"] for e in range(num_experts)])
            for map_ in ("gate_proj", "up_proj", "down_proj")
        )
        found[f"{layer}.experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
        found[f"{layer}.experts.down_proj"] = down
    return found


def publish(model: PolicyModel, root: Path, version: int) -> Path:
    publish_version(
        root,
        "p",
        version,
        WeightKind.FULL,
        lambda folder: export_weights(model, folder),
        0.0,
        deltas=True,
    )
    return root / f"{version:08d}"


def aside_of(version: Path) -> Path:
    """The file of what training does not change."""
    return max(version.glob("*.safetensors"))


def edited(folder: Path, changes: dict[str, Any], text: dict[str, Any] | None = None) -> Path:
    path = folder / "config.json"
    said = json.loads(path.read_text())
    said["text_config"] |= text or {}
    path.write_text(json.dumps(said | changes))
    return folder


@pytest.fixture(params=WRAPPED)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_folder(tmp_path / "base", request.param)


# What is told of files is told of any model's.
one_folder = pytest.mark.parametrize("folder", rows(WRAPPED, now=("mistral3",)), indirect=True)


@pytest.mark.parametrize(
    ("dtype", "is_sharded"),
    rows(
        product((ModelDtype.FLOAT32, ModelDtype.BFLOAT16), (False, True)),
        now=((ModelDtype.FLOAT32, False), (ModelDtype.BFLOAT16, True)),
    ),
)
def test_a_version_is_the_folder_with_another_decoder(
    folder: Path, tmp_path: Path, dtype: ModelDtype, *, is_sharded: bool
) -> None:
    for name in (*PROCESSORS, "tokenizer.json"):
        (folder / name).write_text(f'{{"of": "{name}"}}')
    expected = whole(folder)
    # Layers that predict further tokens, in a dtype that nothing here computes with.
    others = {"mtp.a": torch.arange(7, dtype=torch.int8), "mtp.b": torch.tensor(float("nan"))}
    if is_sharded:
        shard(folder, **others)
    before = tensors_of(folder)
    model = load(folder, dtype=dtype)
    randomize(model, seed=3)
    version = publish(model, tmp_path / "versions", 0)

    after = tensors_of(version)
    assert after.keys() == before.keys()
    changed = {name for name, each in after.items() if not same_bytes(each, before[name])}
    assert len(changed) == len(exported_like(model))
    read, trained = whole(version), dict(model.module.named_parameters())
    for name, parameter in read.named_parameters():
        own = trained.get(name.replace("model.language_model.", "model.", 1))
        value = expected.get_parameter(name) if own is None else own
        # The tower is read as the words of the folder say, whatever its bytes are.
        assert torch.equal(parameter, value.to(parameter.dtype)), name
    said, published = (json.loads((at / "config.json").read_text()) for at in (folder, version))
    for words in (said, said["text_config"]):
        words |= {"dtype": dtype.value} if "dtype" in words else {}
    assert published == said
    for name in (*PROCESSORS, "tokenizer.json"):
        assert (version / name).read_bytes() == (folder / name).read_bytes()
    values = read_weights(model, folder_of(version), "").values
    assert values.keys() == model.named_trainable().keys()
    assert all(torch.equal(value, model.named_trainable()[n]) for n, value in values.items())
    index = json.loads((version / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in after.values())
    assert index["metadata"]["total_parameters"] == sum(each.numel() for each in after.values())


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return a.dtype is b.dtype and a.numpy().tobytes() == b.numpy().tobytes()


def test_what_is_not_trained_is_on_the_disk_once(folder: Path, tmp_path: Path) -> None:
    names = ("tokenizer.json", "additional_chat_templates/rag.jinja", "config.json")
    (folder / names[1]).parent.mkdir()
    for name in names[:2]:
        (folder / name).write_text(name)
    model = load(folder, dtype=ModelDtype.FLOAT32)
    root = tmp_path / "versions"
    first = publish(model, root, 0)
    # The folder is needed no more.
    shutil.rmtree(folder)
    for version in (1, 2, 3):
        randomize(model, seed=version)
        there = publish(model, root, version)
        for name in (aside_of(there).name, *names):
            assert (there / name).samefile(first / name)
            listed = find_named(root, version, name)[0]
            assert listed == there / name
        prune_versions(root, list_versions(root)[-2:])
        first = there


@one_folder
@pytest.mark.parametrize("damage", ["bytes", "gone"])
def test_a_damaged_file_is_not_linked(folder: Path, tmp_path: Path, damage: str) -> None:
    model = load(folder, dtype=ModelDtype.FLOAT32)
    root = tmp_path / "versions"
    first = publish(model, root, 0)
    before = {path.name: path.read_bytes() for path in (aside_of(first), first / "config.json")}
    for name, good in before.items():
        if damage == "gone":
            (first / name).unlink()
        else:
            (first / name).write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    second = publish(model, root, 1)
    assert {name: (second / name).read_bytes() for name in before} == before


@one_folder
@pytest.mark.parametrize("change", ["values", "short", "gone", "header"])
def test_a_folder_that_was_changed_is_not_published(
    folder: Path, tmp_path: Path, change: str
) -> None:
    """Nothing but the bytes of when the policy was made."""
    model = load(folder, dtype=ModelDtype.FLOAT32)
    path = folder / WEIGHTS
    data = path.read_bytes()
    if change == "gone":
        path.unlink()
    else:
        path.write_bytes(
            {
                "values": data[:-100] + bytes(100),
                "short": data[:-100],
                "header": bytes(100) + data[100:],
            }[change]
        )
    if change == "header":
        publish(model, tmp_path / "versions", 0)  # Their place is known.
        return
    error = error_of(lambda: publish(model, tmp_path / "versions", 0))
    assert (error.code, error.field) == (ErrorCode.INVALID_ARGUMENT, f"model_folder/{WEIGHTS}")


def test_a_version_comes_back_and_no_other_tower(folder: Path, tmp_path: Path) -> None:
    model = load(folder, dtype=ModelDtype.FLOAT32)
    randomize(model, seed=3)
    version = publish(model, tmp_path / "versions", 0)
    trained = {name: value.clone() for name, value in model.named_trainable().items()}
    read = read_weights(model, folder_of(version), "")
    assert read.values.keys() == trained.keys()
    assert all(torch.equal(value, trained[name]) for name, value in read.values.items())
    # A caller that merges the decoder alone gives no more than that.
    shutil.copytree(version, tmp_path / "alone")
    aside_of(tmp_path / "alone").unlink()
    (tmp_path / "alone" / INDEX).unlink()
    assert read_weights(model, folder_of(tmp_path / "alone"), "").values.keys() == trained.keys()

    # As folders of the other form name the decoder and the tower.
    renamed = shutil.copytree(version, tmp_path / "renamed")
    for path in renamed.glob("*.safetensors"):
        found = {_in_other_form(name): value for name, value in load_file(path).items()}
        save_file(found, path, {"format": "pt"})
    (renamed / INDEX).unlink()
    again = read_weights(model, folder_of(renamed), "").values
    assert all(torch.equal(value, trained[name]) for name, value in again.items())

    other = shutil.copytree(version, tmp_path / "other")
    tensors = load_file(aside_of(other))
    name = min(tensors)
    save_file(tensors | {name: tensors[name] + 1}, aside_of(other), {"format": "pt"})
    error = error_of(lambda: read_weights(model, folder_of(other), ""))
    assert (error.code, error.field) == (ErrorCode.INVALID_ARGUMENT, f"model_folder[{name!r}]")
    save_file(tensors | {"visual.unknown": torch.ones(1)}, aside_of(other), {"format": "pt"})
    error = error_of(lambda: read_weights(model, folder_of(other), ""))
    assert error.field == "model_folder['visual.unknown']"


def _in_other_form(name: str) -> str:
    name = name.replace("model.language_model.", "language_model.model.", 1)
    head = name.startswith("lm_head.")
    return f"language_model.{name}" if head else name.removeprefix("model.")


def folder_of(path: Path) -> Any:
    from ratoon.model.folder import ModelFolder

    return ModelFolder.of(path)


@pytest.mark.parametrize("tuning", [LORA_ATTENTION, LORA_HEADS])
def test_an_adapter_reaches_the_decoder_alone(
    folder: Path, tmp_path: Path, tuning: LoraTuning
) -> None:
    from peft import PeftModel

    model = load(folder, tuning=tuning, dtype=ModelDtype.FLOAT32)
    randomize(model, seed=6)
    (tmp_path / "out").mkdir()
    export_weights(model, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    adapted = PeftModel.from_pretrained(cast(Any, whole(folder)), str(tmp_path / "out"))
    loaded = {name for name, _ in adapted.named_parameters() if ".lora_" in name}
    with safe_open(tmp_path / "out/adapter_model.safetensors", framework="pt") as written:
        names = {*written.keys()}
    assert {name.replace(".default", "") for name in loaded} == names
    assert all(".language_model." in name or ".lm_head." in name for name in loaded)
    sequence = branching_sequences(0, vocab_size=IMAGE_TOKEN)[0]
    ours = logits_of(model, pack([sequence]))
    theirs = adapted(input_ids=torch.tensor([sequence])).logits[0]
    assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
    read = read_weights(model, folder_of(tmp_path / "out"), "")
    assert all(torch.equal(v, model.named_trainable()[name]) for name, v in read.values.items())


def test_a_merged_version_is_the_folder_with_another_decoder(folder: Path, tmp_path: Path) -> None:
    """Tower and words are the folder's; what differs is what the adapter reaches."""
    before = tensors_of(folder)
    model = load(folder, tuning=LORA_ATTENTION, dtype=ModelDtype.FLOAT32, publishes_merged=True)
    randomize(model, seed=6)
    (tmp_path / "out").mkdir()
    export_weights(model, tmp_path / "out", is_merged=True)
    after = tensors_of(tmp_path / "out")
    assert after.keys() == before.keys()
    changed = {name for name, each in after.items() if not same_bytes(each, before[name])}
    ends = tuple(f"{target}.weight" for target in LORA_ATTENTION.target_modules)
    assert changed == {n for n in before if "language_model." in n and n.endswith(ends)}
    said, published = (
        json.loads((at / "config.json").read_text()) for at in (folder, tmp_path / "out")
    )
    for words in (said, said["text_config"]):
        words |= {"dtype": "float32"} if "dtype" in words else {}
    assert published == said
    sequence = branching_sequences(0, vocab_size=IMAGE_TOKEN)[0]
    ours = hidden_of(model, pack([sequence])) @ model.lm_head_VD.T
    theirs = cast(Any, whole(tmp_path / "out"))(input_ids=torch.tensor([sequence])).logits[0]
    assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


def test_a_folder_without_its_tower_is_refused(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    decoder = {n: v for n, v in tensors.items() if "language_model." in n or n.startswith("lm_")}
    save_file(decoder, folder / WEIGHTS, {"format": "pt"})
    error = error_of(lambda: load(folder))
    assert (error.code, error.field) == (ErrorCode.INVALID_ARGUMENT, "model_folder")
    assert "tower" in error.got


def test_a_tensor_of_the_decoder_is_named_as_the_folder_names_it(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    (name,) = [name for name in tensors if name.endswith("layers.1.input_layernorm.weight")]
    save_file({n: v for n, v in tensors.items() if n != name}, folder / WEIGHTS, {"format": "pt"})
    assert error_of(lambda: load(folder)).field == f"model_folder[{name!r}]"
    save_file(tensors | {name: tensors[name].int()}, folder / WEIGHTS, {"format": "pt"})
    assert error_of(lambda: load(folder)).field == f"model_folder[{name!r}]"


@pytest.mark.parametrize(
    ("changes", "text", "field"),
    [
        ({"text_config": None}, {}, "config.text_config"),
        ({"text_config": []}, {}, "config.text_config"),
        ({"vision_config": 1}, {}, "config.vision_config"),
        ({"model_type": "llama"}, {}, "config.model_type"),
        ({"auto_map": {"AutoModel": "m.M"}}, {}, "config.auto_map"),
        ({"quantization_config": {"quant_method": "fp8"}}, {}, "config.quantization_config"),
        ({"dtype": "x"}, {}, "config.dtype"),
        ({"tie_word_embeddings": "x"}, {}, "config.tie_word_embeddings"),
        ({}, {"model_type": "llama"}, "config.text_config.model_type"),
        ({}, {"hidden_size": "16"}, "config.text_config.hidden_size"),
        ({}, {"num_key_value_heads": 3}, "config.text_config.num_key_value_heads"),
        ({}, {"rms_norm_eps": 0}, "config.text_config.rms_norm_eps"),
        ({}, {"auto_map": {"AutoModel": "m.M"}}, "config.text_config.auto_map"),
    ],
)
def test_words_of_a_wrapper_are_refused_by_field(
    folder: Path, changes: dict[str, Any], text: dict[str, Any], field: str
) -> None:
    assert error_of(lambda: load(edited(folder, changes, text))).field == field


def test_the_tensors_decide_a_tie_that_the_words_do_not(folder: Path) -> None:
    """Released folders say nothing, or say it of the whole and of the decoder differently."""
    has_head = any(name.endswith("lm_head.weight") for name in load_file(folder / WEIGHTS))
    name, path = "tie_word_embeddings", folder / "config.json"
    said = json.loads(path.read_text())
    for of_whole in ({name: True}, {name: False}, {name: None}):
        for of_decoder in ({}, {name: True}, {name: False}):
            if len({of_whole[name], *of_decoder.values()} - {None}) == 1:
                continue
            others = {key: value for key, value in said["text_config"].items() if key != name}
            words = {**said, **of_whole, "text_config": {**others, **of_decoder}}
            path.write_text(json.dumps(words))
            model = load(folder)
            assert ("lm_head.weight" in model.named_trainable()) is has_head
    path.write_text(json.dumps(said))
    assert ("lm_head.weight" in load(folder).named_trainable()) is has_head
    said |= {name: has_head}
    said["text_config"] |= {name: has_head}
    path.write_text(json.dumps(said))
    # Both say what the tensors do not.
    assert error_of(lambda: load(folder)).field.startswith(("config.", "model_folder"))


def test_tokens_of_images_are_known_by_their_fields(folder: Path) -> None:
    tokens = load(folder).info().media_tokens
    assert IMAGE_TOKEN in tokens.values()
    said = json.loads((folder / "config.json").read_text())
    assert {name: said[name] for name in tokens} == tokens
    field = next(iter(tokens))
    for value in (-1, "11", 2.0):
        assert error_of(lambda: load(edited(folder, {field: value}))).field == f"config.{field}"  # noqa: B023
