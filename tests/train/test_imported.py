"""Weights of a folder: what was exported comes back, a folder with a fault changes nothing."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from ratoon.errors import ErrorCode, RatoonError
from ratoon.model.export import export_weights
from ratoon.model.spec import FolderBase, ModelDtype, PresetBase
from ratoon.train.spec import OptimizerStates
from ratoon.train.trainer import Trainer
from ratoon_proto.types import LoraTuning
from tests.model.builders import hidden_of, logits_of
from tests.model.packing import pack
from tests.oracle import hf
from tests.tiny_models import ARCHITECTURES, write_folder
from tests.train.optimizer_runs import masters_of, moments_of
from tests.train.trainer_runs import (
    assert_equal,
    forward_backward,
    make_batch,
    make_loss,
    make_trainer,
    state_of,
    update,
    weights_of,
)

WEIGHTS = "model.safetensors"
NORM = "model.norm.weight"
LORA = LoraTuning(rank=2, alpha=4.0)


def trainer_of(
    base: FolderBase,
    kind: OptimizerStates | None = None,
    tuning: LoraTuning | None = None,
) -> Trainer:
    """float32 where there is no `kind`."""
    dtype = ModelDtype.FLOAT32 if kind is None else ModelDtype.BFLOAT16
    spec = make_trainer(base, dtype=dtype, tuning=tuning).spec
    return Trainer.create(replace(spec, optimizer_states=kind or OptimizerStates.FP32))


def export(trainer: Trainer, folder: Path) -> Path:
    folder.mkdir()
    export_weights(trainer.model, folder)
    return folder


def take(trainer: Trainer, folder: Path, *, adds: bool = False, resets: bool = False) -> str:
    weights = trainer.read_weights(folder, "", adds=adds)
    trainer.import_weights(weights, adds=adds, resets_optimizer=resets)
    return weights.digest


def logprobs_of(trainer: Trainer) -> bytes:
    batch = make_batch(99)
    return trainer.forward(
        trainer.prepare_forward(batch), with_entropy=False, use_reference=False
    ).logprobs.tobytes()


@pytest.fixture(scope="module")
def _exported(base: FolderBase, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, Path]:
    trainer = trainer_of(base)
    return trainer, export(trainer, tmp_path_factory.mktemp("exported") / "one")


@pytest.fixture
def exported(_exported: tuple[Trainer, Path], tmp_path: Path) -> tuple[Trainer, Path]:
    """A trainer that no test changes, and a folder with its weights."""
    trainer, folder = _exported
    return trainer, shutil.copytree(folder, tmp_path / "one")


@pytest.mark.parametrize(
    ("kind", "tuning"),
    [
        *((kind, None) for kind in OptimizerStates),
        (None, None),
        (OptimizerStates.BF16_SPLIT, LORA),
        (OptimizerStates.BF16_8BIT, LORA),
    ],
)
def test_an_exported_version_comes_back_bit_for_bit(
    base: FolderBase, tmp_path: Path, kind: OptimizerStates | None, tuning: LoraTuning | None
) -> None:
    trainer = trainer_of(base, kind, tuning)
    update(trainer, 0)
    then, weights = logprobs_of(trainer), dict(trainer.model.named_trainable())
    weights = {name: weight.clone() for name, weight in weights.items()}
    folder = export(trainer, tmp_path / "one")
    update(trainer, 1)
    assert logprobs_of(trainer) != then
    before, moments = trainer.state_digest(), moments_of(state_of(trainer))
    take(trainer, folder)
    assert logprobs_of(trainer) == then
    assert_equal(dict(trainer.model.named_trainable()), weights)
    assert trainer.version == 3
    assert trainer.state_digest() != before
    state = state_of(trainer)
    assert state.num_steps == 2
    assert_equal(moments_of(state), moments)
    update(trainer, 2)


def test_an_adapter_of_experts_comes_back_byte_for_byte(tmp_path: Path) -> None:
    base = FolderBase(folder=str(write_folder(tmp_path / "base", "qwen3_moe")))
    trainer = trainer_of(base, OptimizerStates.BF16_SPLIT, LORA)
    update(trainer, 0)
    folder = export(trainer, tmp_path / "one")
    other = trainer_of(base, OptimizerStates.BF16_SPLIT, LORA)
    update(other, 1)
    assert logprobs_of(other) != logprobs_of(trainer)
    take(other, folder)
    assert logprobs_of(other) == logprobs_of(trainer)
    again = export(other, tmp_path / "two")
    for path in folder.iterdir():
        assert (again / path.name).read_bytes() == path.read_bytes()
    path = folder / "adapter_model.safetensors"
    name = "base_model.model.model.layers.0.mlp.experts.3.up_proj.lora_A.weight"
    save_file({n: value for n, value in load_file(path).items() if n != name}, path)
    with pytest.raises(RatoonError) as refused:
        take(other, folder)
    assert refused.value.field == f"model_folder[{name!r}]"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_float32_values_of_any_architecture_become_the_masters(
    tmp_path: Path, architecture: str
) -> None:
    """By the names of the hub: experts one by one, tied embeddings once."""
    base = FolderBase(folder=str(write_folder(tmp_path / "base", architecture)))
    other = write_folder(tmp_path / "other", architecture, seed=1)
    trainer = trainer_of(base, OptimizerStates.BF16_SPLIT)
    own, theirs = (load_file(Path(folder) / WEIGHTS) for folder in (base.folder, other))
    kept = {name: value for name, value in own.items() if name.endswith("correction_bias")}
    if kept:
        # It is not trained, and another one would be another model.
        with pytest.raises(RatoonError) as refused:
            trainer.read_weights(other, "")
        assert refused.value.field == f"model_folder[{min(kept)!r}]"
        save_file(theirs | kept, other / WEIGHTS, {"format": "pt"})
    weights = trainer.read_weights(other, "")
    assert weights.dtypes == ("F32",)
    trainer.import_weights(weights, adds=False, resets_optimizer=False)
    expected = trainer_of(FolderBase(folder=str(other)))
    assert_equal(masters_of(state_of(trainer)), weights_of(expected))


def test_fused_experts_are_those_of_one_tensor_each(tmp_path: Path) -> None:
    base = FolderBase(folder=str(write_folder(tmp_path / "base", "qwen3_moe")))
    trainer = trainer_of(base)
    update(trainer, 0)
    fused = {
        name: value.detach().clone() for name, value in trainer.model.named_trainable().items()
    }
    apart = export(trainer, tmp_path / "apart")
    assert not fused.keys() <= load_file(apart / WEIGHTS).keys()
    (tmp_path / "fused").mkdir()
    save_file(fused, tmp_path / "fused" / WEIGHTS)
    found, expected = (trainer.read_weights(tmp_path / each, "") for each in ("fused", "apart"))
    assert_equal(found.values, expected.values)
    assert found.num_tensors == expected.num_tensors > len(fused)
    # One of both kinds, in one file, and one of another shape.
    experts = "model.layers.0.mlp.experts"
    both = fused | {f"{experts}.0.up_proj.weight": torch.zeros(16, 16)}
    save_file(both, tmp_path / "fused" / WEIGHTS)
    with pytest.raises(RatoonError, match="there twice"):
        trainer.read_weights(tmp_path / "fused", "")
    for shape in ((), (3, 32, 16), (4, 31, 16), (4, 0, 16), (4, 32)):
        odd = fused | {f"{experts}.gate_up_proj": torch.zeros(shape)}
        save_file(odd, tmp_path / "fused" / WEIGHTS)
        with pytest.raises(RatoonError) as caught:
            trainer.read_weights(tmp_path / "fused", "")
        assert caught.value.code is ErrorCode.INVALID_ARGUMENT


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_sharded_files_of_both_dtypes_are_one_folder(tmp_path: Path, architecture: str) -> None:
    base = FolderBase(folder=str(write_folder(tmp_path / "base", architecture)))
    trainer = trainer_of(base)
    tensors = load_file(write_folder(tmp_path / "other", architecture, seed=1) / WEIGHTS)
    halves = list(tensors)[::2], list(tensors)[1::2]
    (tmp_path / "parts").mkdir()
    save_file({n: tensors[n] for n in halves[0]}, tmp_path / "parts/a.safetensors")
    coarse = {n: tensors[n].bfloat16() for n in halves[1]}
    save_file(coarse, tmp_path / "parts/b.safetensors")
    weights = trainer.read_weights(tmp_path / "parts", "")
    assert (weights.num_tensors, weights.dtypes) == (len(tensors), ("BF16", "F32"))
    trainer.import_weights(weights, adds=False, resets_optimizer=False)
    written = load_file(export(trainer, tmp_path / "out") / WEIGHTS)
    assert_equal(written, {n: coarse.get(n, tensors[n]).float() for n in tensors})


def test_a_delta_is_added_to_the_masters(base: FolderBase, tmp_path: Path) -> None:
    """What a bfloat16 weight cannot hold is in its master, and adds up there."""
    trainer = trainer_of(base, OptimizerStates.BF16_SPLIT)
    update(trainer, 0)
    before = masters_of(state_of(trainer))
    tensors = load_file(Path(base.folder) / WEIGHTS)
    delta = {name: tensor * 1e-5 for name, tensor in tensors.items()}
    (tmp_path / "delta").mkdir()
    save_file(delta, tmp_path / "delta" / WEIGHTS)
    for _ in range(2):
        take(trainer, tmp_path / "delta", adds=True)
    after = masters_of(state_of(trainer))
    for name, master in before.items():
        assert torch.equal(after[name], master + delta[name] + delta[name])
        assert not torch.equal(after[name], master)


def test_reset_makes_the_next_step_a_first_one(base: FolderBase, tmp_path: Path) -> None:
    folder = export(trainer_of(base), tmp_path / "one")
    trainer, fresh = trainer_of(base), trainer_of(base)
    update(trainer, 0)
    take(trainer, folder, resets=True)
    for one in (trainer, fresh):
        update(one, 5)
    assert trainer.state_digest() == fresh.state_digest()


def test_the_frozen_reference_stays(base: FolderBase, tmp_path: Path) -> None:
    trainer = trainer_of(base)
    batch = make_batch(7)

    def reference() -> bytes:
        arrays = trainer.forward(
            trainer.prepare_forward(batch), with_entropy=False, use_reference=True
        )
        return arrays.logprobs.tobytes()

    before = reference()
    take(trainer, write_folder(tmp_path / "other", "qwen3", seed=1))
    assert reference() == before


def _as_a_cache(models: Path, name: str, folder: Path) -> Path:
    """As Hugging Face keeps it: a snapshot of links to blobs."""
    (models / "blobs").mkdir(parents=True, exist_ok=True)
    snapshot = models / "snapshots" / name
    snapshot.mkdir(parents=True)
    for path in folder.iterdir():
        path.rename(models / "blobs" / f"{name}-{path.name}")
        (snapshot / path.name).symlink_to(f"../../blobs/{name}-{path.name}")
    return snapshot


def test_links_below_the_models_root_are_followed_and_no_others(tmp_path: Path) -> None:
    models = tmp_path / "models"
    base = _as_a_cache(models, "one", write_folder(tmp_path / "base", "qwen3"))
    other = _as_a_cache(models, "two", write_folder(tmp_path / "other", "qwen3", seed=1))
    plain = make_trainer(PresetBase(name="tiny"), dtype=ModelDtype.FLOAT32).spec
    spec = replace(plain, model=replace(plain.model, base=FolderBase(folder=str(base))))
    trainer = Trainer.create(replace(spec, models_root=models))
    before = trainer.state_digest()
    take(trainer, other)
    assert trainer.state_digest() != before
    trainer.spec = replace(trainer.spec, models_root=None)
    for refused in (partial(take, trainer, other), partial(Trainer.create, spec)):
        with pytest.raises(RatoonError, match="a link to another place"):
            refused()


def test_an_open_window_is_refused(base: FolderBase, tmp_path: Path) -> None:
    trainer = trainer_of(base)
    folder, batch = export(trainer, tmp_path / "one"), make_batch(0)
    forward_backward(trainer, batch, make_loss(batch))
    with pytest.raises(RatoonError) as refused:
        take(trainer, folder)
    assert refused.value.code is ErrorCode.WINDOW_OPEN


def test_other_bytes_than_at_first_are_refused(exported: tuple[Trainer, Path]) -> None:
    """A file that is renamed, changed by a bit or no longer loads: replay takes none of these."""
    trainer, path = exported[0], exported[1] / WEIGHTS
    digest = trainer.read_weights(path.parent, "").digest
    assert trainer.read_weights(path.parent, digest).digest == digest
    data = path.read_bytes()
    for changed in (data[:-1] + bytes([data[-1] ^ 1]), data[:-1], data + b"\0"):
        path.write_bytes(changed)
        with pytest.raises(RatoonError, match=digest):
            trainer.read_weights(path.parent, digest)
    path.write_bytes(data)
    path.rename(path.with_name("other.safetensors"))
    with pytest.raises(RatoonError, match=digest):
        trainer.read_weights(path.parent, digest)


def _edited(edit: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        edit(tensors)
        save_file(tensors, folder / WEIGHTS)

    return write


def _cut(folder: Path) -> None:
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:-8])


def _spoil(name: str, value: float) -> Callable[[Path], None]:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[name].view(-1)[-1] = value

    return _edited(spoil)


def _hostile_dtype(folder: Path) -> None:
    header = {NORM: {"dtype": "\x1b[31m" * 5000, "shape": [1], "data_offsets": [0, 4]}}
    text = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))


def _endless_shape(folder: Path) -> None:
    header = {NORM: {"dtype": "F32", "shape": [0, 2**62, 4], "data_offsets": [0, 0]}}
    text = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text)


def _set(name: str, tensor: Tensor) -> Callable[[Path], None]:
    return _edited(lambda tensors: tensors.update({name: tensor}))


def _link(target: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "b.safetensors").symlink_to(target)


def _grow(folder: Path) -> None:
    with (folder / WEIGHTS).open("ab") as file:
        file.truncate(2**30)


def _damages() -> Iterator[tuple[str, Callable[[Path], object], str]]:
    """Each damage: a name, what is done to a good folder, and what the error must name."""
    yield "cut", _cut, WEIGHTS
    yield "no safetensors", lambda folder: (folder / WEIGHTS).write_bytes(b"PK\3\4" * 9), WEIGHTS
    yield "empty file", lambda folder: (folder / WEIGHTS).write_bytes(b""), WEIGHTS
    yield "no files", lambda folder: (folder / WEIGHTS).unlink(), "no weights"
    yield "a folder", lambda folder: (folder / "b.safetensors").mkdir(), "b.safetensors"
    yield "a fifo", lambda folder: os.mkfifo(folder / "b.safetensors"), "b.safetensors"
    yield "a device", _link("/dev/zero"), "b.safetensors"
    yield "a system's file", _link("/etc/passwd"), "b.safetensors"
    yield "another folder's", _link("../other/model.safetensors"), "b.safetensors"
    yield "too large", _grow, "bytes of weights"
    # By safetensors' order and by name the last one read.
    yield "nan", _spoil(NORM, torch.nan), NORM
    yield "infinite", _spoil("model.embed_tokens.weight", torch.inf), "model.embed_tokens.weight"
    yield "missing", _edited(lambda tensors: tensors.pop(NORM)), NORM
    yield "surplus", _set("model.norm.bias", torch.zeros(16)), "model.norm.bias"
    yield "a head", _set("lm_head.weight", torch.zeros(63, 16)), "lm_head.weight"
    yield "a shape that none has", _endless_shape, NORM
    yield "shape", _set(NORM, torch.ones(17)), NORM
    yield "transposed", _set(NORM, torch.ones(1, 16)), NORM
    yield "hostile dtype", _hostile_dtype, WEIGHTS
    yield "hostile name", _set("\x1b[31m" + "x" * 10_000, torch.ones(1)), "x1b"
    yield (
        "twice",
        lambda folder: save_file({NORM: torch.ones(16)}, folder / "second.safetensors"),
        NORM,
    )


@pytest.mark.parametrize(
    ("damage", "named"), [d[1:] for d in _damages()], ids=[d[0] for d in _damages()]
)
def test_a_folder_with_a_fault_is_named_and_changes_nothing(
    exported: tuple[Trainer, Path], damage: Callable[[Path], object], named: str
) -> None:
    trainer, folder = exported
    damage(folder)
    before = trainer.state_digest()
    for adds in (False, True):
        with pytest.raises(RatoonError) as refused:
            take(trainer, folder, adds=adds)
        assert refused.value.code is ErrorCode.INVALID_ARGUMENT
        assert refused.value.field.startswith("model_folder")
        assert named in refused.value.message
        assert refused.value.message.isprintable()
        assert len(refused.value.message) < 500
        assert str(folder.parent) not in refused.value.message
        assert (trainer.state_digest(), trainer.version) == (before, 0)


def _all_as(dtype: torch.dtype) -> Callable[[Path], None]:
    return _edited(lambda tensors: tensors.update({n: v.to(dtype) for n, v in tensors.items()}))


def _short(tensors: dict[str, Tensor]) -> None:
    for name in list(tensors):
        tensors[name.removeprefix("model.")] = tensors.pop(name)
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)


def _shard(folder: Path) -> None:
    """Shards with an index, beside another export of the same weights that no reader takes."""
    tensors = load_file(folder / WEIGHTS)
    parts = {f"model-{n}.safetensors": list(tensors)[n::2] for n in (0, 1)}
    for file, names in parts.items():
        save_file({name: tensors[name] for name in names}, folder / file)
    (folder / WEIGHTS).unlink()
    weight_map = {name: file for file, names in parts.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    save_file({"layers.0.attention.wq.weight": torch.ones(2)}, folder / "consolidated.safetensors")


_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.mark.parametrize(
    "edit",
    [
        _all_as(torch.float16),
        _all_as(torch.float64),
        _edited(lambda tensors: tensors.update({_HEAD: tensors[_EMBEDDING].clone()})),
        _edited(_short),
        _shard,
    ],
    ids=["float16", "float64", "a tied head", "short names and frequencies", "an index"],
)
def test_what_a_policy_is_made_of_is_imported_as_that(
    base: FolderBase, tmp_path: Path, edit: Callable[[Path], None]
) -> None:
    folder = write_folder(tmp_path / "other", "qwen3", seed=1)
    edit(folder)
    trainer = trainer_of(base)
    take(trainer, folder)
    assert_equal(weights_of(trainer), weights_of(trainer_of(FolderBase(folder=str(folder)))))


def _two_names(folder: Path) -> None:
    _set("norm.weight", torch.ones(16))(folder)


def _pickled(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")


def _index_elsewhere(folder: Path) -> None:
    _shard(folder)
    text = json.dumps({"weight_map": {NORM: "../other.safetensors"}})
    (folder / "model.safetensors.index.json").write_text(text)


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (_set(_HEAD, torch.ones(64, 16)), ErrorCode.UNSUPPORTED),
        (_set(NORM, torch.ones(16, dtype=torch.int32)), ErrorCode.UNSUPPORTED),
        (_set(NORM, torch.ones(16).to(torch.float8_e4m3fn)), ErrorCode.UNSUPPORTED),
        (_pickled, ErrorCode.UNSUPPORTED),
        (lambda folder: (folder / "adapter_config.json").write_text("{}"), ErrorCode.UNSUPPORTED),
        (_index_elsewhere, ErrorCode.INVALID_ARGUMENT),
        (_two_names, ErrorCode.INVALID_ARGUMENT),
        (_spoil(NORM, torch.nan), ErrorCode.INVALID_ARGUMENT),
        (_edited(lambda tensors: tensors.pop(NORM)), ErrorCode.INVALID_ARGUMENT),
        (_set(NORM, torch.ones(17)), ErrorCode.INVALID_ARGUMENT),
        (_cut, ErrorCode.INVALID_ARGUMENT),
    ],
)
def test_what_no_policy_is_made_of_is_refused_by_the_same_words(
    exported: tuple[Trainer, Path],
    tmp_path: Path,
    damage: Callable[[Path], object],
    code: ErrorCode,
) -> None:
    folder = write_folder(tmp_path / "other", "qwen3", seed=1)
    damage(folder)
    errors = list[RatoonError]()
    for reader in (partial(take, exported[0]), lambda at: trainer_of(FolderBase(folder=str(at)))):
        with pytest.raises(RatoonError) as refused:
            reader(folder)
        errors.append(refused.value)
    assert errors[0].code is code
    # The library of the format says where it was, too.
    imported, created = (error.message.replace(" header:", ":") for error in errors)
    assert imported == created


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_another_architecture_is_refused(
    exported: tuple[Trainer, Path], tmp_path: Path, architecture: str
) -> None:
    trainer, _ = exported
    before = trainer.state_digest()
    with pytest.raises(RatoonError) as refused:
        take(trainer, write_folder(tmp_path / "other", architecture))
    assert refused.value.code is ErrorCode.INVALID_ARGUMENT
    assert trainer.state_digest() == before


def _config(**changes: object) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return write


def _deep(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"a":' * 5000 + "1" + "}" * 5000)


def _fifo(folder: Path) -> None:
    (folder / "adapter_config.json").unlink()
    os.mkfifo(folder / "adapter_config.json")


@pytest.fixture(scope="module")
def adapted(base: FolderBase, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, Path]:
    """A trainer of an adapter, and a folder with it."""
    trainer = trainer_of(base, tuning=LORA)
    return trainer, export(trainer, tmp_path_factory.mktemp("adapted") / "one")


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (_config(lora_alpha=8.0), "lora_alpha"),
        (_config(use_rslora=True), "use_rslora"),
        (_config(alpha_pattern={"q_proj": 8}), "alpha_pattern"),
        (_config(use_dora=True), "adapter_config.json: use_dora: got True"),
        (_config(bias="all"), "bias"),
        (_config(modules_to_save=["lm_head"]), "modules_to_save"),
        (_config(ensure_weight_tying=True), "ensure_weight_tying"),
        (_config(alora_invocation_tokens=[1]), "alora_invocation_tokens"),
        (_config(peft_type="ADALORA"), "peft_type"),
        (_config(init_lora_weights="pissa"), "init_lora_weights"),
        (_config(of_tomorrow=True), "of_tomorrow"),
        (_config(r=3), ": r:"),
        (lambda folder: (folder / "adapter_config.json").unlink(), "adapter_config.json"),
        (lambda folder: (folder / "adapter_config.json").write_text("[]"), "adapter_config.json"),
        (_deep, "adapter_config.json"),
        (_fifo, "adapter_config.json"),
    ],
)
def test_an_adapter_that_means_something_else_is_refused(
    adapted: tuple[Trainer, Path], tmp_path: Path, damage: Callable[[Path], object], named: str
) -> None:
    """Equal tensors under another scale are another policy."""
    trainer, folder = adapted[0], shutil.copytree(adapted[1], tmp_path / "one")
    take(trainer, folder)
    damage(folder)
    with pytest.raises(RatoonError) as refused:
        take(trainer, folder)
    assert named in refused.value.message


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (_config(use_dora=True), ErrorCode.UNSUPPORTED),
        (_config(init_lora_weights="pissa_niter_16"), ErrorCode.UNSUPPORTED),
        (_config(use_rslora=True), ErrorCode.INVALID_ARGUMENT),
    ],
)
def test_another_function_is_unsupported_and_another_scale_invalid(
    adapted: tuple[Trainer, Path],
    tmp_path: Path,
    change: Callable[[Path], object],
    code: ErrorCode,
) -> None:
    trainer, folder = adapted[0], shutil.copytree(adapted[1], tmp_path / "one")
    change(folder)
    with pytest.raises(RatoonError) as refused:
        take(trainer, folder)
    assert refused.value.code is code


def _of_peft(base: FolderBase, folder: Path, **fields: Any) -> Path:
    """An adapter folder that peft made and saved, with random factors."""
    with torch.random.fork_rng():
        torch.manual_seed(8)
        stock = AutoModelForCausalLM.from_pretrained(base.folder, dtype=torch.float32)
        fields = {"r": 2, "lora_alpha": 4, "init_lora_weights": "gaussian"} | fields
        config = LoraConfig(task_type="CAUSAL_LM", **fields)
        made = get_peft_model(stock, config)
        for name, parameter in made.named_parameters():
            if ".lora_B." in name or ".lora_embedding_A." in name:
                torch.nn.init.normal_(parameter, std=0.3)
    made.save_pretrained(str(folder))
    return folder


PARTS: dict[str, dict[str, Any]] = {
    "projections": {"target_modules": ["q_proj", "v_proj"]},
    "layers": {"target_modules": ["o_proj", "up_proj"], "layers_to_transform": [1]},
    "pattern": {"target_modules": r".*\.mlp\.(up|down)_proj"},
    "whole": {"target_modules": "all-linear", "lora_dropout": 0.1},
}


@pytest.mark.parametrize("part", PARTS)
def test_an_adapter_of_peft_on_a_part_of_the_linear_maps_is_the_same_function(
    base: FolderBase, tmp_path: Path, part: str
) -> None:
    """What it lacks adds nothing, whatever the policy had there, and is trained from there on."""
    folder = _of_peft(base, tmp_path / "theirs", **PARTS[part])
    trainer = make_trainer(base, tuning=LORA)
    update(trainer, 0)
    take(trainer, folder)
    sequence, model = [3, 1, 4, 1, 5, 9, 2, 6], trainer.model
    ours_TV = hidden_of(model, pack([sequence])) @ model.lm_head_VD.T
    theirs = hf.with_adapter(hf.load(Path(base.folder), dtype=torch.float64), folder)
    with hf.double_names():
        logits_TV = theirs.double().eval()(input_ids=torch.tensor([sequence])).logits[0]
    assert (ours_TV - logits_TV).norm() <= 1e-10 * logits_TV.norm()
    found, fresh = model.named_trainable(), model.new_adapter(trainer.spec.model.seed)
    there = {name.replace(".weight", ".default.weight") for name in _tensors(folder)}
    absent = found.keys() - there
    assert bool(absent) == (part != "whole")
    assert all(torch.equal(found[name], fresh[name]) for name in absent)
    before = {name: p.clone() for name, p in found.items()}
    update(trainer, 1)
    changed = {name for name, p in found.items() if not torch.equal(p, before[name])}
    assert {name for name in found if ".lora_B." in name} <= changed


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_an_adapter_of_peft_on_embedding_and_head_is_the_same_function(
    tmp_path: Path, architecture: str
) -> None:
    """peft saves the base's two beside it, which must be the policy's."""
    base = FolderBase(folder=str(write_folder(tmp_path / "base", architecture)))
    targets = ("q_proj", "embed_tokens", "lm_head")
    folder = _of_peft(base, tmp_path / "theirs", target_modules=[*targets])
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    of_base = {name for name in tensors if name.endswith(".base_layer.weight")}
    assert len(of_base) == 2
    trainer = make_trainer(base, tuning=replace(LORA, target_modules=targets))
    update(trainer, 0)
    take(trainer, folder)
    sequence, model = [3, 1, 4, 1, 5, 9, 2, 6], trainer.model
    ours_TV = logits_of(model, pack([sequence]))
    theirs = hf.with_adapter(hf.load(Path(base.folder), dtype=torch.float64), folder)
    with hf.double_names():
        logits_TV = theirs.double().eval()(input_ids=torch.tensor([sequence])).logits[0]
    assert (ours_TV - logits_TV).norm() <= 1e-10 * logits_TV.norm()
    digest = trainer.state_digest()
    save_file({name: v for name, v in tensors.items() if name not in of_base}, path)
    take(trainer, folder)
    assert trainer.state_digest() == digest
    for name in of_base:
        for other in (tensors[name] + 1e-3, tensors[name][1:].contiguous()):
            save_file(tensors | {name: other}, path)
            with pytest.raises(RatoonError) as refused:
                take(trainer, folder)
            assert refused.value.code is ErrorCode.INVALID_ARGUMENT
            assert name in str(refused.value.field)
    assert trainer.state_digest() == digest


def test_a_delta_of_a_part_leaves_the_others(base: FolderBase, tmp_path: Path) -> None:
    folder = _of_peft(base, tmp_path / "theirs", **PARTS["projections"])
    trainer = make_trainer(base, tuning=LORA)
    update(trainer, 0)
    before = {name: p.clone() for name, p in trainer.model.named_trainable().items()}
    take(trainer, folder, adds=True)
    theirs = {n.replace(".weight", ".default.weight"): v for n, v in _tensors(folder).items()}
    for name, parameter in trainer.model.named_trainable().items():
        added = theirs.get(name, torch.zeros(()))
        assert torch.equal(parameter, before[name] + added), name


def test_an_adapter_of_some_experts_leaves_the_others_to_the_base(tmp_path: Path) -> None:
    base = FolderBase(folder=str(write_folder(tmp_path / "base", "qwen3_moe")))
    trainer = trainer_of(base, tuning=LORA)
    update(trainer, 0)
    folder = export(trainer, tmp_path / "one")
    _config(target_modules=".*experts.*")(folder)
    path = folder / "adapter_model.safetensors"
    kept = {n: v for n, v in load_file(path).items() if ".experts.3." in n}
    save_file(kept, path)
    take(trainer, folder)
    for name, parameter in trainer.model.named_trainable().items():
        if ".lora_B." in name:
            is_kept = torch.tensor([".experts." in name and e == 3 for e in range(len(parameter))])
            assert parameter[~is_kept].count_nonzero() == 0
    again = load_file(export(trainer, tmp_path / "two") / "adapter_model.safetensors")
    assert all(torch.equal(again[name], value) for name, value in kept.items())


def _without(*ends: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        save_file({n: v for n, v in load_file(path).items() if not n.endswith(ends)}, path)

    return edit


@pytest.mark.parametrize(
    "ends",
    [
        # Half of a pair.
        ("layers.0.self_attn.q_proj.lora_A.weight",),
        # A pair that the configuration lists.
        ("layers.0.self_attn.q_proj.lora_A.weight", "layers.0.self_attn.q_proj.lora_B.weight"),
        # All.
        ("weight",),
    ],
)
def test_an_adapter_without_what_it_must_have_is_refused_by_tensor(
    adapted: tuple[Trainer, Path], tmp_path: Path, ends: tuple[str, ...]
) -> None:
    trainer, folder = adapted[0], shutil.copytree(adapted[1], tmp_path / "one")
    before = trainer.state_digest()
    _without(*ends)(folder)
    with pytest.raises(RatoonError) as refused:
        take(trainer, folder)
    assert refused.value.code is ErrorCode.INVALID_ARGUMENT
    assert "lora_" in str(refused.value.field)
    assert trainer.state_digest() == before


def _tensors(folder: Path) -> dict[str, Tensor]:
    tensors = load_file(folder / "adapter_model.safetensors")
    return {name: tensor.double() for name, tensor in tensors.items()}


def test_a_full_model_for_an_adapter_and_back_is_refused(base: FolderBase, tmp_path: Path) -> None:
    full, adapted = trainer_of(base), trainer_of(base, tuning=LORA)
    folders = export(full, tmp_path / "full"), export(adapted, tmp_path / "adapter")
    for trainer, folder, code in (
        (adapted, folders[0], ErrorCode.INVALID_ARGUMENT),
        (full, folders[1], ErrorCode.UNSUPPORTED),
    ):
        with pytest.raises(RatoonError) as refused:
            take(trainer, folder)
        assert refused.value.code is code


def _step(trainer: Trainer, _folder: Path) -> None:
    update(trainer, 1)


def _import(trainer: Trainer, folder: Path) -> None:
    take(trainer, export(trainer, folder), adds=True)


def _load(trainer: Trainer, folder: Path) -> None:
    other = Trainer.create(trainer.spec)
    update(other, 2)
    other.snapshot().write(folder)
    trainer.load_checkpoint(folder)


@pytest.mark.parametrize("change", [_step, _import, _load])
def test_weights_stay_until_a_device_may_have_copied_them(
    base: FolderBase,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Trainer, Path], None],
) -> None:
    """A GPU copies beside what runs next, which waits for it before it changes weights."""
    trainer = trainer_of(base)
    update(trainer, 0)
    trainer.copy_weights()
    held, seen = weights_of(trainer), list[dict[str, Tensor]]()
    copy = trainer.ranks.own._weights_copy
    monkeypatch.setattr(copy, "settle", lambda: seen.append(weights_of(trainer)))
    change(trainer, tmp_path / "other")
    assert len(seen) == 1
    assert_equal(seen[0], held)
    with pytest.raises(AssertionError):
        assert_equal(weights_of(trainer), held)
