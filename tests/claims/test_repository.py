"""What stands beside the code: workflows and forms, the citation, README in two languages, versions, public names. Not
covered: running a workflow, the words of pages, what the public functions do (tests/losses/applying).
"""

import ast
import inspect
import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import check_jsonschema
import pytest
import yaml
from click.testing import CliRunner

import verl_clipx
from verl_clipx.analysis.demo import files as demo
from verl_clipx.losses.base.shared_metrics import RECEIPT, RECEIPT_FAILED
from verl_clipx.run.run_files import METRICS, record_path
from verl_clipx.training.worker.receipt import Receipt

from .documents import PAGES, ROOT, blocks_of, commands_of, inline_code_of, is_as_printed, links_of

WORKFLOWS = ROOT / ".github" / "workflows"
FORMS = ROOT / ".github" / "ISSUE_TEMPLATE"
SCHEMAS = {
    "vendor.github-workflows": sorted(WORKFLOWS.iterdir()),
    "custom.github-workflows-require-timeout": sorted(WORKFLOWS.iterdir()),
    "vendor.github-issue-forms": sorted({*FORMS.iterdir()} - {FORMS / "config.yml"}),
    "vendor.github-issue-config": [FORMS / "config.yml"],
    "vendor.citation-file-format": [ROOT / "CITATION.cff"],
}
ENGLISH, CHINESE = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh.md"))
PROJECT = metadata.metadata("verl-clipx")


def check_files(schema, *files):
    return CliRunner().invoke(check_jsonschema.main, ["--builtin-schema", schema, *map(str, files)])


@pytest.mark.slow
@pytest.mark.parametrize("schema", SCHEMAS)
def test_each_file_follows_the_schema_of_its_kind(schema, tmp_path):
    assert SCHEMAS[schema]
    checked = check_files(schema, *SCHEMAS[schema])
    assert checked.exit_code == 0, checked.output
    broken = tmp_path / "broken.yml"
    broken.write_text(
        re.sub(r"\b(timeout-minutes|body|blank_issues_enabled|title):", "else:", SCHEMAS[schema][0].read_text())
    )
    assert check_files(schema, broken).exit_code == 1


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
    classified = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT.get_all("Classifier")))
    versions = job.get("strategy", {}).get("matrix", {}).get("python")
    assert versions is None or {*versions} == {*classified}


def test_the_form_asks_for_what_the_project_writes():
    json_files = [code for code in inline_code_of((FORMS / "bug.yml").read_text()) if code.endswith(".json")]
    assert json_files == [record_path(Path(METRICS)).name]


def commands(page):
    return [
        (command.words, command.variables, block.needs) for block in blocks_of(page) for command in commands_of(block)
    ]


def test_the_translation_has_the_same_commands_links_and_code():
    assert len(commands(ENGLISH)) > 6 and commands(CHINESE) == commands(ENGLISH)
    assert {*inline_code_of(CHINESE)} == {*inline_code_of(ENGLISH)}
    english_links, chinese_links = (
        [link for link in links_of(page) if not link.startswith("README")] for page in (ENGLISH, CHINESE)
    )
    assert len(english_links) > 10 and chinese_links == english_links
    assert "README.zh.md" in links_of(ENGLISH) and "README.md" in links_of(CHINESE)
    prose = [re.sub(r"```.*?```|\(.*?\)", "", page, flags=re.DOTALL) for page in (ENGLISH, CHINESE)]
    english_numbers, chinese_numbers = (sorted(re.findall(r"\d+(?:\.\d+)?", text)) for text in prose)
    assert english_numbers == chinese_numbers


@pytest.mark.parametrize(("page", "reward_words"), [(ENGLISH, r"reward|points|score"), (CHINESE, r"奖励|百分点|得分")])
def test_readme_s_first_screen_has_no_number_of_reward(page, reward_words):
    screen, _, _ = page.partition("\n## ")
    sentences = re.split(r"[.:]\s|[。：]|\n\n|\n- ", screen)
    assert len(sentences) > 15
    # Of tokens, versions and bounds there may be numbers.
    assert [
        sentence for sentence in sentences if re.search(reward_words, sentence) and re.search(r"\d", sentence)
    ] == []


def test_readme_names_both_commands_that_do_all_the_set_up():
    lines = [" ".join(words) for words, _, _ in commands(ENGLISH)]
    assert "bash scripts/quickstart.sh" in lines
    assert "bash scripts/test.sh" in lines


