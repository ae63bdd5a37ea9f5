"""Show that a change of the code changes no number of training: record the bits of short runs before it, compare after.

    python tests/same_bits.py record FILE.json
    python tests/same_bits.py compare FILE.json [--tree FOLDER] [--only WORD ...] [--jobs N]

Every recipe trains a tiny model for three steps on the CPU, on one rank and on two, and does its third step again from
the checkpoint of the second. It compares all metrics of each step but the clock's (CLOCK), the columns of the
samples that a run keeps, and the tensors of its model. Exit status 1 if anything differs, or if a resumed run differs
from the uninterrupted one. Bits belong to one machine and the libraries' versions, which FILE names.

It uses what restructuring keeps: the command line, YAML, and the files of a run. So the same file serves an older tree,
by --tree. The runs are forks of this process, which imports what a first run has imported: that takes them longer than
training. With --fresh each is a process of its own, as a user starts it.
"""

import argparse
import atexit
import hashlib
import importlib
import importlib.metadata
import json
import os
import platform
import random
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
CLOCK = re.compile(r"time/|tokens_per_second$")  # metrics whose names begin so differ between two identical runs
STEPS, BEFORE = 3, 2  # steps of a run, and step of its checkpoint from which the last step is done again
PATIENCE_S = 600  # limit of one run
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PACKAGES = ("torch", "transformers", "deepspeed", "numpy")
PAD, EOS = "<pad>", "<eos>"
ALPHABET = (PAD, EOS, *"0123456789+=<>")
SCRATCH = {"hidden_size": 32, "layers": 2, "heads": 2, "intermediate_size": 64, "max_position_embeddings": 64}

BASE: dict[str, dict[str, Any]] = {
    "model": {"path": "model", "dtype": "float32"},
    "data": {"path": "train.jsonl", "demonstration": "demonstration", "max_prompt_length": 8},
    "reward": {"kind": "exact_match", "pattern": "([01])", "workers": 1, "timeout_s": 100.0},
    "rollout": {"engine": "transformers", "group_size": 4, "max_response_length": 12},
    "algorithm": {},
    # The backend is not `auto`, which depends on what has been compiled in the tree.
    "train": {"steps": STEPS, "prompts_per_step": 4, "prompts_per_update": 2, "tokens_per_micro_batch": 128,
              "lr": 1e-3, "backend": "torch", "collective_timeout_s": 300.0},
    "checkpoint": {"every": BEFORE},
    "log": {"samples_every": 1},
}  # fmt: skip
SHOWN = "{demonstration}<{prompt}"  # the default template has letters, which are no tokens here
CRITIC = {"gae_lambda": 0.9, "critic_updates": 2, "lr": 1e-3, "warmup_steps": 2}
OTHER_DATA = {"path": "other.jsonl", "max_prompt_length": 8}

CASES: dict[str, dict[str, dict[str, Any]]] = {  # sections of a configuration as they differ from BASE
    "plain rlplus": {"algorithm": {"preset": "rlplus"}},
    "plain grpo": {"algorithm": {"preset": "grpo"}, "train": {"backend": "reference"}},
    "plain dapo": {"algorithm": {"preset": "dapo"}},
    "plain luffy": {"algorithm": {"preset": "luffy"}},
    "plain sft": {"algorithm": {"preset": "sft"}, "model": {"path": None, "scratch": SCRATCH}},
    "plain gspo": {"algorithm": {"preset": "gspo"}, "train": {"zero_stage": 2}},
    "interleaved relift": {"algorithm": {"preset": "relift", "recipe": {"batch": 2}}},
    "interleaved pairs": {"algorithm": {"preset": "relift", "recipe": {"batch": 3}}, "rollout": {"group_size": 2}},
    "gate hpt": {"algorithm": {"preset": "hpt", "recipe": {"solved": 1, "keep": True}}},
    "prefix uft": {"algorithm": {"preset": "uft", "recipe": {"steps": 6, "segments": 3, "members": 3}}},
    "prefix prefix-rft": {"algorithm": {"preset": "prefix-rft", "recipe": {"steps": 6, "members": 2}}},
    "prefix-search bread": {"algorithm": {"preset": "bread", "recipe": {"above": 0.2, "below": 0.8}}},
    "entropy-weights srft": {"algorithm": {"preset": "srft", "recipe": {"level": "token"}}},
    "replay exgrpo": {"algorithm": {"preset": "exgrpo", "recipe": {"start": 0.0, "share": 0.8}}},
    "critic ppo": {"algorithm": {"preset": "ppo", "recipe": CRITIC}},
    "process-reward prime": {"algorithm": {"preset": "prime", "recipe": {"update": "before", "lr": 1e-3}}},
    "distill gkd": {"algorithm": {"preset": "gkd", "recipe": {"teacher": "teacher"}}},
    "distill opd": {"algorithm": {"preset": "opd", "recipe": {"teacher": "teacher"}}},
    "self-distill opsd": {"algorithm": {"preset": "opsd", "recipe": {"template": SHOWN}}},
    "self-distill sdpo": {"algorithm": {"preset": "sdpo", "recipe": {"template": SHOWN, "teacher_update_rate": 0.5}}},
    "options with demonstrations": {
        "algorithm": {
            "preset": "rlplus-official",
            "objective": {"gamma": 1.0},
            "external_schedule": {"shape": "cosine", "end": 0.1, "steps": 4},
            "top_entropy": 0.7,
            "skip_grad_norm": 100.0,
        },
        "data": {"behavior_logprob": "logprob"},
        "train": {"lr_schedule": "cosine", "warmup_steps": 1},
        "validation": {"data": OTHER_DATA, "every": 1, "samples": 2},
        "evaluation": {"data": OTHER_DATA, "every": 2, "samples": 2, "k": [1, 2]},
    },
    "options without demonstrations": {
        "algorithm": {
            "preset": "dr-grpo",
            "objective": {"mismatch_cap": 1.5, "kl_coef": 0.01},
            "advantage": "leave-one-out",
            "mismatch_level": "sequence",
            "reward_kl_coef": 0.05,
            "refill": {"low": 0.1, "high": 0.9, "fill": True},
            "shaping": {"wrong": -0.5, "overlong": 0.5},
        },
        "train": {"zero_stage": 3},
    },
}
Digest = dict[str, dict[str, dict[str, str]]]  # "steps" or "weights" -> step or tensor -> what of it -> its bits


