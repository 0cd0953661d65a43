"""Pages of the documentation that are made from the code: the command line and the files that people write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

DOCS = Path(__file__).parent


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages, the schema files, and guides that the navigation does not name."""
    made = {"reference/cli.md": cli_page(), "reference/files.md": files_page(), "adr/index.md": adr_page()}
    for place, text in made.items():
        files.append(File.generated(config, place, content=text))
    from perfmodel.config import schema

    for kind in schema.KINDS:
        text = schema.schema_text(kind)
        files.append(File.generated(config, f"schemas/{kind}.schema.json", content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links to a folder, which a forge shows as a list, lead to the made list here."""
    return markdown.replace("](adr/)", "](adr/index.md)") if page.file.src_uri == "architecture.md" else markdown


def cli_page() -> str:
    """Every command with its help."""
    from perfmodel.cli import cli

    parts = ["# Command line\n\nExit codes: 0 an answer, 1 a check that failed, 2 wrong usage or input.\n"]
    parts += _command(cli, "perfmodel", None)
    return "\n".join(parts)


def _command(command: click.Command, path: str, parent: click.Context | None) -> list[str]:
    context = click.Context(command, info_name=path.rsplit(maxsplit=1)[-1], parent=parent, max_content_width=100)
    parts = [f"## `{path}`\n\n```text\n{command.get_help(context)}\n```\n"]
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            if inner is not None:
                parts += _command(inner, f"{path} {name}", context)
    return parts


def files_page() -> str:
    """Every key of every file people write, from the JSON Schemas."""
    from perfmodel.config import schema

    parts = [
        "# Files people write\n\nA quantity is text with its unit (`3.35 TB/s`, `80 GiB`, `2 us`); a bare number is refused. "
        "The schemas are in the package (`perfmodel/config/schemas/`). In an editor with a YAML language server, a first line "
        "such as\n\n```yaml\n# yaml-language-server: $schema=<path>/topology.schema.json\n```\n\ncompletes and checks keys.\n"
    ]
    for kind, (title, _) in schema.KINDS.items():
        body = schema.schema(kind)
        parts.append(f"## {title}\n\n[{kind}.schema.json](../schemas/{kind}.schema.json)\n")
        if "properties" in body:
            parts.append(_keys(body))
        for name, part in body.get("$defs", {}).items():
            if "properties" in part:
                parts.append(f"### {kind}: {name}\n\n{_words(part.get('description', ''))}\n\n{_keys(part)}")
    return "\n".join(parts)


def _words(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _keys(part: dict[str, Any]) -> str:
    lines = ["| key | what | default |", "| --- | --- | --- |"]
    needed = set(part.get("required", ()))
    for key, value in part["properties"].items():
        default = "needed" if key in needed else f"`{json.dumps(value['default'])}`" if "default" in value else "-"
        about = _words(value.get("description", "")).replace("\n", " ")
        lines.append(f"| `{key}` | {_kind(value)}{': ' + about if about else ''} | {default} |".replace("`null`", "-"))
    return "\n".join(lines) + "\n"


def _kind(value: dict[str, Any]) -> str:
    if "$ref" in value:
        return value["$ref"].rpartition("/")[2]
    if "anyOf" in value:
        return " or ".join(dict.fromkeys(_kind(item) for item in value["anyOf"] if item.get("type") != "null"))
    if "enum" in value:
        return ", ".join(f"`{item}`" for item in value["enum"])
    if "const" in value:
        return f"`{value['const']}`"
    if "x-quantity" in value:
        return f"{value['x-quantity']}, such as `{value['examples'][0]}`"
    if value.get("type") == "array":
        return f"list of {_kind(value['items'])}" if isinstance(value.get("items"), dict) else "list"
    kind = value.get("type", "any value")
    return " or ".join(kind) if isinstance(kind, list) else str(kind)


def adr_page() -> str:
    """The list of decisions."""
    lines = ["# Decisions\n\nChoices that would puzzle a newcomer, one page each.\n"]
    for path in sorted((DOCS / "adr").glob("[0-9]*.md")):
        title = path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        lines.append(f"- [{title}]({path.name})")
    return "\n".join(lines) + "\n"
