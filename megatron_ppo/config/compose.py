"""From command-line words to a checked RunConfig.

Order: Hydra composes YAML groups and overrides, OmegaConf resolves interpolations, pydantic validates. Every
error on the way, Hydra's own included, becomes one ConfigError. Driven by the scripts, before torch, Ray or
Megatron. Writes nothing and does not change the working directory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from megatron_ppo.config.messages import config_error, hydra_problem, schema_problems
from megatron_ppo.config.schema import RunConfig

CONFIG_DIR = Path(__file__).resolve().parents[2] / "conf"
_MISSING = "???"
# Overlays that are in no defaults list, because Hydra would then see two choices for them.
_APPENDED_GROUPS = ("experiment", "debug")


def compose_values(overrides: Sequence[str] = (), *, extra_dirs: Sequence[Path] = ()) -> dict[str, Any]:
    """The composed and resolved configuration as plain values, not validated yet.

    Args:
        overrides: Hydra's words, such as `+experiment=cpu_smoke` or `run.seed=1`.
        extra_dirs: further folders with config groups, searched after `conf/`.
    Raises: ConfigError.
    """
    words = list(overrides)
    for group in _APPENDED_GROUPS:
        for word in words:
            if word.startswith(f"{group}="):
                raise config_error([f"{word}: {group} is not set by default; write +{word}"])
    if extra_dirs:
        words.append(
            "hydra.searchpath=[" + ",".join(f"file://{folder.resolve()}" for folder in extra_dirs) + "]"
        )
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(CONFIG_DIR), job_name="megatron_ppo"):
            composed = compose(config_name="config", overrides=words)
        values = OmegaConf.to_container(composed, resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise config_error([hydra_problem(error)]) from error
    assert isinstance(values, dict)
    return {str(key): value for key, value in _without_missing(values).items()}


def validate(values: Mapping[str, Any]) -> RunConfig:
    """The typed configuration. Raises: ConfigError with every finding of the schema."""
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise config_error(schema_problems(error, values)) from error


def load(overrides: Sequence[str] = (), *, extra_dirs: Sequence[Path] = ()) -> RunConfig:
    """Compose and validate one configuration. `checks.derive` then applies the rules between sections.

    Raises: ConfigError.
    """
    return validate(compose_values(overrides, extra_dirs=extra_dirs))


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """What a script was asked for.

    Attributes:
        jobs: overrides of each job; more than one only with `-m`.   extra_dirs: from `--config-dir`.
    """

    jobs: tuple[tuple[str, ...], ...]
    extra_dirs: tuple[Path, ...] = ()

    def load(self) -> list[RunConfig]:
        """The configuration of every job. Raises: ConfigError, before the first job could start."""
        return [load(job, extra_dirs=self.extra_dirs) for job in self.jobs]


def parse_command_line(words: Sequence[str]) -> CommandLine:
    """Split a command line into jobs.

    `-m` or `--multirun` turns `key=a,b`, `key=range(…)` and `experiment=glob(…)` into one job per
    combination, in the order in which Hydra's basic sweeper would run them. `--config-dir DIR` adds a folder
    of config groups.

    Raises: ConfigError.
    """
    overrides: list[str] = []
    extra_dirs: list[Path] = []
    multirun, rest = False, iter(words)
    for word in rest:
        if word in ("-m", "--multirun"):
            multirun = True
        elif word in ("-cd", "--config-dir"):
            folder = Path(next(rest, ""))
            if not folder.is_dir():
                raise config_error([f"--config-dir: got {str(folder)!r}, which is not an existing folder"])
            extra_dirs.append(folder)
        elif word.startswith("-"):
            raise config_error(
                [f"{word}: unknown option; allowed: -m, --config-dir DIR, and key=value overrides"]
            )
        else:
            overrides.append(word)
    try:
        parsed = OverridesParser.create().parse_overrides(overrides=overrides)
    except HydraException as error:
        raise config_error([hydra_problem(error)]) from error
    return CommandLine(jobs=tuple(_jobs(parsed, multirun, extra_dirs)), extra_dirs=tuple(extra_dirs))


def _jobs(
    parsed: Iterable[Override], multirun: bool, extra_dirs: Sequence[Path]
) -> Iterable[tuple[str, ...]]:
    choices: list[list[str]] = []
    for override in parsed:
        if not override.is_sweep_override():
            choices.append([str(override.input_line)])
        elif not multirun:
            raise config_error([f"{override.input_line}: several values need -m (multirun)"])
        else:
            values = _sweep_values(override, extra_dirs)
            choices.append([f"{override.get_key_element()}={value}" for value in values])
    return itertools.product(*choices)


def _sweep_values(override: Override, extra_dirs: Sequence[Path]) -> list[str]:
    if not isinstance(override.value(), Glob):
        return list(override.sweep_string_iterator())
    pattern = override.value()
    assert isinstance(pattern, Glob)
    names = group_choices(override.key_or_group, extra_dirs=extra_dirs)
    kept = [
        name
        for name in names
        if any(fnmatch(name, included) for included in pattern.include)
        and not any(fnmatch(name, excluded) for excluded in pattern.exclude)
    ]
    if not kept:
        raise config_error(
            [f"{override.input_line}: matches nothing; available: {', '.join(names) or 'nothing'}"]
        )
    return kept


def group_choices(group: str, *, extra_dirs: Sequence[Path] = ()) -> list[str]:
    """Names of the YAML files of a config group, sorted."""
    folders = [CONFIG_DIR, *extra_dirs]
    return sorted({file.stem for folder in folders for file in (folder / group).glob("*.yaml")})


def _without_missing(values: Any) -> Any:
    """Drop mandatory keys that nobody has set, so that the schema reports all of them together."""
    if isinstance(values, dict):
        return {key: _without_missing(value) for key, value in values.items() if value != _MISSING}
    if isinstance(values, list):
        return [_without_missing(value) for value in values]
    return values
