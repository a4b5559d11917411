"""Weights as folders: what another process loads is what was trained, bit for bit."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.core_model_loading import revert_weight_conversion

from ratoon.model import lora
from ratoon.model.export import export_weights, exported_values
from ratoon.model.loader import read_model
from ratoon.model.policy_model import PolicyModel
from ratoon.model.safetensors_files import WEIGHTS_NAME, FileContent, write_files
from ratoon.model.spec import PRESET_NAMES, FolderBase, ModelDtype, ModelSpec, PresetBase
from ratoon.stream.files import digest_file
from ratoon_client.weights.export import merge_adapter
from ratoon_proto.types import LoraTuning
from tests.model.builders import (
    FULL,
    LORA,
    LORA_ATTENTION,
    LORA_EXPERTS,
    LORA_HEADS,
    TINY,
    hidden_of,
    load,
    logits_of,
    randomize,
)
from tests.model.packing import branching_sequences, pack
from tests.tiny_models import ARCHITECTURES, write_folder


def export(model: PolicyModel, folder: Path) -> list[str]:
    """The names of the files, sorted."""
    folder.mkdir()
    digests = export_weights(model, folder)
    paths = [path for path in folder.rglob("*") if path.is_file()]
    names = sorted(str(path.relative_to(folder)) for path in paths)
    assert digests == {n: digest_file(folder / n) for n in names if n.endswith(".safetensors")}
    return names


def reload(folder: Path) -> nn.Module:
    return cast(Any, AutoModelForCausalLM).from_pretrained(
        folder, local_files_only=True, experts_implementation="eager"
    )


def biases_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: bias for name, bias in model.named_buffers() if name.endswith("correction_bias")}


def assert_same_bits(got: nn.Module, expected: nn.Module) -> None:
    """Parameters, and what routers choose by, are compared."""
    values, others = (
        {**dict(model.named_parameters()), **biases_of(model)} for model in (got, expected)
    )
    assert values.keys() == others.keys()
    for name, value in values.items():
        assert value.dtype is others[name].dtype
        assert torch.equal(value, others[name]), name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [ModelDtype.FLOAT32, ModelDtype.BFLOAT16])
def test_full_export_loads_bit_for_bit(
    tmp_path: Path, architecture: str, dtype: ModelDtype
) -> None:
    model = load(write_folder(tmp_path / "base", architecture), dtype=dtype)
    randomize(model, seed=3)
    names = export(model, tmp_path / "out")
    has_aside = model.base.aside is not None
    weights = "model.safetensors.index.json" if has_aside else "model.safetensors"
    assert {"config.json", "generation_config.json", weights} <= set(names)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype.value
    assert_same_bits(reload(tmp_path / "out"), model.module)


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_preset_export_loads_bit_for_bit_with_its_tokenizer(tmp_path: Path, name: str) -> None:
    model = load(PresetBase(name=name), dtype=ModelDtype.FLOAT32)
    names = export(model, tmp_path / "out")
    assert names == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert_same_bits(reload(tmp_path / "out"), model.module)
    tokenizer = cast(Any, AutoTokenizer).from_pretrained(tmp_path / "out", local_files_only=True)
    assert tokenizer("3+4=")["input_ids"] == list(b"3+4=")
    turn = tokenizer.apply_chat_template(
        [{"role": "user", "content": "3+4="}], add_generation_prompt=True, return_dict=False
    )
    assert turn == [257, *b"user\n3+4=", 258, *b"\n", 257, *b"assistant\n"]
    generation = GenerationConfig.from_pretrained(tmp_path / "out")
    assert (generation.eos_token_id, generation.pad_token_id) == (258, 256)


@pytest.mark.parametrize("dtype", [ModelDtype.FLOAT32, ModelDtype.BFLOAT16])
def test_exported_model_is_the_same_function(tmp_path: Path, dtype: ModelDtype) -> None:
    """The sampler's logits: stock attention of the loaded folder against ours."""
    model = load(TINY, dtype=dtype)
    randomize(model, seed=4)
    export(model, tmp_path / "out")
    tokens = list(range(40, 90))
    hidden_TD = hidden_of(model, pack([tokens]))
    with torch.no_grad():
        ours = (hidden_TD @ model.lm_head_VD.T).float()
        theirs = reload(tmp_path / "out")(torch.tensor([tokens])).logits[0].float()
    tolerance = 1e-5 if dtype is ModelDtype.FLOAT32 else 2e-2
    assert (ours - theirs).norm() <= tolerance * theirs.norm()


