"""What the Tinker wire tells of a key's sessions, models and saved weights.

All of it is read from the policies whose ids begin with the key's, and from their checkpoints.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import cast

from ratoon.api.gate import AuthorizedCall
from ratoon.api.service import PolicyService
from ratoon.api.tinker import bodies
from ratoon.api.tinker.names import (
    NOBODY,
    SAMPLER_WEIGHTS,
    UNNAMED,
    Model,
    Sampler,
    checked_session,
    is_owned,
    model_of,
    model_of_policy,
    not_found,
    weights_of,
)
from ratoon.errors import ErrorCode, RatoonError
from ratoon_proto.v1 import operation_pb2, policy_pb2, service_pb2

Json = dict[str, object]
_Saved = operation_pb2.CheckpointInfo | operation_pb2.NamedVersion
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


class Runs:
    """Reads of one key's own; all raise POLICY_NOT_FOUND for what is another's."""

    def __init__(self, service: PolicyService, models_root: Path) -> None:
        self._service = service
        self._models_root = models_root

    async def capabilities(self) -> Json:
        found = await asyncio.to_thread(_bases, self._models_root)
        models = [
            {
                "model_name": name,
                "max_context_length": facts.get("max_position_embeddings"),
                "trainable": True,
                "sampleable": True,
            }
            for name, facts in found.items()
        ]
        return {"supported_models": models}

    async def heartbeat(self, authorized: AuthorizedCall, body: bodies.OfSession) -> Json:
        """Renew the `idle_ttl_s` of the session's models."""
        for policy in await self.of_session(authorized, body.session_id):
            if policy.state != policy_pb2.POLICY_STATE_ENDED:
                await self.policy(policy.spec.policy_id)
        return {"type": "session_heartbeat"}

    async def session(self, authorized: AuthorizedCall, session_id: str) -> Json:
        found = await self.of_session(authorized, session_id)
        models = [model_of_policy(policy.spec.policy_id, "") for policy in found]
        samplers = [
            Sampler(session=session_id, model=model, name=named.name).sampler_id
            for model in models
            for named in await self._named(model)
        ]
        return {
            "training_run_ids": [model.model_id for model in models],
            "sampler_ids": samplers,
        }

    async def get_info(self, authorized: AuthorizedCall, body: bodies.OfModel) -> Json:
        model = model_of(body.model_id, owner_of(authorized))
        spec = (await self.policy(model.policy_id)).spec
        base = base_of(spec)
        facts = await asyncio.to_thread(_facts, self._models_root / base)
        return {
            "type": "get_info",
            "model_data": {
                "arch": facts.get("model_type") or base,
                "model_name": base,
                "tokenizer_id": base,
            },
            "model_id": model.model_id,
            "is_lora": spec.HasField("lora"),
            "lora_rank": spec.lora.rank or None,
            "model_name": base,
        }

    async def weights_info(self, authorized: AuthorizedCall, body: bodies.OfPath) -> Json:
        model, name = weights_of(body.tinker_path, owner_of(authorized))
        spec = (await self.policy(model.policy_id)).spec
        if all(each.checkpoint_id != name for each in await self._saved(model)):
            raise not_found(ErrorCode.CHECKPOINT_NOT_FOUND)
        names = set(spec.lora.target_modules) or {*ATTENTION, *MLP}
        return {
            "base_model": base_of(spec),
            "is_lora": spec.HasField("lora"),
            "lora_rank": spec.lora.rank or None,
            "train_unembed": "lm_head" in names,
            "train_mlp": not names.isdisjoint(MLP),
            "train_attn": not names.isdisjoint(ATTENTION),
        }

    async def training_runs(self, authorized: AuthorizedCall, offset: int, limit: int) -> Json:
        """List the key's models, newest first."""
        owner = owner_of(authorized)
        found = [*reversed(await self._policies(lambda name: is_owned(name, owner)))]
        shown_runs = [await self._run_json(policy) for policy in found[offset : offset + limit]]
        return {"training_runs": shown_runs, "cursor": _cursor(offset, limit, len(found))}

    async def training_run(self, authorized: AuthorizedCall, model_id: str) -> Json:
        model = model_of(model_id, owner_of(authorized))
        return await self._run_json(await self.policy(model.policy_id))

    async def run_checkpoints(self, authorized: AuthorizedCall, model_id: str) -> Json:
        model = model_of(model_id, owner_of(authorized))
        saved = await self._all_saved(model)
        return {"checkpoints": [_saved_json(model, each) for each in saved]}

    async def checkpoints(self, authorized: AuthorizedCall, offset: int, limit: int) -> Json:
        """List the saved weights of all the key's models, newest first."""
        owner = owner_of(authorized)
        found: list[tuple[Model, _Saved]] = []
        for policy in await self._policies(lambda name: is_owned(name, owner)):
            model = model_of_policy(policy.spec.policy_id, owner)
            found.extend((model, each) for each in await self._all_saved(model))
        found.sort(key=lambda pair: pair[1].created_at.ToNanoseconds(), reverse=True)
        page = [_saved_json(*pair) for pair in found[offset : offset + limit]]
        return {"checkpoints": page, "cursor": _cursor(offset, limit, len(found))}

    async def policy(self, policy_id: str) -> policy_pb2.Policy:
        return await self._service.get_policy(service_pb2.GetPolicyRequest(policy_id=policy_id))

    async def _policies(self, is_wanted: Callable[[str], bool]) -> list[policy_pb2.Policy]:
        """Return the policies whose ids are wanted, oldest first."""
        found = await self._service.list_policies(service_pb2.ListPoliciesRequest())
        return [policy for policy in found.policies if is_wanted(policy.spec.policy_id)]

    async def of_session(
        self, authorized: AuthorizedCall, session_id: str
    ) -> list[policy_pb2.Policy]:
        """Return the models of a session. Raises POLICY_NOT_FOUND for another key's."""
        session = checked_session(session_id, owner_of(authorized))
        return await self._policies(lambda name: name.startswith(f"tinker-{session}-"))

    async def _saved(self, model: Model) -> list[operation_pb2.CheckpointInfo]:
        """Return the checkpoints of a model that a caller has named, newest first."""
        request = service_pb2.ListCheckpointsRequest(policy_id=model.policy_id)
        found = (await self._service.list_checkpoints(request)).checkpoints
        named = [each for each in found if each.checkpoint_id]
        return sorted(named, key=lambda each: each.created_at.ToNanoseconds(), reverse=True)

    async def _named(self, model: Model) -> list[operation_pb2.NamedVersion]:
        """Return the versions of a model that are kept to be sampled from: none of one that has
        ended, or is not ready."""
        request = service_pb2.ListVersionsRequest(policy_id=model.policy_id)
        try:
            versions = (await self._service.list_versions(request)).versions
        except RatoonError as error:
            if error.code not in (ErrorCode.POLICY_FAILED, ErrorCode.POLICY_NOT_READY):
                raise
            return []
        return [named for version in versions for named in version.names]

    async def _all_saved(self, model: Model) -> list[_Saved]:
        """Return what a caller has saved under a name, newest first."""
        named = [each for each in await self._named(model) if not each.name.startswith(UNNAMED)]
        found: list[_Saved] = [*await self._saved(model), *named]
        return sorted(found, key=lambda each: each.created_at.ToNanoseconds(), reverse=True)

    async def _run_json(self, policy: policy_pb2.Policy) -> Json:
        model = model_of_policy(policy.spec.policy_id, "")
        saved = await self._saved(model)
        request = service_pb2.ListOperationsRequest(policy_id=model.policy_id, page_size=1)
        newest = (await self._service.list_operations(request)).operations
        last = newest[0].created_at if newest else policy.created_at
        return {
            "training_run_id": model.model_id,
            "base_model": base_of(policy.spec),
            "model_owner": model.session.partition("-")[0],
            "is_lora": policy.spec.HasField("lora"),
            "lora_rank": policy.spec.lora.rank or None,
            "corrupted": policy.state == policy_pb2.POLICY_STATE_FAILED,
            "last_request_time": last.ToJsonString(),
            "last_checkpoint": _saved_json(model, saved[0]) if saved else None,
        }


