"""Between the wires and the service: who may make this call about this policy, and the audit of it.

Enters a call's name with what its caller presented, then its request; leaves the service's answer.
Invariant: a request reaches the service only after `enter` and `check`; every call that changes
something or is refused has one line in the audit log.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast

from google.protobuf.message import Message

from ratoon.api.convert.checks import POLICY_ID
from ratoon.auth.access import Access, Caller, Presented, access_of, denied
from ratoon.auth.audit import Audit, AuditEntry, AuditLog
from ratoon.auth.scopes import Scope, is_changing
from ratoon.config import RatoonConfig
from ratoon.errors import ErrorCode, RatoonError
from ratoon_proto.v1 import service_pb2

RequestT = TypeVar("RequestT", bound=Message)
ResponseT = TypeVar("ResponseT", bound=Message)
# Calls about no policy. ListPolicies answers those that its caller may see.
OF_NO_POLICY = frozenset({"list_policies", "get_server_info", "health", "api_document"})
ANSWERED = "OK"
# The caller left before there was an answer; what was begun goes on.
NO_ANSWER = "CANCELLED"


class Visit:
    """One call that was let in: entered, then recorded where it has its line in the audit log."""

    def __init__(self, caller: Caller, call: str) -> None:
        self.caller = caller
        self.call = call
        self.is_recorded = False


class Gate:
    """One a process. A wire calls `enter`, then `run` (or `check`), and in any case `leave`."""

    def __init__(self, access: Access, audit: Audit) -> None:
        self._access = access
        self._audit = audit

    def enter(self, call: str, presented: Presented) -> Visit:
        """Before the request is read. Raises UNAUTHENTICATED, PERMISSION_DENIED, UNAVAILABLE."""
        caller, error = self._judged(call, presented)
        visit = Visit(caller, call)
        if error is not None:
            self._write(visit, "", 0, str(error.code))
            raise error
        return visit

    def refusal(self, call: str, presented: Presented) -> RatoonError | None:
        """What `enter` would raise; nothing is recorded."""
        return self._judged(call, presented)[1]

    def _judged(self, call: str, presented: Presented) -> tuple[Caller, RatoonError | None]:
        """Who calls, as far as that is proven, and why not."""
        try:
            caller = self._access.enter(call, presented)
        except RatoonError as error:
            nobody = Caller(key_id="", peer=presented.peer, scope=Scope.READ, policies=())
            return nobody, error
        return caller, None if caller.may_call(call) else denied()

    def check(self, visit: Visit, request: Message) -> None:
        """Raises PERMISSION_DENIED where `request` is about a policy that the key is not for."""
        if visit.call not in OF_NO_POLICY and not visit.caller.may_see(policy_of(request)):
            error = denied()
            self._write(visit, policy_of(request), seq_of(request), str(error.code))
            raise error

    def check_all(self, visit: Visit) -> None:
        """Of a call about all policies at once. Raises PERMISSION_DENIED for a key of some."""
        if visit.caller.policies is not None:
            error = denied()
            self._write(visit, "", 0, str(error.code))
            raise error

    async def run(
        self,
        visit: Visit,
        call: Callable[[RequestT], Awaitable[ResponseT]],
        request: RequestT,
    ) -> ResponseT:
        """The service's answer to `request`, as far as the caller may see it."""
        self.check(visit, request)
        seq, outcome = seq_of(request), NO_ANSWER
        try:
            answer = await call(request)
            # Under server sequencing the service has given it.
            seq, outcome = seq_of(answer) or seq, ANSWERED
        except Exception as error:
            code = error.code if isinstance(error, RatoonError) else ErrorCode.INTERNAL
            outcome = str(code)
            raise
        finally:
            if is_changing(visit.call):
                self._write(visit, policy_of(request), seq, outcome)
        return visible(visit.caller, answer)

    def leave(self, visit: Visit, policy_id: str, outcome: str) -> None:
        """Record a changing call that was refused before it was a request: a malformed body."""
        if is_changing(visit.call) and not visit.is_recorded:
            self._write(visit, policy_id, 0, outcome)

    def _write(self, visit: Visit, policy_id: str, seq: int, outcome: str) -> None:
        visit.is_recorded = True
        self._audit.write(
            AuditEntry(
                key_id=visit.caller.key_id,
                peer=visit.caller.peer,
                call=visit.call,
                # What is no id may be anything, a key given by mistake too.
                policy_id=policy_id if POLICY_ID.fullmatch(policy_id) else "?" * bool(policy_id),
                seq=seq,
                outcome=outcome,
            )
        )


def build_gate(config: RatoonConfig) -> Gate:
    """What the config asks for; the audit log is kept whoever is let in."""
    return Gate(access_of(config), AuditLog(config.data_root.absolute()))


def policy_of(request: Message) -> str:
    """The policy that a request is about; "" where it names none."""
    fields = request.DESCRIPTOR.fields_by_name
    message = cast("Any", request)
    if "policy_id" in fields:
        return str(message.policy_id)
    if "operation_id" in fields:
        # What follows the policy's id has no dot, and neither has the id.
        return str(message.operation_id).rpartition(".")[0]
    if "spec" in fields:
        return str(message.spec.policy_id)
    return ""


def seq_of(message: Message) -> int:
    """The seq of a request, in its key, or of an operation; 0 where there is none."""
    fields = message.DESCRIPTOR.fields_by_name
    if "key" in fields:
        return int(cast("Any", message).key.seq)
    if "seq" in fields:
        return int(cast("Any", message).seq)
    return 0


def visible(caller: Caller, answer: ResponseT) -> ResponseT:
    """`answer` without the policies that `caller` may not see."""
    if caller.policies is None or not isinstance(answer, service_pb2.ListPoliciesResponse):
        return answer
    seen = [policy for policy in answer.policies if caller.may_see(policy.spec.policy_id)]
    return cast("ResponseT", service_pb2.ListPoliciesResponse(policies=seen))
