"""Authenticates callers: everybody, this machine, or holders of a key.

A refusal reveals neither which keys nor which policies exist.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Protocol

from ratoon.auth.keys import KeyFile, Scope, is_secret_of, split_key
from ratoon.config import KeyLimits, RatoonConfig, is_loopback, public_hosts
from ratoon.errors import ErrorCode, RatoonError, invalid
from ratoon.log import get_logger

# Calls of the Tinker wire, by whether they change something.
_TINKER_CHANGES = (
    "tinker_create_session",
    "tinker_finish_session",
    "tinker_create_model",
    "tinker_forward_backward",
    "tinker_optim_step",
    "tinker_save_weights",
    "tinker_load_weights",
    "tinker_save_weights_for_sampler",
    "tinker_delete_checkpoint",
    "tinker_set_ttl",
)
_TINKER_READS = (
    "tinker_client_config",
    "tinker_capabilities",
    "tinker_telemetry",
    "tinker_heartbeat",
    "tinker_session",
    "tinker_get_info",
    "tinker_weights_info",
    "tinker_training_runs",
    "tinker_training_run",
    "tinker_checkpoints",
    "tinker_run_checkpoints",
    "tinker_retrieve_future",
    "tinker_create_sampling_session",
    "tinker_sampler",
    "tinker_asample",
)
# The scope that each call needs. A call that is not in the table is refused to everybody.
# None: the call is free, and a key is not checked.
CALL_SCOPES: Mapping[str, Scope | None] = MappingProxyType(
    {
        "create_policy": Scope.ADMIN,
        "delete_policy": Scope.ADMIN,
        "send_model_file": Scope.ADMIN,
        "release_policy": Scope.TRAIN,
        "get_policy": Scope.READ,
        "list_policies": Scope.READ,
        "update": Scope.TRAIN,
        "forward_backward": Scope.TRAIN,
        "optim_step": Scope.TRAIN,
        "discard_gradients": Scope.TRAIN,
        "forward": Scope.TRAIN,
        "upload_part": Scope.TRAIN,
        "get_operation": Scope.READ,
        "watch_operation": Scope.READ,
        "list_operations": Scope.READ,
        "list_steps": Scope.READ,
        "cancel_operation": Scope.TRAIN,
        "save_checkpoint": Scope.TRAIN,
        "load_checkpoint": Scope.TRAIN,
        "list_rollouts": Scope.READ_ROLLOUTS,
        "get_rollout": Scope.READ_ROLLOUTS,
        "list_checkpoints": Scope.READ,
        "list_versions": Scope.READ,
        "publish_version": Scope.TRAIN,
        "delete_version": Scope.TRAIN,
        "delete_checkpoint": Scope.TRAIN,
        "get_weight_manifest": Scope.READ,
        "watch_weights": Scope.READ,
        "ack_weights": Scope.READ,
        "fetch_weights": Scope.READ,
        "import_weights": Scope.TRAIN,
        "sample": Scope.READ,
        "get_gradient_manifest": Scope.TRAIN,
        "get_server_info": Scope.READ,
        "health": None,
        # HTTP only. `auth.metrics` may make it free.
        "metrics": Scope.READ,
        "api_document": None,
        "page": None,
        # The Tinker wire.
        **dict.fromkeys((*_TINKER_CHANGES, *_TINKER_READS), Scope.TINKER),
        "tinker_health": None,
    }
)

_log = get_logger("auth")


@dataclass(frozen=True, slots=True, kw_only=True)
class Presented:
    """Credentials of a call: the `authorization` header or metadata, and the peer's address.

    `peer` is "" if it is not known.
    """

    authorization: str
    peer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """An authenticated principal.

    `key_id` "": no key was needed. `policies` None: all policies.
    """

    key_id: str
    peer: str
    scope: Scope
    policies: tuple[str, ...] | None
    limits: KeyLimits
    reads_rollouts: bool = False

    @property
    def name(self) -> str:
        """The name under which requests in flight are counted."""
        return f"key {self.key_id}" if self.key_id else f"host {self.peer}"

    def may_call(self, call: str) -> bool:
        """Return whether the caller's scope includes that of a call."""
        scope = CALL_SCOPES[call]
        if scope is Scope.READ_ROLLOUTS:
            return self.reads_rollouts
        return scope is None or self.scope.includes(scope)

    def may_see(self, policy_id: str) -> bool:
        """Return whether the caller may know of a policy."""
        return self.policies is None or policy_id in self.policies


class Access(Protocol):
    """Authenticates callers; a `Caller` says what it may do. `enter` raises UNAUTHENTICATED."""

    def enter(self, call: str, presented: Presented) -> Caller: ...


class OpenAccess:
    """Lets everybody in: `auth.required: false`."""

    def enter(self, call: str, presented: Presented) -> Caller:
        return anybody(presented)


