"""What the documents promise exists, and what exists is in the documents."""

from __future__ import annotations

import dataclasses
import re
import shlex

import pytest
import typer.main

from launch.cli import app
from launch.compose import dotted_keys
from launch.config import RunConfig, load_config, preset_names
from ops.comm.base import OUTSTANDING_BYTES_MAX, PIECE_BYTES
from tests.architecture.sources import LAYERS, ROOT, files

README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
CODE = "\n".join(re.findall(r"```[a-z]*\n(.*?)```", README, flags=re.DOTALL))
FIRST_SCREEN_LINES = 30


def targets() -> set[str]:
    """Targets of the Makefile that people name."""
    (line,) = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, flags=re.MULTILINE)
    return set(line.split())


def test_both_commands_are_on_the_first_screen_of_the_readme() -> None:
    first_screen = "\n".join(README.splitlines()[:FIRST_SCREEN_LINES])
    assert re.search(r"^make train\b", first_screen, flags=re.MULTILINE)
    assert re.search(r"^make test\b", first_screen, flags=re.MULTILINE)


def test_make_commands_of_the_readme_exist() -> None:
    named = set(re.findall(r"\bmake ([a-z][a-z-]*)", CODE))
    assert named
    assert named <= targets()
    for target in targets():
        assert re.search(rf"^{target}:", MAKEFILE, flags=re.MULTILINE), target


def test_headrace_commands_of_the_readme_exist() -> None:
    commands = set(getattr(typer.main.get_command(app), "commands"))  # noqa: B009
    named = set(re.findall(r"\bheadrace ([a-z]+)", CODE))
    assert named
    assert named <= commands


@pytest.mark.parametrize("document", ["README.md", "docs/configuration.md"])
def test_keys_set_in_examples_exist(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    named = set(re.findall(r"--set ([a-z_.0-9]+)=", text))
    assert named <= set(dotted_keys(RunConfig))


def test_the_page_on_configuration_names_every_key_in_its_section() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## `(\w+)`.*?\n(.*?)(?=^## |\Z)", text, flags=re.M | re.S))
    missing = []
    for key in dotted_keys(RunConfig):
        section, _, rest = key.partition(".")
        if rest and f"`{rest}`" not in sections.get(section, ""):
            missing.append(key)
    assert not missing
    known = {field.name for field in dataclasses.fields(RunConfig)}
    assert set(sections) <= known


def test_the_page_on_configuration_names_every_preset() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in preset_names())


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda p: p.name)
def test_every_example_is_a_valid_configuration(path: object) -> None:
    load_config(str(path))


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_loads_and_plans(name: str) -> None:
    from launch.build import make_plan

    plan = make_plan(load_config(name))
    assert plan.fits, plan.problems


def run_commands() -> list[tuple[str, list[str]]]:
    """Each `headrace train` and `headrace launch` of the documents, as (document, words).

    From code blocks and from the text; what stands for something else, as CONFIG does, is none.
    """
    found = []
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = path.read_text(encoding="utf-8")
        blocks = re.findall(r"^ *```[a-z]*\n(.*?)^ *```", text, flags=re.M | re.S)
        lines = [x for block in blocks for x in block.replace("\\\n", " ").splitlines()]
        prose = re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S)
        for line in [*lines, *re.findall(r"`([^`]+)`", prose)]:
            if not re.match(r"\s*headrace\s+(train|launch)\s", line):
                continue
            words = shlex.split(line, comments=True)
            if not any(re.search(r"\[|\b[A-Z]{3,}\b", word) for word in words):
                found.append((path.name, words))
    return found


@pytest.mark.parametrize(
    ("document", "words"), [pytest.param(*x, id=" ".join(x[1][1:])) for x in run_commands()]
)
def test_a_command_in_the_documents_is_one_that_would_start(
    document: str, words: list[str]
) -> None:
    """Copied commands were refused: by the plan, or as they started too many ranks for the mesh."""
    from launch.build import make_plans
    from moe.mesh_check import check_num_ranks

    shell = typer.main.get_command(app)
    parsed = shell.make_context("headrace", words[1:])
    command, num_ranks, arguments = words[1], 1, words[2:]
    known = getattr(shell, "commands")  # noqa: B009
    if command == "launch":
        outer = known["launch"].make_context("launch", arguments, parent=parsed)
        num_ranks, (command, *arguments) = outer.params["num_ranks"], outer.params["arguments"]
        assert command == "train"
    options = known["train"].make_context("train", arguments, parent=parsed).params
    if options["source"] not in preset_names():
        return
    config = load_config(options["source"], options["overrides"] or ())
    check_num_ranks(config.parallel, config.model, config.train, num_ranks)
    assert (options["steps"] or 0) <= config.train.steps
    for item in make_plans(config, resumed=options["resume"] is not None):
        assert item.plan.fits, (document, item.plan.problems)


def test_commands_are_found_in_blocks_and_in_the_text() -> None:
    found = {(document, words[1]) for document, words in run_commands()}
    assert {("README.md", "train"), ("README.md", "launch"), ("ascend.md", "launch")} <= found
    assert any(
        document == "ascend.md" and "tiny-moe" in words for document, words in run_commands()
    )


def test_the_page_tells_what_collectives_take_beside_the_budgets() -> None:
    """README said that budgets cover transfers, and nothing told what travels between ranks."""
    page = (ROOT / "docs/ARCHITECTURE.md").read_text(encoding="utf-8")
    assert f"{OUTSTANDING_BYTES_MAX >> 20} MiB of messages to other pipeline stages" in page
    assert f"{PIECE_BYTES >> 20} MiB of scratch" in page
    assert "Memory of collectives" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_architecture_page_maps_every_file() -> None:
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    missing = [str(path) for path in files(*LAYERS) if str(path) not in text]
    assert not missing


def test_ci_runs_exactly_the_two_targets() -> None:
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.startswith("make")] == ["make checks", "make test"]


def test_the_in_memory_example_trains_the_default_model() -> None:
    example = load_config(str(ROOT / "examples" / "all-in-memory.yaml"))
    default = load_config("tiny-moe")
    for section in ("model", "train", "optimizer", "data", "runtime"):
        assert getattr(example, section) == getattr(default, section)
