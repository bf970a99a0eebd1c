"""One engine and one server per speculation for the whole run; skipped where the extra `serve` is not installed.

Needs nothing of the extra `test` but pytest: `pytest tests/serving --confcutdir=tests/serving` runs without torch.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .harness import Server

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("pytriton", "tritonclient", "starlette", "uvicorn", "openai")
MISSING = [name for name in NEEDED if util.find_spec(name) is None]
SERVER_FILES = ("test_clients.py", "test_bad_input.py", "test_lifecycle.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if MISSING:
        for item in items:
            if item.path.name in SERVER_FILES:
                item.add_marker(pytest.mark.skip(reason=f"{', '.join(MISSING)} not installed: pip install -e .[serve]"))


@pytest.fixture(scope="session")
def checkpoint_dir() -> Path:
    """v4-nano, or a skip."""
    for place in (ROOT / "models" / "v4-nano", ROOT.parent / "shared" / "models" / "v4-nano"):
        if place.is_dir():
            return place
    pytest.skip("v4-nano is neither in models/ nor in ../shared/models/")


@pytest.fixture(scope="session")
def engine_dir(checkpoint_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The v4-nano engine as `v4tree build` makes it."""
    out = tmp_path_factory.mktemp("serve") / "engine"
    command = [
        sys.executable,
        "-m",
        "trtllm_v4tree.cli.main",
        "build",
        "--checkpoint_dir",
        str(checkpoint_dir),
        "--output_dir",
        str(out),
    ]
    subprocess.run([*command, "--draft_shapes", "s3_k2,s4_k1"], check=True, cwd=ROOT, capture_output=True)
    return out


@pytest.fixture(scope="session")
def start(engine_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """Starts servers that end with the run."""
    from .harness import Server

    running: list[Server] = []

    def make(*options: str, command: list[str] | None = None) -> Server:
        log = tmp_path_factory.mktemp("log") / "serve.log"
        running.append(Server.start(engine_dir, log, *options, command=command))
        return running[-1]

    yield make
    for server in running:
        server.stop()


@pytest.fixture(scope="session")
def server_of(start: Callable[..., Server]) -> Callable[[str], Server]:
    """The shared server of a speculation."""
    return cache(lambda speculation: start("--speculation", speculation))


@pytest.fixture(scope="session")
def server(server_of: Callable[[str], Server]) -> Server:
    return server_of("s3_k2_d6")
