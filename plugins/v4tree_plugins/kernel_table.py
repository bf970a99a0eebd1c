"""`python -m v4tree_plugins.kernel_table`: what every kernel, dtype and chip takes, compiled ahead of time. Needs no GPU."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product

from v4tree_plugins import aot


@dataclass(frozen=True)
class Figures:
    """One compiled variant: registers per thread; spill stores and loads, shared memory of a block, PTX and cubin in bytes."""

    kernel: str
    dtype: str
    chip: int
    warps: int
    registers: int
    spills: int
    shared: int
    ptx: int
    cubin: int

    @property
    def fits(self) -> bool:
        return self.shared <= aot.SHARED_LIMIT[self.chip]


def figures(dtype: str, capability: int, only: str = "") -> list[Figures]:
    """Compiles the variants whose name contains `only`."""
    found = []
    for variant in aot.variants(dtype, capability):
        if only in variant.name:
            c = aot.compile_variant(variant, capability)
            sizes = (c.num_warps, c.registers, c.spill_bytes, c.shared, len(c.ptx), len(c.cubin))
            found.append(Figures(variant.name.removesuffix(f"_{dtype}"), dtype, capability, *sizes))
    return found


def compile_all(dtypes: list[str], capabilities: list[int], only: str, jobs: int) -> Iterator[Figures]:
    """Figures in order of dtype and chip, compiled by `jobs` processes."""
    pairs = list(product(dtypes, capabilities))
    with ProcessPoolExecutor(jobs) as pool:
        for rows in pool.map(figures, *zip(*pairs, strict=True), [only] * len(pairs)):
            yield from rows


def markdown(rows: list[Figures]) -> Iterator[str]:
    """Lines of the table in benchmarks/kernels_aot.md."""
    yield "| kernel | dtype | chip | warps | registers | spills | shared memory | PTX | cubin |"
    yield "|---|---|---|--:|--:|--:|--:|--:|--:|"
    for row in rows:
        sizes = " | ".join(f"{n:,}" for n in (row.warps, row.registers, row.spills, row.shared, row.ptx, row.cubin))
        yield f"| {row.kernel} | {row.dtype} | sm_{row.chip} | {sizes} |"


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="kernel_table", description=(__doc__ or "").split(": ", 1)[1])
    parser.add_argument("--capability", type=int, choices=aot.CAPABILITIES, action="append")
    parser.add_argument("--dtype", choices=aot.DTYPES, action="append")
    parser.add_argument("--only", default="", help="part of a kernel's name")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes that compile")
    parser.add_argument("--json", action="store_true", help="a JSON list in place of the markdown table")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Status 1 where a kernel needs more shared memory than its chip has."""
    args = parse(argv)
    chosen = args.dtype or list(aot.DTYPES), args.capability or list(aot.CAPABILITIES)
    rows = list(compile_all(*chosen, args.only, args.jobs))
    print(json.dumps([asdict(row) for row in rows]) if args.json else "\n".join(markdown(rows)))
    return 0 if all(row.fits for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
