"""Answers of a vLLM server that its model cannot have generated: each is one line with server, request and field."""

from pathlib import Path
from typing import Any

import pytest
from rollout_models import EOS, ODD_LOGPROBS, ODD_TOKENS, save, tiny_model
from servers import FakeServer, ask, connect

from rlplus.train.rollout import RunFailed


def told(*numbers: Any) -> list[dict[str, Any]]:
    """vLLM's logprobs of tokens, each followed by its own."""
    pairs = zip(numbers[::2], numbers[1::2], strict=True)
    return [{"token_id": token, "logprob": logprob} for token, logprob in pairs]


def test_answers_that_the_model_cannot_have_generated_are_refused(fake: FakeServer, tmp_path: Path) -> None:
    save(model := tiny_model(tied=False), tmp_path)
    engine = connect(fake.url, tmp_path)
    engine.push_weights(model.named_parameters(), 3)
    for choice, message in [
        *(
            (
                {"logprobs": {"content": told(5, value, EOS, -0.25)}},
                "request [02], response 0: logprob 1: want 2 finite",
            )
            for value in (-9999.0, *ODD_LOGPROBS)
            if not isinstance(value, str)
        ),
        ({"logprobs": {"content": told(5, -1.0)}}, "request [02], response 0: .*want 2 finite logprobs"),
        (
            {"logprobs": {"content": told(5, -1.0, 7, -1.0)}},
            r"want logprobs of the tokens \[5, 1\] .*those of \[5, 7\]",
        ),
        *(
            (
                {"token_ids": [t, EOS], "logprobs": {"content": told(t, -1.0, EOS, -1.0)}},
                rf"token 1: want .*; got {t!r}",
            )
            for t in ODD_TOKENS
        ),
        ({"token_ids": [], "logprobs": {"content": []}}, "want 1 to 16 tokens; got 0"),
        ({"token_ids": [5] * 17, "logprobs": {"content": told(*[5, -1.0] * 17)}}, "want 1 to 16 tokens; got 17"),
        (
            {"token_ids": [5, 7], "logprobs": {"content": told(5, -1.0, 7, -1.0)}},
            r"stop: want one of .* \[1\] .* got 7",
        ),
        ({"finish_reason": "length"}, "length: want 16 tokens without an end token .*; got 2"),
        ({"token_ids": "51"}, r"want choices\[\d\].token_ids to be a list; got '51'"),
        ({"token_ids": None}, r"want choices\[\d\].token_ids to be a list; got None"),
        ({"sampling_mask": [[2**70], [EOS]]}, r"want choices\[\d\].sampling_mask to be lists of token ids; got"),
        ({"sampling_mask": [[48], [EOS]]}, "kept tokens: want ids from 0 to 47; got 1 to 48"),
    ]:
        fake.choice = choice
        with pytest.raises(RunFailed, match=message) as error:
            ask(engine)
        assert f"vllm at {fake.url}" in str(error.value)
        assert "\n" not in str(error.value)
    engine.close()
