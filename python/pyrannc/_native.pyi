from typing import ClassVar, Final, final

from typing_extensions import Self

__all__ = ["Watchdog", "run_cli", "version"]

version: Final[str]

def run_cli(args: list[str]) -> int: ...

@final
class Watchdog:
    EXIT_STATUS: ClassVar[int]
    @property
    def address(self) -> str: ...
    @classmethod
    def listen(
        cls,
        world_size: int,
        host: str,
        *,
        bind: str = "0.0.0.0",
        heartbeat_s: float = 0.5,
        silence_s: float = 20.0,
        stall_timeout_s: float = 600.0,
        left_timeout_s: float = 20.0,
        fail_grace_s: float = 2.0,
    ) -> Self: ...
    @classmethod
    def connect(
        cls,
        address: str,
        rank: int,
        world_size: int,
        *,
        connect_timeout_s: float = 30.0,
        heartbeat_s: float = 0.5,
        silence_s: float = 20.0,
        stall_timeout_s: float = 600.0,
        left_timeout_s: float = 20.0,
        fail_grace_s: float = 2.0,
    ) -> Self: ...
    def program(self, names: list[str]) -> None: ...
    def enter(self, index: int) -> None: ...
    def idle(self) -> None: ...
    def fail(self, message: str) -> None: ...
    def close(self) -> None: ...
