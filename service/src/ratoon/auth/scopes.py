"""Lists the scope that each call needs; a call that is not in the table is refused to everybody."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType


class Scope(StrEnum):
    """The calls that a key may make. Each scope includes those before it."""

    READ = "read"
    TRAIN = "train"
    ADMIN = "admin"

    def includes(self, other: Scope) -> bool:
        """Return whether this scope allows the calls of another."""
        order = tuple(Scope)
        return order.index(self) >= order.index(other)


# None: the call is free, and a key is not checked.
CALL_SCOPES: Mapping[str, Scope | None] = MappingProxyType(
    {
        "create_policy": Scope.ADMIN,
        "delete_policy": Scope.ADMIN,
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
        "cancel_operation": Scope.TRAIN,
        "save_checkpoint": Scope.TRAIN,
        "load_checkpoint": Scope.TRAIN,
        "list_checkpoints": Scope.READ,
        "get_weight_manifest": Scope.READ,
        "watch_weights": Scope.READ,
        "ack_weights": Scope.READ,
        "fetch_weights": Scope.READ,
        "import_weights": Scope.TRAIN,
        "get_gradient_manifest": Scope.TRAIN,
        "get_server_info": Scope.READ,
        "health": None,
        # HTTP only. `auth.metrics` may make it free.
        "metrics": Scope.READ,
        "api_document": None,
    }
)


def is_changing(call: str) -> bool:
    """Return whether the call gets an audit line even if it succeeds."""
    return CALL_SCOPES[call] not in (None, Scope.READ)