def test_tied_embedding_is_written_once(tmp_path: Path) -> None:
    export(load(write_folder(tmp_path / "base", "qwen3")), tmp_path / "out")
    names = load_file(tmp_path / "out" / "model.safetensors").keys()
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def test_experts_are_written_one_by_one_as_transformers_does(tmp_path: Path) -> None:
    model = load(write_folder(tmp_path / "base", "qwen3_moe"), dtype=ModelDtype.BFLOAT16)
    export(model, tmp_path / "out")
    written = tmp_path / "out" / "model.safetensors"
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in load_file(written)
    (tmp_path / "theirs").mkdir()
    state = dict(model.module.state_dict())
    theirs = revert_weight_conversion(model.module, state)
    write_files(tmp_path / "theirs", {WEIGHTS_NAME: FileContent.of(theirs)})
    assert written.read_bytes() == (tmp_path / "theirs" / "model.safetensors").read_bytes()


def test_what_is_written_is_no_copy(tmp_path: Path) -> None:
    """Exported tensors are dense rows in the memory of their parameter, from which experts are
    cut."""
    model = load(write_folder(tmp_path / "base", "qwen3_moe"))
    values = {name: parameter.detach() for name, parameter in model.named_trainable().items()}
    exported = exported_values(model, values)
    assert sum(each.numel() for each in exported.values()) == model.info().num_parameters
    memory = {value.untyped_storage().data_ptr() for value in values.values()}
    for value in exported.values():
        assert value.is_contiguous()
        assert value.untyped_storage().data_ptr() in memory


def test_files_of_equal_weights_are_equal(tmp_path: Path) -> None:
    for tuning, name in ((FULL, "full"), (LORA, "lora")):
        first = export(load(TINY, tuning=tuning), tmp_path / f"{name}-1")
        second = export(load(TINY, tuning=tuning), tmp_path / f"{name}-2")
        assert first == second
        for file in first:
            content = (tmp_path / f"{name}-1" / file).read_bytes()
            assert content == (tmp_path / f"{name}-2" / file).read_bytes(), file


