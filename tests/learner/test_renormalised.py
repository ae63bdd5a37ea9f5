"""Loss and logprobs of samples that were drawn from kept tokens: the policy's, renormalised over them."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from trainer_runs import run_config
from transformers import AutoModelForCausalLM
from update_cases import batch_of_samples, check_gradients, dropped, naive_gradients, packed

from rlplus.common.kept_sets import KeptSets
from rlplus.train.data import Sample, pack
from rlplus.train.learner import by_sample
from rlplus.train.recipe import set_advantages
from rlplus.train.trainer import Run, open_run

TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    objective = {"kl_coef": 0.1}  # so that there is a reference
    sections: dict[str, Any] = {
        "rollout": {"temperature": TEMPERATURE},
        "algorithm": {"preset": "rlplus", "objective": objective},
    }
    with open_run(run_config(tmp_path_factory.mktemp("run"), **sections)) as run:
        yield run


def samples_with_sets(vocabulary: int) -> list[Sample]:
    """Sets of 2 to 9 tokens for what was sampled; none for demonstrations, nor for some of the sampled tokens."""
    generator, samples = random.Random(0), batch_of_samples()
    for sample in samples:
        if not sample.external:
            sample.kept = KeptSets()
            for token in sample.response:
                others = generator.sample([t for t in range(vocabulary) if t != token], generator.randint(1, 8))
                whole = generator.random() < 0.2
                sample.kept.extend(KeptSets.of([[] if whole else [*others[:2], token, *others[2:]]]))
    return samples


def exact_logprob(folder: Path, sample: Sample) -> Tensor:
    lm = AutoModelForCausalLM.from_pretrained(str(folder / "scratch"), dtype=torch.float64)
    with torch.no_grad():
        z = lm(torch.tensor([[*sample.prompt, *sample.response]])).logits[0, len(sample.prompt) - 1 : -1] / TEMPERATURE
    logp = z.masked_fill(dropped(sample, z.shape[1]), -torch.inf).log_softmax(-1)
    return logp.gather(1, torch.tensor(sample.response)[:, None])[:, 0]


@pytest.mark.parametrize("reference", [False, True])
def test_logprobs_under_policy_and_reference(run: Run, reference: bool) -> None:
    samples = samples_with_sets(run.policy.model_config.vocab_size)
    got = by_sample(samples, lambda b: run.policy.logprob(b, reference=reference), run.config, run.pad_id, "cpu")  # type: ignore[arg-type]
    far = 0.0
    for sample, logprob in zip(samples, got, strict=True):
        want = exact_logprob(run.folder.path, sample)
        torch.testing.assert_close(logprob.double(), want, rtol=1e-5, atol=1e-5)
        sample.kept = None
        far = max(far, float((exact_logprob(run.folder.path, sample) - want).abs().max()))
    assert far > 1, "the comparison can fail"


def test_the_gradient_is_the_renormalised_policys(run: Run) -> None:
    samples = samples_with_sets(run.policy.model_config.vocab_size)
    set_advantages(samples, run.recipe.algorithm)
    lm = run.policy.engine.module
    for batch in packed(run, samples):
        assert batch.kept is not None
        batch.ref_logprob = torch.zeros_like(batch.advantage).sub(1)
        objective = run.recipe.algorithm.objective.__class__()  # eq. 7 alone
        lm(batch, run.policy._loss_op(objective, batch)).loss.backward()
    want = naive_gradients(run, samples, temperature=TEMPERATURE)
    check_gradients(lm, want)
    for sample in samples:
        sample.kept = None
    whole = naive_gradients(run, samples, temperature=TEMPERATURE)
    for name, gradient in want.items():
        assert not torch.allclose(whole[name], gradient, rtol=1e-2)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_sets_stay_with_their_tokens_in_rows_and_shards(parts: int) -> None:
    samples = samples_with_sets(256)
    weights = [torch.ones(len(s.response)) for s in samples]
    options: dict[str, Any] = {"row_length": 24, "tokens_per_micro_batch": 48, "pad_id": 0, "multiple": 4}
    seen = 0
    for batch in pack(samples, weights, **options):
        for shard in [batch.shard(i, parts) for i in range(parts)] if parts > 1 else [batch]:
            assert shard.kept is not None
            offsets, tokens = shard.kept
            place = dict.fromkeys(range(len(samples)), 0)
            if parts > 1:  # a sample's tokens before this shard's
                flat = batch.rows % batch.input_ids.shape[1] // (batch.input_ids.shape[1] // parts)
                first = next(i for i in range(parts) if torch.equal(batch.target[flat == i], shard.target))
                for index in batch.sequence[flat < first].tolist():
                    place[index] += 1
            for row, (index, target) in enumerate(zip(shard.sequence.tolist(), shard.target.tolist(), strict=True)):
                sample, number = samples[index], place[index]
                place[index] += 1
                assert sample.response[number] == target
                want = set(range(256)) - set(dropped(sample, 256)[number].nonzero()[:, 0].tolist())
                got = set(tokens[offsets[row] : offsets[row + 1]].tolist()) or set(range(256))
                assert got == want
                seen += 1
    assert seen == sum(len(s.response) for s in samples)


def test_a_wrong_number_of_sets_is_refused() -> None:
    sample = batch_of_samples()[0]
    sample.kept = KeptSets.of([[sample.response[0]]] * (len(sample.response) + 1))
    weights = [torch.ones(len(sample.response))]
    message = f"sample 0: want {len(sample.response)} kept sets; got {len(sample.response) + 1}"
    with pytest.raises(ValueError, match=message):
        pack([sample], weights, row_length=64, tokens_per_micro_batch=64, pad_id=0)
