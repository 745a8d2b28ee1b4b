"""Configuration items, from ``rannc_conf.toml`` and the environment.

The file is ``$RANNC_CONF_DIR/rannc_conf.toml`` if that variable is set, else ``~/.pyrannc/rannc_conf.toml`` if it
exists. An environment variable ``RANNC_<ITEM>`` wins over the file.
"""

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from pyrannc import old_config
from pyrannc.errors import ConfigError
from pyrannc.suggest import nearest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Value = bool | int | float | str

FILE_NAME = "rannc_conf.toml"
_PREFIX = "RANNC_"
_OTHER_VARIABLES = ("RANNC_CONF_DIR", "RANNC_LOG")
_FOREVER_S = 1e8
_TRUE, _FALSE = ("1", "true"), ("0", "false")


def _item(
    default: Value,
    *,
    least: float | None = None,
    below: float | None = None,
    choices: tuple[str, ...] = (),
    later: str = "",
    replaced_by: str = "",
) -> Any:
    """An item; ``later`` says what it cannot do yet, ``replaced_by`` what does its work now."""
    limits = {"least": least, "below": below, "choices": choices, "later": later, "replaced_by": replaced_by}
    return field(default=default, metadata=limits)


@dataclass(frozen=True)
class Config:
    """All items.

    Attributes:
        show_config_items: Log all items when the first module is made.
        mem_limit_gb: Memory per device, in GiB, that a Plan may use and, on GPUs, torch is held to; 0 is all that the
            device has.
        mem_margin: Share of that memory that a Plan leaves free.
        save_deployment: Write the Plan to ``deployment_file``.
        load_deployment: Take the Plan from ``deployment_file`` instead of searching.
        deployment_file: Path of a plan file.
        partition_num: Number of Stages; 0 leaves it to the search.
        pipeline_num: Number of microbatches; 0 leaves it to the search.
        min_pipeline: Least number of microbatches.
        max_pipeline: Greatest number of microbatches.
        min_pipeline_bs: Least number of rows of a microbatch on a Replica.
        max_partition_num: Greatest number of Stages; 0 is no limit.
        search_timeout_s: The search for a Plan ends after so long with the best that it has found; 0 lets it end by
            itself. A first Plan is always found, however long it takes.
        opt_param_factor: Bytes of optimizer state per byte of parameters, for optimizers that RaNNC does not know.
        trace_events: Record what every rank does when.
        event_trace_file: Where to write that record.
        profile_by_acc: Has no effect any more.
        sync_allreduce: Has no effect any more.
        partitioning_dry_run_np: Plan for this number of ranks and do not train; 0 is off.
        dump_graph: Write the captured Graph to a file.
        cluster_file: Path of a cluster file; without one the devices are those of this start.
        profile: Whether Blocks and links are measured before the search: "auto" does it on accelerators, "always"
            also on the host's processor, with "never" estimates serve.
        profile_cache: Keep Profiles for the next start.
        profile_cache_dir: Where; by default ``$XDG_CACHE_HOME/pyrannc`` or ``~/.cache/pyrannc``.
        save_graph_profile: Write the Profile to ``graph_profile_file``.
        load_graph_profile: Take the Profile from ``graph_profile_file`` instead of measuring.
        graph_profile_file: Path of a profile file.
        verify_partitioning: Compare the first training call with one process, before it runs, and end with an error if
            they differ; it takes the time of a step in one process and rank 0's memory for the whole model.
        display_comm_value: Log a digest of every value that is sent.
        fused_dropout: On GPUs, attention with dropout stays one kernel, which draws its mask itself: the same mask
            for one Plan and one set of row counts, another mask of the same law under another Plan. False computes it
            by its formula with a mask that no Plan changes, which costs the memory of all attention scores (two
            tensors of them, and a byte for each, in forward until backward) and the time to move them, several times
            that of the kernel. So is what no such kernel takes: anything on the host, float64, or scores with a bias
            whose last dimension has gaps, as T5's. No Plan ever changes those masks.
        enable_zero: What the Replicas of a Stage divide among them (ZeRO): "off", nothing; "1", the optimizer's state;
            "2", also gradients; "3", also parameters; each of them for every Stage that has several Replicas; "auto",
            for each Stage what the search finds best.
        reduce_dtype: Type in which gradients are summed over ranks: "float32", or a parameter's own where that is
            wider; "bfloat16", which halves the messages and rounds each sum; or "param", each parameter's own. On a
            rank, those of several microbatches are always added up in float32 at least.
        compile_spans: Whether runs of operators are compiled by torch's compiler, forward and backward, when a Plan is
            deployed: "on", "off", or "auto", which compiles on GPUs. Each distinct one is compiled once for each number
            of rows and held against the operators themselves; one that differs by more than rounding, or that cannot
            be compiled, runs as it is, which a line says, as does ``report()``. Compiled code is kept in
            ``profile_cache_dir``, unless TORCHINDUCTOR_CACHE_DIR says where.
        split_backward: Whether Plans may let the backward of a microbatch come in two parts: first the gradients that
            the Stage before waits for, later those of parameters, in time that would be idle otherwise. It takes more
            memory, and has a use with several Stages only.
        cuda_graphs: "auto": on GPUs, from the third step of a kind on, what a rank does from its inputs to its outputs
            is replayed as one CUDA graph, which takes the host next to no time; where it cannot be, ``report()`` says
            why. A graph keeps the memory of a step's activations for itself. "off": never.
        consolidate_grads: Has no effect any more.
        stall_timeout_s: The job ends when a rank is inside a collective call and no rank has come forward for so long.
        silence_timeout_s: A rank whose process has sent no sign of life for so long is taken for dead.
        different_calls_timeout_s: The job ends when ranks have waited for so long in calls that do not go together,
            such as ``state_dict()`` on one and ``model(...)`` on the others, or in one that has failed on another rank,
            whose script goes on.
        left_timeout_s: The job ends when a rank has waited for so long in a call that another rank, whose script has
            ended, has not made.
        fail_grace_s: After a rank's exception the other ranks go on for so long, so that their own come out first.
        connect_timeout_s: How long a rank tries to reach others when the job starts.
        heartbeat_s: Pause between two signs of life of a rank; less than half of ``silence_timeout_s``.
        late_notice_s: When a rank has not come for so long to a call in which others wait, a line on stderr says so.
        recapture_interval: At the second call of what was traced for itself, and of each captured form whenever this
            many calls have passed, one rank captures once more and compares, while the others wait; later where that
            would take more than a hundredth of the time. 0 is never.
    """

    show_config_items: bool = _item(False)
    mem_limit_gb: float = _item(0.0, least=0)
    mem_margin: float = _item(0.1, least=0, below=1)
    save_deployment: bool = _item(False)
    load_deployment: bool = _item(False)
    deployment_file: str = _item("")
    partition_num: int = _item(0, least=0)
    pipeline_num: int = _item(0, least=0)
    min_pipeline: int = _item(1, least=1)
    max_pipeline: int = _item(32, least=1)
    min_pipeline_bs: int = _item(1, least=1)
    max_partition_num: int = _item(0, least=0)
    search_timeout_s: float = _item(60.0, least=0, below=_FOREVER_S)
    opt_param_factor: float = _item(2.0, least=0)
    trace_events: bool = _item(False, later="no events are recorded")
    event_trace_file: str = _item("", later="no events are recorded")
    profile_by_acc: bool = _item(
        False, replaced_by="distinct Blocks are profiled once, on the device that will run them"
    )
    sync_allreduce: bool = _item(False, replaced_by="gradients are reduced in one fixed order on all ranks")
    partitioning_dry_run_np: int = _item(0, least=0)
    dump_graph: bool = _item(False, later="no graph is written")
    cluster_file: str = _item("")
    profile: str = _item("auto", choices=("auto", "always", "never"))
    profile_cache: bool = _item(True)
    profile_cache_dir: str = _item("")
    save_graph_profile: bool = _item(False)
    load_graph_profile: bool = _item(False)
    graph_profile_file: str = _item("")
    verify_partitioning: bool = _item(False)
    display_comm_value: bool = _item(False, later="no values are logged")
    fused_dropout: bool = _item(True)
    enable_zero: str = _item("off", choices=("off", "auto", "1", "2", "3"))
    reduce_dtype: str = _item("float32", choices=("float32", "bfloat16", "param"))
    recapture_interval: int = _item(1000, least=0)
    compile_spans: str = _item("auto", choices=("auto", "on", "off"))
    split_backward: bool = _item(True)
    cuda_graphs: str = _item("auto", choices=("auto", "off"))
    consolidate_grads: bool = _item(True, replaced_by="gradients are always reduced in buckets")
    stall_timeout_s: float = _item(600.0, least=1, below=_FOREVER_S)
    silence_timeout_s: float = _item(20.0, least=2, below=_FOREVER_S)
    different_calls_timeout_s: float = _item(10.0, least=1, below=_FOREVER_S)
    left_timeout_s: float = _item(20.0, least=1, below=_FOREVER_S)
    fail_grace_s: float = _item(2.0, least=0.1, below=_FOREVER_S)
    connect_timeout_s: float = _item(30.0, least=1, below=_FOREVER_S)
    heartbeat_s: float = _item(0.5, least=0.05, below=_FOREVER_S)
    late_notice_s: float = _item(30.0, least=1, below=_FOREVER_S)

    @property
    def mem_limit_bytes(self) -> int | None:
        """``mem_limit_gb`` in bytes; None when the device is the limit."""
        return int(self.mem_limit_gb * 2**30) or None

    @property
    def search_timeout_ms(self) -> int | None:
        """``search_timeout_s`` in milliseconds; None when there is no limit."""
        return math.ceil(self.search_timeout_s * 1e3) or None

    def compiles_on(self, device_type: str) -> bool:
        """True when Spans are compiled for devices of a type."""
        return self.compile_spans == "on" or (self.compile_spans == "auto" and device_type != "cpu")

    def records_on(self, device_type: str) -> bool:
        """True when steps are recorded as CUDA graphs on devices of a type."""
        return self.cuda_graphs == "auto" and device_type == "cuda"

    def lines(self) -> list[str]:
        """One line ``item: value`` for each item."""
        return [f"{item.name}: {getattr(self, item.name)}" for item in fields(self)]


