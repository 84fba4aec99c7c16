"""What README.md and docs/ show is run, or what it names is looked up. By the language of a block:

    python  runs on 2 ranks (gloo, CPU); the blocks of a page share one namespace, in order
    bash    programs, files and options exist; the options of scripts/train.py are parsed;
            `loco_fsdp.plan` and programs of the page, a block that starts with "# name.py", print
            the text block that comes next, if one does
    toml    is a configuration of scripts/train.py
    json    parses
    text    output of a command, or a formula

Other fenced blocks have to be directives of MyST, which the build of the documentation checks. What
a reader need not see, but a python block needs, is a comment in front of it:

    <!-- setup
    from toy import Net, shard
    model = shard(Net())
    -->
"""

# ruff: noqa: E402 - what is not installed is skipped before the imports

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

pytest.importorskip("jsonargparse", reason="needs the train extra")

import torch
import torch.distributed as dist
from torch.distributed.run import get_args_parser as torchrun_parser

from loco_fsdp import LoCoConfig, plan
from ranks import RankPool

ROOT = Path(__file__).parent.parent

from train_config import load_config

Ranks = Callable[[int], RankPool]


class Block(NamedTuple):
    """A fenced block, or a comment with setup; `line` is that of its first line of content."""

    page: str
    line: int
    language: str
    content: str
    follower: str | None = None
    """Content of the next block of the page, if that is text."""


def blocks_of(page: Path) -> Iterator[Block]:
    """The blocks of a page, in order."""
    lines = page.read_text().splitlines()
    name, start = str(page.relative_to(ROOT)), 0
    while start < len(lines):
        opening = re.fullmatch(r"( *)(?:(`{3,})(\S*).*|(<!-- setup))", lines[start])
        start += 1
        if opening is None:
            continue
        indent, fence, language, setup = opening.groups()
        end = lines.index(indent + ("-->" if setup else fence), start)
        content = "".join(line.removeprefix(indent) + "\n" for line in lines[start:end])
        yield Block(name, start + 1, "setup" if setup else language, content)
        start = end + 1


def all_blocks() -> list[Block]:
    """The blocks of all pages, each with what follows it."""
    blocks: list[Block] = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        blocks.extend(blocks_of(page))
    return [
        block._replace(follower=after.content)
        if after is not None and after.language == "text" and after.page == block.page
        else block
        for block, after in zip(blocks, [*blocks[1:], None], strict=True)
    ]


BLOCKS = all_blocks()


def each(language: str) -> pytest.MarkDecorator:
    """Parametrizes a test with the blocks in a language."""
    blocks = [block for block in BLOCKS if block.language == language]
    ids = [f"{block.page}:{block.line}" for block in blocks]
    return pytest.mark.parametrize("block", blocks, ids=ids)


def test_every_block_is_in_a_language_that_is_checked() -> None:
    checked = ("python", "setup", "bash", "toml", "json", "text")
    unchecked = [
        f"{block.page}:{block.line}: {block.language or 'no language'}"
        for block in BLOCKS
        if block.language not in checked and not block.language.startswith("{")
    ]
    assert not unchecked


def run_page(blocks: list[Block], directory: str) -> dict[str, str]:
    """Runs the code of a page on this rank; what each block printed, by its first line."""
    namespace: dict[str, Any] = {"__name__": "page"}
    printed: dict[str, str] = {}
    there = os.getcwd()
    os.chdir(directory)
    try:
        with (
            # The pool has a process group, and keeps it.
            mock.patch.object(dist, "init_process_group"),
            mock.patch.object(dist, "destroy_process_group"),
            mock.patch.object(torch.cuda, "is_available", return_value=False),
        ):
            for block in blocks:
                code = "\n" * (block.line - 1) + block.content
                with contextlib.redirect_stdout(io.StringIO()) as output:
                    exec(compile(code, block.page, "exec"), namespace)
                printed[block.content.split("\n")[0]] = output.getvalue()
    finally:
        os.chdir(there)
    return printed


@pytest.mark.parametrize(
    "page", sorted({block.page for block in BLOCKS if block.language == "python"})
)
def test_python(ranks: Ranks, page: str, tmp_path: Path) -> None:
    blocks = [block for block in BLOCKS if block.page == page]
    code = [block for block in blocks if block.language in ("python", "setup")]
    printed, *_ = ranks(2).run(run_page, code, str(tmp_path))
    for block in blocks:
        program = f"# {block.content.split()[-1]}"
        if block.language == "bash" and block.follower is not None and program in printed:
            assert block.follower == printed[program]


@each("bash")
def test_bash(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for line in block.content.replace("\\\n", " ").splitlines():
        for command in re.split(r"\s(?:&&|\|)\s", line):
            words = shlex.split(command, comments=True)
            while words and re.match(r"[A-Z_]+=", words[0]):
                words.pop(0)
            if words:
                check_command(words, block)


def check_command(words: list[str], block: Block) -> None:
    program, *arguments = words
    if program in ("python", "torchrun"):
        if program == "torchrun":
            options = torchrun_parser().parse_args(arguments)
            is_module = options.module
            target, rest = options.training_script, options.training_script_args
        else:
            is_module = arguments[0] == "-m"
            target, *rest = arguments[is_module:]
        check_python(target, rest, is_module, block)
    elif program == "pip":
        assert arguments[0] == "install"
        extras = importlib.metadata.metadata("loco-fsdp").get_all("Provides-Extra", [])
        for argument in arguments[1:]:
            for named in re.findall(r"\[(.+)\]", argument):
                assert set(named.split(",")) <= set(extras), argument
            if argument.startswith("."):
                continue
            assert argument in ("-e", "-c", "constraints.txt", "torch"), argument
    elif program == "export":
        assert re.match(r"[A-Z_]+=", arguments[0])
    else:
        assert (ROOT / program).is_file(), f"unknown program {program}"
        assert os.access(ROOT / program, os.X_OK), f"{program} is not executable"


def check_python(target: str, arguments: list[str], is_module: bool, block: Block) -> None:
    if target == "loco_fsdp.plan":
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            plan.main(arguments)
        if block.follower is not None:
            assert block.follower == output.getvalue()
    elif target == "scripts/train.py":
        load_config(arguments)
    elif (block.page, f"# {target}") in [(b.page, b.content.split("\n")[0]) for b in BLOCKS]:
        assert not arguments  # a block of this page, which test_python runs
    else:
        assert is_module or (ROOT / target).is_file(), target
        known = help_of(target, is_module)
        for argument in arguments:
            if argument.startswith("--"):
                assert re.search(rf"{argument.split('=')[0]}\b", known), (
                    f"{target} has no {argument}"
                )


@functools.cache
def help_of(target: str, is_module: bool) -> str:
    command = [sys.executable, *(["-m"] if is_module else []), target, "--help"]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


@each("toml")
def test_toml(block: Block, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(block.content)
    load_config(["--config", str(path)])


@each("json")
def test_json(block: Block) -> None:
    json.loads(block.content)


def test_the_page_on_configuration_has_every_field_and_its_default() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \|", page, re.MULTILINE)
    assert rows == [(name, repr(value)) for name, value in LoCoConfig().to_dict().items()]
