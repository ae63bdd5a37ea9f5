"""A training step on 16,384 tokens with the real vocabulary, on one rank and on two, and its memory."""

import json
import math
import sys
from functools import cache
from pathlib import Path

import processes
import pytest
from trainer_runs import by_torchrun, environment

PROGRAM = processes.SUPPORT / "long_context.py"
VOCABULARY, TOKENS = 151_936, 16_384
CHUNK = 4 * 2048 * VOCABULARY  # bytes of the fp32 logits of 2048 rows, for which the default scratch has room
REST = 0.7e9  # bytes: gradients and AdamW's state of 19.5 million parameters, activations, memory not yet given back


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("thin")
    call(folder, "write", TOKENS)
    return folder


def call(*arguments: object, ranks: int = 1) -> str:
    command = by_torchrun(PROGRAM, *arguments) if ranks > 1 else [sys.executable, str(PROGRAM), *map(str, arguments)]
    done = processes.run(command, env=environment())
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@cache
def step(folder: Path, kind: str, tokens: int, sequences: int, preset: str, ranks: int) -> list[dict[str, float]]:
    """The measurements of each rank."""
    return json.loads(call(folder, kind, tokens, sequences, preset, ranks=ranks).splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("sequences", [1, 4])
def test_sixteen_thousand_tokens_take_a_fraction_of_their_logits(folder, sequences):
    """The step's addition to RSS, optimizer included; the (N, V) logits alone would be 9.96 GB.

    A mask for rows of several sequences would be 0.27 GB of bool and, a layer at a time, 1.07 of fp32.
    """
    (result,) = step(folder, "fused", TOKENS, sequences, "rlplus", 1)
    assert result["tokens"] == TOKENS
    assert result["grad_norm"] > 0
    sys.stderr.write(f"16,384 tokens, {sequences} sequences: the step took {result['step_bytes'] / 1e9:.2f} GB\n")
    assert result["step_bytes"] < CHUNK + REST


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["rlplus", "grpo-official"])
def test_two_ranks_share_sixteen_thousand_tokens(folder, preset):
    """Sequence parallelism and ZeRO-3. The logits of a rank's rows alone would be 4.98 GB."""
    (one,), two = (step(folder, "fused", TOKENS, 1, preset, ranks) for ranks in (1, 2))
    assert [rank["tokens"] for rank in two] == [TOKENS / 2] * 2
    for name in ("rows", "loss", "logprob"):
        assert math.isfinite(one[name])
        assert sum(rank[name] for rank in two) == pytest.approx(one[name], rel=1e-6, abs=1e-8), name
    assert 0 < one["grad_norm"] < math.inf
    for rank in two:
        sys.stderr.write(f"16,384 tokens, {preset}: the step took {rank['step_bytes'] / 1e9:.2f} GB per rank of two\n")
        assert rank["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-6)
        assert rank["step_bytes"] < CHUNK + REST


@pytest.mark.slow
def test_a_tokens_price_with_and_without_the_fused_head(folder):
    """Bytes that a further token adds: whole logits at least three times 4 V (logits, log-softmax, gradient)."""
    naive = [step(folder, "naive", n, 1, "rlplus", 1)[0]["step_bytes"] for n in (512, 1024)]
    fused = [step(folder, "fused", n, 1, "rlplus", 1)[0]["step_bytes"] for n in (2048, 6144)]
    naive_price, fused_price = (naive[1] - naive[0]) / 512, (fused[1] - fused[0]) / 4096
    sys.stderr.write(f"a token: {naive_price / 1e3:.0f} kB with whole logits, {fused_price / 1e3:.1f} kB fused\n")
    assert naive_price > 0.9 * 3 * 4 * VOCABULARY
    assert fused_price < naive_price / 20