@dataclass(frozen=True)
class Loaded:
    """A configuration, and what its user should know about it (one sentence each)."""

    config: Config
    warnings: tuple[str, ...]


def load(environ: Mapping[str, str] = os.environ, home: Path | None = None) -> Loaded:
    """Read the file and the environment.

    Raises:
        ConfigError: The file cannot be read; an item is unknown, of the wrong type or out of range; items contradict
            each other.
    """
    known = {item.name: item for item in fields(Config)}
    values: dict[str, Value] = {}
    sources: dict[str, str] = {}
    old: dict[str, str] = {}
    for name, raw, source in [*_from_file(environ, home), *_from_environment(environ)]:
        if name in old_config.REPLACED_BY:
            old[name] = source
            continue
        if name not in known:
            raise ConfigError(f"{source} is not a configuration item{_meant(source, name, known)}")
        values[name] = _convert(known[name], raw, source)
        sources[name] = source
    config = Config(**values)  # type: ignore[arg-type] # _convert gives every item its own type
    _reject_contradictions(config, sources)
    return Loaded(config, (*old_config.told(old), *_warnings(config, known, sources)))


def _from_file(environ: Mapping[str, str], home: Path | None) -> list[tuple[str, object, str]]:
    folder = environ.get("RANNC_CONF_DIR")
    path = (Path(folder) if folder else (home or Path.home()) / ".pyrannc") / FILE_NAME
    if not folder and not path.exists():
        return []
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error}") from error
    return [(name, raw, f"{name!r} in {path}") for name, raw in table.items()]


