"""The errors that RaNNC raises."""


class RaNNCError(RuntimeError):
    """Base of all errors that RaNNC raises on its own account."""


class CaptureError(RaNNCError):
    """The model cannot be captured as a Graph."""


class ConfigError(RaNNCError):
    """A configuration item is unknown, has a wrong value, or contradicts another one."""


class InputError(RaNNCError):
    """A call got arguments that RaNNC cannot work with, such as a tensor on the wrong device."""


class MismatchError(RaNNCError):
    """The ranks disagree on something that must be equal everywhere, such as the model."""


class PlanError(RaNNCError):
    """There is no Plan: nothing fits, or the model cannot be cut as asked."""


class MemoryShortageError(PlanError):
    """No Plan fits into the devices' memory."""


class PlanFileError(RaNNCError):
    """A plan file is damaged, or belongs to another model, world size or version."""


class ProfileError(RaNNCError):
    """A profile file is damaged, or was measured for another model or device."""


class ClusterError(RaNNCError):
    """A cluster file cannot be read, or describes a cluster that there cannot be."""


class PeerError(RaNNCError):
    """Another rank has died, failed or left while this one needed it."""


def first_line(error: BaseException) -> str:
    """An error in a line: its class, and how its text begins."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
