"""Blocking faces of the client's asynchronous classes, for any number of threads.

`blocking(method)` is a method of the same name, arguments and documentation that waits for the
answer on the client's own event loop. A handle, session or receiver in the answer becomes a
blocking one, and an asynchronous generator an iterator.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping
from functools import wraps
from inspect import isasyncgen, iscoroutine, signature
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, cast, overload

from ratoon_client.async_client import AsyncRatoonClient
from ratoon_client.blocking.loop import LoopThread
from ratoon_client.config import ClientConfig
from ratoon_client.operation import AsyncOperationHandle
from ratoon_client.session import AsyncPolicySession
from ratoon_client.weights.receiver import AsyncWeightReceiver

P = ParamSpec("P")
T = TypeVar("T")
ResultT = TypeVar("ResultT")
AsyncT = TypeVar("AsyncT")
# A method of an asynchronous class, and of its face.
_Async = Callable[Concatenate[Any, P], T]


@overload
def blocking(
    method: _Async[P, Coroutine[Any, Any, AsyncOperationHandle[ResultT]]],
) -> _Async[P, OperationHandle[ResultT]]: ...
@overload
def blocking(
    method: _Async[P, Coroutine[Any, Any, tuple[T, AsyncOperationHandle[ResultT]]]],
) -> _Async[P, tuple[T, OperationHandle[ResultT]]]: ...
@overload
def blocking(method: _Async[P, Coroutine[Any, Any, T]]) -> _Async[P, T]: ...
@overload
def blocking(method: _Async[P, AsyncGenerator[T, None]]) -> _Async[P, Iterator[T]]: ...
@overload
def blocking(method: _Async[P, AsyncPolicySession]) -> _Async[P, PolicySession]: ...
@overload
def blocking(method: _Async[P, AsyncWeightReceiver]) -> _Async[P, WeightReceiver]: ...
def blocking(method: Callable[..., Any]) -> Callable[..., Any]:
    """Make the blocking method of an asynchronous one."""

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        loop: LoopThread = self._loop
        answer = method(self._async, *args, **kwargs)
        if isasyncgen(answer):
            return loop.iterate(cast("AsyncGenerator[Any, None]", answer))
        if iscoroutine(answer):
            answer = loop.run(answer)
        if isinstance(answer, tuple):
            return tuple(_faced(loop, part) for part in cast("tuple[Any, ...]", answer))
        return _faced(loop, answer)

    of_async = signature(method)
    returned = str(of_async.return_annotation).replace("Async", "")
    cast("Any", call).__signature__ = of_async.replace(return_annotation=returned)
    return call


class _Face(Generic[AsyncT]):
    """An asynchronous object, and the loop that runs it."""

    def __init__(self, loop: LoopThread, asynchronous: AsyncT) -> None:
        self._loop = loop
        self._async = asynchronous


class OperationHandle(_Face[AsyncOperationHandle[ResultT]]):
    """The handle of one operation; it holds the newest state seen."""

    @property
    def operation_id(self) -> str:
        """The operation's id, by which `client.operation` finds it again."""
        return self._async.operation_id

    @property
    def seq(self) -> int:
        """The operation's place in its policy's order; 0: it has none."""
        return self._async.seq

    def result(self, timeout_s: float | None = None, *, progress: bool = False) -> ResultT:
        """Wait for what the operation makes; see `AsyncOperationHandle.result`."""
        return self._loop.run(self._async.result(timeout_s, progress=progress))

    status = blocking(AsyncOperationHandle[Any].status)
    wait = blocking(AsyncOperationHandle[Any].wait)
    watch = blocking(AsyncOperationHandle[Any].watch)
    cancel = blocking(AsyncOperationHandle[Any].cancel)


class PolicySession(_Face[AsyncPolicySession]):
    """Sequenced calls to one policy: one loop runs those of all threads, and seqs stay contiguous.

    `AsyncPolicySession` says which keys calls have.
    """

    @property
    def policy_id(self) -> str:
        """The id of the policy."""
        return self._async.policy_id

    next_seq = blocking(AsyncPolicySession.next_seq)
    resync = blocking(AsyncPolicySession.resync)
    update = blocking(AsyncPolicySession.update)
    forward_backward = blocking(AsyncPolicySession.forward_backward)
    forward_backward_custom = blocking(AsyncPolicySession.forward_backward_custom)
    optim_step = blocking(AsyncPolicySession.optim_step)
    discard_gradients = blocking(AsyncPolicySession.discard_gradients)
    forward = blocking(AsyncPolicySession.forward)
    save_checkpoint = blocking(AsyncPolicySession.save_checkpoint)
    load_checkpoint = blocking(AsyncPolicySession.load_checkpoint)
    import_weights = blocking(AsyncPolicySession.import_weights)