def _from_environment(environ: Mapping[str, str]) -> list[tuple[str, object, str]]:
    variables = sorted(name for name in environ if name.startswith(_PREFIX))
    ours = [name for name in variables if not name.startswith(_OTHER_VARIABLES)]
    return [(name.removeprefix(_PREFIX).lower(), environ[name], f"environment variable {name}") for name in ours]


def _meant(source: str, name: str, known: Mapping[str, object]) -> str:
    """The nearest item, spelled as its source spells items."""
    spelled = (lambda item: _PREFIX + item.upper()) if source.startswith("environment") else str
    return nearest(name, known, spelled)


def _convert(item: Field[Any], raw: object, source: str) -> Value:
    """``raw`` as the item's type. Only the environment needs text parsed; a file's values have types already."""
    kind = type(item.default)
    if type(raw) is int and str(raw) in item.metadata["choices"]:
        raw = str(raw)
    value = _parse(kind, raw) if isinstance(raw, str) and source.startswith("environment") else _cast(kind, raw)
    if value is None:
        wanted = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}[kind]
        raise ConfigError(f"{source} must be {wanted}, not {raw!r}")
    least, below, choices = (item.metadata[limit] for limit in ("least", "below", "choices"))
    if isinstance(value, int | float) and (
        (least is not None and not value >= least) or (below is not None and not value < below)
    ):
        upper = "" if below is None else f" and less than {below}"
        raise ConfigError(f"{source} must be at least {least}{upper}, not {raw!r}")
    if choices and value not in choices:
        raise ConfigError(f"{source} must be one of {', '.join(choices)}, not {raw!r}{nearest(str(raw), choices)}")
    return value


