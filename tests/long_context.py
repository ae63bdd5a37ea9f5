"""One training step on packed rows of a long context, as a separate process; prints its measurements as JSON.

    python tests/long_context.py FOLDER {fused,naive} TOKENS [SEQUENCES]

fused: the trainer's own path, `Policy` on `make_micro_batches`: DeepSpeed, packed rows, the fused head. naive:
the same model and batch with whole logits, as `log_softmax(lm_head(hidden))`. RSS is the process's high-water mark.
"""

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, Qwen2Config, Qwen2ForCausalLM

from rlplus.config import Config
from rlplus.data import MicroBatch, Sample, byte_tokenizer
from rlplus.learner import make_micro_batches
from rlplus.learner.policy import Policy
from rlplus.trainer.ranks import initialize_distributed

VOCABULARY = 151_936  # Qwen2.5-Math-7B's


def write_model(folder: Path, tokens: int) -> None:
    """A Qwen2 that is thin and has the real vocabulary."""
    torch.manual_seed(0)
    model = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=tokens,
        rope_parameters={"rope_type": "default", "rope_theta": 40000.0},
        tie_word_embeddings=False,
    )
    Qwen2ForCausalLM(model).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def make_config(folder: Path, tokens: int) -> Config:
    return Config.model_validate(
        {
            "output_dir": str(folder / "run"),
            "model": {"path": str(folder), "dtype": "float32", "gradient_checkpointing": True},
            "data": {"path": "-", "demonstration": "demonstration", "max_prompt_length": 8},
            "reward": {"kind": "exact_match"},
            "rollout": {"engine": "transformers", "max_response_length": tokens - 8},
            "train": {"steps": 1, "prompts_per_step": 1, "tokens_per_micro_batch": tokens, "lr": 1e-3},
        }
    )


def make_samples(tokens: int, sequences: int) -> list[Sample]:
    """Sequences that fill one row, of random tokens."""
    generator = torch.Generator().manual_seed(1)
    samples = []
    for i in range(sequences):
        response = torch.randint(VOCABULARY, (tokens // sequences - 8,), generator=generator).tolist()
        samples.append(Sample([1] * 8, response, 0, i == 0, False, None, advantage=1.0 if i % 2 else -1.0))
    return samples


def naive_update(policy: Policy, batch: MicroBatch) -> None:
    """The same step with whole logits, and the plainest of losses."""

    def op(hidden: torch.Tensor, weight: torch.Tensor, **_: Any) -> torch.Tensor:
        logprob = (hidden @ weight.t()).log_softmax(-1).gather(1, batch.target[:, None]).squeeze(1)
        return -(batch.advantage * batch.token_weight * logprob).sum()

    policy.engine.backward(policy.engine(batch, op))
    policy.engine.step()


def main() -> None:
    folder, kind, tokens = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    sequences = int(sys.argv[4]) if len(sys.argv) > 4 else 1
    config = make_config(folder, tokens)
    initialize_distributed()
    objective = config.algorithm.resolve().objective
    policy = Policy(config, str(folder), AutoConfig.from_pretrained(folder))
    algorithm = config.algorithm.resolve()
    (batch,) = make_micro_batches(make_samples(tokens, sequences), algorithm, config, 0, policy.device)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    start = time.perf_counter()
    if kind == "fused":
        policy.accumulate([batch], objective)
        applied = policy.step()
        assert applied
    else:
        naive_update(policy, batch)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    result = {
        "tokens": batch.tokens,
        "rows": len(batch.target),
        "seconds": time.perf_counter() - start,
        "step_bytes": peak - before,
        "peak_rss": peak,
        "grad_norm": policy.grad_norm,
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    if sys.argv[2] == "write":
        write_model(Path(sys.argv[1]), int(sys.argv[3]))
    else:
        main()
