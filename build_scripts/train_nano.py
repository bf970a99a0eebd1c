"""Trains a small DeepSeek-V4 with its drafter on text files and writes a checkpoint in DeepSeek's layout.

    python build_scripts/train_nano.py --data train.jsonl --output_dir runs/nano --minutes 60
    python build_scripts/train_nano.py --data train.jsonl --output_dir runs/multi \\
        --start_from runs/nano/checkpoint --freeze_trunk --mtp_steps 4 --minutes 15

Started again with the same options, a run goes on where it stopped. `plan.json` in its directory may be edited meanwhile.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from trtllm_v4tree.errors import InputError, V4TreeError

FAILURE, BAD_INPUT = 1, 2
_INTERRUPTED = 130

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"token_normalize_func": lambda name: name.replace("-", "_")},
)
console = Console(stderr=True, highlight=False, soft_wrap=True)


@app.command(help=__doc__)
def train(
    data: Annotated[list[str], typer.Option(help="PATH or PATH*N (seen N times an epoch): .txt, .jsonl or .json")],
    output_dir: Annotated[Path, typer.Option(help="of this run: state, log, plan and checkpoint/")],
    mtp_steps: Annotated[
        int, typer.Option(min=1, max=8, help="drafter steps that are trained, each on its own output")
    ] = 1,
    start_from: Annotated[
        Path | None, typer.Option(help="checkpoint to go on from, with its config and tokenizer")
    ] = None,
    start_mtp: Annotated[Path | None, typer.Option(help="file of mtp.* tensors in place of the checkpoint's")] = None,
    grow_from: Annotated[
        Path | None, typer.Option(help="checkpoint of a shallower model than --config, which begins as that one")
    ] = None,
    freeze_trunk: Annotated[
        bool, typer.Option(help="train the drafter alone; it learns the trunk's distribution")
    ] = False,
    fresh_drafter: Annotated[bool, typer.Option(help="do not start from the checkpoint's drafter")] = False,
    index_topk: Annotated[
        int | None, typer.Option(min=1, help="entries a CSA layer selects; default: the config's")
    ] = None,
    steps: Annotated[int, typer.Option(min=0, help="length of the run; 0: --minutes alone decides")] = 0,
    minutes: Annotated[float, typer.Option(min=0, help="length in minutes of processor time per thread")] = 0.0,
    config: Annotated[
        Path | None, typer.Option(help="config.json of the model; default: the built-in small one")
    ] = None,
    strip: Annotated[
        str | None, typer.Option(help="regular expression; what it matches is taken out of the text")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1)] = 8,
    seq_len: Annotated[int, typer.Option(min=16, help="tokens of a row")] = 512,
    learning_rate: Annotated[float, typer.Option(min=0, help="peak rate of the matrices (Muon)")] = 5e-3,
    adam_rate: Annotated[float, typer.Option(min=0, help="peak rate of everything else (AdamW)")] = 3e-3,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    compute: Annotated[str, typer.Option(help="bfloat16 or float32, for the products")] = "bfloat16",
    compiled: Annotated[bool, typer.Option(help="fuse kernels with torch.compile (needs a C++ compiler)")] = True,
) -> None:
    import torch

    from trtllm_v4tree.training.optimizer import Rates
    from trtllm_v4tree.training.options import Options
    from trtllm_v4tree.training.run import run
    from trtllm_v4tree.training.state import Plan

    if compute not in ("bfloat16", "float32"):
        raise typer.BadParameter(f"--compute is {compute!r}, but it is bfloat16 or float32")
    options = Options(
        data=[_file(text) for text in data],
        output_dir=output_dir,
        plan=Plan(steps, minutes or (0.0 if steps else 60.0)),
        mtp_steps=mtp_steps,
        config=config,
        start_from=start_from,
        start_mtp=start_mtp,
        grow_from=grow_from,
        freeze_trunk=freeze_trunk,
        fresh_drafter=fresh_drafter,
        index_topk=index_topk,
        strip=strip,
        batch_size=batch_size,
        seq_len=seq_len,
        seed=seed,
        rates=Rates(muon=learning_rate, adamw=adam_rate),
        compute=getattr(torch, compute),
        compiled=compiled,
        threads=threads,
    )
    print(run(options, console))


def _file(text: str) -> tuple[Path, int]:
    path, star, repeats = text.rpartition("*")
    return (Path(path), int(repeats)) if star and repeats.isdecimal() and int(repeats) > 0 else (Path(text), 1)


def status_of(arguments: list[str]) -> int:
    """Runs the command; what went wrong becomes one sentence on stderr. 0 done, 2 bad input, 1 failure."""
    try:
        status = app(arguments, prog_name="train_nano.py", standalone_mode=False)
    except InputError as error:
        return _complain(str(error), BAD_INPUT)
    except V4TreeError as error:
        return _complain(str(error), FAILURE)
    except OSError as error:
        return _complain(
            f"the system refused to write {error.filename or 'the output'} ({error.strerror or error}).", FAILURE
        )
    except (KeyboardInterrupt, typer.Abort):
        status = _INTERRUPTED
    except ImportError as error:
        return _complain(f"{error}: install the extra with `pip install -e .[train]`.", FAILURE)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        return _complain(error.format_message(), BAD_INPUT)
    if status == _INTERRUPTED:
        return _complain("interrupted; the same command goes on from the last step that was saved.", FAILURE)
    return 0


def _complain(sentence: str, status: int) -> int:
    console.print(f"error: {sentence}", markup=False)
    return status


if __name__ == "__main__":
    sys.exit(status_of(sys.argv[1:]))
