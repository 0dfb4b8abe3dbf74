"""Renders a user's message in the chat format of a model folder, without transformers.

Driven by the tasks that start from an instruction-tuned model. The template is the folder's own, run in jinja2's
sandbox as transformers does, because a folder may come from anywhere. Invariant: for the templates of the supported
families the text equals transformers' `apply_chat_template(..., add_generation_prompt=True)`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatron_ppo.protocol.errors import ConfigError

_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


def chat_renderer(folder: str | Path) -> Callable[[str], str]:
    """A function from the user's message to the prompt, up to where the assistant begins.

    Raises: ConfigError if the folder has no template or one that jinja2 cannot read; the function raises it for a
        template that refuses the message.
    """
    source, settings = _template(Path(folder))
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], undefined=jinja2.Undefined
    )
    environment.filters["tojson"] = _plain_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _today
    try:
        template = environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ConfigError(f"the chat template of {folder} cannot be read: {error}") from error
    special = {name: _content(settings[name]) for name in _SPECIAL_TOKENS if settings.get(name)}

    def render(message: str) -> str:
        try:
            return template.render(
                messages=[{"role": "user", "content": message}],
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **special,
            )
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template of {folder} refuses a user's message: {error}") from error

    return render


def _template(folder: Path) -> tuple[str, dict[str, Any]]:
    path, alone = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    # transformers 5 writes the template into a file of its own.
    source = alone.read_text(encoding="utf-8") if alone.is_file() else settings.get("chat_template")
    if isinstance(source, list):
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if not isinstance(source, str):
        raise ConfigError(
            f"model folder {folder} has no chat template (chat_template.jinja, or chat_template in "
            "tokenizer_config.json); data.chat_template=false sends the bare question"
        )
    return source, settings


def _content(token: str | dict[str, Any]) -> str:
    # Older folders store a token as {"content": ..., ...}.
    return token if isinstance(token, str) else str(token["content"])


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _plain_json(value: object, indent: int | None = None) -> str:
    # jinja2's own filter escapes for HTML.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _today(style: str) -> str:
    return datetime.now(tz=UTC).strftime(style)
