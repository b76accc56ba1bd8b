# SPDX-License-Identifier: Apache-2.0
"""Data that the package `datasets` of Hugging Face reads: from the disk, or from the hub. Columns go by their types."""

import re
from pathlib import Path

SPLITS = {"train": ("train", "auxiliary_train"), "test": ("test", "validation", "val")}  # by what they are called


def is_name(path):
    """Whether a path that is not there may be a name of the hub: NAME or OWNER/NAME, and :CONFIG behind it."""
    is_one = re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?(:[\w.-]+)?(?<!\.npz)", str(path)) is not None
    return is_one and not Path(path).exists()


def splits_of(path):
    """{name: Dataset} of what save_to_disk() wrote, of a folder that load_dataset() reads, of a parquet file or a
    Dataset by itself, which is the test set, or of a name of the hub."""
    try:
        import datasets
    except ImportError:
        message = f"{path} needs the package datasets, which is not there; allowed: pip install datasets, or"
        raise SystemExit(f"{message} files of the kinds that --help names") from None
    try:
        if is_name(path):
            name, _, config = str(path).partition(":")
            return datasets.load_dataset(name, config or None)
        if Path(path).is_file():
            return datasets.load_dataset("parquet", data_files={"test": str(path)})
        if any((Path(path) / name).exists() for name in ("dataset_dict.json", "state.json")):
            found = datasets.load_from_disk(str(path))
            return found if isinstance(found, dict) else {"test": found}
        return datasets.load_dataset(str(path))
    except (FileNotFoundError, ConnectionError) as error:
        message = f"{path} is neither a path with data nor a name that the hub gives ({error})"
        raise SystemExit(f"{message}; allowed: such. experiments/fetch brings what it can") from None


def pick(splits, split, path):
    """The Dataset of the split "train" or "test"."""
    for name in SPLITS[split]:
        if name in splits:
            return splits[name]
    raise ValueError(f"{path} has the splits {', '.join(splits)}; allowed to {split}: {', '.join(SPLITS[split])}")


def kind(feature):
    """A column's type in a word: Image, ClassLabel, int64, string, List(string), ..."""
    if hasattr(feature, "feature"):
        return f"{type(feature).__name__}({kind(feature.feature)})"
    return feature.dtype if type(feature).__name__ == "Value" else type(feature).__name__


STRING, INTEGER = r"(large_)?string", r"u?int\d+"


def column(dataset, what, *kinds, names=()):
    """The name of the one column of the first of these kinds (patterns) that there is; of several, it is in `names`."""
    of = {name: kind(feature) for name, feature in dataset.features.items()}
    found = next((found for wanted in kinds if (found := [name for name in of if re.fullmatch(wanted, of[name])])), [])
    if len(found) > 1:
        found = [name for name in names if name in found]
    if not found:
        columns = ", ".join(f"{name} ({of[name]})" for name in of)
        called = f", called {' or '.join(names)} among several" if names else ""
        raise ValueError(f"no {what} in the columns {columns}; allowed: one {' or '.join(kinds)}{called}")
    return found[0]