class RunFault(Exception):
    """A run ended with an error, or its resumed part differs."""


def write_data(folder: Path) -> None:
    """Prompts like "3+4=", whose answer is the sum's parity; their demonstrations and logprobs of these."""
    draw = random.Random(0)
    for name, pairs in (("train", [(i, i * i % 10) for i in range(10)]), ("other", [(1, 1), (2, 1), (9, 5)])):
        rows = []
        for a, b in pairs:
            demonstration = f"<{a + b}>{(a + b) % 2}"
            row: dict[str, Any] = {"prompt": f"{a}+{b}=", "answer": str((a + b) % 2), "demonstration": demonstration}
            row["logprob"] = [-draw.uniform(0.1, 3.0) for _ in (*demonstration, EOS)]
            rows.append(json.dumps(row) + "\n")
        (folder / f"{name}.jsonl").write_text("".join(rows))


def write_models(*folders: Path) -> int:
    """Random Qwen2s whose tokens are the characters of the task, so that responses end and are right now and then."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    words = Tokenizer(models.WordLevel({sign: i for i, sign in enumerate(ALPHABET)}, unk_token=PAD))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    words.decoder = decoders.Fuse()
    config = Qwen2Config(
        vocab_size=len(ALPHABET), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.12, eos_token_id=1, pad_token_id=0,
        bos_token_id=None,
    )  # fmt: skip
    for seed, folder in enumerate(folders):
        torch.manual_seed(seed)
        Qwen2ForCausalLM(config).save_pretrained(folder)
        PreTrainedTokenizerFast(tokenizer_object=words, pad_token=PAD, eos_token=EOS).save_pretrained(folder)
    return 0


def set_up(folder: Path, tree: Path) -> None:
    """Make this process one that trains with the tree's rlplus, in `folder`, on the CPU and without the network."""
    for name in (*LAUNCHER, *(name for name in os.environ if name.startswith("RLPLUS_"))):
        os.environ.pop(name, None)
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(tree)}
    sys.path[0] = str(tree)  # instead of the folder of this file
    sys.dont_write_bytecode = True
    os.chdir(folder)
    import deepspeed  # noqa: F401
    import transformers  # noqa: F401

    import rlplus.tools.cli

    if not Path(rlplus.tools.cli.__file__).resolve().is_relative_to(tree):
        raise SystemExit(f"want the rlplus of {tree}; got {rlplus.tools.cli.__file__}")
    write_data(folder)
    if not wait([fork(lambda: write_models(folder / "model", folder / "teacher"), folder / "model.log")]):
        raise SystemExit((folder / "model.log").read_text())


