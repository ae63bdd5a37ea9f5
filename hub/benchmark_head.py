"""Loss and gradients of a language-model head, from its hidden states, beside whole logits in plain PyTorch.

Run by `kernels benchmark FOLDER`: on a GPU with the head that huggingface/trl#7244 measures, else with a small one.
"""

import torch
from kernels.benchmark import Benchmark  # noqa: TID251  # Hugging Face's
from torch import Tensor

HEAD = (8192, 4096, 151_936, torch.bfloat16)  # tokens, hidden size, vocabulary


class HeadBenchmark(Benchmark):
    """`out` is the gradient of the hidden states, in fp32, divided by its largest element."""

    seed = 0

    def setup(self) -> None:
        N, H, V, dtype = (256, 256, 8192, torch.float32) if self.device == "cpu" else HEAD

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device=self.device, dtype=dtype)

        self.hidden = normal(N, H).requires_grad_()
        self.weight = (normal(V, H) / H**0.5).requires_grad_()
        self.target = torch.randint(V, (N,), device=self.device)
        self.each = torch.full((N,), 1 / N, device=self.device)
        self.advantage = torch.randn(N, device=self.device)

    def _gradient(self, loss: Tensor) -> Tensor:
        self.hidden.grad = self.weight.grad = None
        loss.backward()
        gradient = self.hidden.grad.float()
        return gradient / gradient.abs().max()

    def benchmark_cross_entropy(self) -> None:
        logprob, _ = self.kernel.linear_logprob(self.hidden, self.weight, self.target)
        self.out = self._gradient(-(self.each * logprob).sum())

    def verify_cross_entropy(self) -> Tensor:
        logits = (self.hidden @ self.weight.T).float()
        return self._gradient(torch.nn.functional.cross_entropy(logits, self.target))

    def benchmark_policy_loss(self) -> None:
        given = {"old_logprob": None, "advantage": self.advantage, "token_weight": self.each}
        self.out = self._gradient(
            self.kernel.linear_policy_loss(self.hidden, self.weight, self.target, **given, objective="grpo").loss
        )

    def verify_policy_loss(self) -> Tensor:
        logits = (self.hidden @ self.weight.T).float()
        logprob = logits.log_softmax(1).gather(1, self.target[:, None]).squeeze(1)
        return self._gradient(-(self.each * self.advantage * (logprob - logprob.detach()).exp()).sum())
