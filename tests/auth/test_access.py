"""Which access a config asks for, and what may not start."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratoon import app
from ratoon.auth.access import (
    KeyAccess,
    LocalAccess,
    OpenAccess,
    access_of,
    check_start,
)
from ratoon.auth.keys import KeyFile, Scope, new_key
from ratoon.config import AuthConfig, GrpcConfig, HttpConfig, RatoonConfig
from ratoon.errors import RatoonError

PUBLIC = GrpcConfig(host="10.1.2.3")


def _config(root: Path, *, public: bool, required: bool | None) -> RatoonConfig:
    return RatoonConfig(
        data_root=root,
        http=HttpConfig(host="127.0.0.1"),
        grpc=PUBLIC if public else GrpcConfig(),
        auth=AuthConfig(required=required),
    )


@pytest.mark.parametrize(
    ("public", "required", "kind"),
    [
        (False, None, LocalAccess),
        (False, True, KeyAccess),
        (False, False, OpenAccess),
        (True, None, KeyAccess),
        (True, True, KeyAccess),
        (True, False, OpenAccess),
    ],
)
def test_keys_are_required_where_others_reach_the_service(
    tmp_path: Path, public: bool, required: bool | None, kind: type
) -> None:
    assert type(access_of(_config(tmp_path, public=public, required=required))) is kind


def test_a_public_bind_without_a_key_is_refused(tmp_path: Path) -> None:
    config = _config(tmp_path, public=True, required=None)
    with pytest.raises(RatoonError) as refused:
        app.start(config)
    assert refused.value.field == "auth.required"
    expired, _ = new_key(scope=Scope.ADMIN, policies=None, note="", created_at=1.0, expires_at=2.0)
    KeyFile(tmp_path).add(expired)
    with pytest.raises(RatoonError):
        check_start(config)
    key, _ = new_key(scope=Scope.READ, policies=None, note="", created_at=1.0, expires_at=None)
    KeyFile(tmp_path).add(key)
    check_start(config)


@pytest.mark.parametrize(
    ("public", "required", "event"),
    [
        (True, False, "served without API keys"),
        (True, True, "no API key is valid"),
        (False, True, "no API key is valid"),
        (False, False, ""),
        (False, None, ""),
    ],
)
def test_an_explicit_choice_is_logged(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    public: bool,
    required: bool | None,
    event: str,
) -> None:
    from ratoon.log import configure_logging

    configure_logging("WARNING")
    check_start(_config(tmp_path, public=public, required=required))
    logged = capsys.readouterr().err
    assert event in logged
    assert bool(logged) is bool(event)
