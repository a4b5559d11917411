"""The server's settings: one YAML file and `RATOON_*` environment variables, read only here.

Nested names take two underscores: `RATOON_HTTP__PORT=8000`. Unknown settings and variables are
refused. docs/settings.md lists all settings.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from difflib import get_close_matches
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import psutil
import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

MIB = 2**20
GIB = 2**30
_PREFIX = "RATOON_"
_DELIMITER = "__"
# Variables of the project that are not settings: the client's, the kernels', the benchmarks'.
OTHER_VARIABLES = frozenset(
    {
        "RATOON_URL",
        "RATOON_API_KEY",
        "RATOON_CA_FILE",
        "RATOON_CERT_FILE",
        "RATOON_KEY_FILE",
        "RATOON_PLAIN_TEXT_KEY",
        "RATOON_KERNELS_CACHE",
        "RATOON_COMMIT",
    }
)
# Variables that Kubernetes sets in every pod for a Service named `ratoon` or `ratoon-...`. Only
# `..._PORT` could be mistaken for a setting; its value tells which it is.
_OF_KUBERNETES = re.compile(
    r"RATOON(_\w+)?_(SERVICE_HOST|SERVICE_PORT(_\w+)?"
    r"|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_PORT_OF_KUBERNETES = re.compile(r"RATOON(_\w+)?_PORT")
_ADDRESS_OF_KUBERNETES = re.compile(r"(tcp|udp|sctp)://.*")


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class HttpConfig(_Section):
    """HTTP of the gateway.

    `allowed_hosts`: host names accepted besides loopback's where no API keys are required. "*"
    accepts any, which also lets in web pages that rebind their name to this machine's address.
    """

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    allowed_hosts: tuple[str, ...] = ()


class GrpcConfig(_Section):
    """gRPC of the gateway."""

    host: str = "127.0.0.1"
    port: int = Field(default=8443, ge=0, le=65535)
    max_message_bytes: int = Field(default=64 * MIB, ge=MIB)


class ServeConfig(_Section):
    """Ray Serve: the same HTTP in replicas, for callers inside a cluster. 0 replicas: no Serve.

    Its port lacks the gateway's bounds on slow callers and asks for no client certificate.
    """

    num_replicas: int = Field(default=1, ge=0)
    http_host: str = "127.0.0.1"
    http_port: int = Field(default=8001, ge=0, le=65535)

    @property
    def is_on(self) -> bool:
        """Whether Serve is started at all."""
        return self.num_replicas > 0


class AuthConfig(_Section):
    """Access: docs/security.md.

    `required` true: API keys always; false: never; None: keys are required if a non-loopback
    address is bound, and otherwise only callers of this machine are admitted. `metrics`: what
    `/metrics` needs if keys are required.
    """

    required: bool | None = None
    metrics: Literal["read", "free"] = "read"
    # The audit log rotates at this size and keeps this many old files. 0: it never rotates.
    audit_file_bytes: int = Field(default=64 * MIB, ge=0)
    audit_files: int = Field(default=16, ge=1)


class TlsConfig(_Section):
    """TLS of the gateway (docs/security.md): PEM files, which may change while it runs.

    Without `cert_file` the gateway speaks plain text. With `client_ca_file` clients need a
    certificate signed by one of its authorities.
    """

    cert_file: Path | None = None
    key_file: Path | None = None
    client_ca_file: Path | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> TlsConfig:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file are given together or not at all")
        if self.client_ca_file is not None and self.cert_file is None:
            raise ValueError("client_ca_file needs cert_file and key_file")
        return self


class LimitsConfig(_Section):
    """Bounds that are checked before anything is allocated. Sizes in bytes, times in seconds."""

    max_body_bytes: int = Field(default=64 * MIB, ge=1024)
    # Seconds for reading a request: the whole body, and the longest pause within it.
    max_body_s: float = Field(default=600.0, gt=0)
    max_body_pause_s: float = Field(default=30.0, gt=0)
    max_fetch_bytes: int = Field(default=16 * MIB, ge=1024, le=16 * MIB)
    max_groups: int = Field(default=65_536, ge=1)
    max_sequences: int = Field(default=131_072, ge=1)
    max_tokens: int = Field(default=64 * MIB, ge=1)
    max_wait_s: float = Field(default=60.0, gt=0)
    # Seconds that callers may wait in total for an operation that is blocked by a missing seq.
    gap_wait_s: float = Field(default=30.0, gt=0)
    max_policies: int = Field(default=16, ge=1)
    # Steps whose figures are kept, per policy: those of the last so many seqs.
    max_steps: int = Field(default=1_000_000, ge=1)
    # Limit per policy. The next seq bypasses it, or the queue would deadlock.
    max_open_operations: int = Field(default=1024, ge=1)
    # Bodies of open operations, and uploads not yet used by a call: per policy, and over all.
    max_queued_bytes: int = Field(default=8 * GIB, ge=1024)
    max_total_queued_bytes: int = Field(default=32 * GIB, ge=1024)
    # Models that were sent for policies that are not created yet.
    max_sent_model_bytes: int = Field(default=64 * GIB, ge=1024)
    # Unanswered calls per process: in all, and per API key (or host, without a key).
    max_requests_in_flight: int = Field(default=4096, ge=1)
    max_requests_in_flight_of_caller: int = Field(default=1024, ge=1)
    # Reserved for work that was already accepted; new work is refused below it. 0: no reserve.
    min_free_disk_bytes: int = Field(default=GIB, ge=0)
    # Seconds that running operations have after SIGTERM. Queued ones wait for the next start.
    drain_s: float = Field(default=30.0, ge=0)
    upload_ttl_s: float = Field(default=3600.0, gt=0)
    result_ttl_s: float = Field(default=3600.0, gt=0)
    # Versions that receivers hold beyond `keep_versions`, per policy, and for how long each.
    max_held_versions: int = Field(default=2, ge=0)
    max_hold_s: float = Field(default=3600.0, gt=0)
    # Gradients of one GetGradientManifest.
    max_gradient_bytes: int = Field(default=GIB, ge=1024)
    inline_result_bytes: int = Field(default=4 * MIB, ge=0)


class KeyLimits(_Section):
    """Limits of one API key; None: no limit.

    The config section `quotas` holds the defaults of keys that were made without limits of their
    own. Everything is counted over all processes. Tokens are unshared (each rollout counted alone),
    of accepted work, per minute, hour and day of UTC.
    """

    requests_per_second: float | None = Field(default=None, gt=0)
    # Requests at once after a pause. None: as many as in one second, at least one.
    burst: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)
    tokens_per_hour: int | None = Field(default=None, ge=1)
    tokens_per_day: int | None = Field(default=None, ge=1)
    # The following limits apply over all policies.
    max_open_operations: int | None = Field(default=None, ge=1)
    max_queued_bytes: int | None = Field(default=None, ge=1024)

    def or_else(self, default: KeyLimits) -> KeyLimits:
        """These limits, with `default`'s where one is None."""
        own = self.model_dump(exclude_none=True)
        return KeyLimits.model_validate(default.model_dump() | own)


