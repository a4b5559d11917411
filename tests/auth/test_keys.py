"""Keys and their file: hashes, changes seen at once, writers that meet."""

from __future__ import annotations

import hashlib
import stat
import threading
from pathlib import Path

import pytest

from ratoon.auth.keys import ApiKey, KeyFile, Scope, is_secret_of, new_key, split_key
from ratoon.errors import ErrorCode, RatoonError


def _key(expires_at: float | None = None) -> tuple[ApiKey, str]:
    return new_key(
        scope=Scope.TRAIN, policies=("a", "b"), note="n", created_at=1.5, expires_at=expires_at
    )


def test_a_key_is_recognised_by_its_hash_alone() -> None:
    key, text = _key()
    pair = split_key(text)
    assert pair is not None
    key_id, secret = pair
    assert key_id == key.key_id
    assert key.secret_sha256 == hashlib.sha256(secret.encode()).hexdigest()
    assert is_secret_of(secret, key)
    assert not is_secret_of(secret[:-1] + ("0" if secret[-1] != "0" else "1"), key)
    assert not is_secret_of(secret, None)
    assert secret not in repr(key)


def test_keys_differ_and_hold_256_random_bits() -> None:
    secrets = {split_key(_key()[1]) for _ in range(64)}
    assert len(secrets) == 64
    assert all(pair is not None and len(bytes.fromhex(pair[1])) == 32 for pair in secrets)


@pytest.mark.parametrize(
    ("expires_at", "revoked_at", "valid"),
    [(None, None, True), (10.0, None, False), (10.5, None, True), (None, 1.0, False)],
)
def test_a_key_ends_at_its_time(
    expires_at: float | None, revoked_at: float | None, valid: bool
) -> None:
    key, _ = _key(expires_at)
    object.__setattr__(key, "revoked_at", revoked_at)
    assert key.is_valid(10.0) is valid


def test_scopes_are_ordered() -> None:
    order = (Scope.READ, Scope.TRAIN, Scope.ADMIN)
    for index, scope in enumerate(order):
        assert [scope.includes(other) for other in order] == [i <= index for i in range(3)]


def test_a_file_gives_back_what_was_added(tmp_path: Path) -> None:
    writer, reader = KeyFile(tmp_path), KeyFile(tmp_path)
    assert reader.keys() == {}
    assert list(tmp_path.iterdir()) == []
    first, second = _key()[0], _key(99.0)[0]
    writer.add(first)
    assert reader.keys() == {first.key_id: first}
    writer.add(second)
    assert reader.keys() == {first.key_id: first, second.key_id: second}
    writer.revoke(first.key_id, 7.0)
    assert reader.keys()[first.key_id].revoked_at == 7.0
    writer.revoke(first.key_id, 8.0)
    assert reader.keys()[first.key_id].revoked_at == 7.0
    assert stat.S_IMODE((tmp_path / "access").stat().st_mode) == 0o700


def test_no_secret_is_in_the_file(tmp_path: Path) -> None:
    key, text = _key()
    KeyFile(tmp_path).add(key)
    for path in (tmp_path / "access").iterdir():
        assert text[-64:] not in path.read_text()


def test_revoking_no_key_names_the_field(tmp_path: Path) -> None:
    with pytest.raises(RatoonError) as caught:
        KeyFile(tmp_path).revoke("absent", 1.0)
    assert (caught.value.code, caught.value.field) == (ErrorCode.INVALID_ARGUMENT, "key_id")


def test_writers_that_meet_lose_no_key(tmp_path: Path) -> None:
    def add_ten() -> None:
        for _ in range(10):
            KeyFile(tmp_path).add(_key()[0])

    threads = [threading.Thread(target=add_ten) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(KeyFile(tmp_path).keys()) == 40


@pytest.mark.parametrize("damage", ["{", '{"format": 2, "keys": []}', '{"format": 1, "keys": [1]}'])
def test_a_damaged_file_is_refused_until_it_is_whole(tmp_path: Path, damage: str) -> None:
    file = KeyFile(tmp_path)
    file.add(_key()[0])
    path = tmp_path / "access" / "keys.json"
    whole = path.read_bytes()
    path.write_text(damage)
    for _ in range(2):
        with pytest.raises(RatoonError) as caught:
            file.keys()
        assert caught.value.code is ErrorCode.UNAVAILABLE
    with pytest.raises(RatoonError):
        file.add(_key()[0])
    path.write_bytes(whole)
    assert len(file.keys()) == 1


def test_a_changed_byte_lets_nobody_in(tmp_path: Path) -> None:
    """Without a digest in the file a scope, an expiry or a revocation changed in silence."""
    file = KeyFile(tmp_path)
    file.add(_key()[0])
    path = tmp_path / "access" / "keys.json"
    whole = path.read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(RatoonError) as caught:
            KeyFile(tmp_path).keys()
        assert caught.value.code is ErrorCode.UNAVAILABLE


def test_looking_a_key_up_takes_no_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million keys would make every call slow if the file were read for it."""
    file = KeyFile(tmp_path)
    file.add(_key()[0])
    first = file.keys()
    monkeypatch.setattr(Path, "read_bytes", lambda _path: pytest.fail("the file is read again"))
    assert all(file.keys() is first for _ in range(1000))
