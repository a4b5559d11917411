"""What a client can be told, and the environment variables it reads, here alone."""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

from ratoon_client.arguments import check_seconds
from ratoon_client.errors import InvalidArgumentError

MIB = 2**20
URL_VARIABLE = "RATOON_URL"
KEY_VARIABLE = "RATOON_API_KEY"
CA_VARIABLE = "RATOON_CA_FILE"
CERT_VARIABLE = "RATOON_CERT_FILE"
KEY_FILE_VARIABLE = "RATOON_KEY_FILE"
PLAIN_VARIABLE = "RATOON_PLAIN_TEXT_KEY"
WEIGHTS_VARIABLE = "RATOON_WEIGHTS_ROOT"
DEFAULT_URL = "grpc://127.0.0.1:8443"
# What may stand in a header.
_KEY = re.compile(r"[!-~]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """Times in seconds, sizes in bytes.

    `timeout_s` bounds a whole call with its retries, `attempt_timeout_s` each try of it.
    `connect_timeout_s` is how long the first call waits for something to take a connection: give
    more to a client that may start before its service. A service that goes away later is waited for
    as long as a call may take. Manifests
    may take ten minutes: that of a version, which the service answers once the version is written,
    is asked for again for as long as the service answers a probe; that of gradients, which waits
    for the operation that runs, has ten minutes for a try. A batch over `upload_above_bytes` is
    sent in parts of about `part_bytes`. `api_key` "": none; it is in no text of this value.
    `plain_text_key`: it may go to another machine without TLS. For `https://` and `grpcs://` there
    are files in PEM: `ca_file` has the authorities that the service is verified with (None: those
    that the libraries bring), `cert_file` and `key_file` are the client's own. `weights_root`: the
    service's, where this host has it (None: by `RATOON_WEIGHTS_ROOT`); files of versions are linked
    or copied from there, and verified, in place of being fetched.
    """

    timeout_s: float = 60.0
    attempt_timeout_s: float = 30.0
    connect_timeout_s: float = 2.0
    max_message_bytes: int = 256 * MIB
    upload_above_bytes: int = 32 * MIB
    part_bytes: int = 16 * MIB
    fetches_in_flight: int = 4
    chunk_bytes: int = 16 * MIB
    api_key: str = field(default="", repr=False)
    plain_text_key: bool = False
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    weights_root: Path | None = None

    def __post_init__(self) -> None:
        check_seconds("timeout_s", self.timeout_s)
        check_seconds("attempt_timeout_s", self.attempt_timeout_s)
        check_seconds("connect_timeout_s", self.connect_timeout_s)

    @property
    def authorization(self) -> str:
        """The header of every call; "": there is none."""
        return f"Bearer {self.api_key}" if self.api_key else ""


def with_api_key(config: ClientConfig, api_key: str | None) -> ClientConfig:
    """`config` with `api_key`, or else its own, or else `RATOON_API_KEY`.

    Raises InvalidArgumentError, which does not show it, for a key that no header can hold.
    """
    key = (api_key or config.api_key or os.environ.get(KEY_VARIABLE) or "").strip()
    if _KEY.fullmatch(key) is None:
        raise InvalidArgumentError("api_key", "other characters", "printable ASCII without spaces")
    return replace(config, api_key=key)


def may_send_plain_key(config: ClientConfig) -> bool:
    """Whether the key may go to another machine without TLS: said in the config, or by `1`."""
    return config.plain_text_key or os.environ.get(PLAIN_VARIABLE) == "1"


def with_tls_files(
    config: ClientConfig,
    ca_file: Path | str | None,
    cert_file: Path | str | None,
    key_file: Path | str | None,
    *,
    is_tls: bool,
) -> ClientConfig:
    """`config` with the files that are given, or else its own, or else those of the environment.

    Raises InvalidArgumentError for files that are given where nothing would use them.
    """
    given = (ca_file or config.ca_file, cert_file or config.cert_file, key_file or config.key_file)
    if not is_tls:
        if any(given):
            raise InvalidArgumentError(
                "target", "one without TLS, with certificate files", "grpcs:// or https://"
            )
        return config
    variables = (CA_VARIABLE, CERT_VARIABLE, KEY_FILE_VARIABLE)
    ca, cert, key = (
        Path(path) if (path := file or os.environ.get(variable)) else None
        for file, variable in zip(given, variables, strict=True)
    )
    if (cert is None) != (key is None):
        raise InvalidArgumentError("cert_file", "one of cert_file and key_file", "both, or none")
    return replace(config, ca_file=ca, cert_file=cert, key_file=key)


def weights_root(config: ClientConfig) -> Path | None:
    """The config's, or else that of the variable, which the service reads too."""
    path = config.weights_root or os.environ.get(WEIGHTS_VARIABLE)
    return Path(path) if path else None


def lock_folder() -> Path:
    """Where this user's locks are: below the machine's temporary folder, or that of `TMPDIR`."""
    return Path(tempfile.gettempdir()) / f"ratoon-{os.geteuid()}"


def default_url() -> str:
    """`RATOON_URL`, or the gateway of a service on this machine."""
    return os.environ.get(URL_VARIABLE) or DEFAULT_URL
