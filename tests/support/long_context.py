"""One training step on packed rows of a long context, as a separate process; prints the ranks' measurements as JSON.

    python tests/support/long_context.py FOLDER write TOKENS
    python tests/support/long_context.py FOLDER {fused,naive} TOKENS SEQUENCES PRESET

write: the model, once, before the others. fused: the trainer's own path, `Policy` on `make_micro_batches`: DeepSpeed,
packed rows, the fused head; under torchrun with ZeRO-3 and sequence parallelism over all ranks. naive: the same model
and batch with whole logits, as `log_softmax(lm_head(hidden))`. RSS is the process's high-water mark.
"""

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, Qwen2Config, Qwen2ForCausalLM

from rlplus.common import agree
from rlplus.common.agree import initialize_distributed
from rlplus.train.config import Config
from rlplus.train.data import MicroBatch, Sample, byte_tokenizer
from rlplus.train.learner import make_micro_batches
from rlplus.train.learner.policy import Policy

VOCABULARY = 151_936  # Qwen2.5-Math-7B's


def write_model(folder: Path, tokens: int) -> None:
    """A Qwen2 that is thin and has the real vocabulary. Its attention is far from uniform."""
    torch.manual_seed(0)
    model = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=tokens,
        rope_parameters={"rope_type": "default", "rope_theta": 40000.0},
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    Qwen2ForCausalLM(model).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def make_config(folder: Path, tokens: int, preset: str) -> Config:
    ranks = dist.get_world_size()
    stage = 3 if ranks > 1 else 1
    shared = {"sequence_parallel": ranks, "zero_stage": stage, "tokens_per_micro_batch": tokens // ranks}
    return Config.model_validate(
        {
            "output_dir": str(folder / "run"),
            "model": {"path": str(folder), "dtype": "float32", "gradient_checkpointing": True},
            "data": {"path": "-", "demonstration": "d", "behavior_logprob": "b", "max_prompt_length": 8},
            "reward": {"kind": "exact_match"},
            "rollout": {"engine": "transformers", "max_response_length": tokens - 8},
            "algorithm": {"preset": preset},
            "train": {"steps": 1, "prompts_per_step": 1, "lr": 1e-3} | shared,
        }
    )


def make_samples(tokens: int, sequences: int, demonstrates: bool) -> list[Sample]:
    """Sequences that fill one row, of random tokens and advantages.

    demonstrates: whether the first half of the first one is demonstrated. Its author's probabilities are uniform: with
    larger ones, such as the estimate's, the importance weights of random tokens would be almost 0.
    """
    generator = torch.Generator().manual_seed(1)
    length, samples = tokens // sequences - 8, []
    for i in range(sequences):
        response = torch.randint(VOCABULARY, (length,), generator=generator).tolist()
        external = [demonstrates and i == 0 and j < length // 2 for j in range(length)]
        advantage = torch.randn(length, generator=generator).tolist()
        samples.append(Sample([1] * 8, response, 0, external, False, None, advantage=advantage))
        samples[-1].behavior_logprob = [-math.log(VOCABULARY)] * length
    return samples


def naive_update(policy: Policy, batch: MicroBatch) -> None:
    """The same step with whole logits, and the plainest of losses."""

    def op(hidden: torch.Tensor, weight: torch.Tensor, **_: Any) -> torch.Tensor:
        logprob = (hidden @ weight.t()).log_softmax(-1).gather(1, batch.target[:, None]).squeeze(1)
        return -(batch.advantage * batch.token_weight * logprob).sum()

    policy.engine.backward(policy.engine(batch, op))
    policy.engine.step()


def peak_rss() -> int:
    """Bytes of this program's own peak; getrusage's counts the process's before it became this program."""
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def main() -> None:
    folder, kind, tokens, sequences, preset = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:5]), sys.argv[5]
    initialize_distributed()
    config = make_config(folder, tokens, preset)
    algorithm = config.algorithm.resolve()
    policy = Policy(config, str(folder), AutoConfig.from_pretrained(folder))
    samples = make_samples(tokens, sequences, algorithm.demonstrates)
    (batch,) = make_micro_batches(samples if dist.get_rank() == 0 else [], algorithm, config, 0, policy.device)
    before = peak_rss()
    start, result = time.perf_counter(), dict[str, float]()
    if kind == "fused":
        (out,) = policy.backward([batch], policy.loss_of(algorithm.objective))
        applied = policy.step()
        assert applied
        result = {"loss": float(out.loss), "logprob": float(out.logprob.double().sum())}
    else:
        naive_update(policy, batch)
    peak = peak_rss()
    result |= {
        "tokens": batch.tokens,
        "rows": len(batch.target),
        "seconds": time.perf_counter() - start,
        "step_bytes": peak - before,
        "peak_rss": peak,
        "grad_norm": policy.grad_norm or 0.0,
    }
    ranks = agree.gathered(result)
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(ranks) + "\n")


if __name__ == "__main__":
    if sys.argv[2] == "write":
        write_model(Path(sys.argv[1]), int(sys.argv[3]))
    else:
        main()
