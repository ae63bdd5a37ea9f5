"""A training step on 16,384 tokens with the real vocabulary, and what it takes against whole logits."""

import json
import sys
from pathlib import Path

import processes
import pytest
from trainer_runs import environment

PROGRAM = Path(__file__).with_name("long_context.py")
VOCABULARY, TOKENS = 151_936, 16_384


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("thin")
    call(folder, "write", TOKENS)
    return folder


def call(*arguments: object) -> str:
    done = processes.run([sys.executable, str(PROGRAM), *map(str, arguments)], env=environment())
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def step(folder: Path, kind: str, tokens: int, sequences: int = 1) -> dict[str, float]:
    return json.loads(call(folder, kind, tokens, sequences).splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("sequences", [1, 4])
def test_sixteen_thousand_tokens_take_a_fraction_of_their_logits(folder, sequences):
    """The step's addition to RSS, optimizer included; the (N, V) logits alone would be 9.96 GB.

    A chunk of 2048 rows, which the default scratch has room for, is 1.24 GB in fp32.
    Rows of several sequences need masks in sdpa, (L, L) of bool and, a layer at a time, of fp32.
    """
    result = step(folder, "fused", TOKENS, sequences)
    assert result["tokens"] == TOKENS
    assert result["grad_norm"] > 0
    masks = (1 + 4) * TOKENS**2 if sequences > 1 else 0
    sys.stderr.write(f"16,384 tokens, {sequences} sequences: the step took {result['step_bytes'] / 1e9:.2f} GB\n")
    assert result["step_bytes"] - masks < 4 * 2048 * VOCABULARY + 0.7e9


@pytest.mark.slow
def test_a_tokens_price_with_and_without_the_fused_head(folder):
    """Bytes that a further token adds: whole logits at least three times 4 V (logits, log-softmax, gradient)."""
    naive = [step(folder, "naive", n)["step_bytes"] for n in (512, 1024)]
    fused = [step(folder, "fused", n)["step_bytes"] for n in (2048, 6144)]
    naive_price, fused_price = (naive[1] - naive[0]) / 512, (fused[1] - fused[0]) / 4096
    sys.stderr.write(f"a token: {naive_price / 1e3:.0f} kB with whole logits, {fused_price / 1e3:.1f} kB fused\n")
    assert naive_price > 0.9 * 3 * 4 * VOCABULARY
    assert fused_price < naive_price / 20
