"""Data sets on the Hugging Face hub as local files: `hf://owner/name/split`."""

from pathlib import Path

from rlplus.train.config import HUB_PREFIX, split_hub_path
from rlplus.train.config.folders import DATA_SUFFIXES

_PARQUET = "refs/convert/parquet"  # the branch on which the hub keeps every data set as Parquet


def local_files(path: str) -> list[Path]:
    """The files of a data path: itself, or the files of a split on the hub, which are downloaded first.

    hf://owner/name/split, hf://owner/name/configuration/split, or hf://owner/name/ and a file of the repository.
    ValueError if the data set or split does not exist, or its download fails.
    """
    if not path.startswith(HUB_PREFIX):
        return [Path(path)]
    name, rest = split_hub_path(path)
    from huggingface_hub import snapshot_download

    file = rest.endswith(DATA_SUFFIXES)
    pattern = rest if file else f"{rest}/*.parquet" if "/" in rest else f"*/{rest}/*.parquet"
    try:
        folder = snapshot_download(
            name, repo_type="dataset", revision=None if file else _PARQUET, allow_patterns=[pattern]
        )
    except Exception as error:  # its classes come from several libraries
        reason = " ".join(str(error).split()) or repr(error)
        raise ValueError(f"want {path}; {name} could not be loaded from the hub: {reason}") from error
    found = sorted(Path(folder).glob(pattern))
    if len(configurations := sorted({file.parent.parent.name for file in found})) > 1:
        raise ValueError(
            f"want {HUB_PREFIX}{name}/CONFIGURATION/{rest}, as it has several: {', '.join(configurations)}"
        )
    if not found:
        have = sorted({str(file.parent.relative_to(folder)) for file in Path(folder).glob("*/*/*.parquet")})
        came = f"; loaded before: {', '.join(have)}" if have else ""
        raise ValueError(f"want {path}: {name} has no {'file' if file else 'split'} {rest!r}{came}")
    return found
