"""Files that ship with the package: recipes, studies, model shapes, cluster files.

In a checkout they lie beside the package; a wheel has them inside, in ``qurl_megatron/shipped``
(``setup.py`` copies them there).
"""

from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_INSIDE = _PACKAGE / "shipped"
ROOT = _INSIDE if _INSIDE.is_dir() else _PACKAGE.parent
"""Folder that has ``launch/`` and ``slurm/``."""


def shipped(path: str | Path, folder: str) -> Path:
    """Return a path as it is where it exists, else the shipped file that it may mean.

    Args:
        path: of the user's; ``quickstart`` and ``launch/recipes/quickstart.toml`` both mean the
            recipe that ships.
        folder: where bare names are looked up, e.g. ``launch/recipes``.
    """
    path = Path(path)
    candidates = [ROOT / path]
    if len(path.parts) == 1:
        candidates += [ROOT / folder / path, ROOT / folder / f"{path}.toml"]
    if not path.exists() and not path.is_absolute():
        for candidate in candidates:
            if candidate.is_file():
                return candidate
    return path


def shipped_names(folder: str) -> str:
    """Return the names in a shipped folder, sorted and separated by commas."""
    return ", ".join(sorted(path.stem for path in (ROOT / folder).glob("*.toml")))
