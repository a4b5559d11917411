"""The blocking client: the asynchronous one on a thread of its own, for any number of callers.

`blocking(method)` is a method of the same name, arguments and documentation that waits for the
answer on the client's own event loop. A handle, session or receiver in the answer becomes a
blocking one, and an asynchronous generator an iterator. A caller that is interrupted cancels what
it waits for.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import wraps
from inspect import isasyncgen, iscoroutine, signature
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, cast, overload

from ratoon_client.async_client import AsyncRatoonClient
from ratoon_client.caller import check_process, closed
from ratoon_client.config import ClientConfig
from ratoon_client.errors import UnusableClientError
from ratoon_client.operation import AsyncOperationHandle
from ratoon_client.session import AsyncPolicySession
from ratoon_client.weights.receiver import AsyncWeightReceiver

T = TypeVar("T")
P = ParamSpec("P")
ResultT = TypeVar("ResultT")
AsyncT = TypeVar("AsyncT")
# A method of an asynchronous class, and of its face.
_Async = Callable[Concatenate[Any, P], T]


class LoopThread:
    """Running from construction to `stop`; in a process that is forked meanwhile, not at all."""

    def __init__(self) -> None:
        self._process = os.getpid()
        # Reentrant: a watch that is collected while it is held is closed by a call of its own.
        self._stopping = threading.RLock()
        self._is_stopped = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="ratoon-client", daemon=True
        )
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return not self._is_stopped and self._process == os.getpid()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result, in the calling thread. Raises UnusableClientError."""
        try:
            self._check_thread()
        except UnusableClientError:
            coroutine.close()
            raise
        future = self._begin(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def iterate(self, items: AsyncGenerator[T, None]) -> Iterator[T]:
        """The items one by one; leaving the loop early closes the generator."""
        try:
            while True:
                try:
                    yield self.run(_next(items))
                except StopAsyncIteration:
                    return
        finally:
            # Not waited for: a watch may be collected on the loop's own thread.
            with suppress(UnusableClientError):
                self._begin(items.aclose())

    def stop(self) -> None:
        """Threads that still wait for something get CancelledError."""
        with self._stopping:
            if self._is_stopped:
                return
            self._is_stopped = True
        asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _begin(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        try:
            check_process(self._process)
            with self._stopping:
                if self._is_stopped:
                    raise closed()
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except UnusableClientError:
            coroutine.close()
            raise

    def _check_thread(self) -> None:
        """A wait on the loop's own thread would have no end."""
        if threading.current_thread() is self._thread:
            raise UnusableClientError(
                "a blocking call on the client's own thread, which runs adapters and on_event: make"
                " it on another thread, or with another client"
            )


async def _next(items: AsyncGenerator[T, None]) -> T:
    return await anext(items)


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    loop = asyncio.get_running_loop()
    await loop.shutdown_asyncgens()
    await loop.shutdown_default_executor()


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

    def result(self, timeout_s: float | None = None, *, progress: bool | None = None) -> ResultT:
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
    publish_version = blocking(AsyncPolicySession.publish_version)
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
    release_policy = blocking(AsyncRatoonClient.release_policy)
    get_policy = blocking(AsyncRatoonClient.get_policy)
    list_policies = blocking(AsyncRatoonClient.list_policies)
    policy = blocking(AsyncRatoonClient.policy)
    forward = blocking(AsyncRatoonClient.forward)
    sample = blocking(AsyncRatoonClient.sample)
    upload_part = blocking(AsyncRatoonClient.upload_part)
    operation = blocking(AsyncRatoonClient.operation)
    get_operation = blocking(AsyncRatoonClient.get_operation)
    operations = blocking(AsyncRatoonClient.operations)
    cancel_operation = blocking(AsyncRatoonClient.cancel_operation)
    steps = blocking(AsyncRatoonClient.steps)
    versions = blocking(AsyncRatoonClient.versions)
    list_checkpoints = blocking(AsyncRatoonClient.list_checkpoints)
    rollouts = blocking(AsyncRatoonClient.rollouts)
    rollout = blocking(AsyncRatoonClient.rollout)
    delete_checkpoint = blocking(AsyncRatoonClient.delete_checkpoint)
    delete_version = blocking(AsyncRatoonClient.delete_version)
    weight_manifest = blocking(AsyncRatoonClient.weight_manifest)
    watch_weights = blocking(AsyncRatoonClient.watch_weights)
    ack_weights = blocking(AsyncRatoonClient.ack_weights)
    gradient_manifest = blocking(AsyncRatoonClient.gradient_manifest)
    fetch_file = blocking(AsyncRatoonClient.fetch_file)
    fetch_weights = blocking(AsyncRatoonClient.fetch_weights)
    pull_weights = blocking(AsyncRatoonClient.pull_weights)
    export_weights = blocking(AsyncRatoonClient.export_weights)
    weight_receiver = blocking(AsyncRatoonClient.weight_receiver)
    server_info = blocking(AsyncRatoonClient.server_info)
    health = blocking(AsyncRatoonClient.health)