def test_adapter_of_experts_has_the_names_of_the_hub(tmp_path: Path) -> None:
    """As peft and engines look for them."""
    folder = write_folder(tmp_path / "base", "qwen3_moe")
    model = load(folder, tuning=LORA, dtype=ModelDtype.FLOAT32)
    randomize(model, seed=6)
    export(model, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["target_modules"] == [
        "down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj",
    ]  # fmt: skip
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    layer = "base_model.model.model.layers.1"
    experts = f"{layer}.mlp.experts"
    for name, shape in (
        (f"{experts}.3.gate_proj.lora_A.weight", (3, 16)),
        (f"{experts}.0.down_proj.lora_B.weight", (16, 3)),
        (f"{layer}.self_attn.q_proj.lora_A.weight", (3, 16)),
    ):
        assert tensors[name].shape == shape
    fused = model.named_trainable()[f"{experts}.up_proj.lora_B.weight"]
    each = [tensors[f"{experts}.{expert}.up_proj.lora_B.weight"] for expert in range(4)]
    assert torch.equal(torch.stack(each), fused)
    assert len(tensors) == 2 * 2 * (4 + 4 * 3)


@pytest.mark.parametrize(
    "architecture",
    ["qwen3_moe", "qwen3_moe_mixed", "glm4_moe", "glm4_moe_lite", "deepseek_v3", "qwen3_next"],
)
def test_adapter_of_experts_is_the_same_function_to_peft(tmp_path: Path, architecture: str) -> None:
    """Dense and shared MLPs beside them have projections of the same names, and no factors."""
    from peft import PeftModel

    folder = write_folder(tmp_path / "base", architecture)
    targets = (*LORA_EXPERTS.target_modules, "o_proj")
    tuning = LORA if architecture == "qwen3_moe" else replace(LORA, target_modules=targets)
    model = load(folder, tuning=tuning, dtype=ModelDtype.FLOAT32)
    randomize(model, seed=6)
    export(model, tmp_path / "out")
    of_mlps = [name for name in model.named_trainable() if ".mlp." in name]
    assert of_mlps
    assert all(".experts." in name for name in of_mlps)

    adapted = PeftModel.from_pretrained(cast(Any, reload(folder)), str(tmp_path / "out"))
    sequence = branching_sequences(0)[0]
    ours = hidden_of(model, pack([sequence])) @ model.lm_head_VD.T
    theirs = adapted(input_ids=torch.tensor([sequence])).logits[0]
    assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
    with model.reference():
        base = hidden_of(model, pack([sequence])) @ model.lm_head_VD.T
    assert (ours - base).norm() > 0.1 * base.norm()


@pytest.mark.parametrize(
    ("architecture", "tuning"),
    [("qwen3_moe", LORA_ATTENTION), *((name, LORA_HEADS) for name in ("qwen3", "llama", "gemma3"))],
)
def test_adapter_export_loads_bit_for_bit(
    tmp_path: Path, architecture: str, tuning: LoraTuning
) -> None:
    from peft import PeftModel

    folder = write_folder(tmp_path / "base", architecture)
    model = load(folder, tuning=tuning, dtype=ModelDtype.FLOAT32)
    randomize(model, seed=6)
    names = export(model, tmp_path / "out")
    assert names == ["adapter_config.json", "adapter_model.safetensors"]
    base = reload(folder)
    adapted = PeftModel.from_pretrained(cast(Any, base), str(tmp_path / "out"))
    loaded = {n: p for n, p in adapted.named_parameters() if ".lora_" in n}
    assert loaded.keys() == model.named_trainable().keys()
    for name, parameter in model.named_trainable().items():
        assert torch.equal(parameter, loaded[name]), name

    sequence = branching_sequences(0)[0]
    ours = logits_of(model, pack([sequence]))
    theirs = adapted(input_ids=torch.tensor([sequence])).logits[0]
    assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


@pytest.mark.parametrize(
    ("family", "tuning"), [("qwen3", LORA), ("qwen3_moe", LORA), ("llama", LORA_HEADS)]
)
def test_a_merged_adapter_is_the_model_with_it(
    tmp_path: Path, family: str, tuning: LoraTuning
) -> None:
    folder = write_folder(tmp_path / "base", family)
    model = load(folder, tuning=tuning, dtype=ModelDtype.FLOAT32)
    randomize(model, seed=6)
    export(model, tmp_path / "out")
    before = reload(folder).state_dict()
    shutil.copytree(folder, tmp_path / "merged")
    merge_adapter(tmp_path / "out", tmp_path / "merged")
    sequence = branching_sequences(0)[0]
    ours = logits_of(model, pack([sequence]))
    merged = cast("Any", reload(tmp_path / "merged"))
    theirs = merged(input_ids=torch.tensor([sequence])).logits[0]
    assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
    changed = [name for name, value in merged.state_dict().items() if (value != before[name]).any()]
    expected = {"qwen3": 2 * 7, "qwen3_moe": 2 * 6, "llama": 2 + 2}
    assert len(changed) == expected[family], "fused experts count as two"


@pytest.mark.parametrize(
    ("architecture", "tuning"),
    [
        *((name, LORA) for name in ("qwen3", "llama", "gemma3", "qwen3_5", "qwen3_moe")),
        ("qwen3", replace(LORA, use_rslora=True)),
        ("qwen3_moe", replace(LORA, use_rslora=True)),
        ("gpt_oss", LORA_ATTENTION),
        ("llama", LORA_HEADS),
    ],
)
def test_a_merged_version_is_a_whole_model_with_the_adapter(
    tmp_path: Path, architecture: str, tuning: LoraTuning
) -> None:
    """In float64, against the adapter's own forward; names, files and words are a full policy's."""
    folder = write_folder(tmp_path / "base", architecture)
    model = load(folder, tuning=tuning, publishes_merged=True)
    randomize(model, seed=6)
    (tmp_path / "out").mkdir()
    export_weights(model, tmp_path / "out", is_merged=True)
    (tmp_path / "full").mkdir()
    export_weights(load(folder), tmp_path / "full")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        path.name for path in (tmp_path / "full").iterdir()
    }
    config, full = (tmp_path / name / "config.json" for name in ("out", "full"))
    assert json.loads(config.read_text()) == json.loads(full.read_text())
    merged, base = (load_file(tmp_path / name / WEIGHTS_NAME) for name in ("out", "full"))
    assert {name: value.shape for name, value in merged.items()} == {
        name: value.shape for name, value in base.items()
    }
    sequence = branching_sequences(0)[0]
    ours = logits_of(model, pack([sequence]))
    theirs = logits_of(load(tmp_path / "out"), pack([sequence]))
    assert (ours - theirs).norm() <= 1e-12 * ours.norm()
    plain = logits_of(load(folder), pack([sequence]))
    assert (ours - plain).norm() > 1e-2 * ours.norm()


