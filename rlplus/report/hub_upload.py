"""Upload of a finished run to the Hugging Face hub: its model, a card with its results, and the files behind them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rlplus.common.textfiles import read_text
from rlplus.config import RESULTS, RUN, STARTS
from rlplus.evaluation import Evaluation, load_results
from rlplus.evaluation.asked import model_identity
from rlplus.report.tables import percent

CARD = "README.md"


def files_of(run: Path) -> dict[str, Path | bytes]:
    """Contents by path in the repository. ValueError for a run without an exported model, or with another's results.

    The card is the exported one, with the results of `rlplus eval`.
    """
    model = run / "model"
    if not (run / "checkpoints/exported").is_file() or not any(model.glob("*.safetensors")):
        raise ValueError(f"want a finished run, with the weights in its model/; {run} has none: finish the training")
    results = load_results(run)
    identity = model_identity(model).rpartition("@")[2]
    for name, result in results.items():
        if result.model and result.model.rpartition("@")[2] != identity:
            raise ValueError(f"the results of {name} in {run} are another model's: run `rlplus eval` again")
    files: dict[str, Path | bytes] = {path.name: path for path in sorted(model.iterdir()) if path.is_file()}
    files[CARD] = (read_text(model / CARD) + results_section(results)).encode()
    others = (*(run / name for name in (*RUN, STARTS)), *sorted(run.glob(f"{RESULTS}-*.json")))
    return files | {path.name: path for path in others if path.is_file()}


def results_section(results: Mapping[str, Evaluation]) -> str:
    """Markdown with the pass@k of each benchmark; empty without any."""
    if not results:
        return ""
    rows = ["| benchmark | pass@k, % | 95% interval | problems | samples of each | temperature | graded by |"]
    rows.append("|---" * 7 + "|")
    for name, one in results.items():
        for k in one.k:
            found = one.pass_at(k)
            cells = [f"{name}, pass@{k}", percent(found.mean), f"{percent(found.low)} to {percent(found.high)}"]
            cells += [str(len(one.problems)), str(max(one.n)), f"{one.temperature:g}", one.grader]
            rows.append(f"| {' | '.join(cells)} |")
    return "\n## Results\n\n" + "\n".join(rows) + "\n"


def upload(repository: str, files: Mapping[str, Path | bytes], *, public: bool, message: str) -> str:
    """Commit the files to a repository of models, which is made, private unless `public`, if there is none; its URL.

    The token comes from `hf auth login` or HF_TOKEN. ValueError, in a line, if it fails.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi(library_name="rlplus")
    operations: Sequence[CommitOperationAdd] = [
        CommitOperationAdd(path_in_repo=name, path_or_fileobj=content) for name, content in files.items()
    ]
    try:
        place = api.create_repo(repository, private=not public, exist_ok=True)
        api.create_commit(place.repo_id, operations, commit_message=message)
    except Exception as error:  # its classes come from several libraries
        reason = " ".join(str(error).split()) or repr(error)
        raise ValueError(f"{repository} could not be uploaded to {api.endpoint}: {reason}") from error
    return str(place)
