"""RL-PLUS in one file: transformers, PyTorch and the loss of rlplus, without a trainer.

    pip install -e . transformers
    python examples/train_minimal.py      # about a minute on a CPU

A random LLaMA of 110,000 parameters learns to reverse three digits: "407=" -> "704.". A random model hardly ever
finds an answer by itself, so GRPO has nothing to start from. RL-PLUS (arXiv 2508.00222) replaces one rollout of each
group by a correct demonstration. Each step

1. samples seven responses to each of 32 problems, and appends the demonstration to each group;
2. rewards right answers with 1, and takes advantages within each group (eq. 3);
3. takes an optimizer step on the loss of eq. 7: a sampled token counts by its ratio r = p / p_old, a demonstrated one
   by the multiple importance sampling ratio 2 p / (p_author + p_old), with p_author estimated as (1 + p_old) / 2, times
   the exploration weight (1 - p) ** 0.5, which is small for tokens that the policy is already sure of.

p is the policy's probability of a token, p_old the sampling policy's.
"""

import random

try:
    import torch
    from torch import Tensor
    from transformers import LlamaConfig, LlamaForCausalLM

    import rlplus
except ModuleNotFoundError as missing:
    raise SystemExit(f"{missing.name} is not installed: pip install -e . transformers") from None

VOCABULARY = "0123456789=."
END = VOCABULARY.index(".")  # ends a response, and pads behind it
PROMPT, RESPONSE = 4, 4  # tokens
PROBLEMS, MEMBERS = 32, 8  # prompts per step, responses per prompt
HELD_OUT = 100  # problems, out of the 1000
LR = 2e-3
OBJECTIVE = rlplus.Objective.preset("rlplus")


def encode(texts: list[str]) -> Tensor:
    """Token ids (len(texts), length) of texts of one length."""
    return torch.tensor([[VOCABULARY.index(c) for c in text] for text in texts])


def prompts(problems: list[str]) -> Tensor:
    return encode([f"{digits}=" for digits in problems])


def answers(problems: list[str]) -> Tensor:
    """The demonstrations, END included."""
    return encode([f"{digits[::-1]}." for digits in problems])


def make_policy() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(VOCABULARY),
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=PROMPT + RESPONSE,
            initializer_range=0.1,
            bos_token_id=None,
            eos_token_id=END,
            pad_token_id=END,
        )
    )


@torch.no_grad()
def respond(lm: LlamaForCausalLM, problems: list[str], n: int, greedy: bool = False) -> Tensor:
    """n responses to each problem: (len(problems), n, RESPONSE)."""
    start = prompts(problems).repeat_interleave(n, dim=0)
    options = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    tokens = lm.generate(start, attention_mask=torch.ones_like(start), max_new_tokens=RESPONSE, **options)
    response = tokens[:, PROMPT:]
    response = torch.nn.functional.pad(response, (0, RESPONSE - response.shape[1]), value=END)
    return response.view(len(problems), n, RESPONSE)


def rewards(response: Tensor, problems: list[str]) -> Tensor:
    """1 for the right answer, else 0: (P, n, RESPONSE) -> (P, n)."""
    return (response == answers(problems)[:, None]).all(-1).float()


def train_step(lm: LlamaForCausalLM, optimizer: torch.optim.Optimizer, problems: list[str]) -> tuple[float, float]:
    """One batch; returns the mean reward of the rollouts and the policy's mean probability of a demonstrated token."""
    # The demonstration is the last member of its group; the rollout in its place is not generated.
    response = torch.cat([respond(lm, problems, MEMBERS - 1), answers(problems)[:, None]], dim=1)
    reward = rewards(response, problems)
    group = torch.arange(len(problems))[:, None].expand_as(reward)
    advantage = rlplus.group_advantages(reward, group)
    external = torch.zeros(response.shape, dtype=torch.bool)
    external[:, -1] = True
    ends = response == END
    mask = (ends.cumsum(-1) - ends.long()) == 0  # ends with the first END, which the policy wrote too

    prompt = prompts(problems)[:, None].expand(-1, MEMBERS, -1)
    tokens = torch.cat([prompt, response], dim=-1).flatten(0, 1)
    hidden = lm.model(tokens).last_hidden_state[:, PROMPT - 1 : -1]  # the state before a token predicts it
    out = rlplus.linear_policy_loss(
        hidden.view(*response.shape, -1),
        target=response,
        **rlplus.head_of(lm),
        old_logprob=None,  # one update per batch: the policy that sampled is the current one
        advantage=advantage[..., None],
        token_weight=rlplus.token_weights(mask, "token"),  # the mask, and the divisor of the loss
        external=external,
        objective=OBJECTIVE,
    )
    optimizer.zero_grad()
    out.loss.backward()
    torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
    optimizer.step()
    return reward[:, :-1].mean().item(), out.logprob[external].exp().mean().item()


def main(steps: int = 250) -> list[tuple[float, float]]:
    """Train, print a line every 20 steps, and return the numbers of every `train_step`."""
    torch.manual_seed(0)
    rng = random.Random(0)
    problems = [f"{number:03d}" for number in range(1000)]
    rng.shuffle(problems)
    held_out, known = problems[:HELD_OUT], problems[HELD_OUT:]
    lm = make_policy()
    optimizer = torch.optim.AdamW(lm.parameters(), lr=LR, betas=(0.9, 0.95))
    history = []
    for step in range(1, steps + 1):
        history.append(train_step(lm, optimizer, rng.sample(known, PROBLEMS)))
        if step % 20 == 0:
            reward, p = torch.tensor(history[-20:]).mean(0).tolist()
            print(f"step {step:4d}   reward of rollouts {reward:.3f}   p(demonstrated token) {p:.3f}")
    right = rewards(respond(lm, held_out, 1, greedy=True), held_out).mean().item()
    print(f"{right:.0%} of {HELD_OUT} problems that were not trained on are solved")
    return history


if __name__ == "__main__":
    main()
