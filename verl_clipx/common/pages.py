"""Where the documentation's pages are that a message names, as in docs/reading.md#health."""

from pathlib import Path


def folder_of_pages() -> Path:
    """Return the folder in which `docs` is: the package itself in a wheel, the repository's root in a checkout.

    Raises:
        FileNotFoundError: there are no pages.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package, package.parent):
        if (folder / "docs/reading.md").exists():
            return folder
    raise FileNotFoundError(f"there is no docs/reading.md in {package} or {package.parent}. Install verl-clipx again.")


def say_where_pages_are() -> str:
    """Return a line that says where the pages are that other lines name."""
    return f"Find the pages named docs/… in {folder_of_pages()}"
