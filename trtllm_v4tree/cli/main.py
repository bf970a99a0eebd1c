"""`v4tree`: build, generate, inspect, doctor. Exit status: 0 done, 1 failure, 2 bad usage or input."""

from __future__ import annotations

import sys

import typer

from trtllm_v4tree.cli.build import build
from trtllm_v4tree.cli.doctor import doctor
from trtllm_v4tree.cli.generate import generate
from trtllm_v4tree.cli.inspect import inspect
from trtllm_v4tree.cli.output import complain
from trtllm_v4tree.errors import InputError, V4TreeError

app = typer.Typer(
    name="v4tree",
    help="Tree-structured speculative decoding for DeepSeek-V4.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (build, generate, inspect, doctor):
    app.command()(command)


def underscored(argument: str) -> str:
    """`--max-seq-len=8` -> `--max_seq_len=8`: option names take hyphens for underscores."""
    name, equals, value = argument.partition("=")
    return name[:2] + name[2:].replace("-", "_") + equals + value if name.startswith("--") and len(name) > 2 else argument


def run(arguments: list[str] | None = None) -> None:
    """Entry point of the console script."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        app([underscored(a) for a in given], standalone_mode=True)
    except InputError as error:
        complain(str(error))
        sys.exit(2)
    except (V4TreeError, OSError) as error:
        complain(str(error))
        sys.exit(1)
    except KeyboardInterrupt:
        complain("interrupted.")
        sys.exit(130)


if __name__ == "__main__":
    run()