def _parse(kind: type, text: str) -> Value | None:
    text = text.strip()
    if kind is bool:
        return True if text.lower() in _TRUE else False if text.lower() in _FALSE else None
    try:
        return kind(text)  # type: ignore[no-any-return] # int, float or str
    except ValueError:
        return None


def _cast(kind: type, raw: object) -> Value | None:
    """``raw`` if it is of ``kind``: a whole number is a float too, and 1 and 0 are true and false."""
    if kind is bool:
        return bool(raw) if isinstance(raw, int) and raw in (0, 1) else None
    if isinstance(raw, bool):
        return None
    if kind is float and isinstance(raw, int | float):
        return float(raw)
    if (kind is int and isinstance(raw, int)) or (kind is str and isinstance(raw, str)):
        return raw
    return None


def _reject_contradictions(config: Config, sources: Mapping[str, str]) -> None:
    def reject(first: str, second: str, why: str) -> None:
        places = [sources.get(name, f"the default of {name!r}") for name in (first, second)]
        raise ConfigError(f"{places[0]} ({getattr(config, first)}) {why} {places[1]} ({getattr(config, second)})")

    if config.heartbeat_s * 2 > config.silence_timeout_s:
        reject("heartbeat_s", "silence_timeout_s", "is more than half of")
    if config.min_pipeline > config.max_pipeline:
        reject("min_pipeline", "max_pipeline", "is greater than")
    if config.pipeline_num:
        # A limit that the user has not set does not stand against a number that he has.
        if "max_pipeline" in sources and config.pipeline_num > config.max_pipeline:
            reject("pipeline_num", "max_pipeline", "is greater than")
        if "min_pipeline" in sources and config.pipeline_num < config.min_pipeline:
            reject("pipeline_num", "min_pipeline", "is less than")
    if config.max_partition_num and config.partition_num > config.max_partition_num:
        reject("partition_num", "max_partition_num", "is greater than")
    for what, file in (("deployment", "deployment_file"), ("graph_profile", "graph_profile_file")):
        save, load = f"save_{what}", f"load_{what}"
        for name in (save, load):
            if getattr(config, name) and not getattr(config, file):
                raise ConfigError(f"{sources[name]} needs {file!r}, which is not set")
        if getattr(config, save) and getattr(config, load):
            reject(save, load, "cannot be set together with")
    if config.save_graph_profile and config.profile == "never":
        reject("save_graph_profile", "profile", "cannot be set together with")


def _warnings(config: Config, known: Mapping[str, Field[Any]], sources: Mapping[str, str]) -> list[str]:
    found = []
    for name, source in sources.items():
        item = known[name]
        if item.metadata["replaced_by"]:
            found.append(f"{source} has no effect any more: {item.metadata['replaced_by']}")
        elif item.metadata["later"] and getattr(config, name) != item.default:
            found.append(f"{source} is not available yet: {item.metadata['later']}")
    return found
