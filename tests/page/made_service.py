"""A server that answers the page's calls from `made_runs`, and serves the page's own files.

It counts what it is asked, can ask for a key, and can be made to fail.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ratoon.api.http.page import page_routes
from tests.api.served import LOCALHOST, served
from tests.page import made_runs
from tests.page.made_runs import MadeRun


@dataclass(slots=True, kw_only=True)
class MadeService:
    """What is served. `key`: the one that is asked for; None: none is."""

    runs: dict[str, MadeRun]
    key: str | None = None
    forest: dict[str, list[Any]] | None = None
    is_down: bool = False
    asked: Counter[str] = field(default_factory=Counter)
    url: str = ""

    def app(self) -> Starlette:
        routes = {
            "/v1/info": self._info,
            "/v1/policies": self._policies,
            "/v1/policies/{policy}": self._policy,
            "/v1/policies/{policy}/steps": self._steps,
            "/v1/policies/{policy}/weights": self._weights,
            "/v1/policies/{policy}/checkpoints": self._checkpoints,
            "/v1/policies/{policy}/steps/{seq:int}/rollouts": self._rollouts,
            "/v1/policies/{policy}/steps/{seq:int}/rollouts/{group:int}/{index:int}": self._rollout,
            "/v1/operations": self._operations,
        }
        calls = [Route(path, self._guarded(path, call)) for path, call in routes.items()]
        return Starlette(routes=[*page_routes(), *calls])

    def _guarded(self, path: str, call: Any) -> Any:
        async def answer(request: Request) -> Response:
            self.asked[path] += 1
            if self.is_down:
                return _error(503, "UNAVAILABLE", "the engine does not answer")
            if (
                self.key is not None
                and request.headers.get("authorization") != f"Bearer {self.key}"
            ):
                return _error(401, "UNAUTHENTICATED", "the API key is unknown, revoked or expired")
            policy = request.path_params.get("policy")
            if policy is not None and policy not in self.runs:
                return _error(404, "POLICY_NOT_FOUND", f"policy_id: no policy {policy}")
            return JSONResponse(call(request))

        return answer

    def _run(self, request: Request) -> MadeRun:
        return self.runs[request.path_params["policy"]]

    def _info(self, _: Request) -> Any:
        return {"version": "0.1.0", "device": "cuda"}

    def _policies(self, _: Request) -> Any:
        return {"policies": [made_runs.policy(run) for run in self.runs.values()]}

    def _policy(self, request: Request) -> Any:
        return made_runs.policy(self._run(request))

    def _steps(self, request: Request) -> Any:
        query = request.query_params
        return made_runs.list_steps(
            self._run(request),
            query.getlist("figures"),
            int(query.get("after_seq", 0)),
            int(query.get("max_points", 1000)),
        )

    def _weights(self, request: Request) -> Any:
        newest = self._run(request).num_steps
        versions = [
            {
                "version": newest - i,
                "size_bytes": 1_192_135_096,
                "delta_bytes": 231_002_113 - 7_000_000 * i,
                "published_at": f"2026-11-28T09:59:0{4 - i}.000Z",
                "is_held": i == 1,
                "names": [],
            }
            for i in range(2)
        ]
        receivers = [
            {
                "receiver_id": f"vllm-{i}",
                "version": newest - i,
                "lag": i,
                "holds_version": newest - 1 if i else None,
                "last_seen": "2026-11-28T09:59:05.000Z",
            }
            for i in range(3)
        ]
        return {"versions": versions, "receivers": receivers}

    def _checkpoints(self, request: Request) -> Any:
        newest = self._run(request).num_steps
        return {
            "checkpoints": [
                {
                    "checkpoint_id": f"auto-{version}",
                    "version": version,
                    "seq": version,
                    "replay_from_seq": version + 1,
                    "created_at": "2026-11-28T09:40:00.000Z",
                    "size_bytes": 7_152_810_576,
                }
                for version in range(20, newest + 1, max(1, newest // 3))
            ]
        }

    def _rollouts(self, request: Request) -> Any:
        answer = made_runs.rollouts(self._run(request), request.path_params["seq"])
        return answer if self.forest is None else {**answer, "forest": self.forest}

    def _rollout(self, request: Request) -> Any:
        path = request.path_params
        place = (path["seq"], path["group"], path["index"])
        return made_runs.kept(self._run(request), *place, whole=True)

    def _operations(self, request: Request) -> Any:
        query = request.query_params
        runs = [
            run for run in self.runs.values() if query.get("policy_id") in (None, run.policy_id)
        ]
        seq, size = int(query.get("seq", 0)), int(query.get("page_size", 50))
        after = int(query.get("page_token") or 0)
        pairs = [
            (run, one)
            for run in runs
            for one in ([seq] if seq else range(run.num_steps, 0, -1))
            if one <= run.num_steps
        ]
        page = [made_runs.operation(*pair) for pair in pairs[after : after + size]]
        more = str(after + size) if after + size < len(pairs) else ""
        return {"operations": page, "next_page_token": more}


def _error(status: int, code: str, message: str) -> JSONResponse:
    return JSONResponse({"error": {"code": code, "message": message}}, status_code=status)


@contextmanager
def made_service(*runs: MadeRun, **changes: Any) -> Iterator[MadeService]:
    """The service on a thread's event loop, behind the gateway's own HTTP listener."""
    service = MadeService(runs={run.policy_id: run for run in runs}, **changes)
    started, stop = threading.Event(), threading.Event()

    async def serve() -> None:
        async with served(service.app()) as port:
            service.url = f"http://{LOCALHOST}:{port}/"
            started.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    assert started.wait(60), "the server has not started"
    try:
        yield service
    finally:
        stop.set()
        thread.join(60)