class WorkerConfig(_Section):
    """`device` "auto" is a GPU if there is one, else the CPU."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    # Threads of torch in a CPU worker; 0: as many as the machine has cores.
    num_threads: int = Field(default=0, ge=0)
    # Micro-batch size of policies that set none. None: 16384 on a CPU; on a GPU each plan takes the
    # fastest.
    micro_batch_tokens: int | None = Field(default=None, ge=1)
    # Optimizer states of bfloat16 policies; wider policies always keep fp32. "auto": bf16_split, or
    # bf16_split_8bit on a GPU that is short of memory. A policy keeps its first choice.
    optimizer_states: Literal[
        "auto", "fp32", "bf16_split", "bf16_split_8bit", "bf16_stochastic", "bf16_8bit"
    ] = "auto"
    # Pinned host memory per policy, for activations that do not fit the GPU, those of streamed
    # prefixes first. Allocated on demand, and kept.
    host_activation_bytes: int = Field(default=0, ge=0)
    # Versions between two self-checks, the first at version 1; 0: none.
    self_check_every: int = Field(default=100, ge=0)
    # Policies with equal LoRA on one base that share a process and a GPU, which keeps room for all
    # of them from the first on; 1: each has its own.
    max_tenants: int = Field(default=1, ge=1)
    # A worker or rank that answers nothing for this long is lost, and so is one whose copies to
    # other ranks take longer: the policy gets another worker.
    max_silence_s: float = Field(default=60.0, gt=0)


class SamplingEngineConfig(_Section):
    """A vLLM server that samples for the policies of one base (docs/sampling.md).

    `base`: a preset, or a model folder below the models root. `receiver_id`: of the receiver that
    loads full versions into it; None: it samples for policies with adapters alone.
    """

    url: str
    base: str
    api_key: str = Field(default="", repr=False)
    receiver_id: str | None = None
    # Requests that the engine has at a time; others wait.
    max_in_flight: int = Field(default=256, ge=1)
    # Versions with adapters that are loaded at a time: the engine's `--max-cpu-loras`.
    max_adapters: int = Field(default=8, ge=1)


class SamplerConfig(_Section):
    """Sampling (docs/sampling.md): by a process of the service, or by engines.

    `device` "cuda" is a GPU of its own, which no policy has, for as long as the process lives.
    """

    device: Literal["cpu", "cuda"] = "cpu"
    # Threads of torch on a CPU; 0: as many as the machine has cores.
    num_threads: int = Field(default=0, ge=0)
    # Requests that wait, or are sampled; others are refused.
    max_waiting: int = Field(default=4096, ge=1)
    # Sequences that are sampled together, and bytes of their keys and values.
    max_rows: int = Field(default=256, ge=1)
    max_cache_bytes: int = Field(default=2 * GIB, ge=MIB)
    # Models in its memory: policies that differ by adapters or versions alone share one.
    max_models: int = Field(default=2, ge=1)
    # Seconds without a request after which the process ends, and its memory is free.
    idle_s: float = Field(default=600.0, gt=0)
    engines: tuple[SamplingEngineConfig, ...] = ()


class CheckpointConfig(_Section):
    """Automatic checkpoints of policies with `recovery: replay`, taken at any threshold.

    0 turns a threshold off. A checkpoint frees request bodies and shortens recovery.
    """

    # Operations that change weights or gradients.
    every_operations: int = Field(default=50, ge=0)
    every_s: float = Field(default=600.0, ge=0)
    # Bytes of request bodies.
    every_bytes: int = Field(default=1024 * MIB, ge=0)
    # Checkpoints kept for recovery, callers' own among them.
    keep: int = Field(default=2, ge=1)


class RayConfig(_Section):
    """`address` "" starts a local Ray; sizes in bytes."""

    address: str = ""
    namespace: str = "ratoon"
    object_store_bytes: int = Field(default=200 * MIB, ge=80 * MIB)
    temp_folder: str = ""
    num_cpus: int = Field(default=2, ge=1)


class TinkerConfig(_Section):
    """The Tinker wire: `/api/v1` beside `/v1`, on the same port (docs/tinker.md)."""

    enabled: bool = False
    # Alpha of every adapter, which the wire does not say.
    lora_alpha: float = Field(default=32.0, gt=0)
    # Weights of every model on the device.
    dtype: Literal["float32", "bfloat16"] = "float32"
    # Seconds without a heartbeat or another call until a model ends; its last state stays.
    idle_ttl_s: float = Field(default=3600.0, gt=0)
    # Seconds until weights that a script has saved for sampling without a name are deleted.
    unnamed_ttl_s: float = Field(default=86_400.0, gt=0)


class RatoonConfig(BaseSettings):
    """All settings of `ratoon serve`."""

    model_config = SettingsConfigDict(
        env_prefix=_PREFIX, env_nested_delimiter=_DELIMITER, frozen=True, extra="forbid"
    )

    data_root: Path = Path("ratoon-data")
    # CreatePolicy and ImportWeights may name folders below it. None: `models`, below data_root.
    models_root: Path | None = None
    # Published weights; may be a file system in memory. None: below data_root.
    weights_root: Path | None = None
    # "": SQLite below data_root; or postgresql://USER:PASSWORD@HOST:PORT/NAME.
    database_url: str = Field(default="", repr=False)
    # "": only data_root; or s3://BUCKET/PREFIX, which gets a copy of all that recovery needs.
    # Credentials, region and endpoint come from the usual AWS variables.
    storage_url: str = ""
    log_level: Annotated[
        Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"],
        BeforeValidator(lambda name: name.upper() if isinstance(name, str) else name),
    ] = "INFO"
    # A setting for tests: processes kill themselves at the points named in data_root/crash-points
    # (docs/operations.md).
    crash_points: bool = False
    http: HttpConfig = HttpConfig()
    grpc: GrpcConfig = GrpcConfig()
    serve: ServeConfig = ServeConfig()
    auth: AuthConfig = AuthConfig()
    tls: TlsConfig = TlsConfig()
    limits: LimitsConfig = LimitsConfig()
    quotas: KeyLimits = KeyLimits()
    worker: WorkerConfig = WorkerConfig()
    checkpoints: CheckpointConfig = CheckpointConfig()
    sampler: SamplerConfig = SamplerConfig()
    ray: RayConfig = RayConfig()
    tinker: TinkerConfig = TinkerConfig()

    @property
    def models_folder(self) -> Path:
        """Absolute path of the models root."""
        return (self.models_root or self.data_root / "models").absolute()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The environment overrides the YAML file, whose values are passed to the constructor."""
        return (env_settings, init_settings, _UnknownVariables(settings_cls))