def fork(work: Callable[[], int], log: Path | None = None) -> int:
    """Do `work` in a process of its own, which ends with its status; -> the process. log: for all that it writes."""
    sys.stdout.flush()
    sys.stderr.flush()
    if process := os.fork():
        return process
    status = 1
    try:
        signal.alarm(PATIENCE_S)
        atexit._clear()  # this process's own folder is not the child's to remove
        if log is not None:
            output = os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
            os.dup2(output, 1)
            os.dup2(output, 2)
        status = work()
        atexit._run_exitfuncs()  # a rank leaves its group
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def wait(processes: Sequence[int]) -> bool:
    """Wait for all of them; whether all succeeded. If one fails, the others are ended."""
    left, good = set(processes), True
    while left:
        process, status = os.wait()
        left.discard(process)
        if status and good:
            good = False
            for other in left:
                os.kill(other, signal.SIGKILL)
    return good


def rank_of_run(arguments: Sequence[str], launcher: Mapping[str, str], fresh: bool, modules: Path | None) -> int:
    """`rlplus train` as one rank; -> its exit status. modules: a file for the names of the modules it imported."""
    os.environ |= launcher
    if fresh:
        os.execv(sys.executable, [sys.executable, "-m", "rlplus", *arguments])
    import rlplus.tools.cli

    status = rlplus.tools.cli.main(list(arguments))
    if modules is not None:
        modules.write_text(json.dumps([*sys.modules]))
    return status


def free_port() -> int:
    """A free port, below the range that the system gives to connections."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port := random.SystemRandom().randrange(12000, 32000)))
            return port


def train(run: Path, ranks: int, *options: str, fresh: bool = False, modules: Path | None = None) -> None:
    """Run `rlplus train run.yaml`; RunFault with the end of what it wrote if it fails."""
    arguments, log = ["train", f"{run}.yaml", *options], Path(f"{run}.log")
    group = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    group["MASTER_PORT"] = str(free_port())
    launchers = [group | {"RANK": str(r), "LOCAL_RANK": str(r)} for r in range(ranks)] if ranks > 1 else [{}]

    def starting(launcher: Mapping[str, str]) -> Callable[[], int]:
        return lambda: rank_of_run(arguments, launcher, fresh, modules)

    if not wait([fork(starting(launcher), log) for launcher in launchers]):
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
        raise RunFault(f"rlplus {' '.join(arguments)} failed:\n{tail}")


def digest(run: Path) -> Digest:
    """The bits of a finished run."""
    import pyarrow.parquet as parquet

    steps: dict[str, dict[str, str]] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        steps[f"step {row['step']}"] = {n: float(value).hex() for n, value in row.items() if not CLOCK.match(n)}
    for file in sorted((run / "samples").glob("*.parquet")):
        for name, values in parquet.read_table(file).to_pydict().items():
            steps.setdefault(f"samples {file.stem}", {})[name] = hashlib.sha256(repr(values).encode()).hexdigest()
    weights = {}
    for file in sorted((run / "model").glob("*.safetensors")):
        data = file.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")  # a header's length, the header, and the tensors' bytes
        for name, about in json.loads(data[8:start]).items():
            if name != "__metadata__":
                first, last = about["data_offsets"]
                tensor = f"{about['dtype']} {about['shape']} ".encode() + data[start + first : start + last]
                weights[name] = hashlib.sha256(tensor).hexdigest()
    if len(steps) < STEPS or not weights:
        raise RunFault(f"want {STEPS} steps and a model in {run}; got {[*steps]} and {len(weights)} tensors")
    return {"steps": steps, "weights": {name: {"sha256": value} for name, value in weights.items()}}


def shown(bits: str | None) -> str:
    """A number as itself, the start of a hash, or "nothing"."""
    if bits is None:
        return "nothing"
    return bits[:12] if len(bits) == 64 else repr(float.fromhex(bits))


def differences(before: Digest, now: Digest) -> Iterator[str]:
    """A line for each step's metric and each tensor that is not the same in both."""
    for kind in ("steps", "weights"):
        for place in dict.fromkeys((*before[kind], *now[kind])):
            one, other = before[kind].get(place, {}), now[kind].get(place, {})
            for name in dict.fromkeys((*one, *other)):
                if one.get(name) != other.get(name):
                    yield f"{place}, {name}: {shown(one.get(name))} -> {shown(other.get(name))}"


def do_case(title: str, run: Path, fresh: bool) -> int:
    """Train the case, and its last step again; writes the digest beside the run's folder, or what went wrong."""
    name, _, ranks = title.rpartition(", ")
    number = int(ranks.split()[0])
    sections = {key: BASE.get(key, {}) | CASES[name].get(key, {}) for key in BASE.keys() | CASES[name].keys()}
    Path(f"{run}.yaml").write_text(yaml.safe_dump({"output_dir": str(run)} | sections))
    try:
        train(run, number, fresh=fresh)
        whole = digest(run)
        shutil.rmtree(run / "model")
        train(run, number, f"--resume=step-{BEFORE:06d}", fresh=fresh)
        if found := [*differences(whole, digest(run))]:
            raise RunFault("\n".join(("the resumed run differs from the uninterrupted one:", *found)))
    except RunFault as fault:
        Path(f"{run}.fault").write_text(str(fault))
        return 1
    Path(f"{run}.digest").write_text(json.dumps(whole))
    return 0


