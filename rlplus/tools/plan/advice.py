"""Advice after running out of memory: the plan's numbers for that phase, and the switches that lower them."""

from collections.abc import Iterator

from rlplus.tools.plan import read_model, show_bytes, training_part
from rlplus.tools.plan.cluster import Cluster
from rlplus.tools.plan.memory import MOMENTS, estimate_memory
from rlplus.tools.plan.planned_model import Model
from rlplus.tools.plan.search import Changes, all_switches, show_changes, with_changes
from rlplus.train.config import Config
from rlplus.train.config.surroundings import MAY_CHANGE

PHASES = {  # the plan's moments in a phase; all of them for other phases
    "sync": ("generate",),
    "generate": ("generate",),
    "old_logprob": ("head",),
    "statistics": ("head",),
    "samples": ("head",),
    "forward_backward": ("head", "backward"),
    "optimizer": ("optimizer",),
}
SHOWN = 4  # switches of a kind


def advise(config: Config, cluster: Cluster, phase: str) -> str:
    """Sentences for a user whose run ran out of memory in that phase of a step. Errors as in `make_plan`."""
    trainer = training_part(config, cluster)
    model, _ = read_model(config)
    moments = PHASES.get(phase, MOMENTS)
    memory = estimate_memory(config, model, trainer)
    fullest = max(moments, key=memory.total)
    parts = sorted(memory.parts[fullest].items(), key=lambda part: -part[1])
    shown = ", ".join(f"{name} {show_bytes(size)}" for name, size in parts)
    total = show_bytes(memory.total(fullest))
    capacity = show_bytes(memory.capacity)
    sentences = [f"The plan expected {total} of {capacity} there ({shown})."]
    lower = sorted(_savings(config, model, trainer, moments), key=lambda switch: -switch[1])
    on_resume = [switch for switch in lower if switch[0].keys() <= MAY_CHANGE]
    for when, found in (("with --resume", on_resume), ("in a new run", [s for s in lower if s not in on_resume])):
        texts = [f"{' '.join(show_changes(changes))} (-{show_bytes(saved)})" for changes, saved in found[:SHOWN]]
        if texts:
            sentences.append(f"It takes less {when} and {', or '.join(texts)}.")
    # A choice of the user's: it changes results by more than rounding.
    if saved := _saved(config, {"train.backward": "sampled"}, model, trainer, moments):
        sentences.append(
            f"It takes less in a new run and train.backward=sampled (-{show_bytes(saved)}), whose gradients have the "
            "exact mean, and noise."
        )
    return " ".join(sentences)


def _savings(config: Config, model: Model, cluster: Cluster, moments: tuple[str, ...]) -> Iterator[tuple[Changes, int]]:
    """The mildest setting of each switch that lowers the fullest of these moments, and the bytes saved."""

    for settings in all_switches(config, model, cluster):
        for changes in settings:
            if saved := _saved(config, changes, model, cluster, moments):
                yield changes, saved
                break


def _saved(config: Config, changes: Changes, model: Model, cluster: Cluster, moments: tuple[str, ...]) -> int:
    """Bytes by which the changes lower the fullest of these moments; 0 also where they are refused."""

    def fullest(config: Config) -> int:
        memory = estimate_memory(config, model, cluster)
        return max(map(memory.total, moments))

    other = with_changes(config, changes)
    return 0 if other is None else max(0, fullest(config) - fullest(other))
