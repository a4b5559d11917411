"""Decides who may make which call about which policy, and keeps the audit log.

A request reaches the service only after `enter` and `check`. Every call that changes something or
is refused is in the audit log. A long call is checked again, so a revoked key sees nothing more
after `RECHECK_S` seconds, or of a file after the chunk under way.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, NoReturn, TypeVar, cast

from google.protobuf.message import Message

from ratoon.api.answers import FileChunk
from ratoon.api.contract import acting_for
from ratoon.api.convert.checks import POLICY_ID, policy_of_operation
from ratoon.auth.access import (
    CALL_SCOPES,
    Access,
    Caller,
    Presented,
    access_of,
    denied,
    is_changing,
    nobody,
)
from ratoon.auth.audit import Audit, AuditEntry, AuditLog
from ratoon.auth.rates import InFlight, Rates
from ratoon.config import RatoonConfig
from ratoon.engine.commands import NOBODY, Holder
from ratoon.errors import ErrorCode, RatoonError
from ratoon_proto.v1 import service_pb2

RequestT = TypeVar("RequestT", bound=Message)
ResponseT = TypeVar("ResponseT", bound=Message | FileChunk)
# Called with the reason of a refusal, and the id of the key.
OnRefusal = Callable[[str, str], None]
# Calls that need name no policy. Lists have only what their caller may see.
OF_NO_POLICY = frozenset(
    {"list_policies", "list_operations", "get_server_info", "health", "api_document", "page"}
)
# Calls that wait for something to happen; they change nothing, and end with their caller.
WAITING = frozenset(
    {
        "get_operation",
        "get_weight_manifest",
        "get_gradient_manifest",
        "sample",
        "tinker_retrieve_future",
    }
)
RECHECK_S = 5.0
# Calls that a process accepts beyond the gate's limit, so that the gate can refuse them with the
# usual error.
ROOM_TO_REFUSE = 256
ANSWERED = "OK"
# The caller left before there was an answer; work that was begun goes on.
NO_ANSWER = "CANCELLED"


class AuthorizedCall:
    """One authorized call, until `leave`. `is_recorded`: it has a line in the audit log."""

    def __init__(self, caller: Caller, call: str, presented: Presented) -> None:
        self.caller = caller
        self.call = call
        self.presented = presented
        self.is_recorded = False


class Gate:
    """One process's gate. Wires call `enter`, then `run`, `stream` or `check`, always `leave`."""

    def __init__(
        self,
        access: Access,
        audit: Audit,
        in_flight: InFlight,
        rates: Rates,
        on_refusal: OnRefusal,
    ) -> None:
        self._access = access
        self._audit = audit
        self._in_flight = in_flight
        self._rates = rates
        self._on_refusal = on_refusal

    def enter(self, call: str, presented: Presented) -> AuthorizedCall:
        """Authorize a call before its request is read.

        Raises UNAUTHENTICATED, PERMISSION_DENIED, UNAVAILABLE, and RESOURCE_EXHAUSTED for too many
        requests.
        """
        caller, error = self._judged(call, presented)
        authorized = AuthorizedCall(caller, call, presented)
        if error is None:
            error = self._in_flight.refusal(caller.name)
        if error is None:
            error = self._rates.take(caller.key_id, caller.limits)
        if error is None and CALL_SCOPES[call] is None:
            error = self._rates.take_free(caller.peer)
        if error is not None:
            self._refuse(authorized, "", 0, error)
        self._in_flight.begin(caller.name)
        return authorized

    def _judged(self, call: str, presented: Presented) -> tuple[Caller, RatoonError | None]:
        """Return the caller, as far as it is authenticated, and the refusal, if any."""
        try:
            caller = self._access.enter(call, presented)
        except RatoonError as error:
            return nobody(presented), error
        return caller, None if caller.may_call(call) else denied()

    def check(self, authorized: AuthorizedCall, request: Message) -> None:
        """Check that the key is for the policy of a request, and for all others that it reads.

        Raises PERMISSION_DENIED.
        """
        self.check_policy(authorized, policy_of(request), seq_of(request))
        if not all(map(authorized.caller.may_see, sources_of(request))):
            self._refuse(authorized, policy_of(request), 0, denied())

    def check_policy(self, authorized: AuthorizedCall, policy_id: str, seq: int = 0) -> None:
        """Check that the key is for a policy, for wires that know its id before the whole request.

        Raises PERMISSION_DENIED.
        """
        is_about_one = bool(policy_id) or authorized.call not in OF_NO_POLICY
        if is_about_one and not authorized.caller.may_see(policy_id):
            self._refuse(authorized, policy_id, seq, denied())

    def check_again(self, authorized: AuthorizedCall, request: Message) -> None:
        """Check the key of a call that goes on.

        Raises UNAUTHENTICATED where the key is no longer valid.
        """
        _, error = self._judged(authorized.call, authorized.presented)
        if error is not None:
            self._refuse(authorized, policy_of(request), 0, error)

    def check_all(self, authorized: AuthorizedCall) -> None:
        """Check the key of a call about all policies.

        Raises PERMISSION_DENIED for a key that is limited to some.
        """
        if authorized.caller.policies is not None:
            self._refuse(authorized, "", 0, denied())

    async def run(
        self,
        authorized: AuthorizedCall,
        call: Callable[[RequestT], Awaitable[ResponseT]],
        request: RequestT,
    ) -> ResponseT:
        """Return the service's answer to `request`, reduced to what the caller may see.

        Raises the service's errors, PERMISSION_DENIED as `check`, and UNAUTHENTICATED as
        `check_again`.
        """
        self.check(authorized, request)
        seq, outcome = seq_of(request), NO_ANSWER
        try:
            with acting_for(_holder(authorized.caller)):
                answer = await self._called(authorized, call, request)
            outcome = ANSWERED
            if is_changing(authorized.call):
                # Under server sequencing the answer has the seq.
                seq = seq_of(answer) or seq
        except RatoonError as error:
            outcome = str(error.code)
            if error.code in (ErrorCode.RESOURCE_EXHAUSTED, ErrorCode.BODY_TOO_LARGE):
                self._on_refusal(_reason(error), authorized.caller.key_id)
            raise
        except Exception:
            outcome = str(ErrorCode.INTERNAL)
            raise
        finally:
            if is_changing(authorized.call):
                self._write(authorized, policy_of(request), seq, outcome)
        return visible(authorized.caller, answer)

    async def stream(
        self,
        authorized: AuthorizedCall,
        call: Callable[[RequestT], AsyncGenerator[ResponseT, None]],
        request: RequestT,
    ) -> AsyncGenerator[ResponseT, None]:
        """Yield the service's messages, for as long as the caller's key is valid.

        Raises as `run`.
        """
        self.check(authorized, request)
        async with aclosing(call(request)) as messages:
            while True:
                try:
                    message = await self._watched(authorized, request, anext(messages))
                except StopAsyncIteration:
                    return
                yield message

    def leave(self, authorized: AuthorizedCall, policy_id: str, outcome: str) -> None:
        """End a call; to be called once.

        A call that changes something is recorded now, if it was not yet.
        """
        self._in_flight.end(authorized.caller.name)
        if is_changing(authorized.call) and not authorized.is_recorded:
            self._write(authorized, policy_id, 0, outcome)

    async def _called(
        self,
        authorized: AuthorizedCall,
        call: Callable[[RequestT], Awaitable[ResponseT]],
        request: RequestT,
    ) -> ResponseT:
        if authorized.call not in WAITING:
            return await call(request)
        return await self._watched(authorized, request, call(request))

    async def _watched(
        self, authorized: AuthorizedCall, request: Message, waiting: Awaitable[ResponseT]
    ) -> ResponseT:
        """Return the result of `waiting`, unless the caller's key becomes invalid first."""
        task = asyncio.ensure_future(waiting)
        try:
            while not (await asyncio.wait({task}, timeout=RECHECK_S))[0]:
                self.check_again(authorized, request)
            self.check_again(authorized, request)
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _refuse(
        self, authorized: AuthorizedCall, policy_id: str, seq: int, error: RatoonError
    ) -> NoReturn:
        self._on_refusal(_reason(error), authorized.caller.key_id)
        self._write(authorized, policy_id, seq, str(error.code))
        raise error

    def _write(self, authorized: AuthorizedCall, policy_id: str, seq: int, outcome: str) -> None:
        authorized.is_recorded = True
        self._audit.write(
            AuditEntry(
                key_id=authorized.caller.key_id,
                peer=authorized.caller.peer,
                call=authorized.call,
                # An invalid id could be anything, even an API key pasted by mistake.
                policy_id=policy_id if POLICY_ID.fullmatch(policy_id) else "?" * bool(policy_id),
                seq=seq,
                outcome=outcome,
            )
        )


