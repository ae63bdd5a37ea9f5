"""The RL-PLUS loss of a batch, without a trainer: `python examples/loss.py`, some seconds on a CPU.

The policy is a small random Qwen2. The batch has four prompts with eight responses each, of which the last one is a
correct demonstration by another author. The loss and the gradients of all weights come straight from the hidden states;
the logits are never stored whole. The example compares them with a computation that does store them.
"""

try:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    import rlplus
except ModuleNotFoundError as missing:
    raise SystemExit(f"{missing.name} is not installed: pip install -e . transformers") from None

PROMPTS, MEMBERS = 4, 8
PROMPT, RESPONSE = 6, 10  # tokens
SIZES = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}


def main() -> None:
    torch.manual_seed(0)
    lm = Qwen2ForCausalLM(Qwen2Config(vocab_size=5000, **SIZES, **HEADS))
    tokens = torch.randint(5000, (PROMPTS * MEMBERS, PROMPT + RESPONSE))
    group = torch.arange(PROMPTS).repeat_interleave(MEMBERS)
    demonstrated = torch.arange(PROMPTS * MEMBERS) % MEMBERS == MEMBERS - 1
    reward = torch.where(demonstrated, 1.0, (torch.rand(len(tokens)) < 0.2).float())
    length = torch.randint(1, RESPONSE + 1, (len(tokens), 1))
    mask = torch.arange(RESPONSE) < length

    def loss(backend: str) -> rlplus.PolicyLoss:
        # The state before a token predicts it.
        hidden = lm.model(tokens).last_hidden_state[:, PROMPT - 1 : -1]
        return rlplus.linear_policy_loss(
            hidden,
            target=tokens[:, PROMPT:],
            **rlplus.head_of(lm),  # the weight of the head; bias, scale and softcap where the model has them
            old_logprob=None,  # the policy that sampled is the current one
            advantage=rlplus.group_advantages(reward, group)[:, None],
            token_weight=rlplus.token_weights(mask, "token"),
            external=demonstrated[:, None].expand_as(mask),
            objective=rlplus.Objective.preset("rlplus"),
            backend=backend,
        )

    gradients = {}
    for backend in ("auto", "reference"):  # reference: plain PyTorch on whole logits
        lm.zero_grad()
        out = loss(backend)
        out.loss.backward()
        gradients[backend] = torch.cat([p.grad.flatten() for p in lm.parameters()])
        print(f"{backend:>9}: loss {out.loss:.6f}, gradient norm {gradients[backend].norm():.6f}")
    difference = (gradients["auto"] - gradients["reference"]).norm() / gradients["reference"].norm()
    print(f"relative difference of the gradients: {difference:.1e}")
    print(f"mean entropy of the {int(mask.sum())} tokens: {out.entropy[mask].mean():.3f} nats")


if __name__ == "__main__":
    main()
