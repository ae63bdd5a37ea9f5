"""How foreign demonstrations are to the model, by the probability of their tokens, and what the study found there.

`rlplus plan --data --logprob` measures it before a run, a run logs it, and its report shows the first step.
"""

from collections.abc import Iterator, Mapping, Sequence

from rlplus.tools.report.run_reader import RunData

LOGPROB = "actor/logprob_external"
PROBABILITY = "actor/prob_external"
# The study's numbers, docs/which-method.md: the means of the likeliest foreign form and of the least likely own one.
FOREIGN = 0.51
OWN = 0.73
FOREIGN_LOGPROB = -1.5
OWN_LOGPROB = -0.7


def found_at(p: float) -> str:
    """A sentence on what the study found at this mean probability of a demonstrated token."""
    study = "In our study of small models RL-PLUS was"
    if p >= OWN:
        own = "the model's own form, but for its own responses, which were not seen to help"
        return f"{study} above GRPO at {OWN:.2f} and more (logprobs from {OWN_LOGPROB:g}): {own}."
    if p <= FOREIGN:
        return f"{study} nowhere clearly above GRPO at {FOREIGN:.2f} and less ({FOREIGN_LOGPROB:g}): a foreign form."
    return f"Our study has nothing between {FOREIGN:.2f}, a foreign form, and {OWN:.2f}, the model's own."


def familiarity_notes(trained: Mapping[str, Sequence[RunData]]) -> Iterator[str]:
    """A sentence for each label whose first step had demonstrations, the mean over its runs."""
    for label, runs in trained.items():
        first = [run.metrics[0] for run in runs if run.metrics[0]["step"] == 1 and PROBABILITY in run.metrics[0]]
        if not first:
            continue
        p = sum(step[PROBABILITY] for step in first) / len(first)
        known = [step[LOGPROB] for step in first if LOGPROB in step]
        logprob = f", their mean logprob {sum(known) / len(known):.2f} nats" if len(known) == len(first) else ""
        yield (
            f"{label}: in step 1 the mean probability of the demonstrations' tokens was {p:.2f}{logprob}. "
            f"{found_at(p)} See docs/which-method.md."
        )
