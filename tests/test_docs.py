"""docs/cli.md is generated and complete."""
import subprocess
import sys
from pathlib import Path

import click

from pykvq.cli import main

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from generate_cli_docs import commands           # noqa: E402


def test_command_line_docs_are_not_stale():
    result = subprocess.run([sys.executable, ROOT / "tools/generate_cli_docs.py", "--check"], capture_output=True, text=True)
    assert result.returncode == 0, f"{result.stdout}{result.stderr}run: python tools/generate_cli_docs.py"


def test_every_command_and_option_is_documented():
    text = (ROOT / "docs/cli.md").read_text()
    for path, command in commands(main, "pykvq"):
        assert f"## {path}\n" in text
        assert command.help and command.help.splitlines()[0].rstrip(".") in text
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert parameter.help, f"{path} {parameter.opts}"
                assert parameter.opts[0] in text
        assert isinstance(command, click.Group) or any("--json" in p.opts for p in command.params), f"{path} has no --json"
