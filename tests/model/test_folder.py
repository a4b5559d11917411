"""A model folder leads to its own regular files and to nothing else."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from ratoon.errors import ErrorCode, RatoonError
from ratoon.model.export import export_weights
from ratoon.model.folder import ModelFolder
from ratoon.model.folder_model import published_files
from ratoon.model.loader import read_model
from ratoon.model.spec import FolderBase, ModelDtype, ModelSpec
from ratoon_proto.types import LoraTuning
from tests.model.builders import FULL, error_of, load
from tests.tiny_models import write_folder

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def models(tmp_path: Path) -> tuple[Path, Path]:
    """Two policies' folders of one model with different weights, the second with shards."""
    other = write_folder(tmp_path / "policies/other", "llama", seed=1)
    own = write_folder(tmp_path / "models/own", "llama")
    tensors = load_file(own / WEIGHTS)
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, own / file, {"format": "pt"})
    (own / WEIGHTS).unlink()
    write_index(own, {name: file for file, part in parts.items() for name in part})
    return own, other


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def map_all(folder: Path, file: str) -> None:
    names = json.loads((folder / INDEX).read_text())["weight_map"]
    write_index(folder, dict.fromkeys(names, file))


def test_shards_that_an_index_names_are_read(tmp_path: Path) -> None:
    own, _ = models(tmp_path)
    expected = load_file(own / "a.safetensors") | load_file(own / "b.safetensors")
    found = load(own, dtype=ModelDtype.FLOAT32).named_trainable()
    assert found.keys() == expected.keys()
    assert all((found[name] == value).all() for name, value in expected.items())


@pytest.mark.parametrize(
    "path",
    [
        "../../policies/other/model.safetensors",
        "{other}/model.safetensors",
        "./a.safetensors",
        "sub/model.safetensors",
        "..",
        ".",
        "",
        "a\0.safetensors",
        "..\\other\\model.safetensors",
        "none.safetensors",
        "config.json",
        "pytorch_model.bin",
        "x" * 5000,
    ],
)
def test_an_index_leads_to_no_other_place(tmp_path: Path, path: str) -> None:
    """Weights of another policy, byte for byte, were version 0 of a new one."""
    own, other = models(tmp_path)
    (own / "sub").symlink_to(other)
    map_all(own, path.format(other=other))
    error = error_of(lambda: load(own))
    assert error.code is ErrorCode.INVALID_ARGUMENT
    assert error.field.startswith("model_folder")
    assert (str(tmp_path) in error.message) == path.startswith("{other}")
    assert len(error.message) < 400


@pytest.mark.parametrize(
    "index",
    [
        "[]",
        "{",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {}}',
        '{"weight_map": {"a": 1}}',
        '{"weight_map": {"a": ["a.safetensors"]}}',
        '{"weight_map": ' + '{"a":' * 3000 + "1" + "}" * 3000 + "}",
        '{"weight_map": {' + ",".join(f'"{n}": "{n}.safetensors"' for n in range(5000)) + "}}",
        " " * (17 * 2**20),
    ],
    ids=range(10),
)
def test_an_index_that_is_none_is_refused(tmp_path: Path, index: str) -> None:
    own, _ = models(tmp_path)
    (own / INDEX).write_text(index)
    error = error_of(lambda: load(own))
    assert error.code is ErrorCode.INVALID_ARGUMENT
    assert error.field.startswith("model_folder")


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as unix:
        here = os.open(path.parent, os.O_RDONLY)
        # The path of a Unix socket is short.
        unix.bind(f"/proc/self/fd/{here}/{path.name}")
        os.close(here)


def link_to(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo,
        make_socket,
        Path.mkdir,
        link_to("/dev/zero"),
        link_to("/etc/passwd"),
        link_to("../../policies/other/model.safetensors"),
        link_to("loop"),
        link_to("."),
        link_to("none"),
    ],
    ids=["fifo", "socket", "folder", "device", "system", "policy", "loop", "itself", "dangling"],
)
@pytest.mark.parametrize("name", [WEIGHTS, "a.safetensors", INDEX, "config.json", "tokenizer.json"])
def test_what_is_no_regular_file_of_the_folder_is_refused(
    tmp_path: Path, make: Callable[[Path], None], name: str
) -> None:
    """A FIFO hung the worker; a link was followed, and a tokenizer's file published."""
    own, _ = models(tmp_path)
    (own / "loop").symlink_to("loop")
    (own / name).unlink(missing_ok=True)
    make(own / name)
    error = error_of(lambda: load(own))
    assert (error.code, error.field) == (ErrorCode.INVALID_ARGUMENT, f"model_folder/{name}")
    assert str(tmp_path) not in error.message


def test_links_below_the_models_root_are_followed(tmp_path: Path) -> None:
    """As a cache of Hugging Face has them: snapshots of links to blobs."""
    own, _ = models(tmp_path)
    blobs = tmp_path / "models/blobs"
    blobs.mkdir()
    (own / "tokenizer.json").write_text('{"a": 1}')
    for path in list(own.iterdir()):
        path.rename(blobs / f"blob-{path.name}")
        path.symlink_to(f"../blobs/blob-{path.name}")
    assert error_of(lambda: load(own)).field == "model_folder/config.json"
    spec = ModelSpec(
        base=FolderBase(folder=str(own)), tuning=FULL, dtype=ModelDtype.FLOAT32, seed=0
    )
    module = read_model(spec, models_root=tmp_path / "models").module
    assert module.config.hidden_size == 16


