from typing import Final

version: Final[str]

def run_cli(args: list[str]) -> int: ...
