"""GRPO on a model, a file of prompts and a reward of your own, against a running `ratoon serve`.

    python examples/grpo.py my-model train.jsonl reward.py --eval test.jsonl

`my-model` is a folder below the service's models root, or a preset ("tiny"). A line of a data file
has `prompt` (text) or `messages` (chat turns), and whatever the reward needs beside them. The file
of the reward has a function `reward(response: str, example: dict) -> float`, and where lines have
neither, `messages(example: dict) -> list[dict]`. A line of --sft ends with the answer: `messages`
whose last turn is the assistant's, or `prompt` and `response`.

The sampler is this process's own copy of the model, or with --vllm a vLLM server on the folder
WORK/latest (docs/recipes.md has its flags). What a call does is a function of its seq alone: a run
that is stopped at any moment, and started again with the same arguments, goes on where it ended.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from ratoon_client import (
    Adapter,
    Group,
    Lora,
    Loss,
    Optim,
    PolicySession,
    RatoonClient,
    RatoonClientError,
    Rollout,
    StepReport,
    VllmAdapter,
    WeightReceiver,
    group,
    rollout,
)
from ratoon_client.weights.hf_module import ModuleAdapter

Example = dict[str, Any]
Messages = list[dict[str, str]]
# Requests that a vLLM server has at a time.
AT_ONCE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What the file of the reward has; `messages` None: each line has its own prompt."""

    reward: Callable[[str, Example], float]
    messages: Callable[[Example], Messages] | None

    def examples(self, path: Path | None) -> list[Example]:
        """The lines of a data file, each with `messages` or a `prompt`."""
        lines = read_lines(path) if path else {}
        for number, line in lines.items():
            if "prompt" in line or "messages" in line:
                continue
            if self.messages is None:
                has = ", ".join(line) or "nothing"
                raise SystemExit(
                    f"{path}:{number}: a line with {has}, expected `prompt` or `messages`, or a"
                    " function messages(example) beside the reward"
                )
            line["messages"] = self.messages(line)
        return list(lines.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Token ids [R] of a response and their log-probs [R] at temperature 1."""

    tokens: list[int]
    logprobs: list[float]
    truncated: bool


class Sampler(Protocol):
    def sample(
        self, prompts: list[list[int]], count: int, *, greedy: bool = False
    ) -> list[list[Sample]]:
        """`count` responses to each of the prompts."""
        ...


class ModuleSampler:
    """The newest version in this process; the receiver's adapter writes to it under `lock`."""

    def __init__(self, folder: Path, *, base: str | None, max_tokens: int) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        # generate() is typed as a tensor.
        self.model: Any = AutoModelForCausalLM.from_pretrained(base or folder, dtype="auto")
        if base:
            from peft import PeftModel

            self.model = PeftModel.from_pretrained(self.model, str(folder))
        self.model.to(device)
        self.lock = threading.Lock()
        stop = self.model.generation_config.eos_token_id
        self._stops = set(stop if isinstance(stop, list) else [stop]) - {None}
        self._config = {
            "max_new_tokens": max_tokens,
            "eos_token_id": list(self._stops) or None,
            "pad_token_id": 0,
            "return_dict_in_generate": True,
            "output_logits": True,
        }

    def sample(
        self, prompts: list[list[int]], count: int, *, greedy: bool = False
    ) -> list[list[Sample]]:
        return [self._responses(prompt, count, greedy=greedy) for prompt in prompts]

    @torch.inference_mode()
    def _responses(self, prompt: list[int], count: int, *, greedy: bool) -> list[Sample]:
        tokens = torch.tensor([prompt] * count, device=self.model.device)
        # The whole distribution, as the trainer has it.
        drawn = {} if greedy else {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
        config = GenerationConfig(do_sample=not greedy, **self._config, **drawn)
        with self.lock:
            sampled = self.model.generate(
                tokens, attention_mask=torch.ones_like(tokens), generation_config=config
            )
        responses = sampled.sequences[:, len(prompt) :]
        logprobs = torch.stack(sampled.logits, dim=1).float().log_softmax(-1)
        chosen = logprobs.gather(2, responses[..., None])[..., 0]
        return [self._cut(*row) for row in zip(responses.tolist(), chosen.tolist(), strict=True)]

    def _cut(self, tokens: list[int], logprobs: list[float]) -> Sample:
        """Up to the end of turn, which was sampled too and is trained."""
        ends = [place for place, token in enumerate(tokens) if token in self._stops]
        length = ends[0] + 1 if ends else len(tokens)
        return Sample(
            tokens=tokens[:length],
            logprobs=logprobs[:length],
            truncated=bool(self._stops) > bool(ends),
        )


class VllmSampler:
    """A vLLM server's /v1/completions: token ids in, token ids and log-probs out."""

    def __init__(self, url: str, *, max_tokens: int) -> None:
        self._http = httpx.Client(base_url=url, timeout=600.0, trust_env=False)
        self._max_tokens = max_tokens

    def sample(
        self, prompts: list[list[int]], count: int, *, greedy: bool = False
    ) -> list[list[Sample]]:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(lambda prompt: self._responses(prompt, count, greedy), prompts))

    def _responses(self, prompt: list[int], count: int, greedy: bool) -> list[Sample]:
        body = {
            "prompt": prompt,
            "n": count,
            "max_tokens": self._max_tokens,
            "temperature": 0.0 if greedy else 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "logprobs": 0,
            "return_token_ids": True,
        }
        answer = self._http.post("/v1/completions", json=body).raise_for_status().json()
        return [
            Sample(
                tokens=choice["token_ids"],
                logprobs=choice["logprobs"]["token_logprobs"],
                truncated=choice["finish_reason"] == "length",
            )
            for choice in answer["choices"]
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """Chat turns and texts as the model's own tokens."""

    tokenizer: Any
    template: dict[str, Any]

    def prompt(self, example: Example) -> list[int]:
        if "messages" not in example:
            return self.tokenizer.encode(example["prompt"])
        return self._chat(example["messages"], add_generation_prompt=True)

    def taught(self, example: Example) -> tuple[list[int], list[int]]:
        """Prompt and response of a line of --sft."""
        if "messages" not in example:
            prompt, response = self.prompt(example), str(example["response"])
            ids = self.tokenizer.encode(response, add_special_tokens=False)
            return prompt, [*ids, self.tokenizer.eos_token_id]
        *before, _ = example["messages"]
        prompt = self._chat(before, add_generation_prompt=True)
        whole = self._chat(example["messages"], add_generation_prompt=False)
        if whole[: len(prompt)] != prompt:
            raise SystemExit("the chat template writes another prompt once the answer is there")
        return prompt, whole[len(prompt) :]

    def response(self, sample: Sample) -> str:
        return self.tokenizer.decode(sample.tokens, skip_special_tokens=True)

    def _chat(self, messages: Sequence[Example], *, add_generation_prompt: bool) -> list[int]:
        return self.tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=add_generation_prompt,
            return_dict=False,
            **self.template,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What one seq is: `sft` or `grpo` with the number of its batch, or `save`."""

    kind: str
    number: int


def call_of(seq: int, *, sft_updates: int, save_every: int) -> Call:
    """The warm start comes first; a checkpoint follows every `save_every` updates (0: none)."""
    if seq <= sft_updates:
        return Call(kind="sft", number=seq - 1)
    place = seq - sft_updates - 1
    if not save_every:
        return Call(kind="grpo", number=place)
    block, inside = divmod(place, save_every + 1)
    if inside == save_every:
        return Call(kind="save", number=(block + 1) * save_every)
    return Call(kind="grpo", number=block * save_every + inside)


def batch_of(examples: Sequence[Example], number: int, size: int) -> list[Example]:
    """The `number`-th batch: every example once an epoch, shuffled anew in each."""
    batches = max(1, len(examples) // size)
    epoch, place = divmod(number, batches)
    shuffled = random.Random(epoch).sample(examples, len(examples))
    return shuffled[place * size : (place + 1) * size]


def read_lines(path: Path) -> dict[int, Example]:
    """The objects of a file of JSON lines by the line's number, at least one."""
    lines: dict[int, Example] = {}
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                lines[number] = dict(json.loads(line))
            except (ValueError, TypeError) as err:
                raise SystemExit(f"{path}:{number}: expected an object in JSON ({err})") from err
    if not lines:
        raise SystemExit(f"{path}: no line of JSON")
    return lines


def read_taught(path: Path) -> list[Example]:
    """The lines of --sft, each with an answer."""
    lines = read_lines(path)
    for number, line in lines.items():
        if "messages" not in line and not {"prompt", "response"} <= line.keys():
            raise SystemExit(f"{path}:{number}: expected `messages`, or `prompt` and `response`")
    return list(lines.values())


def read_task(path: Path) -> Task:
    spec = importlib.util.spec_from_file_location("reward", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "reward"):
        raise SystemExit(f"{path}: no function reward(response, example)")
    return Task(reward=module.reward, messages=getattr(module, "messages", None))


class Run:
    """One policy from its creation to the last update that was asked for."""

    def __init__(self, options: argparse.Namespace, client: RatoonClient) -> None:
        self._options = options
        self._client = client
        self._session: PolicySession = client.policy(options.policy)
        self._task = read_task(options.reward)
        self._train, self._test = map(self._task.examples, (options.data, options.eval))
        self._sft = read_taught(options.sft) if options.sft else []
        self.version = 0
        self.reports: list[StepReport] = []
        self.rewards: dict[int, float] = {}

    def run(self) -> None:
        options, client = self._options, self._client
        # Another call of the same arguments finds the policy that is there.
        base = "preset" if options.model in client.server_info().presets else "model_folder"
        spec: dict[str, Any] = {base: options.model, "dtype": options.dtype, "seed": options.seed}
        if options.lora:
            spec["lora"] = Lora(rank=options.lora, alpha=2.0 * options.lora)
        print(f"policy {options.policy}: created from {options.model}, or found", flush=True)
        client.create_policy(options.policy, **spec).result()
        pulled = client.pull_weights(options.policy, options.work)
        self.version = pulled.version
        size = min(options.prompts, len(self._train))
        print(f"version {self.version} in {pulled.folder}, batches of {size} prompts", flush=True)
        tokens = AutoTokenizer.from_pretrained(options.base or pulled.folder)
        self._texts = Texts(tokenizer=tokens, template=options.template)
        with self._open_sampler(pulled.folder) as (sampler, adapter):
            self._sampler = sampler
            receiver = client.weight_receiver(options.policy, options.work / "mirror", adapter)
            if options.vllm:
                # The server may have been left on an earlier version.
                self._receive(receiver)
            while self._step():
                self._receive(receiver)

    def _receive(self, receiver: WeightReceiver) -> None:
        received = receiver.sync_once()
        self.version = self.version if received is None else received.version

    @contextmanager
    def _open_sampler(self, folder: Path) -> Iterator[tuple[Sampler, Adapter]]:
        options = self._options
        if options.vllm:
            with VllmAdapter(options.vllm) as adapter:
                yield VllmSampler(options.vllm, max_tokens=options.max_tokens), adapter
        else:
            base = options.base if options.lora else None
            sampler = ModuleSampler(folder, base=base, max_tokens=options.max_tokens)
            yield sampler, ModuleAdapter(sampler.model, lock=sampler.lock)

    def _step(self) -> bool:
        """Make the policy's next call; False: the last one has been made."""
        options = self._options
        seq = self._session.next_seq()
        call = call_of(seq, sft_updates=options.sft_updates, save_every=options.save_every)
        is_evaluated = options.eval_every and call.number % options.eval_every == 0
        if call.kind == "grpo" and self._test and is_evaluated and call.number not in self.rewards:
            self._evaluate(call.number)
        if call.number >= options.updates and call.kind == "grpo":
            return False
        if call.kind == "save":
            saved = self._session.save_checkpoint(f"update-{call.number}").result()
            print(f"saved {saved.checkpoint_id}", flush=True)
            return True
        groups, loss, divisor = self._batch(call)
        optim = Optim(learning_rate=options.learning_rate, divide_constant=divisor)
        report = self._session.update(groups, loss=loss, optim=optim).result().report
        self.reports.append(report)
        print(f"{call.kind} {call.number + 1}: {report}", flush=True)
        return True

    def _batch(self, call: Call) -> tuple[list[Group], Loss, float | None]:
        """Groups, the loss, and the constant that divides it where it has one."""
        if call.kind == "sft":
            examples = batch_of(self._sft, call.number, self._options.prompts)
            taught = [self._texts.taught(example) for example in examples]
            groups = [
                group(f"{call.number}-{index}", prompt, [rollout(response=response)])
                for index, (prompt, response) in enumerate(taught)
            ]
            return groups, Loss("cross_entropy"), None
        torch.manual_seed(self._options.seed + call.number)
        examples = batch_of(self._train, call.number, self._options.prompts)
        prompts = [self._texts.prompt(example) for example in examples]
        sampled = self._sampler.sample(prompts, self._options.responses)
        groups = [
            group(
                f"{call.number}-{index}",
                prompt,
                [self._rollout(sample, example) for sample in samples],
            )
            for index, (prompt, samples, example) in enumerate(
                zip(prompts, sampled, examples, strict=True)
            )
        ]
        kind = self._options.loss
        # A batch is one update, so the old policy is the one that is trained.
        loss = Loss(kind, old_logprobs="on_policy" if kind == "gspo" else None)
        return groups, loss, self._options.max_tokens if kind == "dr_grpo" else None

    def _rollout(self, sample: Sample, example: Example) -> Rollout:
        return rollout(
            response=sample.tokens,
            sampler_logprobs=sample.logprobs,
            reward=float(self._task.reward(self._texts.response(sample), example)),
            policy_version=self.version,
            truncated=sample.truncated,
        )

    def _evaluate(self, number: int) -> None:
        """Mean reward of the most likely answers to prompts that are not trained on."""
        prompts = [self._texts.prompt(example) for example in self._test]
        answers = self._sampler.sample(prompts, 1, greedy=True)
        rewards = [
            self._task.reward(self._texts.response(answer), example)
            for (answer,), example in zip(answers, self._test, strict=True)
        ]
        self.rewards[number] = sum(rewards) / len(rewards)
        print(f"held out after {number} updates: reward {self.rewards[number]:.3f}", flush=True)


def json_object(text: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError) as err:
        raise argparse.ArgumentTypeError(f"{text!r} is no object in JSON ({err})") from err


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="GRPO on your model, your prompts, your reward.")
    parser.add_argument("model", help="a folder below the models root, or a preset: tiny")
    parser.add_argument("data", type=Path, help="JSON lines: prompt or messages, and more")
    parser.add_argument("reward", type=Path, help="a file with reward(response, example)")
    parser.add_argument("--url", default="grpc://127.0.0.1:8443")
    parser.add_argument("--policy", default="grpo", help="its name in the service")
    parser.add_argument("--work", type=Path, help="versions go here; default: POLICY-work")
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--prompts", type=int, default=8, help="groups in a batch")
    parser.add_argument("--responses", type=int, default=16, help="rollouts of a group")
    parser.add_argument("--max-tokens", type=int, default=256, help="of a response")
    parser.add_argument("--loss", default="grpo", help="grpo, dapo, dr_grpo, gspo, ...")
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--dtype", default="bfloat16", help="of the weights")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="0: full fine-tuning")
    parser.add_argument("--base", help="with --lora: the model's folder as this process finds it")
    parser.add_argument("--sft", type=Path, help="JSON lines that a warm start learns by heart")
    parser.add_argument("--sft-updates", type=int, default=0)
    parser.add_argument("--eval", type=Path, help="JSON lines of held-out prompts")
    parser.add_argument("--eval-every", type=int, default=20, metavar="UPDATES")
    parser.add_argument("--save-every", type=int, default=50, metavar="UPDATES", help="0: never")
    parser.add_argument(
        "--template", type=json_object, default={}, metavar="JSON", help="to the template"
    )
    parser.add_argument("--vllm", metavar="URL", help="sample by this server")
    options = parser.parse_args(arguments)
    options.work = options.work or Path(f"{options.policy}-work")
    if options.lora and not (options.base or options.vllm):
        parser.error("--lora: --base says where the sampler finds the model")
    if options.sft_updates and not options.sft:
        parser.error("--sft-updates: --sft names the examples")
    return options


def main(arguments: Sequence[str] | None = None) -> Run:
    options = parse(arguments)
    with RatoonClient(options.url) as client:
        run = Run(options, client)
        run.run()
    return run


if __name__ == "__main__":
    try:
        main()
    except (RatoonClientError, httpx.HTTPError, OSError) as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error
    except KeyboardInterrupt:
        raise SystemExit("stopped: the same command goes on with the update that is next") from None
