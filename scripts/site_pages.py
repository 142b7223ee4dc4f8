"""MkDocs calls these: pages that are made when the site is built, and links that lead out of docs.

Made are the overview (README), CONTRIBUTING, CHANGELOG, a page a method from its class and its groups with its place
in the navigation, the reference of the public names, and a page for every other file that a page links to. A comment
such as `<!-- the site shows: clipx metrics --markdown -->` becomes what the command prints.
"""

import inspect
import os
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import Environment
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"

# Pages of the site that stand elsewhere in the repository.
ELSEWHERE = {
    "README.md": "overview.md",
    "README.zh.md": "overview.zh.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": "bash", ".toml": "toml", ".json": "json", ".cff": "yaml"}
_SHOWN = re.compile(r"<!-- the site shows: clipx (?P<words>.*?) -->")
# The plugin that serves the pages as markdown takes them as these functions leave them.
BEFORE_PLUGINS = 50
# Where the navigation of mkdocs.yml has the methods' pages.
METHOD_PAGES = "methods/"
METHOD_PAGE = Path(__file__).with_name("method_page.md.jinja")
_LINK = re.compile(r"(?P<before>\]\()(?P<target>[^)\s#]*)(?P<anchor>#[^)\s]*)?(?P<after>\))")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Puts the methods' pages into the navigation."""
    config.nav = with_method_pages(config.nav)
    return config


def with_method_pages(nav: Any) -> Any:
    """A part of the navigation, with the list of the methods' pages in the place of `METHOD_PAGES`."""
    from verl_clipx.losses.methods import BUILT_IN

    if isinstance(nav, list):
        return [with_method_pages(part) for part in nav]
    if isinstance(nav, dict):
        return {title: with_method_pages(part) for title, part in nav.items()}
    return [f"{METHOD_PAGES}{name}.md" for name in BUILT_IN] if nav == METHOD_PAGES else nav


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are made, and those of the files that pages link to."""
    texts = {page: (ROOT / name).read_text() for name, page in ELSEWHERE.items()}
    made = {**texts, **method_pages(), "reference.md": reference()}
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    pages = [file for file in files if file.src_uri.endswith(".md")]
    for source in sorted({one for page in pages for one in linked_files(page.content_string, page.src_uri)}):
        files.append(File.generated(config, page_of(source), content=shown(source)))
    return files


@event_priority(BEFORE_PLUGINS)
def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """Read every page early, because llms.txt is listed by titles, and a page's title is its first heading."""
    for page in nav.pages:
        page.read_source(config)
    return nav