def _holder(caller: Caller) -> Holder:
    if not caller.key_id:
        return NOBODY
    return Holder(key_id=caller.key_id, limits=caller.limits, policies=caller.policies)


def build_gate(config: RatoonConfig, on_refusal: OnRefusal = lambda _reason, _key_id: None) -> Gate:
    """Build the gate of a config; the audit log is kept even without keys."""
    in_flight = InFlight(
        most=config.limits.max_requests_in_flight,
        most_of_caller=config.limits.max_requests_in_flight_of_caller,
    )
    rates = Rates(config.data_root.absolute())
    return Gate(access_of(config), AuditLog.of(config), in_flight, rates, on_refusal)


def policy_of(request: Message) -> str:
    """Return the policy that a request names; "" if it names none."""
    fields = request.DESCRIPTOR.fields_by_name
    message = cast("Any", request)
    if "policy_id" in fields:
        return str(message.policy_id)
    if "operation_id" in fields:
        return policy_of_operation(str(message.operation_id))
    if "spec" in fields:
        return str(message.spec.policy_id)
    return ""


def sources_of(request: Message) -> tuple[str, ...]:
    """Return the policies that a request reads beside its own: a checkpoint's, and teachers."""
    match request:
        case service_pb2.CreatePolicyRequest():
            source = request.spec.from_checkpoint.policy_id
            return (source,) if source else ()
        case service_pb2.UpdateRequest() | service_pb2.ForwardBackwardRequest():
            loss = request.loss
            teachers = (*loss.distillation.teachers, *loss.kl.teachers)
            return tuple(teacher.policy_id for teacher in teachers)
        case _:
            return ()


def seq_of(message: Message | FileChunk) -> int:
    """Return the seq in a request's key, or of an operation; 0 if there is none."""
    fields = message.DESCRIPTOR.fields_by_name
    if "key" in fields:
        return int(cast("Any", message).key.seq)
    if "seq" in fields:
        return int(cast("Any", message).seq)
    return 0


def visible(caller: Caller, answer: ResponseT) -> ResponseT:
    """Return `answer` without policies that `caller` may not see."""
    if caller.policies is None or not isinstance(answer, service_pb2.ListPoliciesResponse):
        return answer
    seen = [policy for policy in answer.policies if caller.may_see(policy.spec.policy_id)]
    return cast("ResponseT", service_pb2.ListPoliciesResponse(policies=seen))


def _reason(error: RatoonError) -> str:
    """Return the exhausted resource, or the error's code: a bounded set of labels."""
    return error.details.get("resource") or str(error.code).lower()