class LocalAccess:
    """Lets this machine in: the default where only loopback addresses are bound.

    Peers are checked even then: under `serve deploy` Serve's port has an address of its own.
    """

    def enter(self, call: str, presented: Presented) -> Caller:
        if CALL_SCOPES[call] is not None and not is_loopback(presented.peer):
            raise RatoonError(
                ErrorCode.UNAUTHENTICATED,
                "without API keys this service answers callers of its own machine alone",
            )
        return anybody(presented)


class KeyAccess:
    """Lets in holders of a valid key.

    `free` calls need none. `quotas` apply to keys without limits of their own.
    """

    def __init__(
        self,
        keys: KeyFile,
        *,
        free: frozenset[str],
        quotas: KeyLimits,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._keys = keys
        self._free = free
        self._quotas = quotas
        self._now = now

    def enter(self, call: str, presented: Presented) -> Caller:
        if CALL_SCOPES[call] is None or call in self._free:
            return anybody(presented)
        pair = split_key(_bearer(presented.authorization))
        if pair is None:
            raise RatoonError(
                ErrorCode.UNAUTHENTICATED,
                "what came with the call is no API key"
                if presented.authorization
                else "no API key came with the call",
                field="authorization",
                expected="Bearer and a key that `ratoon keys create` has made",
            )
        key_id, secret = pair
        key = self._keys.keys().get(key_id)
        if not is_secret_of(secret, key) or key is None or not key.is_valid(self._now()):
            raise RatoonError(
                ErrorCode.UNAUTHENTICATED,
                "the API key is unknown, revoked or expired",
                field="authorization",
            )
        return Caller(
            key_id=key_id,
            peer=presented.peer,
            scope=key.scope,
            policies=key.policies,
            limits=key.limits.or_else(self._quotas),
            reads_rollouts=key.reads_rollouts,
        )


def is_changing(call: str) -> bool:
    """Return whether the call gets an audit line even if it succeeds."""
    return CALL_SCOPES[call] in (Scope.TRAIN, Scope.ADMIN) or call in _TINKER_CHANGES


def anybody(presented: Presented) -> Caller:
    """Return a caller that needs no key."""
    return replace(_without_key(presented, Scope.ADMIN, None), reads_rollouts=True)


def nobody(presented: Presented) -> Caller:
    """Return a caller that is not authenticated."""
    return _without_key(presented, Scope.READ, ())


def _without_key(presented: Presented, scope: Scope, policies: tuple[str, ...] | None) -> Caller:
    return Caller(
        key_id="", peer=presented.peer, scope=scope, policies=policies, limits=KeyLimits()
    )


def denied() -> RatoonError:
    """Return the refusal of a call that the key does not allow.

    A missing scope and another's policy have the same text, whether the policy exists or not.
    """
    return RatoonError(ErrorCode.PERMISSION_DENIED, "the API key does not allow this call")


def needs_keys(config: RatoonConfig) -> bool:
    """Return whether keys are required."""
    required = config.auth.required
    return bool(public_hosts(config)) if required is None else required


def checked_hosts(config: RatoonConfig) -> tuple[str, ...] | None:
    """Return the host names accepted besides loopback's; None if names are not checked.

    Without keys, only the name tells this service's own page from any other.
    """
    allowed = config.http.allowed_hosts
    return None if needs_keys(config) or "*" in allowed else allowed


def access_of(config: RatoonConfig) -> Access:
    """Return the access that the config asks for."""
    if config.auth.required is False:
        return OpenAccess()
    if not needs_keys(config):
        return LocalAccess()
    free = frozenset({"metrics"}) if config.auth.metrics == "free" else frozenset[str]()
    return KeyAccess(KeyFile(config.data_root.absolute()), free=free, quotas=config.quotas)


def check_start(config: RatoonConfig) -> None:
    """Serve other machines without keys only by an explicit, logged choice.

    Raises INVALID_ARGUMENT naming `auth.required`.
    """
    hosts = public_hosts(config)
    if not needs_keys(config) and "*" in config.http.allowed_hosts:
        _log.warning("web pages are let in", reason="http.allowed_hosts has *, and no key is asked")
    if config.auth.required is False:
        if hosts:
            _log.warning("served without API keys", hosts=hosts, reason="auth.required is false")
        return
    if not needs_keys(config):
        return
    now = time.time()
    keys = KeyFile(config.data_root.absolute()).keys()
    if any(key.is_valid(now) for key in keys.values()):
        return
    if config.auth.required is None:
        expected = f"a key (ratoon keys create), or true or false, beside a bind to {hosts[0]}"
        raise invalid("auth.required", "neither a value nor an API key", expected)
    _log.warning("no API key is valid: only health is answered", reason="auth.required is true")


def _bearer(authorization: str) -> str:
    scheme, _, token = authorization.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""