@pytest.mark.parametrize("use_rslora", [False, True])
def test_a_merged_version_has_the_weights_that_peft_merges(
    tmp_path: Path, use_rslora: bool
) -> None:
    from peft import PeftModel

    folder = write_folder(tmp_path / "base", "qwen3")
    model = load(folder, tuning=replace(LORA, use_rslora=use_rslora))
    randomize(model, seed=6)
    export(model, tmp_path / "adapter")
    (tmp_path / "out").mkdir()
    export_weights(model, tmp_path / "out", is_merged=True)
    base = cast("Any", AutoModelForCausalLM).from_pretrained(folder, dtype=torch.float64)
    adapted = PeftModel.from_pretrained(
        base, str(tmp_path / "adapter"), autocast_adapter_dtype=False
    )
    expected = cast("Any", adapted).merge_and_unload().state_dict()
    for name, value in load_file(tmp_path / "out" / WEIGHTS_NAME).items():
        assert (value - expected[name]).norm() <= 1e-14 * value.norm(), name


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_a_merged_weight_is_rounded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    """In blocks of three rows, of which the last is shorter."""
    monkeypatch.setattr(lora, "_BLOCK_ELEMENTS", 48)
    folder = write_folder(tmp_path / "base", architecture)
    narrow = load(folder, tuning=LORA, dtype=ModelDtype.BFLOAT16)
    randomize(narrow, seed=6)
    wide = load(folder, tuning=LORA)
    base = dict(narrow.module.named_parameters())
    with torch.no_grad():
        for name, parameter in wide.module.named_parameters():
            parameter.copy_(base[name])
    for name, model in (("narrow", narrow), ("wide", wide)):
        (tmp_path / name).mkdir()
        export_weights(model, tmp_path / name, is_merged=True)
    found, exact = (load_file(tmp_path / name / WEIGHTS_NAME) for name in ("narrow", "wide"))
    for name, value in found.items():
        assert value.dtype is torch.bfloat16
        # A sum in float32 may be on the other side of a tie.
        assert (value.double() - exact[name]).abs().le(exact[name].abs() * 2**-8 * 1.001).all()
        assert (value != exact[name].bfloat16()).double().mean() < 1e-3, name


# The fields of peft's first LoraConfig; up to peft 0.13 any other field was a TypeError of its
# readers.
EARLY_FIELDS = {
    "base_model_name_or_path", "bias", "fan_in_fan_out", "inference_mode", "init_lora_weights",
    "lora_alpha", "lora_dropout", "modules_to_save", "peft_type", "r", "target_modules",
    "task_type",
}  # fmt: skip


