"""Environment settings: parsing, refusals, their documentation, and the log handler one of them asks for."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from wholestep._logging import attach_handler
from wholestep._settings import Settings, describe
from wholestep.errors import SettingsError

ROOT = Path(__file__).parents[2]


def test_nothing_set_gives_the_defaults() -> None:
    assert Settings.from_environ({}) == Settings(
        log_level=None,
        dump_dir=None,
        cache_size=16,
        recompile_warning=8,
        disable=False,
        verify=0,
        debug=False,
        progress=None,
    )


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("WHOLESTEP_LOG", "info", "log_level", "INFO"),
        ("WHOLESTEP_DUMP_DIR", "outputs/dump", "dump_dir", "outputs/dump"),
        ("WHOLESTEP_CACHE_SIZE", "1", "cache_size", 1),
        ("WHOLESTEP_RECOMPILE_WARNING", " 3 ", "recompile_warning", 3),
        ("WHOLESTEP_DISABLE", "1", "disable", True),
        ("WHOLESTEP_DISABLE", "Off", "disable", False),
        ("WHOLESTEP_VERIFY", "2", "verify", 2),
        ("WHOLESTEP_AGREEMENT_TIMEOUT", "60", "agreement_timeout_s", 60),
        ("WHOLESTEP_KEEP_HEAP", "0", "keep_heap", False),
        ("WHOLESTEP_DEBUG", "1", "debug", True),
        ("WHOLESTEP_PROGRESS", "no", "progress", False),
        ("WHOLESTEP_PROGRESS", "yes", "progress", True),
    ],
)
def test_each_variable_sets_its_field_alone(name: str, text: str, field: str, value: object) -> None:
    settings = Settings.from_environ({name: text})
    assert getattr(settings, field) == value
    assert dataclasses.replace(settings, **{field: getattr(Settings(), field)}) == Settings()


def test_every_variable_is_covered_above() -> None:
    parametrize = next(
        mark for mark in test_each_variable_sets_its_field_alone.pytestmark if mark.name == "parametrize"
    )
    covered = {case[2] for case in parametrize.args[1]}
    assert covered == {field.name for field in dataclasses.fields(Settings)}


@pytest.mark.parametrize("text", ["", "  "])
def test_an_empty_value_counts_as_unset(text: str) -> None:
    assert Settings.from_environ(dict.fromkeys(_names(), text)) == Settings()


@pytest.mark.parametrize(
    ("name", "text", "allowed"),
    [
        ("WHOLESTEP_LOG", "loud", "one of DEBUG, INFO, WARNING, ERROR, CRITICAL"),
        ("WHOLESTEP_CACHE_SIZE", "0", "a whole number, 1 or more"),
        ("WHOLESTEP_CACHE_SIZE", "many", "a whole number, 1 or more"),
        ("WHOLESTEP_RECOMPILE_WARNING", "0", "a whole number, 1 or more"),
        ("WHOLESTEP_VERIFY", "-1", "a whole number, 0 or more"),
        ("WHOLESTEP_VERIFY", "1.5", "a whole number, 0 or more"),
        ("WHOLESTEP_DISABLE", "maybe", "1, true, yes, on or 0, false, no, off"),
        ("WHOLESTEP_PROGRESS", "2", "1, true, yes, on or 0, false, no, off"),
    ],
)
def test_a_bad_value_is_refused_and_the_allowed_ones_named(name: str, text: str, allowed: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.from_environ({name: text})
    assert str(caught.value) == f"{name}={text!r} is not allowed: set it to {allowed}, or unset it"


def test_an_unknown_name_warns_at_the_caller_and_changes_nothing() -> None:
    with pytest.warns(UserWarning, match="WHOLESTEP_CACHESIZE is ignored: .*WHOLESTEP_CACHE_SIZE") as caught:
        settings = Settings.from_environ({"WHOLESTEP_CACHESIZE": "3", "PATH": "", "WHOLESTEPS": "1"})
    assert settings == Settings()
    assert [warning.filename for warning in caught] == [__file__]


def test_the_process_environment_is_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHOLESTEP_VERIFY", "5")
    assert Settings.from_environ().verify == 5


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().verify = 1  # pyright: ignore[reportAttributeAccessIssue]


def test_the_documentation_holds_the_table() -> None:
    table = describe()
    assert all(f"`{name}`" in table for name in _names())
    assert table in (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("wholestep")
    before, level = list(logger.handlers), logger.level
    yield logger
    logger.handlers[:] = before
    logger.setLevel(level)


def test_the_log_handler_is_attached_once_and_keeps_the_level(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    attach_handler("INFO")
    attach_handler("WARNING")
    logging.getLogger("wholestep.capture").info("too quiet")
    logging.getLogger("wholestep.capture").warning("heard")
    assert capsys.readouterr().err == "WARNING wholestep.capture: heard\n"


def test_only_rank_0_prints(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    attach_handler("INFO")
    monkeypatch.setenv("RANK", "1")
    logging.getLogger("wholestep.capture").info("from rank 1")
    monkeypatch.setenv("RANK", "0")
    logging.getLogger("wholestep.capture").info("from rank 0")
    assert capsys.readouterr().err == "INFO wholestep.capture: from rank 0\n"


def _names() -> list[str]:
    return [field.metadata["name"] for field in dataclasses.fields(Settings)]
