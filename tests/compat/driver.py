"""Every call of the SDK of the Tinker API, whatever its version, and what became of each.

It knows nothing of this service but URL and key. It prints a JSON object: a call's name to
`served`, `ignored` (accepted, without an effect), `absent` (not in this SDK), `refused: TEXT` or,
where the SDK cannot use an answer, `fails: TEXT`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import tinker  # pyright: ignore[reportMissingImports]  # in a folder of its own
from tinker import types  # pyright: ignore[reportMissingImports]

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
PATIENCE_S = 120.0
ADAM = types.AdamParams(learning_rate=1e-2, grad_clip_norm=1.0)
NEEDED = "create_lora_training_client"
found: dict[str, str] = {}


class IgnoredError(Exception):
    """Raised by a call whose arguments were accepted and had no effect."""


def note(name: str, call: Callable[[], Any]) -> Any:
    """Make the call, wait for its future, keep what became of it; its result, None without one."""
    try:
        answer = call()
        if hasattr(answer, "result"):
            answer = answer.result(PATIENCE_S)
    except IgnoredError:
        found[name] = "ignored"
    except (tinker.APIError, tinker.RequestFailedError) as error:
        body = error.body if isinstance(error, tinker.APIStatusError) else None
        text = str(error)
        if isinstance(body, dict):
            text = body.get("detail") or body["error"]["message"]
        found[name] = f"refused: {text}"
    except (AttributeError, TypeError, ValueError) as error:
        is_absent = any(
            said in str(error)
            for said in ("has no attribute", "unexpected keyword", "Input should be", "loss_fn")
        )
        found[name] = "absent" if is_absent else f"fails: {type(error).__name__}: {error}"
    else:
        found[name] = "served"
        return answer
    return None


def datum(**columns: float) -> types.Datum:
    size = len(TOKENS) - 1
    inputs = {name: np.full(size, value, np.float32) for name, value in columns.items()}
    return types.Datum(
        model_input=types.ModelInput.from_ints(TOKENS[:-1]),
        loss_fn_inputs={"target_tokens": np.array(TOKENS[1:], np.int64), **inputs},
    )


def supervised(client: Any) -> None:
    """Both passes of the one batch have the loss that its log-probs say."""
    data = [datum(weights=0.5)]
    for name, call in (("forward", client.forward), ("forward_backward", client.forward_backward)):
        answer = note(f"{name} cross_entropy", lambda call=call: call(data, "cross_entropy"))
        z = np.array(answer.loss_fn_outputs[0]["logprobs"].data)
        assert z.shape == (7,), z.shape
        assert abs(answer.metrics["loss:sum"] + 0.5 * z.sum()) < 1e-3, answer.metrics
    note("optim_step", lambda: client.optim_step(ADAM))


def reinforced(client: Any) -> None:
    data = [datum(advantages=0.5, logprobs=-1.0)]
    for loss in ("importance_sampling", "ppo", "cispo", "dro"):
        note(f"forward_backward {loss}", lambda loss=loss: client.forward_backward(data, loss))
    config = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
    note("forward_backward ppo, its clip", lambda: client.forward_backward(data, "ppo", config))
    client.optim_step(ADAM).result(PATIENCE_S)

    def custom(data: list[Any], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:  # noqa: ARG001
        return sum((each**2).sum() for each in logprobs), {"squares": 1.0}

    data = [datum(weights=0.0)]
    note("forward_backward_custom", lambda: client.forward_backward_custom(data, custom))
    client.optim_step(ADAM).result(PATIENCE_S)
    for loss in ("gspo", "stable_reinforce"):
        # An SDK that does not know a loss takes a seq for it, sends nothing, and is stuck then.
        if loss in get_args(types.LossFnType):
            note(f"forward_backward {loss}", lambda loss=loss: client.forward_backward(data, loss))
            # The step of a refused batch is none, and says so.
            note(f"optim_step behind {loss}", lambda: client.optim_step(ADAM))


def saved(service: Any, client: Any) -> str:
    path = note("save_state", lambda: client.save_state("a")).path
    note("save_state ttl_seconds", lambda: client.save_state("b", ttl_seconds=3600))
    note("save_state overwrite", lambda: client.save_state("a", overwrite=True))
    note("load_state", lambda: client.load_state(path))
    note("load_state_with_optimizer", lambda: client.load_state_with_optimizer(path))
    for name in ("", "_with_optimizer"):
        call = f"create_training_client_from_state{name}"
        note(call, lambda call=call: getattr(service, call)(path))
    return path


def sampled(service: Any, client: Any, base_model: str) -> None:
    """From named, unnamed and base weights; what a sample brings is as long as it was asked for."""
    create = service.create_sampling_client
    path = note("save_weights_for_sampler", lambda: client.save_weights_for_sampler("s")).path
    save = client.save_weights_and_get_sampling_client
    note("save_weights_and_get_sampling_client", save)
    note("save_weights_and_get_sampling_client inflight", lambda: save(kind="inflight"))
    note("create_sampling_client base_model", lambda: create(base_model=base_model))
    sampler = note("create_sampling_client model_path", lambda: create(model_path=path))
    prompt, num_tokens = types.ModelInput.from_ints(TOKENS), 4

    def sample(params: dict[str, Any], **options: Any) -> Any:
        # Without an end each sample has all tokens.
        params = {"max_tokens": num_tokens, "stop": [], **params}
        future = sampler.sample(prompt, 2, types.SamplingParams(**params), **options)
        answer = future.result(PATIENCE_S)
        for each in answer.sequences:
            assert len(each.tokens) == len(each.logprobs) == num_tokens, each
        assert len(answer.sequences) == 2, answer
        return answer

    def seeded() -> None:
        tokens = [[[*s.tokens] for s in sample({"seed": 5}).sequences] for _ in range(2)]
        assert tokens[0] == tokens[1], tokens

    def stopped() -> None:
        greedy = [*sample({"temperature": 0.0}).sequences[0].tokens]
        params = types.SamplingParams(max_tokens=num_tokens, temperature=0.0, stop=[greedy[1]])
        found = sampler.sample(prompt, 1, params).result(PATIENCE_S).sequences[0]
        assert [*found.tokens] == greedy[: greedy.index(greedy[1]) + 1], (found, greedy)
        assert found.stop_reason == "stop", found

    def compute_logprobs() -> None:
        found = sampler.compute_logprobs(prompt).result(PATIENCE_S)
        assert found[0] is None, found
        assert len(found) == len(TOKENS), found

    targets = types.TensorData.from_numpy(np.array([[each] for each in TOKENS[1:]], np.int64))
    note("sample", lambda: sample({}))
    note("sample, a seed", seeded)
    note("sample, a stop", stopped)
    note("sample, top_k and top_p", lambda: sample({"top_k": 3, "top_p": 0.9}))
    asked = {
        "include_prompt_logprobs": True,
        "topk_prompt_logprobs": 2,
        "topk_sample_logprobs": 2,
        "target_prompt_logprobs": targets,
        "prompt_alt_tokens_k": 2,
        "prompt_logprobs_last_n": 2,
    }
    for name, value in asked.items():
        # Without the prompt's log-probs an SDK itself refuses the last of them.
        options = {"include_prompt_logprobs": True, name: value}
        note(f"sample {name}", lambda options=options: sample({}, **options))
    note("compute_logprobs", compute_logprobs)


def listed(service: Any, model_id: str, path: str) -> None:
    rest = service.create_rest_client()
    session = model_id.partition(":")[0]

    def searched() -> Any:
        search = rest.search_sessions
        return search(types.SessionSearchRequest())

    def metadata() -> None:
        if rest.get_training_run(model_id).result(PATIENCE_S).user_metadata is None:
            raise IgnoredError

    def unembed() -> None:
        if not rest.get_weights_info_by_tinker_path(path).result(PATIENCE_S).train_unembed:
            raise IgnoredError

    note("search_sessions", searched)
    note(f"{NEEDED} user_metadata", metadata)
    note(f"{NEEDED} train_unembed", unembed)
    calls: dict[str, tuple[Any, ...]] = {
        "get_session": (session,),
        "list_sessions": (),
        "list_training_runs": (),
        "get_training_run": (model_id,),
        "get_training_run_by_tinker_path": (path,),
        "get_weights_info_by_tinker_path": (path,),
        "list_checkpoints": (model_id,),
        "list_user_checkpoints": (),
        "get_sampler": (rest.get_session(session).result(PATIENCE_S).sampler_ids[0],),
        "set_checkpoint_ttl_from_tinker_path": (path, 3600),
        "publish_checkpoint_from_tinker_path": (path,),
        "unpublish_checkpoint_from_tinker_path": (path,),
        "get_checkpoint_archive_url_from_tinker_path": (path,),
        "copy_weights": (path, "a"),
        "get_current_checkpoint_storage_usage": (),
        "delete_checkpoint_from_tinker_path": (path,),
    }
    for name, arguments in calls.items():
        note(name, lambda name=name, arguments=arguments: getattr(rest, name)(*arguments))


def main(base_model: str) -> None:
    service = note("ServiceClient", tinker.ServiceClient)
    note("get_server_capabilities", service.get_server_capabilities)
    client = note(
        NEEDED,
        lambda: service.create_lora_training_client(
            base_model, rank=4, seed=3, user_metadata={"a": "b"}
        ),
    )
    note("get_info", client.get_info)
    supervised(client)
    reinforced(client)
    path = saved(service, client)
    sampled(service, client, base_model)
    listed(service, client.model_id, path)

    def close() -> None:
        service.close("success").result(PATIENCE_S)

    note("close", close)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
