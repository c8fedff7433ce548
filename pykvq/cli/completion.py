"""pykvq completion."""
from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def completion(ctx: click.Context, shell: str, as_json: bool) -> None:
    """Print the completion script of a shell.

    bash: eval "$(pykvq completion bash)" in ~/.bashrc; zsh likewise in ~/.zshrc; fish: pykvq completion fish | source
    """
    import json
    script = get_completion_class(shell)(ctx.find_root().command, {}, "pykvq", "_PYKVQ_COMPLETE").source()
    script = script.replace('string split ","', 'string split --max 1 ","')      # fish: a completion such as turbo3,turbo2 is one
    click.echo(json.dumps({"shell": shell, "script": script}) if as_json else script)
