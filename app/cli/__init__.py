"""Bodies of the commands; :mod:`cli_typer` puts them together."""
