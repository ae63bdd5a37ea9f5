"""A server of a teacher that answers as vLLM's does, in float64."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from local_http import Handler, running
from transformers import AutoModelForCausalLM, AutoTokenizer


class TeacherServer:
    """`odd`: what it answers in place of the truth, by path. `asked`: bodies of requests, by path."""

    def __init__(self, path: Path, longest: int = 64) -> None:
        self.path, self.longest = path, longest
        self.lm = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float64)
        self.tokenizer = AutoTokenizer.from_pretrained(str(path))
        self.odd: dict[str, Any] = {}
        self.asked: dict[str, list[dict[str, Any]]] = {}
        self.url = ""

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        self.asked.setdefault(path, []).append(body)
        if path in self.odd:
            return self.odd[path]
        if path == "/v1/models":
            return {"data": [{"id": "teacher", "root": str(self.path), "max_model_len": self.longest}]}
        assert body["model"] == "teacher"
        if path == "/detokenize":
            return {"prompt": self.tokenizer.decode(body["tokens"])}
        return {"choices": [{"prompt_logprobs": self.prompt_logprobs(body["prompt"], body["prompt_logprobs"])}]}

    def prompt_logprobs(self, tokens: list[int], k: int) -> list[dict[str, Any] | None]:
        """As vLLM 0.32's: for each token but the first its own logprob, and the k largest at its place."""
        with torch.no_grad():
            logp = self.lm(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        rows: list[dict[str, Any] | None] = [None]
        for token, row in zip(tokens[1:], logp, strict=True):
            shown = {token: int((row >= row[token]).sum())} | {int(t): i for i, t in enumerate(row.topk(k).indices, 1)}
            rows.append(
                {str(t): {"logprob": float(row[t]), "rank": rank, "decoded_token": ""} for t, rank in shown.items()}
            )
        return rows


class Listening(ThreadingHTTPServer):
    request_queue_size = 64  # all that ranks ask at a time


@contextmanager
def serving(teacher: TeacherServer) -> Iterator[TeacherServer]:
    class Asked(Handler):
        def do_GET(self) -> None:
            answer = teacher.answer(self.path, json.loads(self.body() or "{}"))
            status, answer = answer if isinstance(answer, tuple) else (200, answer)
            self.answer(answer, status)

        do_POST = do_GET

    with running(Listening(("127.0.0.1", 0), Asked)) as teacher.url:
        yield teacher
