"""What stands beside the code for a forge and for readers: workflows, issue forms, the citation, README in Chinese.

Covers: each file against the schema of its kind, which check-jsonschema has in its package; that workflows run scripts
of this repository, on the versions of Python that the project names, with a limit of time; README.zh.md has README's
commands, links and marks. Not covered: running a workflow, and the translation's words.
"""

import re
from importlib import metadata
from pathlib import Path

import check_jsonschema
import pytest
import yaml
from click.testing import CliRunner

from verl_clipx.common.run_files import METRICS, record_path

from .documents import ROOT, blocks_of, commands_of, inline_code_of, links_of

WORKFLOWS = ROOT / ".github" / "workflows"
FORMS = ROOT / ".github" / "ISSUE_TEMPLATE"
SCHEMAS = {
    "vendor.github-workflows": sorted(WORKFLOWS.iterdir()),
    "custom.github-workflows-require-timeout": sorted(WORKFLOWS.iterdir()),
    "vendor.github-issue-forms": sorted({*FORMS.iterdir()} - {FORMS / "config.yml"}),
    "vendor.github-issue-config": [FORMS / "config.yml"],
    "vendor.citation-file-format": [ROOT / "CITATION.cff"],
}
TRANSLATION = ROOT / "README.zh.md"


def validated(schema, *files):
    return CliRunner().invoke(check_jsonschema.main, ["--builtin-schema", schema, *map(str, files)])


@pytest.mark.slow
@pytest.mark.parametrize("schema", SCHEMAS)
def test_each_file_follows_the_schema_of_its_kind(schema, tmp_path):
    assert SCHEMAS[schema]
    done = validated(schema, *SCHEMAS[schema])
    assert done.exit_code == 0, done.output
    broken = tmp_path / "broken.yml"
    broken.write_text(
        re.sub(r"\b(timeout-minutes|body|blank_issues_enabled|title):", "else:", SCHEMAS[schema][0].read_text())
    )
    assert validated(schema, broken).exit_code == 1


def jobs():
    for path in sorted(WORKFLOWS.iterdir()):
        for name, job in yaml.safe_load(path.read_text())["jobs"].items():
            yield pytest.param(job, id=f"{path.stem}-{name}")


@pytest.mark.parametrize("job", list(jobs()))
def test_a_job_runs_what_is_there(job):
    runs = " ".join(step.get("run", "") for step in job["steps"])
    assert all((ROOT / script).is_file() for script in re.findall(r"\S+\.sh\b", runs))
    # Each action in a version; the publisher's own branch is what its page says to name.
    assert all(re.search(r"@(v\d|release/v\d)", step["uses"]) for step in job["steps"] if "uses" in step)
    classified = metadata.metadata("verl-clipx").get_all("Classifier")
    known = {line.rpartition(" ")[-1] for line in classified if line.startswith("Programming Language :: Python :: 3.")}
    versions = job.get("strategy", {}).get("matrix", {}).get("python")
    assert versions is None or {*versions} == known


def test_the_form_asks_for_what_the_project_writes():
    form = (FORMS / "bug.yml").read_text()
    named = [words for words in inline_code_of(form) if words.endswith(".json")]
    assert named == [record_path(Path(METRICS)).name]


def commands(page):
    blocks = blocks_of(page)
    return [(command.words, command.variables, command.needs) for block in blocks for command in commands_of(block)]


def test_the_translation_has_the_same_commands_links_and_code():
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "README.md", TRANSLATION)]
    english, chinese = map(commands, pages)
    assert len(english) > 6 and chinese == english
    english, chinese = ([link for link in links_of(page) if not link.startswith("README")] for page in pages)
    assert len(english) > 10 and chinese == english
    english, chinese = ({*inline_code_of(page)} for page in pages)
    assert chinese == english
    assert [link for page in pages for link in links_of(page) if link.startswith("README")] == [
        "README.zh.md",
        "README.md",
    ]
    numbers = [re.findall(r"\d+(?:\.\d+)?", re.sub(r"```.*?```|\(.*?\)", "", page, flags=re.DOTALL)) for page in pages]
    assert sorted(numbers[0]) == sorted(numbers[1])
