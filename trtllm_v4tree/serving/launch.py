"""Starts and ends a Triton server process on a model repository prepared for one engine."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import util
from pathlib import Path

from trtllm_v4tree.errors import ConfigError, V4TreeError
from trtllm_v4tree.serving.endings import ending
from trtllm_v4tree.serving.wire import private_directory

MODELS = ("tensorrt_llm", "ensemble", "ensemble_unary")
OWNER_MODEL = "tensorrt_llm"
# Requests end before Triton is told to (`RemoteLoop.drain`). Triton 2.51 counts a stream request that its own checks refused as in flight for ever,
# so a longer wait would not end sooner.
EXIT_TIMEOUT_S = 5
_CLOSED_APIS = "shared-memory,model-repository,trace,logging"  # they take paths or memory keys from requests


class LaunchError(V4TreeError):
    """The server cannot be started here, or it ended before it was ready."""


@dataclass(frozen=True)
class Triton:
    """An installed Triton server: its binary, its back ends, and what its environment needs."""

    binary: Path
    backends: Path
    environment: Mapping[str, str]


def find_triton(cache: Path) -> Triton:
    """`tritonserver` from PATH, else the one of nvidia-pytriton, laid out under `cache`. Raises LaunchError."""
    on_path = shutil.which("tritonserver")
    if on_path is not None:
        return Triton(Path(on_path), Path(on_path).resolve().parents[1] / "backends", {})
    spec = util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        raise LaunchError(
            "no tritonserver on PATH and nvidia-pytriton is not installed: pip install 'trtllm_v4tree[serve]'."
        )
    return _pytriton(Path(spec.submodule_search_locations[0]), cache)


def _pytriton(package: Path, cache: Path) -> Triton:
    root = package / "tritonserver"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = root / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.is_file():
        found = ", ".join(sorted(p.name for p in stub.parents[1].iterdir()))
        raise LaunchError(f"nvidia-pytriton has no python backend for Python {version}: use one of {found}.")
    backends = cache / "backends"
    shutil.copytree(root / "backends" / "python", backends / "python", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy2(stub, backends / "python" / stub.name)
    libraries = [
        str(package.parent / "nvidia_pytriton.libs"),
        *_libpython_directories(),
        os.environ.get("LD_LIBRARY_PATH", ""),
    ]
    _link_package(backends / "python")
    environment = {
        "LD_LIBRARY_PATH": os.pathsep.join(p for p in libraries if p),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
    }
    return Triton(root / "bin" / "tritonserver", backends, environment)


def _libpython_directories() -> list[str]:
    import sysconfig

    return [p for p in (sysconfig.get_config_var("LIBDIR"), str(Path(sys.base_prefix) / "lib")) if p]


def _link_package(directory: Path) -> None:
    """The python backend isolates its interpreter from PYTHONPATH; it takes the packages of the `python3` on PATH and this directory."""
    package = Path(__file__).resolve().parents[1]
    (directory / package.name).symlink_to(package, target_is_directory=True)


def repository_template() -> Path:
    """`triton_server_repo`: beside the package in a checkout, under share/ in an installation."""
    for place in (Path(__file__).resolve().parents[2], Path(sys.prefix) / "share" / "trtllm_v4tree"):
        if (place / "triton_server_repo" / OWNER_MODEL / "config.pbtxt").is_file():
            return place / "triton_server_repo"
    raise LaunchError("triton_server_repo is not installed: install trtllm_v4tree again.")


def prepare_repository(target: Path, parameters: Mapping[str, str]) -> Path:
    """Copies the template to `target` with `parameters` written into each config.pbtxt that has them."""
    template = repository_template()
    for model in MODELS:
        shutil.copytree(template / model, target / model, ignore=shutil.ignore_patterns("__pycache__"))
        config = target / model / "config.pbtxt"
        config.write_text(with_parameters(config.read_text(encoding="utf-8"), parameters), encoding="utf-8")
    return target


def with_parameters(config: str, parameters: Mapping[str, str]) -> str:
    """`config` with the string values of these parameters replaced; a parameter it lacks is left out."""
    for key, value in parameters.items():
        if any(ord(c) < 32 for c in value):
            raise ConfigError(f"{key} {value!r} has control characters.")
        quoted = value.replace("\\", "\\\\").replace('"', '\\"')
        pattern = rf'(key: "{re.escape(key)}"\s+value: \{{ string_value: )"[^"]*"'
        config = re.sub(pattern, lambda match, quoted=quoted: f'{match[1]}"{quoted}"', config)  # type: ignore[misc]
    return config


def cache_directory() -> Path:
    """A new private directory for one server; those of servers that are gone are removed."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trtllm_v4tree"
    private_directory(root)
    for old in root.glob("serve-*"):
        if not _alive(int(old.name.split("-")[1])):
            _remove_memory(memory_prefix(old))
            shutil.rmtree(old, ignore_errors=True)
    return private_directory(root / f"serve-{os.getpid()}-{secrets.token_hex(4)}")


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@dataclass(frozen=True)
class Endpoints:
    """Where the server listens."""

    host: str
    grpc_port: int
    http_port: int
    metrics_port: int

    @property
    def health_url(self) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.host, self.host)
        return f"http://{host}:{self.http_port}/v2/health/ready"


