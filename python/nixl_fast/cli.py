"""Command line."""

import typer

app = typer.Typer()
