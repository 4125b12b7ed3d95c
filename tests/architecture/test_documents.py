"""What the documents promise exists, and what exists is in the documents."""

from __future__ import annotations

import dataclasses
import re
import shlex
from itertools import pairwise

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


def test_a_launch_of_a_preset_in_the_readme_is_one_that_fits() -> None:
    """A newcomer copied the first command for many ranks, and its plan was refused."""
    from launch.build import make_plans

    commands = [
        shlex.split(line)
        for line in CODE.replace("\\\n", " ").splitlines()
        if line.startswith("headrace launch")
    ]
    checked = 0
    for words in commands:
        source = words[words.index("train") + 1]
        if source not in preset_names():
            continue
        overrides = [value for key, value in pairwise(words) if key == "--set"]
        config = load_config(source, overrides)
        assert config.parallel.num_ranks == int(words[words.index("-n") + 1])
        assert all(item.plan.fits for item in make_plans(config)), words
        checked += 1
    assert checked


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
