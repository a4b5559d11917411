"""The folder of a model that a caller names: nothing outside of the models' root is reached."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ratoon.engine.files.paths import model_folder, plain_path
from ratoon.errors import RatoonError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """`models/own` and `outside`, each with a config."""
    for name in ("models/own", "outside"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
    return tmp_path / "models"


@pytest.mark.parametrize(
    "given",
    ["", ".", "..", "../outside", "own/../../outside", "/etc", "own\0", "own/config.json", "none"],
)
def test_a_name_that_leads_elsewhere_is_refused(root: Path, given: str) -> None:
    with pytest.raises(RatoonError) as refused:
        model_folder("spec.model_folder", given, root)
    assert str(root.parent) not in refused.value.message


@pytest.mark.parametrize("target", ["../outside", "{root}/../outside", "/etc", "loop"])
def test_a_link_that_leads_elsewhere_is_refused(root: Path, target: str) -> None:
    (root / "loop").symlink_to(target.format(root=root))
    with pytest.raises(RatoonError):
        model_folder("spec.model_folder", "loop", root)


def test_a_file_that_leads_elsewhere_is_refused(root: Path) -> None:
    model_folder("spec.model_folder", "own", root)
    (root / "own/model.safetensors").symlink_to(root.parent / "outside/config.json")
    with pytest.raises(RatoonError):
        model_folder("spec.model_folder", "own", root)


@pytest.mark.parametrize("target", ["", "/dev/zero", "/etc/passwd", "../..", "loop"])
def test_what_is_neither_a_file_nor_a_folder_is_refused_by_its_name(
    root: Path, target: str
) -> None:
    """A FIFO was let in, and hung the worker that read it."""
    path = root / "own/loop"
    if target:
        path.symlink_to(target)
    else:
        os.mkfifo(path)
    with pytest.raises(RatoonError, match=r"own.*loop") as refused:
        model_folder("spec.model_folder", "own", root)
    assert refused.value.field == "spec.model_folder"
    assert str(root.parent) not in refused.value.message


def test_links_within_the_root_are_followed(root: Path) -> None:
    """As a cache of Hugging Face has them: snapshots of links to blobs."""
    (root / "blob").write_text("{}")
    (root / "own/generation_config.json").symlink_to("../blob")
    (root / "newest").symlink_to("own")
    assert model_folder("spec.model_folder", "newest", root) == root / "own"


@pytest.mark.parametrize(
    ("given", "plain"), [("own", "own"), ("./a//b/", "a/b"), ("a b/c.d", "a b/c.d"), ("..a", "..a")]
)
def test_a_path_has_one_form_whatever_is_there(given: str, plain: str) -> None:
    assert plain_path("model_folder", given) == plain
    assert plain_path("model_folder", plain) == plain


@pytest.mark.parametrize(
    "given", ["", ".", "/", "//a", "..", "a/..", "../a", "a/../b", "a\0b", "x" * 2000]
)
def test_a_path_that_does_not_lead_below_is_refused_by_its_text(given: str) -> None:
    with pytest.raises(RatoonError):
        plain_path("model_folder", given)
