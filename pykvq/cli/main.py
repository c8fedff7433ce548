"""The command group: version, and exceptions turned into one line and an exit code."""
from __future__ import annotations

import sys

import click

from pykvq.cli.bench import bench
from pykvq.cli.calibrate import calibrate
from pykvq.cli.chat import chat
from pykvq.cli.compare import compare
from pykvq.cli.completion import completion
from pykvq.cli.doctor import doctor
from pykvq.cli.embed import embed_rotations
from pykvq.cli.epicache import epicache
from pykvq.cli.errors import explain
from pykvq.cli.eval import evaluate
from pykvq.cli.inspect import inspect
from pykvq.cli.plan import plan
from pykvq.cli.serve import serve
from pykvq.cli.types import types


class Group(click.Group):
    """Usage errors and bad input end with 2 and one line, a negative verdict with 1; nothing ends in a traceback."""

    def make_context(self, *args, **kwargs) -> click.Context:
        try:
            return super().make_context(*args, **kwargs)
        except click.UsageError as error:
            raise usage(error) from error

    def invoke(self, ctx: click.Context):
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            raise usage(error) from error
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except KeyboardInterrupt:
            click.echo(err=True)
            ctx.exit(130)                        # click's own 1 would be a negative verdict
        except BrokenPipeError:
            raise                                # the reader has gone: click ends without a word
        except Exception as error:
            message = explain(error)
            if message is None:
                raise
            raise CommandError(message) from error


class CommandError(click.ClickException):
    """Bad input: the message on stderr, exit code 2."""
    exit_code = 2

    def show(self, file=None) -> None:
        click.echo(f"error: {self.message}", file=file or sys.stderr)


def usage(error: click.UsageError) -> click.ClickException:
    """click's own four lines as one: what is wrong, and the command that tells what is right. A group without a command goes on showing its help."""
    if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):
        return error
    path = error.ctx.command_path if error.ctx else "pykvq"
    return CommandError(f"{' '.join(error.format_message().split()).removesuffix('.')}; run: {path} --help")


def show_version(ctx: click.Context, _, wanted: bool) -> None:
    """Body of --version."""
    if not wanted or ctx.resilient_parsing:
        return
    import pykvq
    from pykvq.native import NativeError, llama_commit
    try:
        commit = llama_commit()
    except NativeError as error:
        commit = f"not installed ({error})"
    click.echo(f"pykvq {pykvq.__version__}, llama.cpp {commit}")
    ctx.exit()


@click.group("pykvq", cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=show_version,
              help="Print the versions of pykvq and of the llama.cpp in it.")
def main() -> None:
    """Smaller KV caches for llama.cpp.

    Data goes to stdout, progress and warnings to stderr. Exit codes: 0 ok, 1 negative verdict, 2 bad usage or input,
    130 interrupted.
    """


for command in (types, doctor, plan, bench, evaluate, chat, compare, calibrate, embed_rotations, inspect, serve, epicache, completion):
    main.add_command(command)
