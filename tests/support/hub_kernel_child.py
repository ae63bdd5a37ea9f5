"""A process that loads a kernel's folder for tests/hub: python hub_kernel_child.py FOLDER BACKEND."""

import json
import sys
from importlib import import_module
from pathlib import Path

import torch
from kernels._rust import Digest, DigestAlgorithm  # noqa: TID251  # its own look at a folder's files

import rlplus
from kernels import get_loaded_kernels, get_local_kernel  # noqa: TID251  # Hugging Face's


def results(module: object, backend: str) -> list[torch.Tensor]:
    """Loss, logprobs, a divergence, and gradients."""
    g = torch.Generator().manual_seed(0)
    hidden, weight, teacher = (torch.randn(n, 8, generator=g) for n in (5, 40, 5))
    target, each = torch.arange(5), torch.linspace(0.2, 1.0, 5)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    given = {"old_logprob": None, "advantage": each - 0.5, "token_weight": each, "backend": backend}
    out = module.linear_policy_loss(*leaves, target, **given, objective="grpo")
    logprob, entropy = module.linear_logprob(*leaves, target, backend=backend)
    apart = module.linear_divergence(*leaves, teacher, weight.detach(), token_weight=each, backend=backend)
    loss = out.loss + logprob.sum() + entropy.sum() + apart.loss
    return [out.loss, out.logprob, entropy, apart.divergence, *torch.autograd.grad(loss, leaves)]


def main(folder: Path, backend: str) -> None:
    kernel = get_local_kernel(folder)
    (loaded,) = get_loaded_kernels()
    variant = Path(kernel.__file__).parent
    loaded.metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
    own, other = results(kernel, backend), results(rlplus, backend)
    for file in sorted((variant / "rlplus").rglob("*.py")):
        if file.name not in ("__init__.py", "selfcheck.py"):  # the last is a program
            import_module(".".join((kernel.__name__, *file.relative_to(variant).with_suffix("").parts)))
    check = import_module(f"{kernel.__name__}.rlplus.loss.guard.verdicts").run_check
    say = "import json, rlplus; print(json.dumps({'status': 'passed', 'reason': rlplus.__file__}))"
    found = {
        "file": kernel.__file__, "name": kernel.__name__, "names": sorted(kernel.__all__),
        "same": [bool(torch.equal(a, b)) for a, b in zip(own, other, strict=True)],
        "apart": kernel.linear_logprob is not rlplus.linear_logprob,
        "ops": sorted(name for name in dir(getattr(torch.ops, kernel.__name__)) if name.startswith("linear")),
        "module": kernel.linear_logprob.__module__,
        "checked": check([sys.executable, "-P", "-c", say]).reason,
    }  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