class WeightReceiver(_Face[AsyncWeightReceiver]):
    """Brings versions into an engine; adapter and observer run on the client's own thread."""

    sync_once = blocking(AsyncWeightReceiver.sync_once)
    follow = blocking(AsyncWeightReceiver.follow)


_FACES: Mapping[type[Any], type[_Face[Any]]] = MappingProxyType(
    {
        AsyncOperationHandle: OperationHandle,
        AsyncPolicySession: PolicySession,
        AsyncWeightReceiver: WeightReceiver,
    }
)


def _faced(loop: LoopThread, answer: Any) -> Any:
    face = _FACES.get(cast("type[Any]", type(answer)))
    return answer if face is None else face(loop, answer)


class RatoonClient(_Face[AsyncRatoonClient]):
    """A client of one service; a context manager, or use `close`.

    Args:
        target: `grpc://host:port` (or just `host:port`), `http://host:port`, and with TLS
            `grpcs://...` or `https://...`.
        api_key: Goes with every call. Without TLS it goes to this machine only, unless `config`
            has `plain_text_key` or RATOON_PLAIN_TEXT_KEY is 1. Default: RATOON_API_KEY.
        ca_file: Authorities to verify the service with, in PEM. Default: RATOON_CA_FILE.
        cert_file: The client's own certificate, in PEM. Default: RATOON_CERT_FILE.
        key_file: The certificate's key, in PEM. Default: RATOON_KEY_FILE.
        timeout_s: Seconds that a call may take with its retries.
        attempt_timeout_s: Seconds that each try of a call may take.
        config: Further settings; arguments above take precedence over its values.

    Raises:
        InvalidArgumentError: An argument has no form on the wire. Methods raise it too, before
            anything is sent.
        RatoonApiError: The service refuses a call.
        TransportError: The service does not answer.
        UnusableClientError: The client is closed, belongs to another process, or is called on its
            own thread.
    """

    def __init__(
        self,
        target: str,
        *,
        api_key: str | None = None,
        ca_file: Path | str | None = None,
        cert_file: Path | str | None = None,
        key_file: Path | str | None = None,
        timeout_s: float | None = None,
        attempt_timeout_s: float | None = None,
        config: ClientConfig | None = None,
    ) -> None:
        asynchronous = AsyncRatoonClient(
            target,
            api_key=api_key,
            ca_file=ca_file,
            cert_file=cert_file,
            key_file=key_file,
            timeout_s=timeout_s,
            attempt_timeout_s=attempt_timeout_s,
            config=config,
        )
        super().__init__(LoopThread(), asynchronous)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection for good; operations on the service go on.

        A second call does nothing, and so does a call in a process that was forked from the
        client's.
        """
        if self._loop.is_running:
            self._loop.run(self._async.close())
            self._loop.stop()

    create_policy = blocking(AsyncRatoonClient.create_policy)
    delete_policy = blocking(AsyncRatoonClient.delete_policy)
    get_policy = blocking(AsyncRatoonClient.get_policy)
    list_policies = blocking(AsyncRatoonClient.list_policies)
    policy = blocking(AsyncRatoonClient.policy)
    forward = blocking(AsyncRatoonClient.forward)
    upload_part = blocking(AsyncRatoonClient.upload_part)
    operation = blocking(AsyncRatoonClient.operation)
    get_operation = blocking(AsyncRatoonClient.get_operation)
    cancel_operation = blocking(AsyncRatoonClient.cancel_operation)
    list_checkpoints = blocking(AsyncRatoonClient.list_checkpoints)
    weight_manifest = blocking(AsyncRatoonClient.weight_manifest)
    watch_weights = blocking(AsyncRatoonClient.watch_weights)
    ack_weights = blocking(AsyncRatoonClient.ack_weights)
    gradient_manifest = blocking(AsyncRatoonClient.gradient_manifest)
    fetch_file = blocking(AsyncRatoonClient.fetch_file)
    fetch_weights = blocking(AsyncRatoonClient.fetch_weights)
    pull_weights = blocking(AsyncRatoonClient.pull_weights)
    weight_receiver = blocking(AsyncRatoonClient.weight_receiver)
    server_info = blocking(AsyncRatoonClient.server_info)
    health = blocking(AsyncRatoonClient.health)