@event_priority(BEFORE_PLUGINS)
def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links to what stands outside docs into links to its page."""
    own = page.file.src_uri

    def turned(match: re.Match) -> str:
        target = target_of(match["target"], own)
        if target is None:
            return match[0]
        to = place_of(target)
        return f"{match['before']}{os.path.relpath(to, Path(own).parent)}{match['anchor'] or ''}{match['after']}"

    return outside_code(with_printed(markdown), lambda text: _LINK.sub(turned, text))


def with_printed(markdown: str) -> str:
    """Puts what a command prints in the place of the comment that names it."""
    from typer.testing import CliRunner

    from verl_clipx.cli import app

    def printed(match: re.Match) -> str:
        result = CliRunner().invoke(app, match["words"].split())
        if result.exit_code:
            raise ValueError(f"clipx {match['words']}: {result.output}")
        return result.output

    return _SHOWN.sub(printed, markdown)


def outside_code(markdown: str, change: Callable[[str], str]) -> str:
    """Changes a page's text, but not its fenced blocks."""
    parts = re.split(r"(^(?:```|~~~~).*?^(?:```|~~~~)\s*?$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if place % 2 else change(part) for place, part in enumerate(parts))


def target_of(link: str, page: str) -> str | None:
    """The file or folder of the repository that a page links to; None for an anchor or another site."""
    if not link or re.match(r"[a-z]+:", link):
        return None
    folder = ROOT if page in ELSEWHERE.values() else (DOCS / page).parent
    return os.path.relpath(folder / link, ROOT)


def linked_files(text: str, page: str) -> set[str]:
    """The files and folders that a page links to and of which a page has to be made."""
    targets = {target_of(match["target"], page) for match in _LINK.finditer(text)} - {None}
    return {target for target in targets if place_of(target) == page_of(target)}


def place_of(target: str) -> str:
    """Where the site has a file or folder of the repository: MkDocs copies the files in docs, but makes no folders."""
    if target == "docs":
        return "README.md"
    if target in ELSEWHERE:
        return ELSEWHERE[target]
    if target.startswith("docs/") and not (ROOT / target).is_dir():
        return target.removeprefix("docs/")
    return page_of(target)


def page_of(source: str) -> str:
    """The page that shows a file, or a folder; MkDocs leaves out what is in a hidden folder."""
    visible = re.sub(r"(^|/)\.(?=\w)", r"\1", source)
    return f"source/{visible}.md"


def shown(source: str) -> str:
    """A file's content, or the names in a folder, as a page that the search leaves out."""
    path = ROOT / source
    names = [name for name in sorted(os.listdir(path)) if not name.startswith(("_", "."))] if path.is_dir() else []
    content = "\n".join(names) if path.is_dir() else path.read_text()
    head = f"---\nsearch:\n  exclude: true\n---\n\n# {source}\n\n"
    return f"{head}~~~~{LANGUAGES.get(path.suffix, 'text')}\n{content}\n~~~~\n"


def reference() -> str:
    """The public names, each with its docstring."""
    from verl_clipx import _PUBLIC

    names = "\n".join(f"::: {module}.{name}\n" for name, module in _PUBLIC.items() if name != "METHODS")
    return (
        "# Python reference\n\nWhat `import verl_clipx` promises: each name is imported as `verl_clipx.NAME`. "
        "`verl_clipx.METHODS` is the dictionary of all methods by name. [own_loss.md](own_loss.md) shows their use.\n\n"
        f"{names}"
    )


def method_pages() -> dict[str, str]:
    """A page a method, and its figure."""
    from verl_clipx.run.listing import describe_methods

    pages = {}
    for method in describe_methods():
        if method["module"] is not None:
            pages[f"{METHOD_PAGES}{method['name']}.md"] = method_page(method)
            pages[f"{METHOD_PAGES}{method['name']}.svg"] = figure(method["name"])
    return pages


def figure(name: str) -> str:
    """The gradient weight of a method over the ratio."""
    from verl_clipx.losses.methods import METHODS

    # MkDocs puts no folder of scripts into the path.
    draw_weights = runpy.run_path(str(Path(__file__).with_name("weight_figure.py")))["draw_weights"]
    return draw_weights(METHODS[name]())


def method_page(method: dict[str, Any]) -> str:
    """A method's page, from its class and its groups."""
    from verl_clipx.losses.methods import METHODS
    from verl_clipx.run.description import describe_limits

    kind, (first, *others) = METHODS[method["name"]], method["groups"]
    differences = [
        (group, one, comment_of(group, one["name"]))
        for group in others
        for one in method["parameters"]
        if one["in_groups"][group] != one["in_groups"][first]
    ]
    template = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    template.filters |= {"written": written, "cell": lambda text: text.replace("|", r"\|")}
    return template.from_string(METHOD_PAGE.read_text()).render(
        method,
        formula="\n\n".join(docstrings(kind)),
        limits=describe_limits(kind()).limit,
        differences=differences if others else None,
        logs=kind.logs,
    )


def docstrings(kind: type) -> list[str]:
    """What the class says of its formula, and, where the weight is a base's, what that says."""
    definer = next(one for one in kind.__mro__ if "gradient_weight" in vars(one))
    texts = [inspect.cleandoc(one.__doc__ or "") for one in dict.fromkeys((kind, definer))]
    return [as_markdown(paragraph) for text in texts for paragraph in text.split("\n\n")]


def as_markdown(paragraph: str) -> str:
    """A paragraph of a docstring: an indented one as it is, another without meaning to signs such as * and _."""
    if paragraph.startswith("    "):
        return f"```text\n{inspect.cleandoc(paragraph)}\n```"
    words = paragraph.split("`")
    plain = [re.sub(r"([*_<>\[\]])", r"\\\1", text) if place % 2 == 0 else text for place, text in enumerate(words)]
    return "`".join(plain)


def comment_of(group: str, parameter: str) -> str:
    """The comment above a parameter in the group's file."""
    text = (ROOT / "configs" / "clipx" / f"{group}.yaml").read_text()
    found = re.search(rf"((?:^ *#.*\n)+)^  {parameter}:", text, re.MULTILINE)
    return " ".join(line.strip(" #") for line in found[1].splitlines()) if found else ""


def written(value: Any) -> str:
    """A value as YAML has it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
