"""Polygraphy's comparator over the outputs that `lockstep` compares: the same question asked of a tool that others wrote."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_v4tree.bench.lockstep import Place, comparable
from trtllm_v4tree.errors import RequestError


class SecondOpinion:
    """Collects outputs call by call. Each is scaled to a largest magnitude of 1, so that `rtol` is polygraphy's absolute tolerance."""

    def __init__(self) -> None:
        try:
            from polygraphy import comparator
        except ImportError as error:
            raise RequestError(
                "--polygraphy needs polygraphy, which is not installed here: pip install 'polygraphy>=0.53'."
            ) from error
        self._polygraphy: Any = comparator
        self._iterations: tuple[list[Any], list[Any]] = ([], [])

    def watch(self, place: Place, reference: NDArray[Any], other: NDArray[Any]) -> None:
        """One output of one call, in float64: an iteration of its own."""
        x, y = comparable(reference, other)
        if not x.size:
            return
        scale = np.abs(x).max() or 1.0
        name = "/".join(str(part) for part in place if part is not None)
        for runner, values, kept in zip(("reference", "other"), (x, y), self._iterations, strict=True):
            kept.append(self._polygraphy.IterationResult({name: values / scale}, runner_name=runner))

    def agreed(self, rtol: float) -> tuple[int, int]:
        """Calls that polygraphy passes, and all of them; what it prints is swallowed."""
        names, passed = ("reference", "other"), 0
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            for pair in zip(*self._iterations, strict=True):
                results = self._polygraphy.RunResults([(n, [one]) for n, one in zip(names, pair, strict=True)])
                compare = self._polygraphy.SimpleCompareFunc(rtol=0.0, atol=rtol)
                passed += bool(self._polygraphy.Comparator.compare_accuracy(results, compare_func=compare))
        return passed, len(self._iterations[0])
