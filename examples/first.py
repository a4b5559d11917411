from transformers import AutoTokenizer

from ratoon_client import Loss, Optim, RatoonClient, SamplingParams, group, rollout

with RatoonClient("grpc://127.0.0.1:8443") as client:
    client.create_policy("first", preset="tiny", seed=7).result()  # or model_folder="qwen3-0.6b"
    session = client.policy("first")
    tokenizer = AutoTokenizer.from_pretrained(client.pull_weights("first", "weights").folder)
    messages = [{"role": "user", "content": "What is 2+2?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    while session.next_seq() <= 20:  # run it again after Ctrl-C: it goes on where it was
        sampled = client.sample("first", prompt, SamplingParams(num_samples=32, max_tokens=8))
        rollouts = []
        for sequence in sampled.sequences:
            text = tokenizer.decode(sequence.tokens, skip_special_tokens=True)
            rollouts.append(
                rollout(
                    response=sequence.tokens,  # the end of turn was sampled too: it is trained
                    sampler_logprobs=sequence.logprobs,
                    reward=sum(c.isdigit() for c in text) / 8,  # yours goes here
                    policy_version=sampled.version,
                )
            )
        update = session.update(
            [group("sum", prompt, rollouts)], loss=Loss("grpo"), optim=Optim(learning_rate=3e-3)
        )
        print(update.result())  # version, reward, loss, and a sampler KL of about 0: both agree
