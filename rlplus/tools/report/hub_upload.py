"""Upload of a finished run to the Hugging Face hub: its model, a card with its results, and the files behind them."""

import os
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlplus.common.textfiles import read_text
from rlplus.common.yaml_text import parse_yaml
from rlplus.tools.report.hidden_keys import HIDDEN, named_keys, without_keys
from rlplus.tools.report.tables import percent
from rlplus.train.config import RESULTS, RUN, STARTS
from rlplus.train.evaluation.asked import model_hash
from rlplus.train.evaluation.results import Evaluation, load_results

CARD = "README.md"
# Names of a model's files: weights, configurations, tokenizer, chat template, code of a model from the hub.
MODEL = re.compile(
    r"README\.md|[\w-]+\.safetensors(\.index\.json)?|[\w-]*config\.json|(tokenizer|vocab|merges|chat_template)[\w.-]*"
    r"|(special_tokens_map|added_tokens)\.json|(spiece|sentencepiece\.bpe)\.model|\w[\w-]*\.py"
)


def files_of(run: Path) -> tuple[dict[str, Path | bytes], list[str]]:
    """Contents by path in the repository, and notes for the user on what is not among them.

    The card is the exported one, with the results of `rlplus eval`. Of model/ only files that a model has are taken,
    and in texts HIDDEN is in the place of what looks like a key. ValueError for a run without an exported model, or
    with another's results, and for a link, which may lead to a file that is not the run's.
    """
    model = run / "model"
    if not (run / "checkpoints/exported").is_file() or not any(model.glob("*.safetensors")):
        raise ValueError(f"want a finished run, with the weights in its model/; {run} has none: finish the training")
    results = load_results(run)
    identity = model_hash(model)
    for name, result in results.items():
        if result.model and result.model.rpartition("@")[2] != identity:
            raise ValueError(f"the results of {name} in {run} are another model's: run `rlplus eval` again")
    if identity not in [*read_text(run / "checkpoints/exported").split()[1:], identity][:1]:  # 0.3 noted none
        raise ValueError(
            f"want the model that the run wrote; {model} has another: finish the training again (--resume)"
        )
    found = sorted(model.iterdir())
    others = [path for name in (*RUN, STARTS) if os.path.lexists(path := run / name)]
    others += sorted(run.glob(f"{RESULTS}-*.json"))
    files: dict[str, Path | bytes] = {}
    for path in (*(each for each in found if MODEL.fullmatch(each.name)), *others):
        if not stat.S_ISREG(path.lstat().st_mode):
            raise ValueError(f"want files to upload; {path} is a link, or no file")
        files[path.name] = path
    texts = {path.name: read_text(path) for path in (*others, model / CARD)}
    texts[CARD] += results_section(results)
    texts, hidden = without_keys(texts, parse_yaml(texts[RUN[0]], run / RUN[0]))
    if [*named_keys(parse_yaml(texts[RUN[0]], run / RUN[0]))]:
        raise ValueError(f"want {run / RUN[0]} without keys; it has one in a form that could not be hidden: remove it")
    notes = [f"{hidden} values that look like keys are replaced by {HIDDEN}"] if hidden else []
    if left := [path.name for path in found if path.name not in files]:
        notes.append(f"not uploaded, as no files of a model: {', '.join(left)} in {model}")
    return files | {name: text.encode() for name, text in texts.items()}, notes


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

    The token comes from `hf auth login` or HF_TOKEN. ValueError, in a line, if it fails, and for a repository that all
    can read without `public`.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi(library_name="rlplus")
    operations: Sequence[CommitOperationAdd] = [
        CommitOperationAdd(path_in_repo=name, path_or_fileobj=content) for name, content in files.items()
    ]
    try:
        place = api.create_repo(repository, private=not public, exist_ok=True)
        if not public and api.model_info(place.repo_id).private is not True:
            raise ValueError("it is public: want --public to upload there, or another repository")
        api.create_commit(place.repo_id, operations, commit_message=message)
    except Exception as error:  # its classes come from several libraries
        reason = " ".join(str(error).split()) or repr(error)
        raise ValueError(f"{repository} could not be uploaded to {api.endpoint}: {reason}") from error
    return str(place)