@pytest.mark.parametrize("root", ["models", "elsewhere", None])
def test_a_folder_that_became_a_link_is_refused(tmp_path: Path, root: str | None) -> None:
    own, other = models(tmp_path)
    own.rename(tmp_path / "moved")
    own.symlink_to(other)
    spec = ModelSpec(
        base=FolderBase(folder=str(own)), tuning=FULL, dtype=ModelDtype.FLOAT32, seed=0
    )
    models_root = None if root is None else tmp_path / root
    error = error_of(lambda: read_model(spec, models_root=models_root))
    assert (error.code, error.field) == (ErrorCode.INVALID_ARGUMENT, "model_folder")


def test_an_adapter_beside_a_model_is_not_loaded_with_it(tmp_path: Path) -> None:
    """transformers put it on the model, or loaded the base that it names in the model's place."""
    own, other = models(tmp_path)
    settings = {"peft_type": "LORA", "base_model_name_or_path": str(other), "target_modules": []}
    (own / "adapter_config.json").write_text(json.dumps(settings))
    error = error_of(lambda: load(own))
    assert (error.code, error.field) == (ErrorCode.UNSUPPORTED, "model_folder")
    assert "adapter_config.json" in error.got


@pytest.mark.parametrize(
    "key",
    ["configuration_files", "transformers_weights", "auto_map", "fusion_config"],
)
def test_no_key_of_a_configuration_leads_to_another_file(tmp_path: Path, key: str) -> None:
    own, other = models(tmp_path)
    path = own / "config.json"
    named = f"../../{other.relative_to(tmp_path)}/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: [named]}))
    error = error_of(lambda: load(own))
    assert (error.code, error.field) == (ErrorCode.UNSUPPORTED, f"config.{key}")


@pytest.mark.parametrize("tuning", [FULL, LoraTuning(rank=1, alpha=2.0)], ids=["full", "lora"])
def test_what_is_published_is_what_was_read_when_the_policy_was_made(
    tmp_path: Path, tuning: LoraTuning
) -> None:
    """A file that was swapped for a link later was read at each first export."""
    own, _ = models(tmp_path)
    (own / "tokenizer.json").write_text('{"a": 1}')
    model = load(own, dtype=ModelDtype.FLOAT32, tuning=tuning)
    (own / "tokenizer.json").unlink()
    (own / "tokenizer.json").symlink_to("/etc/passwd")
    (tmp_path / "version").mkdir()
    export_weights(model, tmp_path / "version")
    published = tmp_path / "version/tokenizer.json"
    if tuning is FULL:
        assert published.read_text() == '{"a": 1}'
    else:
        assert not published.exists()


def _make_templates(folder: Path) -> Path:
    templates = folder / "additional_chat_templates"
    templates.mkdir()
    (templates / "rag.jinja").write_text("{{ messages }}")
    return templates


def _many_templates(folder: Path) -> None:
    templates = _make_templates(folder)
    for number in range(64):
        (templates / f"{number}.jinja").touch()


def _large_files(folder: Path) -> None:
    for name in ("tokenizer.json", "tekken.json", "vocab.txt"):
        with (folder / name).open("wb") as file:
            file.truncate(2**26 - 1)


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda folder: (folder / "additional_chat_templates").touch(), "a folder"),
        (lambda folder: (folder / "additional_chat_templates").symlink_to("/etc"), "models root"),
        (lambda folder: (_make_templates(folder) / "x.jinja").symlink_to("/etc/passwd"), "root"),
        (lambda folder: os.mkfifo(_make_templates(folder) / "x.jinja"), "a regular file"),
        (lambda folder: (_make_templates(folder) / "x.jinja").mkdir(), "a regular file"),
        (lambda folder: (_make_templates(folder) / "x y.jinja").touch(), "a plain name"),
        (_many_templates, "at most 64"),
        (_large_files, "at most 134217728"),
    ],
)
def test_what_versions_have_beside_their_weights_is_of_the_folder_and_bounded(
    tmp_path: Path, damage: Callable[[Path], object], expected: str
) -> None:
    own, _ = models(tmp_path)
    damage(own)
    for root in (None, tmp_path / "models"):
        with pytest.raises(RatoonError) as refused:
            published_files(ModelFolder.of(own, root))
        assert refused.value.code is ErrorCode.INVALID_ARGUMENT
        assert refused.value.field.startswith("model_folder")
        assert expected in refused.value.expected


def test_templates_of_a_cache_are_links_below_the_models_root(tmp_path: Path) -> None:
    own, _ = models(tmp_path)
    template = _make_templates(own) / "rag.jinja"
    template.rename(tmp_path / "models/blob")
    template.symlink_to("../../blob")
    files = published_files(ModelFolder.of(own, tmp_path / "models"))
    assert files["additional_chat_templates/rag.jinja"] == b"{{ messages }}"


def test_transformers_is_given_no_path_of_the_folder(tmp_path: Path) -> None:
    """What it joins to a path, it opens: here all is opened by a name below a descriptor."""
    own, _ = models(tmp_path)
    opened: list[str] = []
    is_on = [True]

    def see(event: str, arguments: tuple[object, ...]) -> None:
        if is_on and event in {"open", "os.open"}:
            opened.append(str(arguments[0]))

    # A hook stays for the life of the process.
    sys.addaudithook(see)
    try:
        load(own)
    finally:
        is_on.clear()
    assert {"config.json", "a.safetensors", "b.safetensors", INDEX} <= {*opened}
    assert [path for path in opened if f"{own}/" in path] == []