class TritonProcess:
    """A running `tritonserver`, in a session of its own so that a terminal's Ctrl-C reaches only us.

    Names of its shared memory start with `memory`, and `stop` removes all that do.
    """

    def __init__(self, triton: Triton, repository: Path, endpoints: Endpoints, verbose: bool, memory: str) -> None:
        e = endpoints
        self.endpoints, self.memory = endpoints, memory
        key = f"{_CLOSED_APIS}:v4tree-admin={secrets.token_urlsafe(24)}"
        arguments = [
            str(triton.binary),
            f"--model-repository={repository}",
            f"--backend-directory={triton.backends}",
            "--disable-auto-complete-config",
            f"--http-address={e.host}", f"--http-port={e.http_port}",
            f"--grpc-address={e.host}", f"--grpc-port={e.grpc_port}",
            f"--metrics-address={e.host}", f"--metrics-port={e.metrics_port}",
            f"--http-restricted-api={key}", f"--grpc-restricted-protocol={key}",
            f"--exit-timeout-secs={EXIT_TIMEOUT_S}",
            f"--backend-config=python,shm-region-prefix-name={memory}",
            f"--log-info={'true' if verbose else 'false'}",
        ]  # fmt: skip
        self.process = subprocess.Popen(
            arguments,
            env={**os.environ, **triton.environment},
            start_new_session=True,
            stdout=sys.stderr,
            preexec_fn=_end_with_parent,
        )

    def ready(self) -> bool:
        """Whether every model answers."""
        try:
            with urllib.request.urlopen(self.endpoints.health_url, timeout=2.0) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def wait_ready(self, timeout_s: float) -> None:
        """Raises LaunchError if the server ends or takes longer."""
        deadline = time.monotonic() + timeout_s
        while not self.ready():
            if self.process.poll() is not None:
                raise LaunchError(f"{self.ending()} before it was ready; its messages are above.")
            if time.monotonic() > deadline:
                raise LaunchError(f"tritonserver was not ready after {timeout_s:g} s.")
            time.sleep(0.1)

    def ending(self) -> str:
        """How it ended, once `process.poll()` says that it has."""
        return f"tritonserver (process {self.process.pid}) ended {ending(self.process.returncode)}"

    def stop(self, timeout_s: float) -> None:
        """SIGTERM, then SIGKILL to what is left of its session."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=timeout_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        _remove_memory(self.memory)


def memory_prefix(cache: Path) -> str:
    """How names of the shared memory start for the server with this directory of `cache_directory`. Its random part tells apart containers
    that share /dev/shm and number their processes alike."""
    return f"v4tree_{cache.name.removeprefix('serve-')}_"


def _remove_memory(prefix: str) -> None:
    """Triton leaves shared memory behind when it ends in a hurry; a container has 64 MB of it."""
    for region in Path("/dev/shm").glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # another user's
            region.unlink()


def _end_with_parent() -> None:
    """In the child: SIGTERM when `v4tree serve` dies, even by SIGKILL (Linux, PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
