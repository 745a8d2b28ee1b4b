"""Configuration items and log levels."""

from __future__ import annotations

import logging
import subprocess
import sys
import traceback
from dataclasses import fields
from pathlib import Path

import pytest
from torch import nn

import pyrannc
from pyrannc import log
from pyrannc.config import FILE_NAME, Config, load
from pyrannc.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A home that has no configuration file."""
    return tmp_path


def write(folder: Path, text: str) -> dict[str, str]:
    (folder / FILE_NAME).write_text(text)
    return {"RANNC_CONF_DIR": str(folder)}


def test_defaults(folder: Path) -> None:
    loaded = load({"HOME": "/nowhere"}, folder)
    assert loaded.config == Config()
    assert loaded.warnings == ()
    assert (loaded.config.mem_margin, loaded.config.max_pipeline, loaded.config.opt_param_factor) == (0.1, 32, 2)
    assert loaded.config.mem_limit_bytes is None


def test_the_search_has_a_limit_of_time(folder: Path) -> None:
    limits = [load({"RANNC_SEARCH_TIMEOUT_S": text}, folder).config.search_timeout_ms for text in ("0", "0.0001", "90")]
    assert limits == [None, 1, 90_000]
    assert Config().search_timeout_ms == 60_000
    with pytest.raises(ConfigError, match="must be at least 0"):
        load({"RANNC_SEARCH_TIMEOUT_S": "-1"}, folder)


def test_file_in_home(folder: Path) -> None:
    (folder / ".pyrannc").mkdir()
    (folder / ".pyrannc" / FILE_NAME).write_text("mem_limit_gb = 4\npartition_num = 2\n")
    config = load({}, folder).config
    assert (config.mem_limit_gb, config.partition_num) == (4.0, 2)
    assert isinstance(config.mem_limit_gb, float)
    assert config.mem_limit_bytes == 4 * 2**30


def test_named_folder_comes_before_home(folder: Path) -> None:
    (folder / ".pyrannc").mkdir()
    (folder / ".pyrannc" / FILE_NAME).write_text("partition_num = 2\n")
    environ = write(folder, "pipeline_num = 4\n")
    config = load(environ, folder).config
    assert (config.partition_num, config.pipeline_num) == (0, 4)


def test_environment_wins(folder: Path) -> None:
    environ = write(folder, "mem_limit_gb = 4\nshow_config_items = true\n")
    config = load(environ | {"RANNC_MEM_LIMIT_GB": "0.5", "RANNC_DEPLOYMENT_FILE": "plan 1.json"}).config
    assert (config.mem_limit_gb, config.show_config_items, config.deployment_file) == (0.5, True, "plan 1.json")


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("true", True), ("True", True), ("0", False), ("FALSE", False)]
)
def test_truth_in_the_environment(folder: Path, text: str, value: bool) -> None:
    assert load({"RANNC_SHOW_CONFIG_ITEMS": text}, folder).config.show_config_items is value


@pytest.mark.parametrize(("text", "value"), [("1", True), ("true", True), ("0", False), ("false", False)])
def test_truth_in_the_file(folder: Path, text: str, value: bool) -> None:
    assert load(write(folder, f"show_config_items = {text}")).config.show_config_items is value


def test_every_item_can_be_given_its_default_in_the_environment(folder: Path) -> None:
    environ = {f"RANNC_{item.name.upper()}": str(item.default) for item in fields(Config)}
    assert len(environ) == 45
    assert load(environ, folder).config == Config()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mem_limit = 4", "'mem_limit' in {path} is not a configuration item; did you mean 'mem_limit_gb'?"),
        ("[pipeline]\nnum = 1", "'pipeline' in {path} is not a configuration item"),
        ("zzz = 1", "'zzz' in {path} is not a configuration item"),
        ('mem_limit_gb = "4"', "'mem_limit_gb' in {path} must be a number, not '4'"),
        ("mem_limit_gb = true", "'mem_limit_gb' in {path} must be a number, not True"),
        ("mem_limit_gb = -1", "'mem_limit_gb' in {path} must be at least 0, not -1"),
        ("mem_limit_gb = nan", "'mem_limit_gb' in {path} must be at least 0, not nan"),
        ("mem_margin = 1.0", "'mem_margin' in {path} must be at least 0 and less than 1, not 1.0"),
        ("partition_num = 2.0", "'partition_num' in {path} must be a whole number, not 2.0"),
        ("show_config_items = 2", "'show_config_items' in {path} must be true or false, not 2"),
        ("deployment_file = 3", "'deployment_file' in {path} must be a text, not 3"),
        (
            'profile = "alwys"',
            "'profile' in {path} must be one of auto, always, never, not 'alwys'; did you mean 'always'?",
        ),
        ("enable_zero = 4", "'enable_zero' in {path} must be a text, not 4"),
        ('enable_zero = "on"', "'enable_zero' in {path} must be one of off, auto, 1, 2, 3, not 'on'"),
        ("min_pipeline =", "cannot read the configuration file {path}"),
    ],
)
def test_errors_in_the_file(folder: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(folder, text))
    assert str(caught.value).startswith(message.format(path=folder / FILE_NAME))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "RANNC_MEM_LIMIT_BG",
            "4",
            "environment variable RANNC_MEM_LIMIT_BG is not a configuration item; did you mean 'RANNC_MEM_LIMIT_GB'?",
        ),
        ("RANNC_MEM_LIMIT_GB", "4G", "environment variable RANNC_MEM_LIMIT_GB must be a number, not '4G'"),
        ("RANNC_MEM_LIMIT_GB", "", "environment variable RANNC_MEM_LIMIT_GB must be a number, not ''"),
        ("RANNC_PARTITION_NUM", "2.5", "environment variable RANNC_PARTITION_NUM must be a whole number, not '2.5'"),
        ("RANNC_SAVE_DEPLOYMENT", "yes", "environment variable RANNC_SAVE_DEPLOYMENT must be true or false, not 'yes'"),
        ("RANNC_MIN_PIPELINE", "0", "environment variable RANNC_MIN_PIPELINE must be at least 1, not '0'"),
        ("RANNC_LOAD_DEPLOYMENT", "1", "environment variable RANNC_LOAD_DEPLOYMENT needs 'deployment_file'"),
        (
            "RANNC_SAVE_GRAPH_PROFILE",
            "1",
            "environment variable RANNC_SAVE_GRAPH_PROFILE needs 'graph_profile_file'",
        ),
    ],
)
def test_errors_in_the_environment(folder: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load({name: text}, folder)
    assert str(caught.value).startswith(message)


def test_what_is_like_no_item(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"variable RANNC_ALLOW_UNCUT is not a configuration item$"):
        load({"RANNC_ALLOW_UNCUT": "1"}, folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "min_pipeline = 8\nmax_pipeline = 4",
            r"'min_pipeline' in .* \(8\) is greater than 'max_pipeline' in .* \(4\)",
        ),
        ("min_pipeline = 64", r"'min_pipeline' in .* \(64\) is greater than the default of 'max_pipeline' \(32\)"),
        ("pipeline_num = 8\nmax_pipeline = 4", "'pipeline_num' in .* is greater than 'max_pipeline'"),
        ("pipeline_num = 2\nmin_pipeline = 4", "'pipeline_num' in .* is less than 'min_pipeline'"),
        ("partition_num = 3\nmax_partition_num = 2", "'partition_num' in .* is greater than 'max_partition_num'"),
        ("heartbeat_s = 3\nsilence_timeout_s = 5", "'heartbeat_s' in .* is more than half of 'silence_timeout_s'"),
        ('save_deployment = 1\nload_deployment = 1\ndeployment_file = "p"', "cannot be set together with"),
        ('save_graph_profile = 1\nload_graph_profile = 1\ngraph_profile_file = "p"', "cannot be set together with"),
        ('save_graph_profile = 1\nprofile = "never"\ngraph_profile_file = "p"', "cannot be set together with"),
    ],
)
def test_contradictions(folder: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(write(folder, text))


def test_forced_number_beats_a_default_limit(folder: Path) -> None:
    assert load({"RANNC_PIPELINE_NUM": "64"}, folder).config.pipeline_num == 64


def test_items_without_effect_warn(folder: Path) -> None:
    warnings = load({"RANNC_SYNC_ALLREDUCE": "1", "RANNC_TRACE_EVENTS": "1", "RANNC_DUMP_GRAPH": "0"}, folder).warnings
    assert warnings == (
        "environment variable RANNC_SYNC_ALLREDUCE has no effect any more: "
        "gradients are reduced in one fixed order on all ranks",
        "environment variable RANNC_TRACE_EVENTS is not available yet: no events are recorded",
    )


def test_missing_file_in_a_named_folder(folder: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration file"):
        load({"RANNC_CONF_DIR": str(folder / "absent")})


def test_other_variables_are_no_items(folder: Path) -> None:
    assert load({"RANNC_LOG": "debug", "OTHER": "1"}, folder).config == Config()


def test_log_levels() -> None:
    levels = log.parse_levels("warning, DPStaging=debug")
    assert levels["DPStaging"] == logging.DEBUG
    assert levels["RaNNCModule"] == logging.WARNING
    with pytest.raises(ConfigError, match="unknown component 'DPStagin'; did you mean 'DPStaging'"):
        log.parse_levels("DPStagin=debug")
    with pytest.raises(ConfigError, match="unknown level 'loud'"):
        log.parse_levels("loud")


@pytest.mark.parametrize(
    ("rank", "setting", "shown"),
    [(0, "", ["info", "warning"]), (1, "", ["warning"]), (1, "DPStaging=debug", ["debug", "info", "warning"])],
)
def test_log_output(rank: int, setting: str, shown: list[str]) -> None:
    script = f"""
import pyrannc
from pyrannc import log
log.configure({rank}, {{"RANNC_LOG": {setting!r}}})
log.configure({rank}, {{"RANNC_LOG": {setting!r}}})
for level in ("debug", "info", "warning"):
    getattr(log.get_logger("DPStaging"), level)("found %d stages", 2)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    lines = [line.partition("] ")[2] for line in run.stderr.splitlines()]
    assert lines == [f"[DPStaging] [{level}] [rank {rank}] found 2 stages" for level in shown]


def test_an_error_shows_the_line_of_the_script(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANNC_PIPELINE_NUM", "abc")
    with pytest.raises(ConfigError, match="RANNC_PIPELINE_NUM must be a whole number") as caught:
        pyrannc.RaNNCModule(nn.Linear(2, 2))
    assert len(traceback.extract_tb(caught.tb)) == 2