class _UnknownVariables(PydanticBaseSettingsSource):
    """Turns unknown RATOON_ variables into unknown fields, so that they are refused.

    pydantic-settings ignores them: a misspelt RATOON_AUTH__REQUIRED would leave keys off.
    """

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return None, field_name, False

    def __call__(self) -> dict[str, Any]:
        # Values may be secrets.
        return dict.fromkeys(unknown_variables(os.environ), "not shown")


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Names that begin with RATOON_, in either case, and are neither settings nor known others."""
    found: list[str] = []
    for name, value in environment.items():
        upper = name.upper()
        if not upper.startswith(_PREFIX) or upper in OTHER_VARIABLES:
            continue
        first, _, rest = upper.removeprefix(_PREFIX).lower().partition(_DELIMITER)
        field = RatoonConfig.model_fields.get(first)
        # pydantic judges the names within a section.
        is_setting = field is not None and (not rest or isinstance(field.default, BaseModel))
        if not is_setting and not _is_of_kubernetes(upper, value):
            found.append(name)
    return found


def _is_of_kubernetes(name: str, value: str) -> bool:
    is_port = _PORT_OF_KUBERNETES.fullmatch(name) and _ADDRESS_OF_KUBERNETES.fullmatch(value)
    return bool(is_port or _OF_KUBERNETES.fullmatch(name))


def load_config(path: Path | None) -> RatoonConfig:
    """Read `path` (YAML; None: defaults) and the environment.

    Raises `ValueError` (`pydantic.ValidationError` is one) naming the field, or the file if it is
    not a YAML mapping; `OSError` if it cannot be read.
    """
    data = {} if path is None else _read_yaml(path)
    try:
        return RatoonConfig(**data)
    except SettingsError as err:
        raise ValueError(f"{err}: a list or a section is written as JSON there") from err


def errors_told(refused: ValidationError) -> str:
    """What is wrong with each setting, and which name was perhaps meant, a line each."""
    known = [*_setting_names(RatoonConfig)]
    variables = [_PREFIX + each.upper().replace(".", _DELIMITER) for each in known]
    lines: list[str] = []
    for error in refused.errors():
        name = ".".join(map(str, error["loc"]))
        if error["type"] == "extra_forbidden":
            is_variable = name.upper().startswith(_PREFIX)
            near = get_close_matches(*((name.upper(), variables) if is_variable else (name, known)))
            meant = f"; did you mean {near[0]}?" if near else ": docs/settings.md lists them"
            lines.append(f"{name}: no such setting{meant}")
            continue
        got, message = error["input"], error["msg"].removeprefix("Value error, ")
        if message.startswith("Input should be ") and isinstance(got, str | int | float):
            expected = message.removeprefix("Input should be ")
            message = f"got {got!r}, expected {expected}"
        lines.append(f"{name}: {message}" if name else message)
    return "\n".join(lines)


def _setting_names(section: type[BaseModel]) -> Generator[str]:
    """`data_root`, `http`, `http.host`, ..."""
    for name, field in section.model_fields.items():
        yield name
        if isinstance(field.default, BaseModel):
            yield from (f"{name}.{inner}" for inner in _setting_names(type(field.default)))


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as err:
        raise ValueError(f"{path}: {err}") from err
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(name, str) for name in data):
        raise ValueError(f"{path}: got {str(data)[:64]}, expected names with their values")
    return cast("dict[str, Any]", data)


def public_hosts(config: RatoonConfig) -> list[str]:
    """The bound addresses that are not loopback."""
    hosts = [config.http.host, config.grpc.host]
    if config.serve.is_on:
        hosts.append(config.serve.http_host)
    return [host for host in hosts if not is_loopback(host)]


def is_loopback(host: str) -> bool:
    try:
        address = ip_address(host)
    except ValueError:
        return host == "localhost"
    # The address may be an IPv4 peer of an IPv6 socket: ::ffff:127.0.0.1.
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def is_ray_open() -> bool:
    """Whether the environment switches Ray's token off."""
    return os.environ.get("RAY_AUTH_MODE", "token").lower() != "token"


