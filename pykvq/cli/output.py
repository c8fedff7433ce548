"""The one sink: data on stdout (a table or JSON), everything else on stderr."""
from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from contextlib import contextmanager

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table


class Output:
    """Where a command writes; built from --json and --quiet."""

    def __init__(self, as_json: bool, quiet: bool):
        self.as_json, self.quiet = as_json, quiet
        # rich itself honours NO_COLOR, TERM=dumb and a stdout that is no terminal
        self.out, self.err = Console(highlight=False, soft_wrap=True), Console(stderr=True, highlight=False, soft_wrap=True)

    def data(self, value: object, *tables: Table) -> None:
        """The result: JSON of `value` with --json, else the tables."""
        if self.as_json:
            click.echo(json.dumps(value, indent=2))
            return
        for table in tables:
            self.out.print(table)

    def line(self, value: dict) -> None:
        """One JSON object on one line, for commands that answer many times."""
        click.echo(json.dumps(value))

    def note(self, text: str) -> None:
        """Information on stderr, silenced by --quiet."""
        if not self.quiet:
            self.err.print(text, markup=False)

    def warn(self, text: str) -> None:
        """A warning on stderr."""
        self.err.print(f"warning: {text}", markup=False, style="yellow")

    @contextmanager
    def progress(self, total: int):
        """A progress bar on stderr; yields step(description), called before each of `total` steps."""
        bar = Progress(TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn(),
                       console=self.err, transient=True, disable=self.quiet or not self.err.is_terminal)
        with bar:
            task = bar.add_task("", total=total)
            done = -1

            def step(description: str) -> None:
                nonlocal done
                done += 1
                bar.update(task, description=description, completed=done)
            yield step

    @contextmanager
    def amount(self, unit: str):
        """A bar with the time left on stderr, for work whose size is known later; yields begin(total), which returns advance(label, done)."""
        bar = Progress(TextColumn("{task.description}"), BarColumn(), TextColumn(f"{{task.completed}}/{{task.total}} {unit}"),
                       TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), console=self.err, transient=True,
                       disable=self.quiet or not self.err.is_terminal)
        with bar:
            def begin(total: int):
                task = bar.add_task("", total=total)
                return lambda label, done: bar.update(task, description=label, advance=done)
            yield begin


def common(command: Callable) -> Callable:
    """--json and --quiet; the command gets an Output as its first argument."""
    @click.option("--json", "as_json", is_flag=True, help="Print JSON.")
    @click.option("--quiet", "-q", is_flag=True, help="No progress and no notes on stderr.")
    @functools.wraps(command)
    def wrapped(*args, as_json: bool, quiet: bool, **kwargs):
        return command(Output(as_json, quiet), *args, **kwargs)
    return wrapped


def table(title: str, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> Table:
    """A plain table; columns whose name starts with ">" are right-aligned."""
    t = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for c in columns:
        t.add_column(c.lstrip(">"), justify="right" if c.startswith(">") else "left", overflow="fold")
    for row in rows:
        t.add_row(*(str(cell) for cell in row))
    return t


def mebibytes(n: int) -> str:
    """Bytes as MiB with one decimal."""
    return f"{n / 2**20:.1f} MiB"
