"""What the site adds to the page of the command line: every command, from the code that reads it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from inspect import Parameter, cleandoc, signature
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

MARKER = "<!-- every command -->"
_SAMPLE = re.compile(r"\b(e\.g\.) (.+?)(?=; |\. |\.?$)", re.IGNORECASE)
_KINDS = {str: "TEXT", int: "INTEGER", float: "FLOAT", Path: "PATH", bool: ""}
_SPECIAL = re.compile(r"([\\`*_\[\]<>|#])")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put the commands where the marker stands."""
    return markdown.replace(MARKER, every_command()) if MARKER in markdown else markdown


def every_command() -> str:
    """What `--help` says of each, the exit codes, and the parameter server's own options."""
    from tacit.stores.server.__main__ import arguments
    from tacit_lab.cli import application

    parts = [part for name, command in commands(application.app) for part in _told(name, command)]
    codes = str(application.app.info.epilog).removeprefix("Exit codes: ")
    parts += ["## Exit codes", "\n".join(f"* {_text(code)}" for code in codes.rstrip(".").split("; "))]
    parts += ["## python -m tacit.stores.server", f"```text\n{arguments().format_help()}```"]
    return "\n\n".join(parts)


def commands(app: Any, name: str = "tacit") -> Iterator[tuple[str, Any]]:
    """Every command of a typer app, with the words that call it."""
    for each in app.registered_commands:
        yield f"{name} {each.name or each.callback.__name__}", each
    for group in app.registered_groups:
        yield from commands(group.typer_instance, f"{name} {group.name}")


def _told(name: str, command: Any) -> list[str]:
    """A heading, what is typed, what it does, and a row for each parameter."""
    given = list(_parameters(command.callback))
    typed = [
        word if each.default is Parameter.empty else f"[{word}]"
        for word, _, each, is_option in given
        if not is_option
    ]
    texts = [_text(each) for each in cleandoc(command.callback.__doc__).split("\n\n")]
    table = "\n".join(["| | default | |", "|---|---|---|", *(_row(*each[:3]) for each in given)])
    epilog = [_listed(command.epilog)] if command.epilog else []
    usage = " ".join([name, "[OPTIONS]", *typed])
    return [f"## {name}", f"```text\n{usage}\n```", *texts, table, *epilog]


def _parameters(command: Callable[..., object]) -> Iterator[tuple[str, str, Parameter, bool]]:
    """Of each: how it is written, its help, its default, and whether it is an option."""
    from typer.models import OptionInfo

    hints = get_type_hints(command, include_extras=True)
    for name, parameter in signature(command).parameters.items():
        if not get_args(hints[name]):
            continue  # typer's own context, which nobody types
        kind, told = get_args(hints[name])
        if not isinstance(told, OptionInfo):
            yield told.metavar or name.upper(), told.help, parameter, False
            continue
        said = [each for each in (told.default, *(told.param_decls or ())) if isinstance(each, str)]
        word = ", ".join(said or [f"--{name.replace('_', '-')}"])
        (single,) = {*(get_args(kind) or [kind])} - {NoneType}
        each, *_ = get_args(single) or (single,)  # of an option that may be given several times
        yield f"{word} {told.metavar or _KINDS[each]}".rstrip(), told.help, parameter, True


def _row(word: str, told: str, parameter: Parameter) -> str:
    default = parameter.default
    shown = "" if any(default is each for each in (None, False, Parameter.empty)) else f"`{default}`"
    return f"| `{word}` | {shown} | {_text(told)} |"


def _listed(text: str) -> str:
    """Sentences that all but the first explain a word, "word: meaning.", as a list; others as they are."""
    first, *sentences = re.split(r"(?<=\.) ", text)
    if not sentences or not all(": " in each for each in sentences):
        return _text(text)
    pairs = [each.rstrip(".").split(": ", 1) for each in sentences]
    return "\n".join([_text(first), "", *(f"* *{_text(word)}*: {_text(told)}" for word, told in pairs)])


def _text(text: str) -> str:
    """As Markdown on one line, with what may be typed as code."""
    text, parts, end = " ".join(text.split()), [], 0
    for found in _SAMPLE.finditer(text):
        parts += [_SPECIAL.sub(r"\\\1", text[end : found.start()]), f"{found[1]} `{found[2]}`"]
        end = found.end()
    return "".join([*parts, _SPECIAL.sub(r"\\\1", text[end:])])
