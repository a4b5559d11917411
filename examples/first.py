import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ratoon_client import Loss, Optim, RatoonClient, group, rollout

with RatoonClient("grpc://127.0.0.1:8443") as client:
    client.create_policy("first", preset="tiny", seed=7).result()  # or model_folder="qwen3-0.6b"
    session = client.policy("first")
    while session.next_seq() <= 20:  # run it again after Ctrl-C: it goes on where it was
        pulled = client.pull_weights("first", "weights")  # weights/version-N, verified
        tokenizer = AutoTokenizer.from_pretrained(pulled.folder)
        sampler = AutoModelForCausalLM.from_pretrained(pulled.folder)

        messages = [{"role": "user", "content": "What is 2+2?"}]
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        sampled = sampler.generate(
            torch.tensor([prompt] * 32),
            attention_mask=torch.ones(32, len(prompt), dtype=torch.long),
            max_new_tokens=8,
            do_sample=True,
            temperature=1.0,
            top_p=1.0,  # the whole distribution, as the trainer has it
            top_k=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        logprobs = torch.stack(sampled.logits, dim=1).float().log_softmax(-1)
        rollouts = []
        for tokens, row in zip(sampled.sequences[:, len(prompt) :].tolist(), logprobs):
            stop = tokenizer.eos_token_id
            length = tokens.index(stop) + 1 if stop in tokens else len(tokens)
            tokens = tokens[:length]  # the end of turn was sampled too: it is trained
            text = tokenizer.decode(tokens, skip_special_tokens=True)
            rollouts.append(
                rollout(
                    response=tokens,
                    sampler_logprobs=row[range(length), tokens].tolist(),
                    reward=sum(c.isdigit() for c in text) / 8,  # yours goes here
                    policy_version=pulled.version,
                )
            )
        update = session.update(
            [group("sum", prompt, rollouts)], loss=Loss("grpo"), optim=Optim(learning_rate=3e-3)
        )
        print(update.result())  # version, reward, loss, and a sampler KL of about 0: both agree
