"""`v4tree`: build, generate, inspect, doctor. Exit status: 0 done, 1 failure, 2 bad usage or input."""

from __future__ import annotations

import signal
import sys
from typing import NoReturn

import typer

from trtllm_v4tree.cli.bench import bench
from trtllm_v4tree.cli.bench_compare import bench_compare
from trtllm_v4tree.cli.build import build
from trtllm_v4tree.cli.compare import compare
from trtllm_v4tree.cli.doctor import doctor
from trtllm_v4tree.cli.generate import generate
from trtllm_v4tree.cli.inspect import inspect
from trtllm_v4tree.cli.output import complain, prepare_streams
from trtllm_v4tree.cli.profile import profile
from trtllm_v4tree.cli.serve import serve
from trtllm_v4tree.cli.simulate import simulate
from trtllm_v4tree.errors import InputError, V4TreeError

FAILURE, BAD_INPUT = 1, 2
_INTERRUPTED = 130
_UsageError: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "UsageError")

app = typer.Typer(
    name="v4tree",
    help="Tree-structured speculative decoding for DeepSeek-V4.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"token_normalize_func": lambda name: name.replace("-", "_")},
)
for command in (build, bench, bench_compare, profile, simulate, compare, generate, inspect, doctor, serve):
    app.command(command.__name__)(command)


def run(arguments: list[str] | None = None) -> NoReturn:
    """Entry point of the console script."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    prepare_streams()
    given = sys.argv[1:] if arguments is None else arguments
    sys.exit(status_of(given) if given else max(status_of(["--help"]), BAD_INPUT))


def status_of(arguments: list[str]) -> int:
    """Runs one command and returns its exit status; what went wrong becomes one sentence on stderr."""
    try:
        status = app(arguments, prog_name="v4tree", standalone_mode=False)
    except _UsageError as error:
        complain(_usage_sentence(error))
        return BAD_INPUT
    except InputError as error:
        complain(str(error))
        return BAD_INPUT
    except MemoryError:
        complain("not enough memory: build with a smaller --max_batch_size, --max_seq_len or --num_pages.")
        return FAILURE
    except V4TreeError as error:
        complain(str(error))
        return FAILURE
    except OSError as error:
        complain(f"the system refused to read or write {error.filename or 'the output'} ({error.strerror or error}).")
        return FAILURE
    except (KeyboardInterrupt, typer.Abort):
        status = _INTERRUPTED
    if status == _INTERRUPTED:
        complain("interrupted.")
        return FAILURE
    return status or 0


def _usage_sentence(error: Exception) -> str:
    """What is wrong with the command line, and where the allowed options are listed."""
    message = error.format_message().rstrip(".")  # type: ignore[attr-defined]
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "v4tree"
    return f"{message}; `{command} --help` lists what is allowed."


if __name__ == "__main__":
    run()