def test_the_lines_that_confirm_a_swap_are_those_that_a_run_prints():
    (block,) = [block for block in blocks_of(ENGLISH) if "clipx: receipt:" in block.text]
    assert block.text in CHINESE
    driver_line, receipt_line, step_line = block.text.splitlines()
    # The demo's run under ACPO printed it.
    record = (demo.SHIPPED / demo.RUNS[1] / record_path(Path(METRICS)).name).read_text()
    (line_in_record,) = map(json.loads, re.findall(r'"line": (".*")', record))
    assert is_as_printed(driver_line, line_in_record)
    # An f-string over several lines of source.
    printed = re.sub(r'"\s+f?"', "", inspect.getsource(Receipt.__str__))
    parts = receipt_line.removeprefix("clipx: ").replace("clipx_acpo", "…").replace("token-mean", "…").split("…")
    assert [part for part in parts if part not in printed] == []
    assert [key for key in (RECEIPT.key, RECEIPT_FAILED.key) if f"actor/{key}:" not in step_line] == []


def test_the_repository_s_address_has_one_placeholder():
    pages = [*PAGES, ROOT / "README.zh.md"]
    owners = {owner for page in pages for owner in re.findall(r"github\.com/([\w.-]+)/verl-clipx", page.read_text())}
    assert owners == {"OWNER"} and "instead of OWNER" in (ROOT / "docs/dev/release.md").read_text()
    assert all("github.com/OWNER/verl-clipx" in page for page in (ENGLISH, CHINESE))


def test_no_page_prints_an_address_that_a_reader_has_to_fill_in():
    incomplete = re.compile(r"(git\+|https?://|git@)\S*[<…]")
    assert [page.name for page in PAGES if incomplete.search(page.read_text(encoding="utf-8"))] == []


# Names that stand for any test file.
MADE_UP = {"tests/losses/methods/test_NAME.py", "tests/a/test_b.py"}


def test_the_test_files_that_code_and_pages_name_are_there():
    folders = ("verl_clipx", "tests", "benchmarks", "scripts")
    code = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    missing = [
        f"{file.relative_to(ROOT)} names {name}"
        for file in (*code, *PAGES)
        for name in re.findall(r"\btests/[\w/]+\.py\b", file.read_text(encoding="utf-8"))
        if name not in MADE_UP and not (ROOT / name).exists()
    ]
    assert missing == []


def test_every_file_names_the_version_and_the_licence():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["authors"] == [{"name": "The verl-clipx developers"}]
    assert (citation["version"], citation["license"]) == (PROJECT["Version"], PROJECT["License-Expression"])
    assert PROJECT["Name"] in citation["title"] and verl_clipx.__version__ == PROJECT["Version"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    # The newest version comes first.
    assert re.findall(r"(?m)^## (\S+)", changelog)[0] == PROJECT["Version"]


TYPES = {"Bounds", "FixedBounds", "Method", "Tokens", "Width"}
FUNCTIONS = {"register_loss", "check_loss", "check_gradient", "clip_loss"}
FUNCTIONS |= {"parameter", "number", "integer", "choice", "of_decision", "of_rollout_batch"}


def test_the_public_names_are_what_they_are_called_and_documented():
    page, public = (ROOT / "docs" / "own_loss.md").read_text(), {*verl_clipx.__all__}
    for name in public:
        public_object = getattr(verl_clipx, name)
        assert getattr(public_object, "__name__", name) == name
        assert name == "__version__" or re.search(rf"`(@|verl_clipx\.|){name}\b", page), name
    assert {name for name in public if isinstance(getattr(verl_clipx, name), type)} == TYPES
    assert public - TYPES - FUNCTIONS == {"__version__", "METHODS"}
    assert all(callable(getattr(verl_clipx, name)) for name in FUNCTIONS)
    assert issubclass(verl_clipx.METHODS["acpo"], verl_clipx.Method)
    names = {}
    exec("from verl_clipx import *", names)
    assert names.keys() >= public
    with pytest.raises(AttributeError, match="'verl_clipx' has no attribute 'losss'"):
        verl_clipx.losss  # noqa: B018


@pytest.mark.parametrize("page", ["own_loss.md", "elsewhere.md"])
def test_the_pages_on_losses_import_public_names_alone(page):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    imports = [
        (node.module, name.name)
        for block in blocks_of(text)
        if block.language == "python"
        for node in ast.walk(ast.parse(block.text))
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "verl_clipx"
        for name in node.names
    ]
    assert imports and {module for module, _ in imports} == {"verl_clipx"}
    assert {name for _, name in imports} <= {*verl_clipx.__all__}


def test_dir_lists_them_before_any_is_used():
    program = "import verl_clipx; assert {*verl_clipx.__all__} <= {*dir(verl_clipx)}, dir(verl_clipx)"
    subprocess.run([sys.executable, "-c", program], check=True)