def is_ray_tls() -> bool:
    """Whether Ray's own ports speak TLS."""
    return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")


def ray_tls_files(*, cert: Path, key: Path, authority: Path) -> AbstractContextManager[None]:
    """Set Ray's TLS variables for the ports that its Python opens in the block, not its core."""
    return _variables(
        RAY_USE_TLS="1",
        RAY_TLS_SERVER_CERT=str(cert),
        RAY_TLS_SERVER_KEY=str(key),
        RAY_TLS_CA_CERT=str(authority),
    )


def ray_token_file(path: Path) -> AbstractContextManager[None]:
    """Point Ray processes started in the block at the token in `path`, unless one is set."""
    if {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        return nullcontext()
    return _variables(RAY_AUTH_TOKEN_PATH=str(path))


@contextmanager
def _variables(**values: str) -> Generator[None, None, None]:
    """Set variables of the environment for the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def set_compile_cache(folder: Path) -> None:
    """Set where torch's compiler caches its output, unless the environment says so already."""
    set_defaults(
        {
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
            "TRITON_CACHE_DIR": str(folder / "triton"),
        }
    )


def set_defaults(variables: Mapping[str, str]) -> None:
    """Set the variables that are not set, for this process and those it starts."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def set_copy_interface(host: str) -> None:
    """Make ranks copy to each other through the interface with this address, and through no other.

    The environment takes precedence. If no interface has the address, the backends choose.
    """
    if name := interface_of(host):
        for backend in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{backend}_SOCKET_IFNAME", name)


def interface_of(host: str) -> str | None:
    """This machine's network interface with the address; None: there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == host for address in addresses):
            return name
    return None


_VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


def visible_gpus() -> str:
    """GPUs of its machine that this process sees; "": not specified."""
    return os.environ.get(_VISIBLE_GPUS, "")


def set_visible_gpus(gpus: str) -> None:
    """Make these GPUs visible, in order. Call it before CUDA is used for the first time."""
    os.environ[_VISIBLE_GPUS] = gpus


def has_expandable_segments() -> bool:
    """Whether torch is told to let its GPU memory grow in place."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return any("expandable_segments:True" in os.environ.get(name, "") for name in names)