def owner_of(authorized: AuthorizedCall) -> str:
    return authorized.caller.key_id or NOBODY


def base_of(spec: policy_pb2.PolicySpec) -> str:
    return spec.preset or spec.model_folder


def _bases(root: Path) -> dict[str, Json]:
    """Return the model folders below a root, one or two names deep, with their `config.json`."""
    paths = sorted({*root.glob("*/config.json"), *root.glob("*/*/config.json")})
    return {path.parent.relative_to(root).as_posix(): _facts(path.parent) for path in paths}


def _facts(folder: Path) -> Json:
    """Return the configuration of a model folder; nothing where it cannot be read."""
    try:
        found = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return cast("Json", found) if isinstance(found, dict) else {}


def _saved_json(model: Model, info: _Saved) -> Json:
    is_version = isinstance(info, operation_pb2.NamedVersion)
    name = info.name if is_version else info.checkpoint_id
    kind = SAMPLER_WEIGHTS if is_version else "weights"
    return {
        "checkpoint_id": f"{kind}/{name}",
        "checkpoint_type": "sampler" if is_version else "training",
        "time": info.created_at.ToJsonString(),
        "tinker_path": model.path(name, kind),
        "size_bytes": info.size_bytes,
        "public": False,
        "expires_at": info.expires_at.ToJsonString() if info.HasField("expires_at") else None,
    }


def _cursor(offset: int, limit: int, total: int) -> Json:
    return {"offset": offset, "limit": limit, "total_count": total}
