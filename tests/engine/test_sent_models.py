"""Model folders that were sent: never other bytes, never half a file, never more than there is room
for."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from ratoon.engine.files import sent_models
from ratoon.engine.files.paths import policy_paths
from ratoon.engine.files.sent_models import SentModels
from ratoon.errors import ErrorCode
from ratoon.stream.files import digest_bytes
from ratoon_proto.types import WeightFile
from tests.engine.refusals import raises


def _file(data: bytes, name: str = "a.json") -> WeightFile:
    return WeightFile(name=name, size_bytes=len(data), digest=digest_bytes(data))


@pytest.fixture
def sent(tmp_path: Path) -> SentModels:
    return SentModels(
        tmp_path, ttl_s=60.0, max_total_bytes=25, paths_of=partial(policy_paths, tmp_path)
    )


def test_pieces_become_the_policys_own_folder_once(sent: SentModels, tmp_path: Path) -> None:
    whole, empty = _file(b"0123456789"), _file(b"", "empty")
    twin = WeightFile(name="within/twin.json", size_bytes=whole.size_bytes, digest=whole.digest)
    files = (whole, empty, twin)
    assert sent.put("p", whole, 0, b"0123") == 4
    with raises(ErrorCode.UPLOAD_NOT_FOUND) as caught:
        sent.take("p", files)
    assert caught.value.details == {"digest": whole.digest, "arrived": "4"}
    # A piece again, one that overlaps, and, of a file that is whole, any.
    assert sent.put("p", whole, 0, b"0123") == 4
    assert sent.put("p", whole, 2, b"23456789") == 10
    assert sent.put("p", whole, 5, b"56") == 10
    assert sent.put("p", empty, 0, b"") == 0
    sent.take("p", files)
    folder = policy_paths(tmp_path, "p").model
    paths = [path for path in folder.rglob("*") if path.is_file()]
    assert {str(path.relative_to(folder)): path.read_bytes() for path in paths} == {
        "a.json": b"0123456789",
        "within/twin.json": b"0123456789",
        "empty": b"",
    }
    assert not (tmp_path / "sent" / "p").exists()
    # Whoever tries again, after a crash too, finds it taken.
    sent.check("p", files)
    sent.take("p", files)


@pytest.mark.parametrize(
    ("offset", "data", "field"),
    [(3, b"x", "offset"), (0, b"01234567890", "data"), (2, b"234567890", "data")],
)
def test_pieces_that_do_not_fit_are_refused(
    sent: SentModels, offset: int, data: bytes, field: str
) -> None:
    whole = _file(b"0123456789")
    sent.put("p", whole, 0, b"01")
    with raises(ErrorCode.INVALID_ARGUMENT) as caught:
        sent.put("p", whole, offset, data)
    assert caught.value.field == field
    assert sent.put("p", whole, 2, b"23456789") == 10


def test_a_file_of_other_bytes_is_dropped_and_may_be_sent_again(sent: SentModels) -> None:
    whole = _file(b"0123")
    with raises(ErrorCode.INVALID_ARGUMENT) as caught:
        sent.put("p", whole, 0, b"0124")
    assert caught.value.field == "digest"
    with raises(ErrorCode.UPLOAD_NOT_FOUND) as caught:
        sent.check("p", (whole,))
    assert caught.value.details["arrived"] == "0"
    assert sent.put("p", whole, 0, b"0123") == 4
    sent.check("p", (whole,))


def test_what_a_torn_write_left_of_a_piece_does_not_shift_the_rest(
    sent: SentModels, tmp_path: Path
) -> None:
    """A disk that fills has the beginning of a piece, of which the sender knows nothing."""
    whole = _file(b"0123456789")
    sent.put("p", whole, 0, b"01")
    with (tmp_path / "sent" / "p" / f"{whole.digest}.part").open("ab") as part:
        part.write(b"23")
    assert sent.put("p", whole, 2, b"23456789") == 10


def test_room_is_that_of_all_policies_together(
    sent: SentModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent.put("p", _file(b"x" * 20), 0, b"x" * 20)
    with raises(ErrorCode.RESOURCE_EXHAUSTED) as caught:
        sent.put("q", _file(b"y" * 6), 0, b"y" * 6)
    assert caught.value.details["resource"] == "sent_model_bytes"
    assert caught.value.details["free"] == "5"
    monkeypatch.setattr(sent_models, "MAX_FILES", 1)
    with raises(ErrorCode.RESOURCE_EXHAUSTED) as caught:
        sent.put("p", _file(b"z"), 0, b"z")
    assert caught.value.details["resource"] == "sent_model_files"


def test_what_nobody_goes_on_with_expires(sent: SentModels, tmp_path: Path) -> None:
    old, half = _file(b"x" * 20), _file(b"y" * 20)
    sent.put("p", old, 0, b"x" * 20)
    for path in (*(tmp_path / "sent" / "p").iterdir(), tmp_path / "sent" / "p"):
        os.utime(path, (0, 0))
    assert sent.put("q", half, 0, b"y" * 10) == 10
    assert not (tmp_path / "sent" / "p").exists()
    assert sent.put("q", half, 10, b"y" * 10) == 20