def test_adapter_is_described_in_words_that_every_peft_knows(tmp_path: Path) -> None:
    from peft import LoraConfig

    export(load(TINY, tuning=LORA), tmp_path / "out")
    written = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert written.keys() == EARLY_FIELDS
    read = LoraConfig.from_pretrained(str(tmp_path / "out")).to_dict()
    own = LoraConfig(
        task_type="CAUSAL_LM",
        r=LORA.rank,
        lora_alpha=cast(Any, LORA.alpha),
        base_model_name_or_path="tiny",
        inference_mode=True,
        init_lora_weights=False,
        target_modules=sorted(written["target_modules"]),
    )
    assert read == own.to_dict()


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("qwen", "qwen"),
        ("models--Qwen--Qwen3-8B/snapshots/0123", "Qwen/Qwen3-8B"),
        ("models--gpt2/snapshots/0123", "gpt2"),
    ],
)
def test_an_adapter_names_its_base_as_a_hub_does(tmp_path: Path, place: str, name: str) -> None:
    """It had the folder's last name, by which nothing loads."""
    root = tmp_path / "root"
    (root / place).parent.mkdir(parents=True)
    folder = write_folder(root / place, "qwen3")
    spec = ModelSpec(
        base=FolderBase(folder=str(folder)), tuning=LORA, dtype=ModelDtype.FLOAT32, seed=1
    )
    model = read_model(spec, models_root=root).place(torch.device("cpu"))
    export(model, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == name


def test_export_says_nothing_of_the_server(tmp_path: Path) -> None:
    """Paths of the server's disk stay there."""
    folder = write_folder(tmp_path / "secret-place", "qwen3")
    for number, tuning in enumerate((FULL, LORA)):
        out = tmp_path / str(number)
        for name in export(load(folder, tuning=tuning), out):
            assert str(tmp_path).encode() not in (out / name).read_bytes(), name


def test_folder_base_hands_its_tokenizer_and_generation_settings_on(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "base", "llama")
    # Settings that transformers refuses to write itself: a temperature without sampling.
    generation = b'{"do_sample": false, "temperature": 0.7, "eos_token_id": [5, 6]}'
    files = {
        "tokenizer.json": b"{}",
        "tokenizer_config.json": b'{"a": 1}',
        "chat_template.jinja": b"{{ messages }}",
        "additional_chat_templates/rag.jinja": b"{{ documents }}",
        "generation_config.json": generation,
        **{name: name.encode() for name in ("tekken.json", "vocab.txt", "tiktoken.model")},
    }
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/notes.md").write_text("not for samplers")
    for name, data in files.items():
        (folder / name).write_bytes(data)
    (folder / "README.md").write_text("not for samplers")
    names = export(load(folder), tmp_path / "out")
    assert names == sorted([*files, "config.json", "model.safetensors"])
    for name, data in files.items():
        assert (tmp_path / "out" / name).read_bytes() == data


def test_a_version_has_the_tokenizer_and_the_processor_of_its_folder(tmp_path: Path) -> None:
    """As transformers makes them of a folder: special tokens, templates by name, image settings."""
    pytest.importorskip("PIL", reason="the processor's images need Pillow")
    from tokenizers import Tokenizer, models
    from transformers import AutoProcessor, AutoTokenizer, Gemma3Processor, PreTrainedTokenizerFast
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    folder = write_folder(tmp_path / "base", "gemma3_vl")
    vocabulary = {f"<{i}>": i for i in range(8)} | {each: 8 + i for i, each in enumerate("abc ")}
    media = {"boi_token": "<1>", "eoi_token": "<2>", "image_token": "<3>"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<0>")),
        eos_token="<7>",
        extra_special_tokens=media,
    )
    whole = cast(Any, Gemma3Processor)(
        image_processor=Gemma3ImageProcessorPil(size={"height": 16, "width": 16}),
        tokenizer=tokenizer,
        chat_template={"default": "{{ messages[0].content }}", "rag": "c{{ messages[0].content }}"},
    )
    whole.save_pretrained(folder)
    out = tmp_path / "version"
    assert "additional_chat_templates/rag.jinja" in export(load(folder), out)
    shutil.rmtree(folder)
    found = cast(Any, AutoProcessor).from_pretrained(out)
    assert type(found) is type(whole)
    assert found.chat_template == whole.chat_template
    assert found.image_processor.to_dict() == whole.image_processor.to_dict()
    read = cast(Any, AutoTokenizer).from_pretrained(out)
    messages = [{"role": "user", "content": "a b<3>"}]
    assert read("a b<3>").input_ids == tokenizer("a b<3>").input_ids == [8, 11, 9, 3]
    for name in ("default", "rag"):
        text = whole.apply_chat_template(messages, chat_template=whole.chat_template[name])
        assert read.apply_chat_template(messages, chat_template=name, tokenize=False) == text


def test_safetensors_say_their_format(tmp_path: Path) -> None:
    export(load(TINY, tuning=LORA), tmp_path / "lora")
    export(load(TINY), tmp_path / "full")
    for name in ("lora/adapter_model.safetensors", "full/model.safetensors"):
        with safe_open(tmp_path / name, framework="pt") as file:
            assert file.metadata()["format"] == "pt"