def import_all(folder: Path) -> None:
    """Import what a run imports, by the names that a first one reports."""
    run, modules = folder / "first", folder / "modules.json"
    Path(f"{run}.yaml").write_text(yaml.safe_dump({"output_dir": str(run)} | BASE | {"checkpoint": {}}))
    train(run, 1, "train.steps=1", modules=modules)
    for name in json.loads(modules.read_text()):
        with suppress(Exception):  # some are made by others
            importlib.import_module(name)


def do_all(titles: Sequence[str], folder: Path, jobs: int, fresh: bool) -> tuple[dict[str, Digest], dict[str, str]]:
    """The cases' digests, and what went wrong in those that have none."""
    waiting, running, done = [*titles], dict[int, str](), dict[str, Digest]()
    faults: dict[str, str] = {}
    if not fresh:
        import_all(folder)
    while waiting or running:
        while waiting and len(running) < jobs:
            title = waiting.pop(0)
            run = folder / title.replace(", ", "-").replace(" ", "-")
            running[fork(lambda title=title, run=run: do_case(title, run, fresh))] = title
        process, _ = os.wait()
        title = running.pop(process)
        run = folder / title.replace(", ", "-").replace(" ", "-")
        if (file := Path(f"{run}.digest")).exists():
            done[title] = json.loads(file.read_text())
        else:
            fault = Path(f"{run}.fault")
            faults[title] = fault.read_text() if fault.exists() else "its process ended"
        shutil.rmtree(run, ignore_errors=True)
        print(f"{len(done) + len(faults)}/{len(titles)} {title}{': FAULT' if title in faults else ''}", flush=True)
    return {title: done[title] for title in titles if title in done}, faults


def compared(recorded: Mapping[str, Any], now: Mapping[str, Any], chosen: Sequence[str]) -> list[str]:
    """The lines of the report: all differences of the chosen cases."""
    lines = []
    for title in chosen:
        one, other = recorded["cases"].get(title), now["cases"].get(title)
        if one is None:
            lines.append(f"{title}: not in the record")
        elif other is not None:  # else its fault is reported
            lines += [f"{title}, {line}" for line in differences(one, other)]
    if lines and recorded["made with"] != now["made with"]:
        lines.append(f"recorded with {recorded['made with']}, compared with {now['made with']}")
    return lines


def versions() -> dict[str, str]:
    """Versions of everything the bits depend on, besides the tree."""
    import torch

    found = {package: importlib.metadata.version(package) for package in PACKAGES}
    return found | {"python": platform.python_version(), "processor": torch.backends.cpu.get_cpu_capability()}


def main() -> int:
    parser = argparse.ArgumentParser(description="Record the bits of short training runs, or compare with a record.")
    parser.add_argument("command", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--tree", type=Path, default=ROOT, help="the tree whose rlplus is run; default: this file's")
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="only cases whose names have one")
    parser.add_argument("--jobs", type=int, default=2, help="how many cases at the same time")
    parser.add_argument("--fresh", action="store_true", help="each rank is a new process, not a fork")
    options = parser.parse_args()
    every = [f"{name}, {ranks}" for name in CASES for ranks in ("1 rank", "2 ranks")]
    chosen = [title for title in every if any(word in title for word in options.only)]
    if not chosen:
        parser.error(f"want --only words of a case; got {options.only}")
    file, tree, began = options.file.resolve(), options.tree.resolve(), time.monotonic()
    recorded = json.loads(file.read_text()) if options.command == "compare" else {}
    with tempfile.TemporaryDirectory(prefix="same_bits") as folder:
        set_up(Path(folder), tree)
        cases, faults = do_all(chosen, Path(folder), options.jobs, options.fresh)
    now = {"made with": versions(), "cases": cases}
    lines = [f"{title}: {fault}" for title, fault in faults.items()]
    if recorded:
        lines += compared(recorded, now, chosen)
    elif not faults:
        file.write_text(json.dumps(now, indent=1) + "\n")
    print("\n".join(lines) or f"{len(cases)} cases {'are the same' if recorded else f'recorded in {file}'}")
    times = os.times()
    cpu = times.user + times.system + times.children_user + times.children_system
    print(f"{time.monotonic() - began:.0f} s, {cpu:.0f} s of CPU time", file=sys.stderr)
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
